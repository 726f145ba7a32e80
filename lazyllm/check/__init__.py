"""The invariants of every method, and the command `check` that runs them on one."""
