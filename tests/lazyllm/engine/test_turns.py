"""Sessions of several turns: against the slow reference of `tests/reference.py`, and against transformers."""

import random
from typing import Any

import numpy as np
import pytest
import torch

import lazyllm
from lazyllm.engine import kernels
from lazyllm.engine.generation import Conversation
from lazyllm.methods import Baseline, FastKV, GemFilter, Lazy, Method, StaticPruning
from tests.field_oracles import on_the_rest
from tests.helpers import TOLERANCE, VOCABULARY, slow
from tests.lazyllm.engine.architecture_matrix import Recording, assert_same, drawn
from tests.lazyllm.methods.method_matrix import LISTED
from tests.reference import (
    ARCHITECTURES,
    VARIANTS,
    LazyTurns,
    attention_of,
    casts_in_float64,
    random_model,
    random_variant,
)
from tests.reference_turns import ContinuedTurns


def draw(rng: random.Random, most: int, least: int = 1) -> list[int]:
    return rng.choices(range(VOCABULARY), k=rng.randint(least, most))


def entering(selected: dict[int, list[int]], tokens: range, num_layers: int) -> list[int]:
    """How many of the tokens enter each layer."""
    sets = [
        selected[max(cuts)] if (cuts := [cut for cut in selected if cut <= layer]) else tokens
        for layer in range(num_layers)
    ]
    return [len(set(tokens) & set(kept)) for kept in sets]


def four_turns(model: Any, schedule: dict[int, float], rng: random.Random, **settings: bool) -> None:
    """Compare four answers."""
    reference = LazyTurns(model, schedule, **settings)
    is_longrope = model.config.rope_parameters.get("rope_type") == "longrope"
    prompt, more = draw(rng, 30, 17 if is_longrope else 1), None  # a LongRoPE may not change later: at 16 tokens
    before = np.zeros(model.config.num_hidden_layers)
    session = lazyllm.start(model, prompt, Lazy(schedule, **settings))
    for turn in range(4):
        steps = rng.randint(1, 4)
        expected = reference.answer(prompt if more is None else more, steps)
        assert max(reference.counts.values()) == 1
        start = len(session.token_ids) if more else 0
        found = assert_same(session, more, steps, expected)
        if not settings:
            new = entering(expected.selected[0], range(start, len(reference.text) - steps), len(before))
            assert found.revived.tolist() == (expected.computed[-1] - before - new).tolist()
        before = expected.computed[-1]
        more = draw(rng, 9 if turn % 2 else 2)
    assert session.token_ids == reference.text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("seed", [0, 1, *slow(*range(2, 6))])
def test_four_turns_with_random_schedules(architecture: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(f"{architecture} {seed}")
    model, schedule = drawn(architecture, seed, rng, monkeypatch)
    settings = rng.choice([{}, {"prune_generated": True}, {"revive": False}])
    four_turns(model, schedule, rng, **settings)


@pytest.mark.parametrize("settings", [{}, {"prune_generated": True}, {"revive": False}])
def test_turns_that_keep_a_single_token_and_revive_none(settings: dict[str, bool]) -> None:
    four_turns(random_model("qwen2", 4, num_layers=4), {1: 0.05, 4: 0.05}, random.Random(1), **settings)


@pytest.mark.parametrize("variant", VARIANTS)
def test_four_turns_of_every_kind_of_model(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SORTED_ON_CPU", 0)
    with casts_in_float64():
        four_turns(random_variant(variant, 3, attention_of(variant)), {1: 0.5, 3: 0.5}, random.Random(variant))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keeping_everything_is_the_model_on_the_whole_text(architecture: str) -> None:
    model, rng = random_model(architecture, 3, num_layers=4), random.Random(architecture)
    for method in (Lazy({1: 1.0, 3: 1.0}), Baseline(), StaticPruning(2, 1.0), FastKV(keep=1.0, retain=1.0)):
        text, more = draw(rng, 20), None
        with lazyllm.start(model, text, method) as session:
            for _ in range(3):
                text = text + (more or [])
                ids = torch.tensor([text])
                expected = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, eos_token_id=None
                )[0].tolist()
                found = session.answer(more, 4, ())
                assert text + found.token_ids == expected
                assert found.pct_prompt_tokens_computed == 100
                text, more = expected, draw(rng, 6)


# Without an oracle of the first turn, the tokens that the method selects are run as a separate prompt
DROPPING = {
    name: LISTED[name] for name in LISTED if LISTED[name].first or name in ("prompt_compression", "random_drop")
}


@pytest.mark.parametrize("turns", ["continue", "recompute"])
def test_scoring_of_all_turns_is_in_the_share_of_tokens_computed(turns: Any) -> None:
    """Two of four layers score, so a token that is scored counts as half a token."""
    model, rng = random_model("llama", 2, num_layers=4), random.Random(turns)
    session = lazyllm.start(model, rng.choices(range(VOCABULARY), k=40), GemFilter(layer=2, keep=0.25), turns=turns)
    first, second, third = (session.answer(more, 3, ()) for more in (None, [7, 8, 9], [5]))
    assert first.pct_prompt_tokens_computed == 100 * (20 + 10) / 40
    if turns == "continue":  # of an answer, only tokens before the turn are no prompt tokens
        assert [out.scoring_tokens for out in (first, second, third)] == [20, 0, 0]
        assert second.pct_prompt_tokens_computed == 100 * (20 + 10 + 3) / 43
        assert third.pct_prompt_tokens_computed == 100 * (20 + 10 + 3 + 1) / 44
    else:  # 46 and 50 tokens of text; shares are rounded up
        assert [out.scoring_tokens for out in (first, second, third)] == [20, 23, 25]
        assert second.pct_prompt_tokens_computed == 100 * (23 + 12) / 46
        assert third.pct_prompt_tokens_computed == 100 * (25 + 13) / 50


@pytest.mark.parametrize("name", DROPPING)
@pytest.mark.parametrize(
    "variant", ["mistral, window", *slow("qwen3", "llama, dynamic NTK", "phi3, LongRoPE and window")]
)
def test_later_turn_of_a_method_that_drops_for_good_sees_what_is_left(variant: str, name: str) -> None:
    rng, row = random.Random(f"{variant} {name}"), DROPPING[name]
    with casts_in_float64():
        model = random_variant(variant, 3)
        prompt = rng.choices(range(VOCABULARY), k=rng.randint(20, 40))
        session = lazyllm.start(model, prompt, row.pruning)
        found = session.answer(None, 3, ())
        if row.first is None:
            first = on_the_rest(model, prompt, found.selected[0][0], 3, renumber=True)
        else:
            first = row.first(model, prompt, 3)
        assert first.margin > TOLERANCE, "something is decided by rounding"
        assert found.token_ids == first.token_ids
        first.passes = first.passes[-1:]  # a pass before it is scoring, which counts apart
        reference = ContinuedTurns(model, first)
        for _ in range(3):
            more = draw(rng, 7)
            assert_same(session, more, 3, reference.answer(more, 3))


@pytest.mark.parametrize("method", [StaticPruning(2, 0.4), FastKV(layer=2)], ids=str)
def test_recomputed_turn_is_a_fresh_generation(method: Method) -> None:
    model, rng = random_model("llama", 2, num_layers=4), random.Random(0)
    text, more = draw(rng, 30), None
    session = lazyllm.start(model, text, method, turns="recompute")
    for _ in range(3):
        text = text + (more or [])
        found, expected = session.answer(more, 3, ()), lazyllm.generate(model, text, method, 3, ())
        assert (found.token_ids, found.selected) == (expected.token_ids, expected.selected)
        assert found.kv_bytes == expected.kv_bytes
        text, more = text + found.token_ids, draw(rng, 5)


@pytest.mark.parametrize("method", [Lazy({1: 0.4, 3: 0.5}), Baseline(), FastKV(layer=2)], ids=str)
def test_fork_and_its_session_do_not_see_each_other(method: Method) -> None:
    model, rng = random_model("llama", 5, num_layers=4), random.Random(3)
    prompt, question, other = draw(rng, 40) * 2, draw(rng, 9), draw(rng, 9)

    def answers(session: Conversation, turns: list[list[int]]) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
        watched = Recording()
        found = [session.answer_with(watched, more, 4) for more in turns]
        return watched.logits, [(out.kv_bytes, out.aux_bytes) for out in found]

    session = lazyllm.start(model, prompt, method)
    session.answer(None, 4, ())
    fork, late = session.fork(), session.fork()
    branches = [(fork, [other]), (session, [question, other]), (late, [question])]
    results = [answers(branch, turns) for branch, turns in branches]
    for (logits, held), (_, turns) in zip(results, branches, strict=True):
        alone = lazyllm.start(model, prompt, method)
        alone.answer(None, 4, ())
        expected, held_alone = answers(alone, turns)
        assert held == held_alone
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(logits, expected, strict=True))


def test_turn_that_would_change_a_longrope_is_refused() -> None:
    session = lazyllm.start(random_variant("phi3, LongRoPE and window", 3), range(10), Lazy({1: 0.5}))
    session.answer(None, 3, ())
    with pytest.raises(ValueError, match="beyond 16 tokens"):
        session.answer([7, 8, 9], 3, ())
    assert len(session.token_ids) == 13
    assert len(session.answer([7], 2, ()).token_ids) == 2


def test_whole_text_that_the_method_cannot_take_is_refused() -> None:
    class Short(Baseline):
        def check_prompt(self, prompt: lazyllm.Prompt) -> None:
            if len(prompt) > 12:
                raise ValueError(f"{len(prompt)} tokens are too many")

    session = lazyllm.start(random_model("llama", 5, num_layers=2), range(6), Short(), turns="recompute")
    session.answer(None, 3, ())
    with pytest.raises(ValueError, match="13 tokens are too many"):
        session.answer([1, 2, 3, 4], 3, ())
    assert len(session.answer([1, 2, 3], 3, ()).token_ids) == 3


def test_bad_turns_leave_the_session_as_it_was() -> None:
    model = random_model("llama", 5, num_layers=4)
    session, twin = (lazyllm.start(model, [5, 17, 3, 80, 41, 9], Lazy({1: 0.5})) for _ in range(2))
    with pytest.raises(lazyllm.UserError, match="leave out more_ids"):
        session.answer([1], 3, ())
    assert session.answer(None, 3, ()).token_ids == twin.answer(None, 3, ()).token_ids
    for more, new, message in (
        (None, 3, "give at least one in more_ids"),
        ([], 3, "no tokens: give at least one"),
        (torch.zeros(1, 0, dtype=torch.long), 3, "no tokens: give at least one"),
        ("hello", 3, "is a text: give token ids"),
        ([97], 3, "the model knows 0 to 96"),
        ([1], 0, "max_new_tokens=0: give 1 or more"),
        ([1], 10**6, "positions"),
    ):
        with pytest.raises(ValueError, match=message):
            session.answer(more, new, ())  # type: ignore[arg-type]
    assert len(session.token_ids) == len(twin.token_ids) == 9
    ours, theirs = session.answer([7, 8], 3, ()), twin.answer([7, 8], 3, ())
    assert (ours.token_ids, ours.selected) == (theirs.token_ids, theirs.selected)
    session.close()
    for call in (session.answer, session.fork):
        with pytest.raises(lazyllm.UserError, match="the conversation is closed"):
            call()
