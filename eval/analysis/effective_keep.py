"""Effective keep rate: the smallest share of prefill FLOPs at which a method's score stays near its baseline's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.columns import EXAMPLES, MODEL, PROMPT_ENDS, SECTION, Column, cells, in_order, range_names, range_of
from eval.analysis.known_methods import BASELINE
from eval.analysis.table import Table
from eval.benchmarks.datasets import TASKS
from eval.store.aggregate import drawn_means, on_common_examples
from eval.store.results import Results, first_turns

WITHIN = 1.0  # per cent of the baseline's score
_SHARES = ("keep", "keep_low", "keep_high")
_SHARE = Column("keep", "", 1)


def effective_keep(results: Results, within: float = WITHIN) -> Table:
    """The smallest share of prefill FLOPs at which a method's score is at most `within` % below its own baseline's."""
    frame: Any = first_turns(results.frame)
    frame = frame[frame["method"] != BASELINE].dropna(subset=["prefill_flops", "baseline_score"])
    shares = 100 * frame["prefill_flops"] / frame["baseline_prefill_flops"]
    frame = frame.assign(share=shares, length=range_of(frame["prompt_tokens"], PROMPT_ENDS))
    rows = []
    for (model, suite, method), group in frame.groupby([*SECTION, "method"], sort=False):
        for task in [*(task for task in TASKS if task in set(group["task"])), "all"]:
            of_task = group if task == "all" else group[group["task"] == task]
            for length in [*(name for name in range_names(PROMPT_ENDS) if name in set(of_task["length"])), "all"]:
                part = of_task if length == "all" else of_task[of_task["length"] == length]
                key = {"model": model, "suite": suite, "method": method, "label": method, "task": task}
                rows.append(key | {"prompt_tokens": length} | _least_share(part, within))
    columns = [*SECTION, "method", "label", "task", "prompt_tokens", "examples", "settings", "setting", *_SHARES]
    table = in_order(pd.DataFrame(rows, columns=columns)).drop(columns="label")
    caption = (
        f"The smallest share of an unpruned prefill's FLOPs, scoring included, in %, at which the score stays "
        f"within {within:g} % of the paired baseline's, by prompt tokens. It is the minimum over all settings of the "
        "method that were run (the CSV names the best one; more settings can only lower it), on the examples that all "
        "settings have. 100: no setting stays that near. ±: half of the 95 % bootstrap interval over examples; both "
        "ends are in the CSV. -: no prompt of this length, or a baseline that scores 0."
    )
    return Table("effective_keep", "Effective keep rate", caption, table, _cells(table, results), keys=3)


def _least_share(part: pd.DataFrame, within: float) -> dict[str, Any]:
    """The least share over the settings of one method."""
    score, baseline, flops = (on_common_examples(part, name) for name in ("score", "baseline_score", "share"))
    counts = {"examples": len(score), "settings": len(score.columns)}
    if not len(score):
        return counts
    scores, baselines, shares = map(drawn_means, (score, baseline, flops))
    if not baselines[0].all():
        return counts
    near = scores >= (1 - within / 100) * baselines
    shares = np.where(near, shares, 100.0).clip(max=100)  # keeping all is the baseline
    least = shares.min(axis=1)
    best = score.columns[shares[0].argmin()] if least[0] < 100 else BASELINE
    low, high = np.percentile(np.where(np.isnan(scores[1:, 0]), np.nan, least[1:]), [2.5, 97.5])
    return counts | {"setting": best} | dict(zip(_SHARES, (least[0], low, high), strict=True))


def _cells(table: Any, results: Results) -> pd.DataFrame:
    """A line for each method and task, with a column for each range of lengths."""
    lengths = [name for name in (*range_names(PROMPT_ENDS), "all") if name in set(table["prompt_tokens"])]
    headings = [Column(name, name if name == "all" else f"{name} tokens") for name in lengths]
    lines = []
    for _, group in table.groupby([*SECTION, "method", "task"], sort=False):
        rows = {row["prompt_tokens"]: row for row in group.to_dict("records")}
        lines.append(rows["all"] | {name: _SHARE.text(rows[name]) if name in rows else "-" for name in lengths})
    keys = [MODEL, Column("method", "method"), Column("task", "task"), EXAMPLES, Column("settings", "settings")]
    return cells(pd.DataFrame(lines), [*keys, *headings], results)
