"""Every example's answers, as data that the page's script filters and shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.store.columns import StoredRecords
from eval.store.frame import StoredRun, label_of
from eval.store.record import Measurement, Record


class Strings:
    """Texts by number: prompts, gold answers and baselines are the same in many runs, and are embedded once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def all(self) -> list[str]:
        """The texts, each at its number."""
        return list(self._numbers)


def embed_records(runs: Sequence[StoredRun], most: int | None = None) -> dict[str, Any]:
    """What the script reads: runs, strings, and one entry a record with texts as numbers into the strings.

    most: of each run and dataset, only so many records, the first ones; None for all.
    Scores are 0 to 100, times in seconds.
    """
    strings = Strings()
    return {
        "runs": [embed_run(run) for run in runs],
        "records": [
            _embed(number, record, strings)
            for number, run in enumerate(runs)
            for record in _first_of_each_dataset(run, most)
        ],
        "strings": strings.all(),
    }


def embed_run(run: StoredRun) -> dict[str, Any]:
    """A run's names, for headings and filters."""
    return {"model": run.model, "label": label_of(run.method, run.settings), "seed": run.seed}


def _first_of_each_dataset(run: StoredRun, most: int | None) -> Sequence[Record]:
    if most is None:
        return run.records
    first = np.flatnonzero(run.examples.groupby("dataset").cumcount() < most).tolist()
    return run.records.take(first) if isinstance(run.records, StoredRecords) else [run.records[one] for one in first]


def _embed(run: int, record: Record, strings: Strings) -> dict[str, Any]:
    return {
        "run": run,
        "dataset": record.dataset,
        "id": strings.number(record.id),
        "tokens": record.prompt_tokens,
        "uncut": record.prompt_tokens_before_truncation,
        "end": strings.number(record.prompt_end),
        "gold": [strings.number(answer) for answer in record.answers],
        "method": _measured(record.method, strings),
        "baseline": None if record.baseline is None else _measured(record.baseline, strings),
    }


def _measured(one: Measurement, strings: Strings) -> dict[str, Any]:
    return {
        "text": strings.number(one.text),
        "tokens": len(one.token_ids),
        "score": _short(100 * one.score),
        "ttft": _short(one.ttft_s),
        "total": _short(one.total_s),
        "pct": _short(one.pct_prompt_tokens_computed),
    }


def _short(value: float) -> float:
    """More digits than are ever shown, and far fewer than a float has: the page is passed on."""
    return float(f"{value:.6g}")
