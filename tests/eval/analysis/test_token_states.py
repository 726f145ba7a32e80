"""The states of tokens, against a slow replay with sets and against the reference implementation."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

import lazyllm
from eval.analysis.token_states import State, counts_per_layer, layer_groups, token_states
from eval.store.record import Trace, compact_counts
from lazyllm.methods import Baseline, Lazy, Method, RandomDrop, StaticPruning
from tests.reference import lazy_reference, random_model

LAYERS = 5
METHODS: dict[str, Method] = {
    "baseline": Baseline(),
    "lazy": Lazy({1: 0.6, 3: 0.5}),
    "lazy, every layer": Lazy(dict.fromkeys(range(1, LAYERS + 1), 0.8)),
    "lazy, keeps all at first": Lazy({1: 1.0, 3: 0.3}),
    "lazy, prune_generated": Lazy({2: 0.5, 4: 0.5}, prune_generated=True),
    "lazy, without revival": Lazy({1: 0.6, 3: 0.5}, revive=False),
    "random_drop": RandomDrop(0.5, seed=3),
    "static_pruning": StaticPruning(2, 0.4),
    "static_pruning, after the last layer": StaticPruning(LAYERS, 0.4),
}


def traced(method: Method, prompt: list[int], steps: int, seed: int = 0) -> Trace:
    model = random_model("llama", seed, num_layers=LAYERS)
    out = lazyllm.generate(model, prompt, method, steps, eos_token_ids=())
    starts, computed = compact_counts(out.computed)
    texts = [f"t{number}" for number in range(len(prompt))]
    importance = [[1 / len(prompt)] * len(prompt)] * LAYERS
    return Trace("lookup", "a", texts, ["g"] * len(out.token_ids), importance, out.selected, starts, computed)


def replay(trace: Trace, forgets: bool) -> list[list[list[str]]]:
    """The same by hand: the set of stored positions per layer, step by step and token by token.

    forgets: tokens pruned in prefill are discarded in all layers, and later steps select nothing.
    """
    n, steps = len(trace.tokens), len(trace.computed)
    stored: list[set[int]] = [set() for _ in trace.importance]
    everything = []
    for step in range(steps):
        present = set(range(n + step))
        if forgets and step > 0:
            present &= set(list(trace.selected[0].values())[-1]) | set(range(n, n + step))
            stored = [positions & present for positions in stored]
        of_step = []
        for layer in range(1, len(trace.importance) + 1):
            if layer - 1 in trace.selected[step]:
                present = set(trace.selected[step][layer - 1])
            row = []
            for position in range(n + steps - 1):
                if position > n + step - 1:
                    row.append("FUTURE")
                elif position in present and position in stored[layer - 1]:
                    row.append("CACHED")
                elif position in present:
                    is_new = step == 0 or position == n + step - 1
                    row.append("COMPUTED" if is_new else "REVIVED")
                elif position in stored[layer - 1]:
                    row.append("STORED")
                else:
                    row.append("PRUNED")
            stored[layer - 1] |= present
            of_step.append(row)
        everything.append(of_step)
    return everything


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_states_are_those_of_a_replay_with_sets(name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    prompt = rng.choices(range(97), k=rng.choice([1, 2, 7, 23]))
    trace = traced(METHODS[name], prompt, steps=rng.randint(1, 7), seed=seed)
    found = [[[State(state).name for state in row] for row in step] for step in token_states(trace)]
    assert found == replay(trace, forgets=name.startswith(("random", "static")))


@pytest.mark.parametrize("seed", range(6))
def test_revived_is_what_the_reference_takes_from_its_aux_cache(seed: int) -> None:
    rng = random.Random(seed)
    prompt = rng.choices(range(97), k=21)
    schedule = {1: 0.6, 3: 0.5}
    expected = lazy_reference(random_model("llama", seed, num_layers=LAYERS), prompt, schedule, 6)
    states = token_states(traced(Lazy(schedule), prompt, 6, seed))
    for step, revived in enumerate(expected.revived):
        for layer in range(1, LAYERS + 1):
            passed = [cut for cut in schedule if cut < layer and step > 0]
            came_back = {position for cut in passed for position in revived[cut]}
            here = came_back & set(expected.selected[step][max(passed)]) if passed else set()
            assert set(np.flatnonzero(states[step, layer - 1] == State.REVIVED)) == here
    assert any(positions for step in expected.revived[1:] for positions in step.values())


def test_states_by_hand() -> None:
    """Three tokens, two layers, and one boundary, which keeps one token, and another one in the second step."""
    trace = Trace(
        "lookup", "a", ["A", "B", "C"], ["D", "E", "F"], [[0.2, 0.3, 0.5]] * 2,
        [{1: [2]}, {1: [0, 3]}, {1: [0, 3, 4]}], [1, 2], [[3, 1], [3, 2], [3, 2]],
    )  # fmt: skip
    p, s, c, n, r, f = State.PRUNED, State.STORED, State.CACHED, State.COMPUTED, State.REVIVED, State.FUTURE
    assert token_states(trace).tolist() == [
        [[n, n, n, f, f], [p, p, n, f, f]],
        [[c, c, c, n, f], [r, p, s, n, f]],
        [[c, c, c, c, n], [c, p, s, c, n]],
    ]
    assert layer_groups(trace) == [range(1, 2), range(2, 3)]
    assert counts_per_layer(trace).tolist() == [[3, 1], [3, 2], [3, 2]]
    with pytest.raises(
        ValueError, match=r"row a: .* 2 prompt tokens computed in layer 2 by step 1, its counters say 3"
    ):
        token_states(replace(trace, computed=[[3, 1], [3, 3], [3, 3]]))


def test_groups_are_between_pruning_layers() -> None:
    assert layer_groups(traced(METHODS["lazy"], [1, 2, 3], 1)) == [range(1, 2), range(2, 4), range(4, 6)]
    assert layer_groups(traced(METHODS["lazy, every layer"], [1, 2, 3], 1))[-1] == range(5, 6)
    assert layer_groups(traced(METHODS["random_drop"], [1, 2, 3], 1)) == [range(1, 6)]
    assert layer_groups(traced(METHODS["baseline"], [1, 2, 3], 1)) == [range(1, 6)]
