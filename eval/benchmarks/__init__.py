"""Suites of datasets, their prompts and scorers. A new suite is a file or folder here, and an entry in `SUITES`."""

from eval.benchmarks import embedded, longbench, longbench_e, longbench_v2, needle, scbench, stdlib
from eval.benchmarks.ruler import ruler_suite
from eval.benchmarks.suite import Suite

_FILES = (longbench, longbench_e, longbench_v2, embedded, stdlib, ruler_suite, needle, scbench)

SUITES: dict[str, Suite] = {file.SUITE.name: file.SUITE for file in _FILES}
