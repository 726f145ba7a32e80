"""The invariants of every method, and the verb `check` that runs them on one."""
