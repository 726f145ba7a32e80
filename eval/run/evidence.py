"""The share of the evidence (the prompt's tokens that hold the answer) that a generation computes in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from eval.benchmarks.prompts import BuiltPrompt
    from lazyllm import Generation


def evidence_positions(prompt: BuiltPrompt) -> np.ndarray:
    """Ascending positions of the tokens that overlap the evidence; none if it is not known."""
    if prompt.spans is None:
        return np.empty(0, dtype=int)
    starts, stops = prompt.spans.T
    inside = np.zeros(len(starts), dtype=bool)
    for start, stop in prompt.evidence:
        inside |= (starts < stop) & (stops > start) & (starts < stops)
    return np.flatnonzero(inside)


def evidence_computed(
    out: Generation, positions: np.ndarray, earlier: Sequence[Generation] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """([layers], [layers]) the shares of the tokens at `positions` that are computed in prefill, and revived later.

    earlier: the answers that this one goes on behind. What they have computed counts as prefill.
    """
    # a later turn's first step without a selection computes no token of the first prompt either
    first, *others = [step for answer in (*earlier, out) for step in selections_that_ran(answer)]
    steps_before = len(others) + 1 - len(out.selected)
    in_prefill = _in_sets(first, positions, out.computed.shape[1])
    for step in filter(None, others[:steps_before]):
        in_prefill |= _in_sets(step, positions, len(in_prefill))
    later = others[steps_before:]
    computed = in_prefill.copy()
    for step in filter(None, later):  # a step without a selection computes no prompt token
        computed |= _in_sets(step, positions, len(computed))
    return in_prefill.mean(axis=1), (computed & ~in_prefill).mean(axis=1)


def selections_that_ran(out: Generation) -> list[dict[int, list[int]]]:
    """The selections with key 0 for tokens that were chosen before the prefill: they enter layer 1."""
    first, *later = out.selected
    is_selected_before = bool(first) and int(out.computed[0, 0]) < out.prompt_tokens
    return [{0: next(iter(first.values()))} if is_selected_before else first, *later]


def _in_sets(selected: dict[int, list[int]], positions: np.ndarray, layers: int) -> np.ndarray:
    """[layers, positions] bool: whether the token is in a step's set for the layer; all are before the first cut."""
    sets = []
    present = np.ones(len(positions), dtype=bool)
    for layer in range(layers):
        present = np.isin(positions, selected[layer]) if layer in selected else present
        sets.append(present)
    return np.array(sets)
