"""Suites of datasets, their prompts and scorers. A new suite is a file or folder here, which is listed below."""

from importlib import import_module

from eval.benchmarks.suite import SUITES as SUITES

# In the order of tables; each registers its suites
for _module in ("longbench", "longbench_v2", "embedded", "needle", "random_tokens"):
    import_module(f"{__name__}.{_module}")
