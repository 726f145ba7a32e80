"""RULER (Hsieh et al., arXiv 2404.06654): 13 synthetic tasks at any length, whose rows equal the official ones.

`read_templates` or `fetch_templates` gives the official prompts and settings, `rows` makes a task's rows, `score` is
the official scorer. Source: https://github.com/NVIDIA/RULER at `COMMIT`; none of it is stored here.
"""

from eval.benchmarks.ruler.generator import Row, rows
from eval.benchmarks.ruler.scorers import score, string_match_all, string_match_part
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
    "score",
    "string_match_all",
    "string_match_part",
]
