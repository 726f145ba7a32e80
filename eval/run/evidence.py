"""Which tokens of the evidence each layer computed."""

from collections.abc import Sequence

import numpy as np

from eval.benchmarks.prompts import BuiltPrompt
from eval.store.visit import Evidence
from lazyllm import Generation


def of_evidence(prompt: BuiltPrompt, turn: int, out: Generation, earlier: Sequence[Generation]) -> Evidence | None:
    """What a turn computed of its evidence; None if that is unknown. earlier: as of `evidence_computed`."""
    positions = evidence_positions(prompt.spans, (prompt, *prompt.turns)[turn].evidence)
    if not len(positions):
        return None
    prefill, revived = (shares.tolist() for shares in evidence_computed(out, positions, earlier))
    return Evidence(
        evidence_tokens=len(positions),
        evidence_recall=prefill[-1],
        evidence_prefill=prefill,
        evidence_revived=revived,
    )


def evidence_positions(spans: np.ndarray | None, evidence: Sequence[tuple[int, int]]) -> np.ndarray:
    """Ascending positions of the tokens whose spans of the text overlap the evidence's; none without spans."""
    if spans is None:
        return np.empty(0, dtype=int)
    starts, stops = spans.T
    inside = np.zeros(len(starts), dtype=bool)
    for first, last in evidence:
        inside |= (starts < last) & (stops > first) & (starts < stops)
    return np.flatnonzero(inside)


def evidence_computed(
    out: Generation, positions: np.ndarray, earlier: Sequence[Generation] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """([layers], [layers]) the shares of the tokens at `positions` that are computed in prefill, and revived later.

    earlier: the conversation's answers before this one. What they have computed counts as prefill.
    """
    steps = [step for answer in (*earlier, out) for step in selections_that_ran(answer)]
    prefill = len(steps) - len(out.selected)  # the number of this answer's first step
    layers = out.computed.shape[1]
    # without a selection, the very first step computes the whole prompt, and every later one nothing of it
    ran = [(number, in_sets(step, positions, layers)) for number, step in enumerate(steps) if step or number == 0]
    in_prefill = np.any([sets for number, sets in ran if number <= prefill], axis=0)
    computed = np.any([sets for _, sets in ran], axis=0)
    return in_prefill.mean(axis=1), (computed & ~in_prefill).mean(axis=1)


def selections_that_ran(out: Generation) -> list[dict[int, list[int]]]:
    """The selections with key 0 for tokens that were chosen before the prefill: they enter layer 1."""
    first, *later = out.selected
    is_selected_before = bool(first) and int(out.computed[0, 0]) < out.prompt_tokens
    return [{0: next(iter(first.values()))} if is_selected_before else first, *later]


def in_sets(selected: dict[int, list[int]], positions: np.ndarray, layers: int) -> np.ndarray:
    """[layers, positions] bool: whether the token is in a step's set for the layer; all are before the first cut."""
    sets = []
    present = np.ones(len(positions), dtype=bool)
    for layer in range(layers):
        present = np.isin(positions, selected[layer]) if layer in selected else present
        sets.append(present)
    return np.array(sets)
