"""Fidelity: a run's records against `model(...)`, and forced answers against the slow reference.

Divergences in nats are PyTorch's, in float64, over the whole vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lazyllm
from eval.benchmarks.prompts import gold_token_ids
from eval.run.case import Case
from eval.run.fidelity import edit_similarity, of_forced, of_generations
from lazyllm import Prompt
from lazyllm.engine import generation
from lazyllm.engine.generation import Forced, Prefilled
from lazyllm.methods import Baseline, Lazy, Method, StaticPruning
from lazyllm.models.load import load_tokenizer_of
from lazyllm.spec import ModelSpec
from tests.eval.store.visits import flat
from tests.helpers import tiny
from tests.lazyllm.methods.method_matrix import ROWS, Row
from tests.reference import lazy_reference, random_model
from tests.runs import arm, bench_of, case_of

MODEL, TOKENIZER = tiny()
RNG = np.random.default_rng(0)
KEPT_ALL = {"kl": 0, "top1_agrees": 1, "edit_similarity": 1, "same_answer": 1}
FORCED = ("answer_kl", "answer_log_likelihood", "gold_kl", "gold_log_likelihood")


def compared(baseline: Tensor, method: Tensor, token_ids: Sequence[int]) -> tuple[float, float]:
    """Of logits [T, V]: KL(baseline || method) per token; the answer's log-likelihood less the baseline's."""
    p, q = (logits.double().log_softmax(-1) for logits in (baseline, method))
    kl = F.kl_div(q, p, reduction="none", log_target=True).sum(-1).mean()
    return kl.item(), (q - p)[range(len(token_ids)), token_ids].mean().item()


def forced_logits(model: Any, prompt: Prompt, method: Method, token_ids: Sequence[int]) -> Tensor:
    """[T, V] the logits before each of T forced tokens, from a prefill of their own: the slow way."""
    forced = Forced(token_ids)
    with lazyllm.start(model, prompt, method) as conversation:
        conversation.answer_with(forced, None, len(token_ids))
    return torch.stack(forced.logits)


def measured(dataset: str, fidelity: str | None = None, **method: Any) -> tuple[Case, Any, Any]:
    """A case, and the measurements of a method and of the baseline in a visit of it."""
    case = case_of(dataset, TOKENIZER, 8)
    arms = arm("baseline", name="baseline"), arm("method", **method)
    bench = bench_of(MODEL, TOKENIZER, arms, fidelity=fidelity)
    (visit,) = bench.visits([replace(case, arms=arms)])
    return case, flat(visit.answers["method"][0]), flat(visit.answers["baseline"][0])


def test_kl_of_a_run_is_that_of_the_models_own_logits() -> None:
    case, found, baseline = measured("hops", name="static_pruning", layer=2, keep=0.3)
    ids = torch.tensor([case.prompt.token_ids])
    kept = lazyllm.generate(MODEL, ids, StaticPruning(2, 0.3), 1, ()).selected[0][2]
    with torch.inference_mode():
        whole = MODEL(ids).logits[0, -1]
        hidden = MODEL(ids, output_hidden_states=True).hidden_states[2][:, kept]
        positions = torch.tensor([kept])
        rope = MODEL.model.rotary_emb(hidden, positions)
        mask = torch.full((len(kept), len(kept)), -math.inf).triu(1)[None, None]
        for layer in MODEL.model.layers[2:]:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rope)
        pruned = MODEL.lm_head(MODEL.model.norm(hidden))[0, -1]
    expected, _ = compared(whole[None], pruned[None], [0])
    assert expected > 1e-5
    assert found.kl == pytest.approx(expected, abs=1e-6)
    assert (baseline.kl, baseline.same_answer) == (None, None)
    assert found.answer_kl is None


@pytest.mark.parametrize(
    "method",
    [{"name": "lazy", "schedule": {2: 1.0, 5: 1.0}}, {"name": "static_pruning", "layer": 2, "keep": 1.0}],
    ids=lambda method: method["name"],
)
def test_keeping_everything_is_the_baseline(method: dict[str, Any]) -> None:
    _, found, baseline = measured("lookup", fidelity="answer", **method)
    assert {name: getattr(found, name) for name in KEPT_ALL} == KEPT_ALL
    assert found.leading_tokens == len(baseline.token_ids)
    assert [getattr(found, name) for name in FORCED] == [0, 0, 0, 0]
    assert found.prefill_flops == baseline.prefill_flops


def test_forced_answers_are_those_of_the_case() -> None:
    """The baseline's own answer as generated, and the gold answer after the prompt."""
    method = Lazy({2: 0.1})
    case, found, baseline = measured("digest", fidelity="answer", name="lazy", schedule={2: 0.1})
    gold = gold_token_ids(TOKENIZER, case.prompt.text, case.example.answers[0])[:8]
    for name, token_ids in (("answer", baseline.token_ids), ("gold", gold)):
        ids = torch.tensor([[*case.prompt.token_ids, *token_ids[:-1]]])
        with torch.inference_mode():
            theirs = MODEL(ids).logits[0, len(case.prompt.token_ids) - 1 :]
        ours = forced_logits(MODEL, case.prompt.as_input(), method, token_ids)
        kl, log_likelihood = compared(theirs, ours, token_ids)
        assert kl > 1e-5
        assert getattr(found, f"{name}_kl") == pytest.approx(kl, abs=1e-6)
        assert getattr(found, f"{name}_log_likelihood") == pytest.approx(log_likelihood, abs=1e-5)


@pytest.mark.parametrize("revive", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_forced_decoding_is_the_methods_own(name: str, revive: bool) -> None:
    """Against the slow reference, in float64: every step selects and revives as in the method's own answer."""
    model = random_model(name, seed=5)
    prompt, answer = RNG.integers(0, 97, 23).tolist(), RNG.integers(0, 97, 5).tolist()
    schedule = {1: 0.6, 2: 0.4}
    given = Prompt(torch.tensor(prompt))
    theirs, ours = (
        forced_logits(model, given, method, answer) for method in (Baseline(), Lazy(schedule, revive=revive))
    )
    full, pruned = (
        torch.tensor(np.stack(lazy_reference(model, prompt, kept, 5, revive=revive, forced=answer).logits))
        for kept in ({}, schedule)
    )
    expected = compared(full, pruned, answer)
    assert of_forced(theirs, ours, answer) == pytest.approx(expected, abs=1e-9)
    assert expected[0] > 1e-4


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_forks_of_a_prefill_are_forced_runs_of_their_own(row: Row) -> None:
    """For every method, two answers one after the other; the answer from whose prefill they are forked is unchanged."""
    model, method, kept = random_model("qwen3", 4, num_layers=4), row.pruning, list[Prefilled]()
    prompt = Prompt(torch.tensor(RNG.integers(0, 97, 24).tolist()))
    alone = lazyllm.generate(model, prompt, method, 6, ())
    out = lazyllm.generate(model, prompt, method, 6, (), after_prefill=lambda prefilled: kept.append(prefilled.fork()))
    assert (out.token_ids, out.selected, out.kv_bytes) == (alone.token_ids, alone.selected, alone.kv_bytes)
    assert np.array_equal(out.computed, alone.computed)
    (prefilled,) = kept
    assert prefilled.nbytes >= out.kv_bytes // 2 > 0
    answers = [alone.token_ids, RNG.integers(0, 97, 6).tolist(), RNG.integers(0, 97, 2).tolist()]
    for answer in answers:
        expected = forced_logits(model, prompt, method, answer)
        torch.testing.assert_close(prefilled.forced_logits(answer), expected, atol=1e-9, rtol=1e-9)


def test_time_after_the_prefill_is_in_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(generation, "read_clock", lambda *_: float(next(clock)))
    plain = lazyllm.generate(MODEL, [5, 6, 7], Baseline(), 4, ())

    def wait(_: Prefilled) -> None:
        for _ in range(100):
            next(clock)

    waited = lazyllm.generate(MODEL, [5, 6, 7], Baseline(), 4, (), after_prefill=wait)
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
    baseline, method = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.25, 0.25, 0.5]).log() + 7
    for pair in ((left, right), (right, left)):
        ids = [[ord(letter) for letter in text] for text in pair]
        found = of_generations(_generation(ids[0], baseline), _generation(ids[1], method))
        assert found.edit_similarity == pytest.approx(similarity)
        assert found.leading_tokens == leading
        assert found.same_answer == (left == right)
        assert found.kl == pytest.approx(math.log(2) / 4, abs=1e-7)  # logits are free up to a constant
        assert not found.top1_agrees
    assert edit_similarity([], [1, 2]) == 0
    assert edit_similarity([], []) == 1


MADE = lazyllm.generate(MODEL, [5, 6], Baseline(), 1, ())


def _generation(token_ids: list[int], logits: torch.Tensor) -> lazyllm.Generation:
    return replace(MADE, token_ids=token_ids, first_logits=logits)


def test_token_without_probability_adds_nothing() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]]), torch.tensor([[0.0, 5.0, 0.0]])
    expected = math.log(2 + math.e**5) - math.log(2)
    assert of_forced(*logits, [0]) == pytest.approx((expected, -expected), abs=1e-6)


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
    tokenizer = load_tokenizer_of(ModelSpec("llama2", "dummy", tokenizer=str(shared / "tokenizers" / "llama2")))
    for prompt, gold in (("[/INST]", " Paris"), ("Answer:", " Paris"), ("line\n", "Paris"), ("line\n", "salmon")):
        ids = tokenizer.encode(prompt + gold)[len(tokenizer.encode(prompt)) :]
        assert gold_token_ids(tokenizer, prompt, gold.strip()) == ids
