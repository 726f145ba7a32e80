"""The share of the evidence that each layer computes, for right and wrong answers: data of a table and a figure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.datasets import DATASETS, TASKS
from eval.store.results import Results
from eval.store.runs import StoredRun

OUTCOMES = ("right", "wrong")
FULL_SCORE = 1 - 1e-6  # ROUGE does not quite reach 1
_KEYS = ["model", "suite", "method", "label", "task", "outcome", "layer"]
_COLUMNS = ["dataset", "id", "method.score", "method.evidence_prefill", "method.evidence_revived"]


def evidence_shares(results: Results) -> pd.DataFrame:
    """model, suite, method, label, task, outcome (right: full score; wrong: less), layer (from 1), examples;
    in_prefill, revived: per cent of the evidence's tokens that the layer computes in prefill, and later.

    Means over the examples with known evidence; seeds are pooled. Empty if there are no such examples.
    """
    known = [_of_run(run) for run in results.runs]
    shares = pd.concat(known or [pd.DataFrame(columns=[*_KEYS, "seed", "dataset", "id", "in_prefill", "revived"])])
    shares = shares.drop_duplicates([*_KEYS, "seed", "dataset", "id"])  # two runs may hold the same example
    means: Any = shares.groupby(_KEYS).agg(
        examples=("id", "size"), in_prefill=("in_prefill", "mean"), revived=("revived", "mean")
    )
    return means.reset_index().sort_values("task", key=lambda tasks: tasks.map(TASKS.index), kind="stable")


def _of_run(run: StoredRun) -> pd.DataFrame:
    """One row per example and layer."""
    known = [row for row in run.table(_COLUMNS).to_pylist() if row["method.evidence_prefill"] is not None]
    layers = len(known[0]["method.evidence_prefill"]) if known else 0
    datasets = [DATASETS[row["dataset"]] for row in known]
    examples = {
        "suite": [dataset.suite for dataset in datasets],
        "task": [dataset.task for dataset in datasets],
        "outcome": [OUTCOMES[row["method.score"] < FULL_SCORE] for row in known],
        "dataset": [row["dataset"] for row in known],
        "id": [row["id"] for row in known],
    }
    by_layer = {name: np.repeat(np.array(values, dtype=object), layers) for name, values in examples.items()}
    by_layer |= {"layer": np.tile(np.arange(1, layers + 1), len(known))}
    for column, name in (("in_prefill", "prefill"), ("revived", "revived")):
        by_layer[column] = 100 * np.array([row[f"method.evidence_{name}"] for row in known], dtype=float).ravel()
    return pd.DataFrame(by_layer).assign(model=run.model, method=run.method, label=run.label, seed=run.seed)
