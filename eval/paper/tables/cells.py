"""What several tables share: their sections, their order, and how a value is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from eval.benchmarks import SUITES
from eval.paper.known_methods import marked, place_of
from eval.paper.table import cell
from eval.store.results import Results

SECTION = ["model", "suite"]
SETTING = [*SECTION, "method", "settings", "label"]


def in_order(frame: Any) -> Any:
    """Settings in the order of models, suites, methods and labels; diagnostics are marked in these."""
    places = {name: place_of(name) for name in frame["method"].unique()}
    order = frame["method"].map({name: number for number, name in enumerate(sorted(places, key=places.__getitem__))})
    labels = list(map(marked, frame["label"], frame["method"]))
    return (
        frame.assign(order=order, label=labels)
        .sort_values([*SECTION, "order", "label"], kind="stable")
        .drop(columns="order")
    )


def overall(results: Results) -> Any:
    """The mean over tasks of each setting, in order."""
    frame = results.by_task
    return in_order(frame[frame["level"] == "all"]).reset_index(drop=True)


def forms(*names: str) -> list[str]:
    """The columns of values and their intervals."""
    return [f"{name}{end}" for name in names for end in ("", "_low", "_high")]


def shown(row: Mapping[str, Any], name: str, digits: int, scale: float = 1) -> str:
    """A value with its interval; what is missing was not measured, for want of a baseline."""
    if np.isnan(row[name]):
        return "unpaired"
    return cell(row[name] / scale, row[f"{name}_low"] / scale, row[f"{name}_high"] / scale, digits)


def model_name(row: Mapping[str, Any], results: Results) -> str:
    """The model's name, with its suite unless that is LongBench, and with a note if its weights were random."""
    notes = [row["suite"]] if not SUITES[row["suite"]].in_paper else []
    notes += ["random weights"] if row["model"] in random_models(results) else []
    return f"{row['model']} ({', '.join(notes)})" if notes else row["model"]


def random_models(results: Results) -> set[str]:
    """Models that were run with random weights: their times count, their scores do not."""
    return {run.model for run in results.runs if run.identity.get("load_format") == "dummy"}
