"""What is asked and how it is scored. A new suite is a file or folder here, and an entry in `SUITES`."""

from eval.benchmarks import embedded, longbench
from eval.benchmarks.ruler import ruler_suite
from eval.benchmarks.suite import Suite

SUITES: dict[str, Suite] = {suite.name: suite for suite in (longbench.SUITE, embedded.SUITE, ruler_suite.SUITE)}
