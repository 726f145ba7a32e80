"""Shared by tables and figures: methods' names, order of settings, columns that show values, ranges of lengths."""

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from eval.store.aggregate import rows_of
from eval.store.results import Results
from lazyllm.errors import UserError
from lazyllm.methods import Method, by_name

BASELINE = "baseline"
STUDIED = "lazy"  # the paper's own method
SECTION = ["model", "suite"]
SETTING = [*SECTION, "method", "settings", "label"]
KLS = ("answer_kl", "gold_kl", "kl")  # the first that was measured ranks methods
PROMPT_ENDS = (512, 1024, 2048, 4096, 8192)  # upper ends of the ranges of prompt lengths
_SPEEDUP = re.compile(r"(\d+(\.\d+)?)x")


def in_order(frame: Any) -> Any:
    """Settings sorted by model, suite, method and label, the method's plain one first; labels mark diagnostics."""
    order = sorted(frame["method"].unique(), key=place_of).index
    labels = pd.Series(list(map(marked, frame["label"], frame["method"])), frame.index, dtype=object)
    ordered = frame.assign(order=frame["method"].map(order), is_named=frame["label"] != frame["method"], label=labels)
    ordered = ordered.sort_values([*SECTION, "order", "is_named", "label"], kind="stable")
    return ordered.drop(columns=["order", "is_named"])


def overall(results: Results) -> Any:
    """The mean over tasks of each setting, in order."""
    frame = results.by_task
    return in_order(frame[frame["level"] == "all"]).reset_index(drop=True)


def rows_by(rows: Any, key: str, among: Any) -> list[dict[str, Any]]:
    """`rows_of` each setting on each suite and value of column `key`, as they appear. among: as of `rows_of`."""
    keys = [*SETTING, key]
    return [
        dict(zip(keys, values, strict=True)) | row
        for values, part in rows.groupby(keys, sort=False)
        for row in rows_of(part, among)
    ]


def with_sums(rows: Any, *names: str) -> Any:
    """The rows, and for sums over each choice of these columns the same rows with `all` there."""
    for name in names:
        rows = pd.concat([rows, rows.assign(**{name: "all"})])
    return rows


def prompt_lengths(rows: Any) -> Any:
    """Of each row of `Results.frame`, the tokens of its example's prompt. rows: must hold the first turns."""
    firsts = rows["prompt_tokens"].where(rows["turn"] == 1)
    return firsts.groupby([rows[name] for name in ("model", "dataset", "id")]).transform("first")


def with_ends(drawn: np.ndarray) -> tuple[float, float, float]:
    """A value and both ends of its 95 % interval. drawn: the value, then those of the resamples (`drawn_means`)."""
    low, high = np.percentile(drawn[1:], [2.5, 97.5])
    return float(drawn[0]), float(low), float(high)


def range_names(ends: Sequence[int] = PROMPT_ENDS) -> list[str]:
    """`1-512`, `513-1024`, ..., `8193+`."""
    starts = [1, *(end + 1 for end in ends)]
    return [*(f"{start}-{end}" for start, end in zip(starts[:-1], ends, strict=True)), f"{starts[-1]}+"]


def range_of(lengths: Any, ends: Sequence[int] = PROMPT_ENDS) -> np.ndarray:
    """The name of each length's range; "unknown" for NaN, as of a server that does not count its tokens."""
    names, numbers = np.array(range_names(ends), dtype=object), lengths.to_numpy(dtype=float)
    return np.where(np.isnan(numbers), "unknown", names[np.searchsorted(ends, numbers, side="left")])


def ranges_in(names: Any, ends: Sequence[int] = PROMPT_ENDS) -> list[str]:
    """The ranges that occur among these names, in order."""
    return [name for name in range_names(ends) if name in set(names)]


def target_of(settings: str) -> float | None:
    """The target speedup in settings (JSON), such as `2.0x`; None if there is none."""
    matches = [_SPEEDUP.fullmatch(value) for value in json.loads(settings).values() if isinstance(value, str)]
    return next((float(match[1]) for match in matches if match), None)


def single_layer(settings: str) -> tuple[int, float] | None:
    """(layer, keep ratio) of a schedule with one pruning layer. settings: JSON."""
    schedule = json.loads(settings).get("schedule")
    if not isinstance(schedule, dict) or len(schedule) != 1:
        return None
    ((layer, keep),) = schedule.items()
    return int(layer), keep


@cache
def kind_of(name: str) -> type[Method] | None:
    """The method's class; None if its package is not installed."""
    try:
        return by_name(name)
    except UserError:
        return None


def is_diagnostic(name: str) -> bool:
    """Whether it is a diagnostic: a reference whose TTFT leaves out the cost of its selection, not a method."""
    kind = kind_of(name)
    return kind is not None and kind.diagnostic


def marked(label: str, method: str) -> str:
    """A setting's label, marked if it is a diagnostic's."""
    return f"{label} (diagnostic)" if is_diagnostic(method) else label


def place_of(name: str) -> tuple[float, str]:
    """The sort key of methods in tables and legends: unknown ones come last."""
    kind = kind_of(name)
    return (float("inf"), name) if kind is None else (kind.order, kind.label)
