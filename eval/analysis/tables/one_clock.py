"""All methods in one table: the score they keep, the time they save, and the speedup that their FLOPs allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.known_methods import BASELINE, is_diagnostic, place_of
from eval.analysis.table import COMPUTED, Table
from eval.analysis.tables.cells import SETTING, forms, model_name, overall, shown
from eval.store.results import Results

_MB = 1e6
_VALUES = (
    "score", "relative_score", "ttft_speedup", "ideal_ttft_speedup", "generation_speedup", "kv_bytes",
    "pct_prompt_tokens_computed",
)  # fmt: skip


def field(results: Results) -> Table:
    """Score, speed, memory and computed tokens of every setting of every method, mean over tasks."""
    frame = overall(results)
    frame["scoring_share"] = 100 * frame["scoring_s"] / frame["ttft_s"]
    frame["diagnostic"] = frame["method"].map(is_diagnostic)
    frame = frame[[*SETTING, "diagnostic", "examples", "seeds", *forms(*_VALUES), "scoring_share"]]
    caption = (
        "Mean over tasks; scores 0 to 100. % of baseline: the score relative to the paired baseline's. "
        "Ideal: the baseline's prefill FLOPs divided by the method's, for the tokens that were computed, scoring "
        "included; -: older records lack FLOPs. Scoring: share of TTFT spent before the prefill. "
        "Generation speedup: of whole answers, which may differ in length. KV cache: at the end, MB = 10^6 bytes. % "
        f"computed: prompt tokens, mean over layers; {COMPUTED}. In brackets: a diagnostic, which is not a method: its "
        "TTFT leaves out the cost of its selection. ±: half of the 95 % bootstrap interval over examples."
    )
    lines = [_line(row, results) for row in frame.to_dict("records")]
    return Table("field", "Every method on one clock", caption, frame, pd.DataFrame(lines), keys=3)


def _line(row: Mapping[str, Any], results: Results) -> dict[str, str]:
    def cell(name: str, digits: int, scale: float = 1) -> str:
        return "-" if np.isnan(row[name]) else shown(row, name, digits, scale)

    around = "({})" if row["diagnostic"] else "{}"
    is_scored = row["scoring_share"] > 0
    return {
        "model": model_name(row, results),
        "method": place_of(row["method"])[1],
        "setting": row["label"].removesuffix(" (diagnostic)").partition(", ")[2] or "-",
        "n": str(row["examples"]),
        "score": cell("score", 2),
        "% of baseline": "100.0" if row["method"] == BASELINE else cell("relative_score", 1),
        "TTFT speedup": around.format(cell("ttft_speedup", 2)),
        "ideal": around.format(cell("ideal_ttft_speedup", 2)),
        "scoring, %": f"{row['scoring_share']:.1f}" if is_scored else "-",
        "generation speedup": around.format(cell("generation_speedup", 2)),
        "KV cache, MB": cell("kv_bytes", 3, _MB),
        "% computed": around.format(cell("pct_prompt_tokens_computed", 1)),
    }
