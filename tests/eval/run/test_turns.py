"""Rows with later turns, from a config to stored numbers: against the model's own generation, and counts by hand."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import eval.run.decode
import lazyllm
from eval.run.arms import Arm
from eval.run.asked import Asked
from eval.run.case import Case
from eval.run.run import prepare
from eval.run.settings import ModelConfig
from lazyllm.engine.flops import LayerShape
from lazyllm.errors import UserError
from lazyllm.methods import Baseline, Lazy, Method, StaticPruning
from lazyllm.methods.support.hyperparameters import keep_count
from lazyllm.models.load import load_end_ids
from lazyllm.spec import ModelSpec
from tests.eval.store.visits import flattened
from tests.runs import arm, bench_of, small_run

TURNS, LAYERS = 3, 8
METHOD = StaticPruning(layer=2, keep=0.5)
END_IDS = load_end_ids(ModelSpec("tiny"))


def run_of(**changes: Any) -> Asked:
    tiny = ModelConfig(name="tiny", dtype="float64", device="cpu")
    method = {"name": "static_pruning", "layer": 2, "keep": 0.5}
    settings = dict(model=tiny, method=method, dataset={"lookup": True}, limit=1, max_new_tokens=None, turns=TURNS)
    return small_run(**({"out": None} | settings | changes))


plan = cache(run_of)
model = cache(lambda: plan().subject.load())


def case() -> Case:
    return prepare(plan()).cases[0]


def visit_of(*arms: Arm) -> Any:
    (visit,) = bench_of(model(), plan().subject.tokenizer, arms, chat=plan().subject.chat).visits(
        [replace(case(), arms=arms)]
    )
    assert not visit.failures
    return flattened(visit)


@cache
def turns_of(turns: str = "continue") -> Any:
    """A conversation with the baseline and static pruning."""
    pruned = arm("method", name="static_pruning", layer=2, keep=0.5, turns=turns)
    return visit_of(arm("baseline", name="baseline"), pruned)


def token_ids(measured: list[Any]) -> list[list[int]]:
    return [one.token_ids for one in measured]


def read(number: int, answers: list[list[int]]) -> list[int]:
    """The tokens that a turn (from 0) has read, assembled by hand: prompt, answers, messages."""
    encode, example = plan().subject.tokenizer.encode, case().example
    ids = encode(f"Ledger: {example.context}\nQuestion: entry {example.input.split()[-1]}")
    for answer, turn in zip(answers[:number], example.turns, strict=False):
        key = turn.text.split()[-1]
        end = encode("<|end|>", add_special_tokens=False)
        ids = ids + answer[: -1 if answer[-1:] == end else None] + end
        ids += encode(f"x\nQuestion: entry {key}", add_special_tokens=False)[1:]
    return ids


def test_turns_of_the_baseline_are_the_models_own_generation() -> None:
    visit = turns_of()
    measured = visit.answers["baseline"]
    answers = token_ids(measured)
    for number in range(TURNS):
        ids = torch.tensor([read(number, answers)])
        out: Any = model().generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=END_IDS)  # type: ignore[operator]
        assert answers[number] == out[0, ids.shape[1] :].tolist()
    expected = [case().example.answers, *(turn.answers for turn in case().example.turns)]
    assert [tuple(turn.answers) for turn in visit.turns] == expected
    for turn, answer in zip(visit.turns, measured, strict=True):
        assert (answer.score == 1) == (answer.text.strip(" .") == turn.answers[0])
    assert any(answer.score == 1 for answer in measured[1:])


def test_each_arm_holds_its_whole_conversation_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    converse, asked = eval.run.decode.converse, []

    def seen(model: Any, of: Case, method: Method, turns: str, *options: Any) -> Any:
        for out in converse(model, of, method, turns):
            asked.append(method)
            yield out

    monkeypatch.setattr(eval.run.decode, "converse", seen)
    visit_of(arm("baseline", name="baseline"), arm("method", name="static_pruning", layer=2, keep=0.5))
    assert asked == [Baseline()] * TURNS + [METHOD] * TURNS


def test_divergence_and_answers_of_a_turn_again_are_those_of_a_fresh_prompt() -> None:
    answers = turns_of("recompute").answers
    own, theirs = token_ids(answers["method"]), token_ids(answers["baseline"])
    for number, measured in enumerate(answers["method"]):
        fresh = lazyllm.generate(model(), read(number, own), METHOD, 8, END_IDS)
        assert measured.token_ids == fresh.token_ids
        with torch.inference_mode():
            logits = model()(torch.tensor([read(number, theirs)])).logits[0, -1]
        p, q = logits.softmax(0), fresh.first_logits.softmax(0)
        assert measured.kl == pytest.approx(float((p * (p.log() - q.log())).sum()), abs=1e-9)


def new_tokens(measured: list[Any]) -> list[int]:
    """Of each turn, the tokens that no earlier turn has read or written."""
    answers = token_ids(measured)
    texts = [read(number, answers) for number in range(TURNS)]
    return [len(text) - before for text, before in zip(texts, [0, *map(len, texts)], strict=False)]


def asked_tokens(measured: list[Any]) -> list[int]:
    """`new_tokens` without the answers."""
    lengths = [0, *map(len, token_ids(measured))]
    return [new - answer for new, answer in zip(new_tokens(measured), lengths, strict=False)]


def test_counts_by_hand() -> None:
    shape = LayerShape.of(model().config)
    vocabulary = 2 * shape.width * model().config.vocab_size
    for label, answers in turns_of().answers.items():
        asked, so_far = asked_tokens(answers), 0.0
        for number, measured in enumerate(answers):
            kept = asked[0] if label == "baseline" else keep_count(0.5, asked[0])
            computed = (2 * asked[0] + 6 * kept) / 8 if number == 0 else asked[number]
            so_far += computed
            assert (measured.tokens_computed, measured.tokens_computed_so_far) == (computed, so_far)
            assert measured.revived_tokens == 0
            stored = kept + sum(new_tokens(answers)[1 : number + 1]) + len(measured.token_ids) - 1
            assert measured.kv_bytes == 2 * LAYERS * shape.kv_heads * shape.head_dim * 8 * stored
            # two layers compute every token
            pairs = 2 * sum(place + 1 for place in range(sum(asked[:number]), sum(asked[: number + 1])))
            behind, ran = (0, kept) if number == 0 else (kept + sum(asked[1:number]), asked[number])
            pairs += 6 * sum(place + 1 for place in range(behind, behind + ran))
            flops = int(8 * computed) * shape.linear_flops + pairs * shape.pair_flops + vocabulary
            assert measured.prefill_flops == flops


def test_turn_again_computes_the_whole_text() -> None:
    measured, so_far = turns_of("recompute").answers["method"], 0.0
    for number, one in enumerate(measured):
        n = len(read(number, token_ids(measured)))
        so_far += (2 * n + 6 * keep_count(0.5, n)) / 8
        assert one.tokens_computed_so_far == so_far


def test_revived_tokens_are_counted_turn_by_turn() -> None:
    method, seconds = Lazy({2: 0.3}), 0.0
    measured = visit_of(arm("lazy", name="lazy", schedule={2: 0.3})).answers["lazy"]
    with lazyllm.start(model(), case().prompt.as_input(), method) as conversation:
        for number, one in enumerate(measured):
            more = None if number == 0 else read(number, token_ids(measured))[len(conversation.token_ids) :]
            out = conversation.answer(more, 8, END_IDS)
            seconds += one.total_s
            assert one.revived_tokens == out.revived.mean()
            assert (one.kv_bytes, one.aux_bytes) == (out.kv_bytes, out.aux_bytes)
            assert one.tokens_computed_so_far == out.computed[-1].mean()
            assert one.total_s_so_far == pytest.approx(seconds)
    assert sum(one.revived_tokens for one in measured[1:]) > 0


def test_more_turns_than_a_row_has_are_refused(caplog) -> None:
    with pytest.raises(UserError, match="turns=9: a row of the embedded suite has up to 8 questions"):
        run_of(turns=9)
    with pytest.raises(UserError, match="digest: a context has one question only"):
        run_of(dataset={"digest": True})
    for whole in ({}, {"embedded": True, "digest": True, "lookup": True}):
        caplog.clear()
        assert "digest" not in [dataset.name for dataset in run_of(dataset=whole).datasets]
        assert caplog.text.count("left out: digest:") == 1


def test_one_turn_is_the_run_without_turns() -> None:
    alone = run_of(turns=None)
    assert prepare(alone).cases[0].prompt.turns == ()
    assert prepare(alone).cases[0].prompt.token_ids == case().prompt.token_ids
    assert "turns" not in prepare(alone).identity
    assert (
        prepare(run_of(turns=1)).identity["data"] == prepare(alone).identity["data"] != prepare(plan()).identity["data"]
    )
