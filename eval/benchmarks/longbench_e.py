"""LongBench-E: 13 of LongBench's datasets, with other rows, about as many short as long ones; scores by length.

Rows are the `_e` files of LongBench's archive, or of `data.dir`. Prompts, answer lengths and scorers are LongBench's.
Lengths are the rows' `length`, in words; the bounds are those of `eval.py` (commit 2e00731).
"""

from __future__ import annotations

from dataclasses import replace

from eval.benchmarks import longbench
from eval.benchmarks.metrics import score_example
from eval.benchmarks.suite import Dataset, DataSettings, LoadedDataset, Suite

_LEFT_OUT = ("narrativeqa", "musique", "qmsum")


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """One dataset, each row in the group of its length. Raises UserError as `longbench.load`."""
    loaded = longbench.load(dataset, settings)
    return replace(loaded, examples=tuple(replace(row, groups=(_group(row.length),)) for row in loaded.examples))


def _group(words: int) -> str:
    return f"length={'0-4k' if words < 4000 else '4-8k' if words < 8000 else '8k+'}"


SUITE = Suite(
    name="longbench_e",
    version=1,
    datasets=tuple(
        replace(dataset, name=f"{dataset.name}_e", suite="longbench_e", prompt_of=dataset.name)
        for dataset in longbench.DATASETS
        if dataset.name not in _LEFT_OUT
    ),
    load=load,
    score=score_example,
    whole="longbench_e",
)
