"""What tables share: columns that show values, the order and names of settings, ranges of prompt lengths."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.known_methods import marked, place_of
from eval.analysis.table import with_interval
from eval.benchmarks import SUITES
from eval.store.results import Results

SECTION = ["model", "suite"]
SETTING = [*SECTION, "method", "settings", "label"]
MB = 1e6
PROMPT_ENDS = (512, 1024, 2048, 4096, 8192)  # upper ends of the ranges of prompt lengths
_SPEEDUP = re.compile(r"(\d+(\.\d+)?)x")


def forms(*names: str) -> list[str]:
    """The columns of values and their intervals."""
    return [f"{name}{end}" for name in names for end in ("", "_low", "_high")]


@dataclass(frozen=True)
class Column:
    """A column of a table as people read it.

    name: the column of the values; `<name>_low` and `<name>_high`, if there are such columns, hold the interval.
    digits: after the decimal point; None for text and whole numbers. missing: shown if the value was not measured.
    scale: divisor, such as 1e6 for bytes shown in MB. sign: "+" to sign positive values too.
    """

    name: str
    heading: str
    digits: int | None = None
    missing: str = "-"
    scale: float = 1
    interval: bool = True
    sign: str = ""

    def text(self, row: Mapping[Any, Any]) -> str:
        """The cell of a row of values."""
        value = row[self.name]
        if pd.isna(value):
            return self.missing
        if self.digits is None:
            return str(value)
        ends = [row.get(f"{self.name}_{end}") if self.interval else None for end in ("low", "high")]
        low, high = (None if end is None else end / self.scale for end in ends)
        return with_interval(value / self.scale, low, high, self.digits, self.sign)


MODEL, LABEL, EXAMPLES = Column("model", "model"), Column("label", "method"), Column("examples", "n")


def cells(values: pd.DataFrame, columns: Sequence[Column], results: Results | None = None) -> pd.DataFrame:
    """The text of each row of values, by heading. results: to show a model with its notes (`model_name`)."""
    rows = values.to_dict("records")
    if results is not None:
        rows = [row | {"model": model_name(row, results)} for row in rows]
    headings = [column.heading for column in columns]
    return pd.DataFrame([[column.text(row) for column in columns] for row in rows], columns=headings, dtype=object)


def in_order(frame: Any) -> Any:
    """Settings sorted by model, suite, method and label; labels mark diagnostics."""
    names = sorted(frame["method"].unique(), key=place_of)
    order = frame["method"].map({name: number for number, name in enumerate(names)})
    labels = list(map(marked, frame["label"], frame["method"]))
    ordered = frame.assign(order=order, label=labels).sort_values([*SECTION, "order", "label"], kind="stable")
    return ordered.drop(columns="order")


def overall(results: Results) -> Any:
    """The mean over tasks of each setting, in order."""
    frame = results.by_task
    return in_order(frame[frame["level"] == "all"]).reset_index(drop=True)


def range_names(ends: Sequence[int]) -> list[str]:
    """`1-512`, `513-1024`, ..., `8193+`."""
    starts = [1, *(end + 1 for end in ends)]
    return [*(f"{start}-{end}" for start, end in zip(starts[:-1], ends, strict=True)), f"{starts[-1]}+"]


def range_of(lengths: Any, ends: Sequence[int]) -> np.ndarray:
    """The name of each length's range."""
    return np.array(range_names(ends), dtype=object)[np.searchsorted(ends, lengths.to_numpy(dtype=float), side="left")]


def target_of(settings: str) -> float | None:
    """The target speedup in settings (JSON), such as `2.0x`; None if there is none."""
    matches = [_SPEEDUP.fullmatch(value) for value in json.loads(settings).values() if isinstance(value, str)]
    return next((float(match[1]) for match in matches if match), None)


def model_name(row: Mapping[Any, Any], results: Results) -> str:
    """The model's name, with its suite unless that is LongBench, and with a note if its weights were random."""
    notes = [row["suite"]] if not SUITES[row["suite"]].in_paper else []
    notes += ["random weights"] if row["model"] in random_models(results) else []
    return f"{row['model']} ({', '.join(notes)})" if notes else row["model"]


def random_models(results: Results) -> set[str]:
    """Models with random weights: their times are meaningful, their scores are not."""
    return {run.model for run in results.runs if run.identity.get("load_format") == "dummy"}
