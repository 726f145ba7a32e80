"""Shared by tables and figures: methods' names, order of settings, columns that show values,
ranges of lengths.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from eval.store.results import Results
from eval.store.runs import kind_of
from eval.store.summary import summarise

BASELINE = "baseline"
STUDIED = "lazy"  # the paper's own method
PAPER_SPEEDUP = "table1"  # the speedup of arms that were solved for the paper's, by task and model
SECTION = ["model", "suite"]
SETTING = [*SECTION, "method", "settings", "label"]
KLS = ("answer_kl", "gold_kl", "kl")  # the first that was measured ranks methods
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
PROMPT_ENDS = (512, 1024, 2048, 4096, 8192)  # upper ends of the ranges of prompt lengths


def in_order(frame: Any) -> Any:
    """Settings sorted by model, suite, method and label (2x before 2.5x, layer 8 before 10), the
    method's plain one first.
    """
    order = sorted(frame["method"].unique(), key=place_of).index
    ordered = frame.assign(
        order=frame["method"].map(order),
        is_named=frame["label"] != frame["method"],
        padded=frame["label"].str.replace(_NUMBER, _pad, regex=True),
    )
    ordered = ordered.sort_values([*SECTION, "order", "is_named", "padded"], kind="stable")
    return ordered.drop(columns=["order", "is_named", "padded"])


def _pad(number: re.Match[str]) -> str:
    """Write a number in one width, so that texts sort as numbers do."""
    return f"{float(number[0]):020.6f}"


def overall(results: Results) -> Any:
    """The mean over tasks of each setting, in order."""
    frame = results.by_task
    return in_order(frame[frame["level"] == "all"]).reset_index(drop=True)


def rows_by(rows: Any, key: str, among: Any) -> list[dict[str, Any]]:
    """`summarise` each setting on each suite and value of column `key`, as they appear. among:
    as of `summarise`.
    """
    keys = [*SETTING, key]
    return [
        dict(zip(keys, values, strict=True)) | row
        for values, part in rows.groupby(keys, sort=False)
        for row in summarise(part, among)
    ]


def with_sums(rows: Any, *names: str) -> Any:
    """The rows, and for sums over each choice of these columns the same rows with `all` there."""
    for name in names:
        rows = pd.concat([rows, rows.assign(**{name: "all"})])
    return rows


def with_ends(drawn: np.ndarray) -> tuple[float, float, float]:
    """A value and both ends of its 95 % interval. drawn: the value, then those of the resamples
    (`drawn_means`).
    """
    low, high = np.percentile(drawn[1:], [2.5, 97.5])
    return float(drawn[0]), float(low), float(high)


def range_names(ends: Sequence[int] = PROMPT_ENDS) -> list[str]:
    """`1-512`, `513-1024`, ..., `8193+`."""
    starts = [1, *(end + 1 for end in ends)]
    return [
        *(f"{start}-{end}" for start, end in zip(starts[:-1], ends, strict=True)),
        f"{starts[-1]}+",
    ]


def range_of(lengths: Any, ends: Sequence[int] = PROMPT_ENDS) -> np.ndarray:
    """The name of each length's range."""
    return np.array(range_names(ends), dtype=object)[
        np.searchsorted(ends, lengths.to_numpy(dtype=float), side="left")
    ]


def ranges_in(names: Any, ends: Sequence[int] = PROMPT_ENDS) -> list[str]:
    """The ranges that occur among these names, in order."""
    return [name for name in range_names(ends) if name in set(names)]


def targets_of(rows: Any) -> Any:
    """The speedups that these rows' settings were solved for; NaN without one, and for the
    paper's (`table1`).
    """
    return pd.to_numeric(rows["speedup"], errors="coerce")


def single_layer(settings: str) -> tuple[int, float] | None:
    """(layer, keep ratio) of a schedule with one pruning layer. settings: JSON."""
    schedule = json.loads(settings).get("schedule")
    if not isinstance(schedule, dict) or len(schedule) != 1:
        return None
    ((layer, keep),) = schedule.items()
    return int(layer), keep


def unsolved_methods(rows: Any) -> str:
    """`ASL and UniPrefill`: the methods of these settings that no speedup gives, if one gives
    others; else "".
    """
    if targets_of(rows).isna().all():
        return ""
    kinds = [kind_of(name) for name in sorted(rows["method"].unique(), key=place_of)]
    names = [
        kind.label
        for kind in kinds
        if kind is not None and kind.adaptive and kind.target_parameter is None
    ]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def unsolved(rows: Any) -> str:
    """A sentence about `unsolved_methods`; "" if there are none."""
    names = unsolved_methods(rows)
    return names and (
        f"No speedup gives the settings of {names}: the number of computed tokens depends on the "
        "prompt, so the speed is measured, not set."
    )


def place_of(name: str) -> tuple[float, str]:
    """The sort key of methods in tables and legends: unknown ones come last."""
    kind = kind_of(name)
    return (float("inf"), name) if kind is None else (kind.order, kind.label)
