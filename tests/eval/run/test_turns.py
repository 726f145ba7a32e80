"""Rows with later turns, from a config to stored numbers: against the model's own generation, and counts by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import eval.run.measure
import lazyllm
from eval.analysis.run_table import run_table
from eval.run import resolved
from eval.run.config import ModelConfig
from eval.run.loop import load_model, run
from eval.run.measure import Bench, Case
from eval.run.prepare import Plan, prepare
from eval.run.resolved import Resolved
from eval.store.folder import read_records
from eval.store.record import Measurement, Record
from eval.store.results import Results
from lazyllm.engine.flops import LayerShape
from lazyllm.errors import UserError
from lazyllm.methods import Baseline, Lazy, Method, StaticPruning
from lazyllm.methods.support.schedule import keep_count
from lazyllm.models.load import load_end_ids
from lazyllm.spec import ModelSpec
from tests.runs import small_run

TURNS, LAYERS = 3, 8
METHOD = StaticPruning(layer=2, keep=0.5)
END_IDS = load_end_ids(ModelSpec("tiny"))


def run_of(**changes: Any) -> Resolved:
    model = ModelConfig(name="tiny", dtype="float64", device="cpu")
    method = {"name": "static_pruning", "layer": 2, "keep": 0.5}
    settings = dict(model=model, method=method, dataset={"lookup": True}, limit=1, max_new_tokens=None, turns=TURNS)
    return small_run(**({"out": None} | settings | changes))


@cache
def plan() -> Plan:
    return prepare(run_of())


@cache
def bench() -> Bench:
    return Bench(load_model(run_of()), plan().tokenizer, plan().run.chat, paired=True)


def case(method: Method, turns: str = "continue") -> Case:
    return replace(plan().cases[0], method=method, turns=turns)


@cache
def turns_of(method: Method, turns: str = "continue") -> list[Record]:
    return bench().record(case(method, turns), baseline_first=True).by_turn


def read(number: int, answers: list[list[int]]) -> list[int]:
    """The tokens that a turn (from 0) has read, assembled by hand: prompt, answers, messages."""
    encode, example = plan().tokenizer.encode, plan().cases[0].example
    ids = encode(f"Ledger: {example.context}\nQuestion: entry {example.input}")
    for answer, turn in zip(answers[:number], example.turns, strict=False):
        key = turn.text.split()[-1]
        end = encode("<|end|>", add_special_tokens=False)
        ids = ids + answer[: -1 if answer[-1:] == end else None] + end
        ids += encode(f"x\nQuestion: entry {key}", add_special_tokens=False)[1:]
    return ids


def test_turns_of_the_baseline_are_the_models_own_generation() -> None:
    measured = [record.baseline for record in turns_of(METHOD)]
    answers = [side.token_ids for side in measured if side is not None]
    for number in range(TURNS):
        ids = torch.tensor([read(number, answers)])
        out: Any = bench().model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=END_IDS)  # type: ignore[operator]
        assert answers[number] == out[0, ids.shape[1] :].tolist()
    expected = [plan().cases[0].example.answers, *(turn.answers for turn in plan().cases[0].example.turns)]
    assert [tuple(record.answers) for record in turns_of(METHOD)] == expected
    for record in turns_of(METHOD):
        assert record.baseline is not None
        assert (record.baseline.score == 1) == (record.baseline.text.strip(" .") == record.answers[0])
    assert any(record.baseline and record.baseline.score == 1 for record in turns_of(METHOD)[1:])


def test_divergence_and_answers_of_a_turn_again_are_those_of_a_fresh_prompt() -> None:
    records = turns_of(METHOD, "again")
    own = [record.method.token_ids for record in records]
    theirs = [record.baseline.token_ids for record in records if record.baseline is not None]
    for number, record in enumerate(records):
        fresh = lazyllm.generate(bench().model, read(number, own), METHOD, 8, END_IDS)
        assert record.method.token_ids == fresh.token_ids
        with torch.inference_mode():
            logits = bench().model(torch.tensor([read(number, theirs)])).logits[0, -1]
        p, q = logits.softmax(0), fresh.first_logits.softmax(0)
        assert record.method.kl == pytest.approx(float((p * (p.log() - q.log())).sum()), abs=1e-9)


def new_tokens(records: list[Record], side: str) -> list[int]:
    """Of each turn, the tokens that no earlier turn has read or written."""
    answers = [getattr(record, side).token_ids for record in records]
    texts = [read(number, answers) for number in range(TURNS)]
    return [len(text) - before for text, before in zip(texts, [0, *map(len, texts)], strict=False)]


def asked_tokens(records: list[Record], side: str) -> list[int]:
    """`new_tokens` without the answers."""
    lengths = [0, *(len(getattr(record, side).token_ids) for record in records)]
    return [new - answer for new, answer in zip(new_tokens(records, side), lengths, strict=False)]


def test_counts_by_hand() -> None:
    shape = LayerShape.of(bench().model.config)
    vocabulary = 2 * shape.width * bench().model.config.vocab_size
    for method in (Baseline(), METHOD):
        records = turns_of(METHOD)
        side = "baseline" if method == Baseline() else "method"
        asked, so_far = asked_tokens(records, side), 0.0
        for number, record in enumerate(records):
            measured: Measurement = getattr(record, side)
            kept = asked[0] if side == "baseline" else keep_count(0.5, asked[0])
            computed = (2 * asked[0] + 6 * kept) / 8 if number == 0 else asked[number]
            so_far += computed
            assert (measured.tokens_computed, measured.tokens_computed_so_far) == (computed, so_far)
            assert measured.revived_tokens == 0
            stored = kept + sum(new_tokens(records, side)[1 : number + 1]) + len(measured.token_ids) - 1
            assert measured.kv_bytes == 2 * LAYERS * shape.kv_heads * shape.head_dim * 8 * stored
            pairs = [0] * 2
            for place in range(sum(asked[:number]), sum(asked[: number + 1])):
                pairs[0] += 2 * (place + 1)  # in the two layers that compute every token
            behind = 0 if number == 0 else kept + sum(asked[1:number])
            for place in range(behind, behind + (kept if number == 0 else asked[number])):
                pairs[1] += 6 * (place + 1)
            flops = int(8 * computed) * shape.linear_flops + sum(pairs) * shape.pair_flops + vocabulary
            assert measured.prefill_flops == flops


def test_turn_again_computes_the_whole_text() -> None:
    records, so_far = turns_of(METHOD, "again"), 0.0
    answers = [record.method.token_ids for record in records]
    for number, record in enumerate(records):
        n = len(read(number, answers))
        so_far += (2 * n + 6 * keep_count(0.5, n)) / 8
        assert record.method.tokens_computed_so_far == so_far


def test_revived_tokens_are_counted_turn_by_turn() -> None:
    method, seconds = Lazy({2: 0.3}), 0.0
    records = bench().record(case(method), baseline_first=False).by_turn
    answers = [record.method.token_ids for record in records]
    with lazyllm.start(bench().model, case(method).prompt.as_input(), method) as conversation:
        for number, record in enumerate(records):
            more = None if number == 0 else read(number, answers)[conversation.num_tokens :]
            out = conversation.answer(more, 8, END_IDS)
            seconds += record.method.total_s
            assert record.method.revived_tokens == out.revived.mean()
            assert (record.method.kv_bytes, record.method.aux_bytes) == (out.kv_bytes, out.aux_bytes)
            assert record.method.tokens_computed_so_far == out.computed[-1].mean()
            assert record.method.total_s_so_far == pytest.approx(seconds)
    assert sum(record.method.revived_tokens or 0 for record in records[1:]) > 0


def test_evidence_of_a_turn_counts_tokens_computed_by_its_first_one() -> None:
    spans, turns = case(METHOD).prompt.spans, case(METHOD).prompt.turns
    assert spans is not None
    out = lazyllm.generate(bench().model, case(METHOD).prompt.as_input(), METHOD, 8, END_IDS)
    kept = set(out.selected[0][2])
    for turn, record in zip(turns, turns_of(METHOD)[1:], strict=True):
        [(start, stop)] = turn.evidence
        assert case(METHOD).prompt.text[start:stop].split()[1] == turn.text.split()[-1]
        tokens = [number for number, (low, high) in enumerate(spans.tolist()) if low < stop and high > start]
        share = sum(token in kept for token in tokens) / len(tokens)
        assert record.method.evidence_prefill == [1, 1, *[share] * 6]
        assert record.method.evidence_revived == [0] * 8


@pytest.mark.slow
def test_run_interrupted_in_a_turn_is_resumed_with_whole_rows(tmp_path: Path, monkeypatch) -> None:
    converse, calls = eval.run.measure.converse, 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        for out in converse(*arguments):
            calls += 1
            if calls == 2 * TURNS + 2:  # the second row's second turn
                raise KeyboardInterrupt
            yield out

    config = run_of(limit=2, out=str(tmp_path / "run"))
    with monkeypatch.context() as patch:
        patch.setattr(eval.run.measure, "converse", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(config, show=False)
    file = tmp_path / "run" / "records.jsonl"
    [line] = file.read_text().splitlines()
    file.write_text(f"{line}\n{line[: len(line) // 2]}")  # as after a kill in the middle of the second
    results = run(config, show=False).results
    records = read_records(tmp_path / "run")
    assert [record.key for record in records] == [case.key for case in prepare(config).cases]
    assert all([turn.turn for turn in record.by_turn] == [1, 2, 3] for record in records)
    frame = Results.read([tmp_path]).frame
    assert frame["turn"].tolist() == [1, 2, 3] * 2
    assert frame["prompt_tokens"].tolist() == [turn.prompt_tokens for record in records for turn in record.by_turn]
    assert results is not None
    row = run_table(results, "").frame.iloc[0]
    assert row["examples"] == 2
    assert row["score"] == pytest.approx(frame["score"].mean(), abs=0.01)
    assert row["ttft_speedup"] == pytest.approx(frame["baseline_ttft_s"].sum() / frame["ttft_s"].sum())
    run(config.changed(limit=1), show=False)  # nothing is measured again
    assert read_records(tmp_path / "run") == records


def test_more_turns_than_a_row_has_are_refused(caplog, monkeypatch) -> None:
    with pytest.raises(UserError, match="turns=9: a row of the embedded suite has up to 8 questions"):
        run_of(turns=9)
    with pytest.raises(UserError, match="digest: a context has one question only"):
        run_of(dataset={"digest": True})
    monkeypatch.delenv(resolved.TOLD, raising=False)
    for whole in ({}, {"embedded": True, "digest": True, "lookup": True}):  # two jobs of a sweep
        assert "digest" not in [dataset.name for dataset in run_of(dataset=whole).datasets]
    assert caplog.text.count("left out: digest:") == 1


def test_one_turn_is_the_run_without_turns() -> None:
    alone = prepare(run_of(turns=None))
    assert alone.cases[0].prompt.turns == ()
    assert alone.cases[0].prompt.token_ids == plan().cases[0].prompt.token_ids
    assert "turns" not in alone.identity
    assert prepare(run_of(turns=1)).identity["data"] == alone.identity["data"] != plan().identity["data"]
