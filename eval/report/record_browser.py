"""Every example's answers, as data for the page's script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.store.record import Measurement, Record, to_records
from eval.store.results import StoredRun, first_turns


class Strings(dict[str, int]):
    """Texts by number, so that prompts, gold answers and baselines of many runs are embedded once."""

    def number(self, text: str) -> int:
        return self.setdefault(text, len(self))


def embed_records(runs: Sequence[StoredRun], most: int | None = None) -> dict[str, Any]:
    """The script's data: runs, strings, and one entry a record's turn, whose texts are indices of strings.

    most: only the first N records of each run and dataset; None for all. Scores are 0 to 100, times in seconds.
    """
    strings = Strings()
    return {
        "runs": [embed_run(run) for run in runs],
        "records": [
            _embed(number, turn, f"{record.id}, turn {turn.turn}" if record.later else record.id, strings)
            for number, run in enumerate(runs)
            for record in _first_of_each_dataset(run, most)
            for turn in record.by_turn
        ],
        "strings": list(strings),
    }


def embed_run(run: StoredRun) -> dict[str, Any]:
    """A run's names, for headings and filters."""
    return {"model": run.model, "label": run.label, "seed": run.seed}


def _first_of_each_dataset(run: StoredRun, most: int | None) -> list[Record]:
    if most is None:
        return run.records
    numbers = first_turns(run.examples).groupby("dataset").cumcount()
    return to_records(run.table().take(np.flatnonzero(numbers < most)))


def _embed(run: int, record: Record, name: str, strings: Strings) -> dict[str, Any]:
    return {
        "run": run,
        "dataset": record.dataset,
        "id": strings.number(name),
        "tokens": record.prompt_tokens,
        "uncut": record.prompt_tokens_before_truncation,
        "end": strings.number(record.prompt_end),
        "gold": [strings.number(answer) for answer in record.answers],
        "method": _measured(record.method, strings),
        "baseline": None if record.baseline is None else _measured(record.baseline, strings),
    }


def _measured(measured: Measurement, strings: Strings) -> dict[str, Any]:
    return {
        "text": strings.number(measured.text),
        "tokens": len(measured.token_ids),
        "score": _short(100 * measured.score),
        "ttft": _short(measured.ttft_s),
        "total": _short(measured.total_s),
        "pct": _short(measured.pct_prompt_tokens_computed),
        "kl": None if measured.kl is None else _short(measured.kl),
    }


def _short(value: float) -> float:
    """Six digits: more than are shown, and fewer than a float has, for a smaller page."""
    return float(f"{value:.6g}")
