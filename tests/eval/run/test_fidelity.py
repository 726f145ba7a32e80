"""Forced answers against the slow reference; divergences in nats are PyTorch's, in float64."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lazyllm
from eval.benchmarks.prompts import gold_token_ids
from eval.run.answer import (
    Measured,
    Reference,
    compare_forced,
    compare_generations,
    edit_similarity,
)
from lazyllm import Prompt
from lazyllm.engine import generation
from lazyllm.engine.generation import Forced, Generation, answer, force
from lazyllm.methods import Baseline, Lazy, Method
from lazyllm.models.load import load_tokenizer_of
from lazyllm.spec import ModelSpec
from tests.helpers import tiny
from tests.lazyllm.engine.test_batch import Unbatchable
from tests.lazyllm.methods.method_matrix import ROWS, Row
from tests.reference import lazy_reference, random_model
from tests.runs import compared

MODEL, TOKENIZER = tiny()
RNG = np.random.default_rng(0)


def forced_logits(model: Any, prompt: Prompt, method: Method, token_ids: list[int]) -> Tensor:
    """[t, v] the logits before each of t forced tokens, from a prefill of their own."""
    forced = Forced(token_ids)
    answer(model, Generation(model, prompt, method, len(token_ids), forced))
    return torch.stack(forced.logits)


def random_prompt(tokens: int) -> tuple[list[int], Prompt]:
    ids = RNG.integers(0, 97, tokens).tolist()
    return ids, Prompt(torch.tensor(ids))


@pytest.mark.parametrize("revive", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_forced_decoding_is_the_methods_own(name: str, revive: bool) -> None:
    """In float64: every step selects and revives as in the method's own answer."""
    model, schedule = random_model(name, seed=5), {1: 0.6, 2: 0.4}
    (prompt, given), (forced, _) = random_prompt(23), random_prompt(5)
    methods = Baseline(), Lazy(schedule, revive=revive)
    theirs, ours = (forced_logits(model, given, method, forced) for method in methods)
    slow = [
        lazy_reference(model, prompt, kept, 5, revive=revive, forced=forced).logits
        for kept in ({}, schedule)
    ]
    expected = compared(*(torch.tensor(np.stack(logits)) for logits in slow), forced)
    assert compare_forced(theirs, ours, forced) == pytest.approx(expected, abs=1e-9)
    assert expected[0] > 1e-4


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_forks_of_a_prefill_are_forced_runs_of_their_own(row: Row) -> None:
    """For every method, several answers; the answer from whose prefill they fork is unchanged."""
    model, method, kept = random_model("qwen3", 4, num_layers=4), row.pruning, list[Generation]()
    _, prompt = random_prompt(24)

    def keep(prefilled: Generation) -> None:
        kept.append(prefilled.fork())

    alone = lazyllm.generate(model, prompt, method, 6, ())
    out = lazyllm.generate(model, prompt, method, 6, (), after_prefill=keep)
    assert (out.token_ids, out.selected) == (alone.token_ids, alone.selected)
    assert out.kv_bytes == alone.kv_bytes
    assert np.array_equal(out.computed, alone.computed)
    (prefilled,) = kept
    assert prefilled.nbytes >= out.kv_bytes // 2 > 0
    answers = [alone.token_ids, random_prompt(6)[0], random_prompt(2)[0]]
    expected = [forced_logits(model, prompt, method, forced) for forced in answers]
    for size in (1, len(answers)) if method.can_batch else (1,):
        for start in range(0, len(answers), size):
            chosen = answers[start : start + size]
            found = force([prefilled] * len(chosen), chosen)
            for ours, theirs in zip(found, expected[start : start + size], strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


def test_methods_that_cannot_be_batched_are_forced_alone() -> None:
    model, (_, prompt), (forced, _) = random_model("llama", 5), random_prompt(9), random_prompt(4)

    def measure(method: Method) -> Measured:
        kept = list[Generation]()
        out = lazyllm.generate(
            model, prompt, method, 4, (), after_prefill=lambda ran: kept.append(ran.fork())
        )
        return Measured(method, out, prefilled=kept[0])

    baseline, single = measure(Baseline()), measure(Unbatchable())
    reference = Reference(baseline, {"answer": tuple(forced)})
    reference.force_together([baseline, single], 4)
    assert [*reference.logits] == [(baseline.prefilled, "answer")]
    found = reference.compare(single)  # alone, both round in the same way
    assert (found["answer_kl"], found["answer_log_likelihood"]) == (0, 0)


def test_time_after_the_prefill_is_in_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(generation, "read_clock", lambda *_: float(next(clock)))

    def wait(_: Generation) -> None:
        for _ in range(100):
            next(clock)

    plain, waited = (
        lazyllm.generate(MODEL, [5, 6, 7], Baseline(), 4, (), after_prefill=after)
        for after in (None, wait)
    )
    assert (waited.ttft_s, waited.decode_step_s) == (plain.ttft_s, plain.decode_step_s)
    assert waited.total_s == plain.total_s


@pytest.mark.parametrize(
    ("left", "right", "similarity", "leading"),
    [
        ("kitten", "sitting", 4 / 7, 0),
        ("flaw", "lawn", 0.5, 0),
        ("abc", "abcde", 0.6, 3),
        ("abxd", "abyd", 0.75, 2),
        ("same", "same", 1, 4),
    ],
)
def test_two_generations_by_hand(left: str, right: str, similarity: float, leading: int) -> None:
    """1 less Levenshtein's distance over the longer length; both ways around."""
    baseline = torch.tensor([0.5, 0.25, 0.25]).log()
    method = torch.tensor([0.25, 0.25, 0.5]).log() + 7  # logits are free up to a constant
    for first, second in ((left, right), (right, left)):
        reference = SimpleNamespace(token_ids=[*map(ord, first)], first_logits=baseline)
        compared = SimpleNamespace(token_ids=[*map(ord, second)], first_logits=method)
        found = compare_generations(reference, compared)
        assert found.pop("kl") == pytest.approx(math.log(2) / 4, abs=1e-7)
        assert found.pop("edit_similarity") == pytest.approx(similarity)
        same = int(left == right)
        assert found == {"leading_tokens": leading, "same_answer": same, "top1_agrees": 0}
    assert edit_similarity([], [1, 2]) == 0
    assert edit_similarity([], []) == 1


def test_token_without_probability_adds_nothing() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]]), torch.tensor([[0.0, 5.0, 0.0]])
    expected = math.log(2 + math.e**5) - math.log(2)
    assert compare_forced(*logits, [0]) == pytest.approx((expected, -expected), abs=1e-6)


@pytest.mark.parametrize(
    ("prompt", "gold", "expected"),
    [
        ("entry bavim", "amber anchor", [" amber", " anchor"]),
        ("entry bavim ", "amber", ["a", "m", "b", "e", "r"]),
        ("call bavim", " amber;", [" amber", ";"]),
        ("call bavim", "", [" "]),
    ],
)
def test_gold_tokens_go_on_from_the_prompt(prompt: str, gold: str, expected: list[str]) -> None:
    found = gold_token_ids(TOKENIZER, prompt, gold)
    assert [TOKENIZER.decode([token_id]) for token_id in found] == expected


def test_gold_tokens_of_llama2_have_no_added_space(shared: Path) -> None:
    folder = str(shared / "tokenizers" / "llama2")
    tokenizer = load_tokenizer_of(ModelSpec("llama2", "dummy", tokenizer=folder))
    prompts = {"[/INST]": " Paris", "Answer:": " Paris", "line\n": "Paris", "so\n": "salmon"}
    for prompt, gold in prompts.items():
        ids = tokenizer.encode(prompt + gold)[len(tokenizer.encode(prompt)) :]
        assert gold_token_ids(tokenizer, prompt, gold.strip()) == ids
