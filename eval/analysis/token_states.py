"""The state of each token in each layer and step of a traced example: computed, cached, revived, stored or pruned."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from eval.store.record import Trace


class State(IntEnum):
    """A token in one layer in one step."""

    FUTURE = 0  # not generated yet
    PRUNED = 1  # this layer has no K and V of it: never computed, or (static pruning) discarded
    STORED = 2  # K and V are stored, but the token is not in this step's set: not attended to
    CACHED = 3  # attended to, with K and V computed in an earlier step
    COMPUTED = 4  # computed in this step: the prompt in prefill, the newest token in decoding
    REVIVED = 5  # a prompt token computed in this decoding step, from the Aux Cache of this or an earlier layer


def token_states(trace: Trace) -> np.ndarray:
    """[steps, layers, n + steps - 1] uint8 of `State`. Step 0 is the prefill; generated tokens follow the prompt's n.

    The last generated token is never run, so it has no column. Raises ValueError if the states and the trace's counters
    disagree about the number of computed tokens.
    """
    n, steps = len(trace.tokens), len(trace.computed)
    in_set = step_sets(trace)
    before = np.zeros_like(in_set)
    before[1:] = np.logical_or.accumulate(in_set)[:-1]
    _check_counts(trace, (before | in_set)[:, :, :n].sum(axis=2))
    states = np.full(in_set.shape, State.PRUNED, dtype=np.uint8)
    states[before & ~in_set] = State.PRUNED if _selects_in_prefill_only(trace) else State.STORED
    states[before & in_set] = State.CACHED
    states[~before & in_set] = State.COMPUTED
    states[1:, :, :n][(~before & in_set)[1:, :, :n]] = State.REVIVED
    for step in range(steps):
        states[step, :, n + step :] = State.FUTURE
    return states


def layer_groups(trace: Trace) -> list[range]:
    """The layers (from 1) between two pruning layers, first group first."""
    layers = len(trace.importance)
    cuts = sorted(layer for layer in trace.selected[0] if 0 < layer < layers)
    return [range(start + 1, end + 1) for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]


def counts_per_layer(trace: Trace) -> np.ndarray:
    """[steps, layers] distinct prompt tokens computed so far: the trace's counters, one column per layer."""
    ends = [*trace.group_starts[1:], len(trace.importance) + 1]
    widths = [end - start for start, end in zip(trace.group_starts, ends, strict=True)]
    return np.repeat(np.array(trace.computed), widths, axis=1)


def step_sets(trace: Trace) -> np.ndarray:
    """[steps, layers, n + steps - 1] bool: whether the token is in the step's set for the layer.

    After a pruning layer, the set is its selection; before the first one, all tokens so far. If a method selects in
    prefill only, all later steps use the tokens that its last selection kept, and the generated ones.
    """
    n, steps, layers = len(trace.tokens), len(trace.selected), len(trace.importance)
    in_set = np.zeros((steps, layers, n + steps - 1), dtype=bool)
    for step in range(steps):
        selected = trace.selected[step]
        present = list(range(n + step))
        if step > 0 and _selects_in_prefill_only(trace):
            present = [*trace.selected[0][max(trace.selected[0])], *range(n, n + step)]
        for layer in range(layers):
            present = selected.get(layer, present)
            in_set[step, layer, present] = True
    return in_set


def _selects_in_prefill_only(trace: Trace) -> bool:
    return bool(trace.selected[0]) and not any(trace.selected[1:])


def _check_counts(trace: Trace, found: np.ndarray) -> None:
    counted = counts_per_layer(trace)
    if (found != counted).any():
        step, layer = np.argwhere(found != counted)[0]
        raise ValueError(
            f"{trace.dataset}, row {trace.id}: its selections make {found[step, layer]} prompt tokens computed in "
            f"layer {layer + 1} by step {step}, its counters say {counted[step, layer]}: the trace is damaged, or its "
            "method does not report all of its selections in `selected`"
        )
