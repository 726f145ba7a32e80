"""Every example's answers, as data for the page's script."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from eval.analysis.mechanism import step_sets
from eval.store.record import Measurement, Record, Trace, read_trace
from eval.store.results import first_turns
from eval.store.runs import StoredRun


class Strings(dict[str, int]):
    """Numbers of texts, so that prompts, gold answers and baselines of many runs are embedded once."""

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
            for record, place in zip(run.records, first_turns(run.examples).groupby("dataset").cumcount(), strict=True)
            if most is None or place < most
            for turn in record.by_turn
        ],
        "strings": list(strings),
    }


def embed_run(run: StoredRun) -> dict[str, Any]:
    """A run's names, for headings and filters."""
    return {"model": run.model, "label": run.label, "seed": run.seed}


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
    ids = measured.token_ids  # None of a server's answer, which may tell their number
    return {
        "text": strings.number(measured.text),
        "tokens": measured.request and measured.request.completion_tokens if ids is None else len(ids),
        "score": _short(100 * measured.score),
        "ttft": _short(measured.ttft_s),
        "total": None if measured.total_s is None else _short(measured.total_s),
        "pct": _short(measured.pct_prompt_tokens_computed),
        "kl": _short(measured.kl),
    }


def _short(value: float | None) -> float | None:
    """Six digits: more than are shown, and fewer than a float has, for a smaller page."""
    return None if value is None else float(f"{value:.6g}")


def embed_traces(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """All traces of the runs. Raises UserError if a file is not a trace."""
    return [{**embed_run(run), **embed_trace(read_trace(file))} for run in runs for file in run.traces]


def embed_trace(trace: Trace) -> dict[str, Any]:
    """One trace. levels: the last layers that occur, ascending. steps: per step one character for each prompt and
    generated token, whose code after "0" is an index into levels. revived: per step, positions. anew: whether the step
    has its own selection.
    """
    depths = last_layers(trace)
    levels = sorted({int(layer) for depth in depths for layer in np.unique(depth)})
    return {
        "dataset": trace.dataset,
        "id": trace.id,
        "tokens": trace.tokens,
        "generated": trace.generated,
        "importance": trace.importance,
        "layers": len(trace.importance),
        "levels": levels,
        "steps": ["".join(chr(ord("0") + levels.index(layer)) for layer in depth) for depth in depths],
        "revived": revived(depths),
        "anew": [bool(selected) for selected in trace.selected],
    }


def last_layers(trace: Trace) -> list[np.ndarray]:
    """Per step, [n + step] the last layer (from 1; 0 for none) in which each token is in the step's set.

    Tokens are the prompt's and the generated ones run so far. A step without its own selection has the prefill's, with
    all generated tokens.
    """
    n, layers = len(trace.tokens), len(trace.importance)
    depths = [in_set[:, : n + step].sum(axis=0) for step, in_set in enumerate(step_sets(trace))]  # the sets are nested
    for step, selected in enumerate(trace.selected):
        if step and not selected:
            depths[step] = np.append(depths[0], np.full(step, layers))
    return depths


def revived(depths: Sequence[np.ndarray]) -> list[list[int]]:
    """Per step, the tokens that it computed in layers in which no earlier step had computed them."""
    deepest, found = depths[0], [[]]
    for before, now in pairwise(depths):
        deeper = now[: len(before)] > deepest
        found.append(np.flatnonzero(deeper).tolist())
        deepest = np.append(np.maximum(deepest, now[: len(before)]), now[len(before) :])
    return found
