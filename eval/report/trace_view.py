"""Traced examples, as data for the page's script: the last layer of each token in each step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from eval.paper.token_states import step_sets
from eval.report.record_browser import embed_run
from eval.store.results import StoredRun
from eval.store.trace import Trace, read_trace


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
    n, steps, layers = len(trace.tokens), len(trace.selected), len(trace.importance)
    depths = [in_set[:, : n + step].sum(axis=0) for step, in_set in enumerate(step_sets(trace))]  # the sets are nested
    return [
        depths[step] if step == 0 or trace.selected[step] else np.append(depths[0], np.full(step, layers))
        for step in range(steps)
    ]


def revived(depths: Sequence[np.ndarray]) -> list[list[int]]:
    """Per step, the tokens that it computed in layers in which no earlier step had computed them."""
    deepest, found = depths[0], [[]]
    for before, now in pairwise(depths):
        deeper = now[: len(before)] > deepest
        found.append(np.flatnonzero(deeper).tolist())
        deepest = np.append(np.maximum(deepest, now[: len(before)]), now[len(before) :])
    return found
