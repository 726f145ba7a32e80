"""RULER (Hsieh et al., arXiv 2404.06654): 13 synthetic tasks at any length, whose rows equal the official ones.

`read_templates` or `fetch_templates` gives the official prompts and settings, `rows` makes a task's rows.
Source: https://github.com/NVIDIA/RULER at `COMMIT`; none of it is stored here.
"""

from eval.benchmarks.ruler.generator import Row, rows
from eval.benchmarks.ruler.sources import COMMIT, TASKS, Sources, Task, Templates, fetch_templates, read_templates

__all__ = [
    "COMMIT",
    "TASKS",
    "Row",
    "Sources",
    "Task",
    "Templates",
    "fetch_templates",
    "read_templates",
    "rows",
]
