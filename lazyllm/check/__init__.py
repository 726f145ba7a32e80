"""What must hold for every method, and the verb `check` that runs it on one."""
