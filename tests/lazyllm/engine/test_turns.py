"""Sessions of several turns: against the slow reference of `tests/reference_turns.py`, and against transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import lazyllm
from lazyllm.engine.generation import Conversation
from lazyllm.methods import Baseline, FastKV, Lazy, Method, StaticPruning
from tests.reference import ARCHITECTURES, VARIANTS, casts_in_float64, random_model, random_variant
from tests.reference_turns import ContinuedTurns, LazyTurns, TurnOutput, static_first

VOCAB = 97
TOLERANCE = 1e-9


def draw(rng: random.Random, most: int) -> list[int]:
    return rng.choices(range(VOCAB), k=rng.randint(1, most))


class Watched:
    """Chooses greedily, and keeps the logits."""

    def __init__(self) -> None:
        self.logits: list[np.ndarray] = []

    def __call__(self, logits: torch.Tensor) -> tuple[int, bool]:
        self.logits.append(logits.numpy().copy())
        return int(logits.argmax()), False


def assert_same(session: Conversation, more_ids: Sequence[int] | None, steps: int, expected: TurnOutput) -> None:
    watched = Watched()
    found = session.answer_by(watched, more_ids, steps)
    assert expected.margin > TOLERANCE, "something is decided by rounding"
    assert found.token_ids == expected.token_ids
    assert [dict(step) for step in found.selected] == expected.selected
    assert found.computed.tolist() == expected.computed.tolist()
    for ours, theirs in zip(watched.logits, expected.logits, strict=True):
        assert np.abs(ours - theirs).max() < TOLERANCE
    assert (session.kv_bytes, session.aux_bytes) == (expected.kv_bytes, expected.aux_bytes)
    assert (found.kv_bytes, found.aux_bytes) == (expected.kv_bytes, expected.aux_bytes)


def four_turns(model: Any, schedule: dict[int, float], rng: random.Random, chunk: int | None = None, **settings: bool):
    """Four answers, compared; the session and the reference go on from there."""
    reference = LazyTurns(model, schedule, **settings)
    prompt, more = draw(rng, 30), None
    session = lazyllm.start(model, prompt, Lazy(schedule, **settings), chunk)
    for turn in range(4):
        steps = rng.randint(1, 4)
        expected = reference.answer(prompt if more is None else more, steps)
        assert max(reference.counts.values()) == 1
        assert_same(session, more, steps, expected)
        more = draw(rng, 9 if turn % 2 else 2)
    assert session.token_ids == reference.text
    return session, reference


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("seed", range(6))
def test_four_turns_with_random_schedules(architecture: str, seed: int) -> None:
    rng = random.Random(f"{architecture} {seed}")
    layers = rng.randint(2, 6)
    model = random_model(architecture, seed, num_layers=layers)
    pruning = sorted(rng.sample(range(1, layers + 1), rng.randint(0, layers)))
    schedule = {layer: rng.choice([0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]) for layer in pruning}
    settings = rng.choice([{}, {}, {"revive": False}])
    four_turns(model, schedule, rng, rng.choice([None, None, 1, 4]), **settings)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "LongRoPE" not in name])
def test_four_turns_of_every_kind_of_model(variant: str) -> None:
    attention = "eager" if variant == "gemma2" else "sdpa"
    with casts_in_float64():
        four_turns(random_variant(variant, 3, attention), {1: 0.5, 3: 0.5}, random.Random(variant), 5)
