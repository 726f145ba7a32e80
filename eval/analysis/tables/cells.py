"""Helpers that several tables share: sections, order, and the format of values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.analysis.known_methods import marked, place_of
from eval.analysis.table import cell
from eval.benchmarks import SUITES
from eval.store.results import Results

SECTION = ["model", "suite"]
SETTING = [*SECTION, "method", "settings", "label"]


def in_order(frame: Any) -> Any:
    """Settings sorted by model, suite, method and label; labels mark diagnostics."""
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


# Upper ends of the ranges of prompt lengths
PROMPT_ENDS = (512, 1024, 2048, 4096, 8192)
_SPEEDUP = re.compile(r"(\d+(\.\d+)?)x")


def range_names(ends: Sequence[int]) -> list[str]:
    """`1-512`, `513-1024`, ..., `8193+`."""
    starts = [1, *(end + 1 for end in ends)]
    return [*(f"{start}-{end}" for start, end in zip(starts[:-1], ends, strict=True)), f"{starts[-1]}+"]


def range_of(lengths: Any, ends: Sequence[int]) -> np.ndarray:
    """The name of each length's range."""
    return np.array(range_names(ends), dtype=object)[np.searchsorted(ends, lengths.to_numpy(dtype=float), side="left")]


def target_of(settings: str) -> float | None:
    """The target speedup in settings (JSON), such as `2.0x`; None if there is none."""
    found = [_SPEEDUP.fullmatch(value) for value in json.loads(settings).values() if isinstance(value, str)]
    return next((float(match[1]) for match in found if match), None)


def forms(*names: str) -> list[str]:
    """The columns of values and their intervals."""
    return [f"{name}{end}" for name in names for end in ("", "_low", "_high")]


def shown(row: Mapping[str, Any], name: str, digits: int, scale: float = 1, missing: str = "unpaired") -> str:
    """A value with its interval. missing: the text if it was not measured, usually for lack of a baseline."""
    if np.isnan(row[name]):
        return missing
    return cell(row[name] / scale, row[f"{name}_low"] / scale, row[f"{name}_high"] / scale, digits)


def model_name(row: Mapping[str, Any], results: Results) -> str:
    """The model's name, with its suite unless that is LongBench, and with a note if its weights were random."""
    notes = [row["suite"]] if not SUITES[row["suite"]].in_paper else []
    notes += ["random weights"] if row["model"] in random_models(results) else []
    return f"{row['model']} ({', '.join(notes)})" if notes else row["model"]


def random_models(results: Results) -> set[str]:
    """Models with random weights: their times are meaningful, their scores are not."""
    return {run.model for run in results.runs if run.identity.get("load_format") == "dummy"}
