"""Cost and quality of later questions on the same context."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pandas as pd

from eval.analysis.known_methods import BASELINE
from eval.analysis.table import Table
from eval.analysis.tables.cells import SETTING, forms, in_order, model_name, shown
from eval.store.aggregate import rows_of
from eval.store.results import Results

VALUES = (
    "score", "baseline_score", "kl", "ttft_speedup", "speedup_so_far", "tokens_computed", "tokens_computed_so_far",
    "revived_tokens", "kv_bytes", "aux_bytes", "total_s_so_far", "baseline_total_s_so_far",
)  # fmt: skip
_SHOWN = (1, 2, 4, 8, 16, 32)  # turns; the CSV has all
_COLUMNS = [*SETTING, "turns", "turn", "level", "name", "task", "examples", *forms(*VALUES)]


def turns(results: Results) -> Table:
    """Every setting by turn. frame: datasets, tasks and their mean; cells: the mean."""
    frame: Any = by_turn(results)
    is_shown = (frame["level"] == "all") & frame["turn"].isin(_SHOWN)
    lines = [_line(row, results) for row in frame[is_shown].to_dict("records")]
    caption = (
        "Mean over tasks of rows with several questions, by question. Each later turn continues from the method's own "
        "earlier answers, and the baseline from its own; KL and speedups compare the two in the same turn. TTFT "
        "speedup: of this turn alone. Speedup so far: of whole answers, all turns up to this one; below 1, the method "
        "has cost more time than the baseline. Computed, revived: prompt tokens in this turn, mean over layers. "
        "turns=again: each turn runs the whole text anew. ±: half of the 95 % bootstrap interval over rows. The other "
        "turns, datasets and tasks are in the CSV."
    )
    return Table("turns", "Later questions on the same context, by turn", caption, frame, pd.DataFrame(lines), keys=3)


def by_turn(results: Results) -> pd.DataFrame:
    """A row for each setting, turn, and dataset, task or "all", for settings with several questions.

    speedup_so_far: the baseline's time for all turns up to this one, divided by the method's. Other values: as in
    `eval.store.aggregate.by_task`, over rows with such a turn. turns: what the method does in later turns.
    """
    frame: Any = results.frame
    frame = frame[(frame["method"] != BASELINE) & frame["baseline_ttft_s"].notna()]
    rows = [
        {**dict(zip(SETTING, setting, strict=True)), "turn": turn, **row}
        for setting, examples in in_order(frame).groupby(SETTING, sort=False)
        for turn, part in _parts(examples)
        for row in rows_of(part)
    ]
    for row in rows:
        row["turns"] = json.loads(row["settings"]).get("turns", "continue")
        row |= {f"speedup_so_far{end}": row[f"generation_speedup{end}"] for end in ("", "_low", "_high")}
    return pd.DataFrame(rows, columns=_COLUMNS)


def _parts(examples: Any) -> Iterator[tuple[int, Any]]:
    """Each turn and its rows, if there are several turns. Their times are sums over all turns so far."""
    if examples["turn"].max() > 1:
        so_far = {name: examples[f"{name}_so_far"] for name in ("total_s", "baseline_total_s")}
        yield from examples.assign(**so_far).groupby("turn")


def _line(row: dict[Any, Any], results: Results) -> dict[str, str]:
    return {
        "model": model_name(row, results),
        "method": row["label"],
        "turn": str(row["turn"]),
        "n": str(row["examples"]),
        "score": shown(row, "score", 2),
        "baseline score": shown(row, "baseline_score", 2),
        "KL, nats": shown(row, "kl", 4),
        "TTFT speedup": shown(row, "ttft_speedup", 2),
        "speedup so far": shown(row, "speedup_so_far", 2),
        "computed": f"{row['tokens_computed']:.1f}",
        "revived": f"{row['revived_tokens']:.1f}",
        "KV + Aux, MB": f"{(row['kv_bytes'] + row['aux_bytes']) / 1e6:.2f}",
    }
