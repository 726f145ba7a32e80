"""Methods ranked at equal ideal speedups, by the KL divergence of their first token from the baseline's."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.columns import EXAMPLES, MODEL, SECTION, Column, cells, forms, target_of
from eval.analysis.known_methods import BASELINE, is_diagnostic, marked
from eval.analysis.table import Table
from eval.store.aggregate import drawn_means, on_common_examples
from eval.store.results import Results

LEAST = 0.9  # of its target: a setting whose prefills' measured ideal speedup is lower is not ranked
_VALUES = {"kl": 5, "score": 2}  # digits shown
_COLUMNS = (
    MODEL,
    Column("speedup", "ideal speedup"),
    Column("rank", "rank"),
    Column("setting", "method"),
    EXAMPLES,
    Column("kl", "KL, nats", _VALUES["kl"]),
    Column("kl_shown", "KL - first's"),
    Column("score", "score", _VALUES["score"]),
    Column("score_shown", "score - first's"),
)


def ranking(results: Results) -> Table:
    """KL and score of all methods by ideal speedup, with each method's difference to the first on the same examples.

    Diagnostics are not ranked, nor settings whose prefills did not reach the speedup: the caption names them.
    """
    frame: Any = results.frame
    frame = frame.assign(target=frame["settings"].map(target_of))
    frame = frame[frame["method"] != BASELINE].dropna(subset=["target", "kl"])
    reasons = _unranked(results)
    left_out = frame.set_index([*SECTION, "label"]).index.map(reasons.get)
    frame, others = frame[left_out.isna()], list(dict.fromkeys(left_out.dropna()))
    rows: list[dict[str, Any]] = []
    for (model, suite, target), group in frame.groupby([*SECTION, "target"], sort=True):
        rows += [{"model": model, "suite": suite, "target": target} | row for row in _ranked(group)]
    keys = [*SECTION, "target", "rank", "method", "label", "examples"]
    table = pd.DataFrame(rows, columns=[*keys, *forms(*_VALUES, *(f"{name}_difference" for name in _VALUES))])
    shown = table.assign(
        speedup=[f"{target:g}x" for target in table["target"]],
        setting=[re.sub(r"\w+=[\d.]+x(, )?", "", label).removesuffix(", ") for label in table["label"]],
        **{f"{name}_shown": [_difference(row, name) for row in rows] for name in _VALUES},
    )
    caption = (
        "Settings given by an ideal TTFT speedup, ranked by the mean KL divergence of the first token's distribution "
        "from the paired baseline's, smallest first. Means over tasks, on the examples that all methods of that "
        "speedup have; seeds are pooled. ±: half of the 95 % bootstrap interval over examples. Differences: to the "
        "method ranked first, on the same examples; in brackets both ends of their 95 % interval (paired: each "
        "resample draws the same examples for both)."
    ) + (f" Not ranked: {'; '.join(others)}." if others else "")
    title = "Methods ranked at equal ideal speedups"
    return Table("ranking", title, caption, table, cells(shown, _COLUMNS, results), keys=4)


def _unranked(results: Results) -> dict[tuple[str, str, str], str]:
    """{(model, suite, label): the setting and why it has no rank} of those that have none."""
    reasons = {}
    frame: Any = results.by_task
    for row in frame[frame["level"] == "all"].to_dict("records"):
        target, ideal = target_of(row["settings"]), row["ideal_ttft_speedup"]
        key, name = (row["model"], row["suite"], row["label"]), marked(row["label"], row["method"])
        if is_diagnostic(row["method"]):
            reasons[key] = name
        elif target is not None and ideal < LEAST * target:  # not of records that lack it: NaN
            reasons[key] = f"{name}, whose prefills had an ideal speedup of {ideal:.2f}"
    return reasons


def _ranked(group: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of one speedup, sorted by KL."""
    names = group.drop_duplicates("label").set_index("label")["method"]
    values = {name: on_common_examples(group, name) for name in _VALUES}
    if not len(values["kl"]):
        return []
    drawn = {name: drawn_means(value) for name, value in values.items()}
    order = drawn["kl"][0].argsort(kind="stable")
    rows = []
    for rank, number in enumerate(order, start=1):
        label = values["kl"].columns[number]
        row = {"rank": rank, "method": names[label], "label": label, "examples": len(values["kl"])}
        for name, means in drawn.items():
            row |= _with_interval(name, means[:, number])
            row |= _with_interval(f"{name}_difference", means[:, number] - means[:, order[0]])
        rows.append(row)
    return rows


def _with_interval(name: str, drawn: np.ndarray) -> dict[str, float]:
    low, high = np.percentile(drawn[1:], [2.5, 97.5])
    return {name: drawn[0], f"{name}_low": low, f"{name}_high": high}


def _difference(row: dict[str, Any], name: str) -> str:
    """Both ends of the interval, as the ends of a difference may differ in sign."""
    if row["rank"] == 1:
        return "-"
    mean, low, high = (f"{row[form]:+.{_VALUES[name]}f}" for form in forms(f"{name}_difference"))
    return mean if low == "+nan" else f"{mean} ({low}, {high})"
