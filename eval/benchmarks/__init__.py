"""Suites of datasets, their prompts and scorers. A new suite is a file or folder here, and an entry in `SUITES`."""

from eval.benchmarks import (
    embedded,
    longbench,
    longbench_v2,
    needle,
    ruler,
    scbench,
)
from eval.benchmarks.suite import Suite

_OTHERS = (longbench_v2, embedded, ruler, needle, scbench)
_ALL = (longbench.SUITE, longbench.SUITE_E, *(module.SUITE for module in _OTHERS))

SUITES: dict[str, Suite] = {suite.name: suite for suite in _ALL}
