"""Suites of datasets, their prompts and scorers. A new suite is a file or folder here, and an entry in `SUITES`."""

from eval.benchmarks import (
    babilong,
    embedded,
    graphwalks,
    longbench,
    longbench_v2,
    mrcr,
    needle,
    ruler,
    scbench,
    stdlib,
)
from eval.benchmarks.suite import Suite

_ALL = (
    longbench.SUITE,
    longbench.SUITE_E,
    longbench_v2.SUITE,
    embedded.SUITE,
    stdlib.SUITE,
    ruler.SUITE,
    needle.SUITE,
    scbench.SUITE,
    graphwalks.SUITE,
    babilong.SUITE,
    mrcr.SUITE,
)

SUITES: dict[str, Suite] = {suite.name: suite for suite in _ALL}
