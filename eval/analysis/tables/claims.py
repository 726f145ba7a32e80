"""Numbers reported by the methods' authors, beside ours with the same settings. `beside_paper` has LazyLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.known_methods import place_of
from eval.analysis.table import Table
from eval.analysis.tables.beside_paper import PUBLISHED
from eval.analysis.tables.cells import forms, overall, shown
from eval.benchmarks import SUITES
from eval.store.results import Results

_VALUES = ("score", "baseline_score", "ttft_speedup")


def claims(results: Results) -> Table:
    """Published numbers for each model that was run on LongBench, beside ours if these settings were run."""
    whole: Any = overall(results)
    measured = [row for row in whole.to_dict("records") if SUITES[row["suite"]].in_paper]
    models = {_name_of(row) for row in measured}
    published: Any = pd.read_csv(PUBLISHED / "field.csv")
    rows = []
    for claim in published[published["model"].isin(models)].to_dict("records"):
        found: Any = [row for row in measured if _is_of(claim, row)]
        ours = max(found, key=lambda row: row["examples"], default={})
        rows.append(claim | {f"measured_{form}": ours.get(form, np.nan) for form in forms(*_VALUES)})
    frame = pd.DataFrame(rows, columns=[*published.columns, *(f"measured_{form}" for form in forms(*_VALUES))])
    caption = (
        "Numbers as published, each measured with its authors' own harness. full: the unpruned model there; for the "
        "same model it differs by 13 points between papers. Ours: the mean over LongBench's tasks with the same "
        "settings, and the paired baseline. why they differ: what the published run did differently. -: not published."
    )
    return Table("claims", "What their authors report", caption, frame, pd.DataFrame(map(_line, rows)), keys=3)


def _name_of(row: Mapping[str, Any]) -> str:
    """The model's name as papers write it, without the publisher's prefix."""
    return row["model"].removeprefix("Meta-")


def _is_of(claim: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether a measured row has the claim's model and settings."""
    settings = json.loads(row["settings"])
    if settings.get("sound"):  # our own variant
        return False
    same = all(settings.get(key) == value for key, value in json.loads(claim["settings"]).items())
    return same and claim["method"] == row["method"] and _name_of(row) == claim["model"]


def _line(row: Mapping[str, Any]) -> dict[str, str]:
    def published(name: str) -> str:
        return "-" if np.isnan(row[name]) else f"{row[name]:.2f}"

    def ours(name: str) -> str:
        return "no run" if np.isnan(row["measured_score"]) else shown(row, f"measured_{name}", 2)

    settings = ", ".join(f"{key}={value}" for key, value in json.loads(row["settings"]).items())
    return {
        "method": place_of(row["method"])[1],
        "setting": settings,
        "model": row["model"],
        "score": published("score"),
        "full": published("full_score"),
        "TTFT speedup": published("ttft_speedup"),
        "score, ours": ours("score"),
        "full, ours": ours("baseline_score"),
        "TTFT speedup, ours": ours("ttft_speedup"),
        "of": "-" if isinstance(row["scale"], float) else row["scale"],
        "why they differ": row["differs"],
    }
