"""Score and speed by schedule of the method under study."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.known_methods import STUDIED
from eval.analysis.table import COMPUTED, Table
from eval.analysis.tables.cells import SECTION, SETTING, forms, model_name, overall, shown
from eval.store.results import Results
from eval.store.runs import label_of

_SLOPE = "score_change_per_0.1_keep"


def sensitivity(results: Results) -> Table:
    """Score, KL and TTFT speedup of every schedule, and the score lost from the next higher keep ratio."""
    frame = overall(results.where(lambda run: run.method == STUDIED))
    frame = frame[frame["method"] == STUDIED].copy()
    frame["score_change"] = frame["score"] - frame["baseline_score"]
    schedules = [_schedule(settings) for settings in frame["settings"]]
    frame = frame.join(pd.DataFrame(schedules, index=frame.index, columns=["layers", "keep", "others"]))
    frame[_SLOPE] = _slopes(frame)
    frame = frame.sort_values([*SECTION, "ttft_speedup"], kind="stable").reset_index(drop=True)
    values = forms("score", "ttft_speedup", "pct_prompt_tokens_computed", "kl")
    frame = frame[[*SETTING, "layers", "keep", "examples", *values, "baseline_score", "score_change", _SLOPE]]
    lines = [
        {
            "model": model_name(row, results),
            "schedule": row["label"].removeprefix(f"{STUDIED}, ").removeprefix("schedule="),
            "n": str(row["examples"]),
            "TTFT speedup": shown(row, "ttft_speedup", 2),
            "score": shown(row, "score", 2),
            "score - baseline": "unpaired" if np.isnan(row["score_change"]) else f"{row['score_change']:+.2f}",
            "% tokens computed": shown(row, "pct_prompt_tokens_computed", 1),
            "KL, nats": shown(row, "kl", 5, missing="-"),
            "points per 0.1 keep": "-" if np.isnan(row[_SLOPE]) else f"{row[_SLOPE]:+.2f}",
        }
        for row in frame.to_dict("records")
    ]
    caption = (
        "Every schedule of LazyLLM that was run ({layer: keep ratio}), by speedup; mean over tasks. Points per 0.1 "
        "keep: change of the score per 0.1 less of the prompt kept after a single pruning layer, relative to the next "
        "higher ratio that was run after the same layer, or to keeping everything (the baseline); - "
        f"for schedules of several layers. % tokens computed: {COMPUTED}. KL: of the first token's distribution from "
        "the paired baseline's. ±: half of the 95 % bootstrap interval over examples."
    )
    title = "Sensitivity of score, KL and speed to the schedule"
    return Table("sensitivity", title, caption, frame, pd.DataFrame(lines), keys=2)


def _schedule(settings: str) -> dict[str, Any]:
    """The layers that prune, the share of the prompt that the last layers keep, and the other settings."""
    values = json.loads(settings)
    schedule = values.pop("schedule", None)
    others = label_of("", values)
    if not isinstance(schedule, dict):
        return {"layers": None, "keep": np.nan, "others": others}
    layers = " ".join(sorted(schedule, key=int))
    return {"layers": layers, "keep": float(np.prod(list(schedule.values()))), "others": others}


def _slopes(frame: pd.DataFrame) -> pd.Series:
    """Change of score per 0.1 of keep, relative to the next higher keep (at most 1) after the same layer.

    NaN for schedules of several pruning layers, as several ratios differ. Scores are differences to the baseline's.
    """
    slopes = pd.Series(np.nan, index=frame.index)
    single = frame["layers"].notna() & ~frame["layers"].astype(str).str.contains(" ")
    known: Any = frame[single & (frame["keep"] < 1)]
    for _, group in known.groupby([*SECTION, "layers", "others"]):
        gentler_keep, gentler_change = 1.0, 0.0  # keeping everything is the baseline
        for index, row in group.sort_values("keep", ascending=False).iterrows():
            slopes[index] = 0.1 * (row["score_change"] - gentler_change) / (gentler_keep - row["keep"])
            gentler_keep, gentler_change = row["keep"], row["score_change"]
    return slopes
