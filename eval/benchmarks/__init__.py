"""Suites of datasets, their prompts and scorers. A new suite is a new module here."""

from eval.benchmarks.datasets import SUITES as SUITES
