"""Answers that decode together: the records of single runs but for times, and what is retried and refused."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from eval.run import decode
from eval.run.run import prepare
from eval.run.settings import ModelConfig
from eval.run.work import Model, fitting_batch
from eval.store.folder import read_about, read_visits
from eval.store.visit import Visit
from lazyllm.errors import UserError
from lazyllm.methods import Baseline, Lazy
from lazyllm.spec import ModelSpec
from tests.lazyllm.engine.test_batch import Unbatchable
from tests.runs import measure as measure_run
from tests.runs import run_of, small_run

ARMS = {
    "lazy": {"name": "lazy", "schedule": {2: 0.5}},
    "static": {"name": "static_pruning", "layer": 2, "keep": 0.5},
}


def visits_of(folder: Path, size: int, **changes: Any) -> dict[tuple[str, str], Visit]:
    measure_run(small_run(folder, batch_size=size, max_new_tokens=6, **changes), show=False)
    return {visit.key: visit for visit in read_visits(folder)}


def untimed(visit: Visit) -> Any:
    """A visit without its times, its order and the memory of the process; logits rounded to what float32 gives."""
    plain = json.loads(visit.to_json())
    del plain["order"], plain["attention_kernel"]
    for answers in plain["answers"].values():
        for answer in answers:
            del answer["times"], answer["cost"]["peak_memory_bytes"], answer["cost"]["prefill_mfu"]
            if answer["fidelity"] is not None:
                answer["fidelity"]["kl"] = round(answer["fidelity"]["kl"], 4)
    return plain


@pytest.mark.parametrize(
    ("size", "changes"), [(5, {"compare": ARMS}), (2, {"compare": ARMS}), (4, {"baseline": False})]
)
def test_batched_visits_are_those_of_single_answers_without_times_of_steps(
    tmp_path: Path, size: int, changes: dict[str, Any]
) -> None:
    """Also if a batch holds fewer answers than there are arms."""
    single, batched = (visits_of(tmp_path / str(n), n, **changes) for n in (1, size))
    assert batched.keys() == single.keys()
    about = [read_about(tmp_path / str(n) / "run.json")["identity"] for n in (1, size)]
    assert about[1] == about[0] | {"batch_size": size}
    for key, visit in batched.items():
        assert untimed(visit) == untimed(single[key])
        assert sorted(visit.order) == sorted(visit.answers)
        for label, (measured,) in visit.answers.items():
            times = measured.times
            assert times.ttft_s > 0
            assert (times.total_s, times.decode_step_s, measured.cost.peak_memory_bytes) == (None, None, None)
            assert single[key].answers[label][0].times.total_s is not None


def test_first_tokens_of_a_visit_come_in_its_order_with_nothing_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[Any] = []
    join, run = decode.Batch.add, decode.Batch.run
    monkeypatch.setattr(decode.Batch, "add", lambda batch, row: [joined.append(row.method), join(batch, row)][1])
    monkeypatch.setattr(decode.Batch, "run", lambda batch: [joined.append(None), run(batch)][1])
    visits = visits_of(tmp_path, 6, compare=ARMS, limit=2)
    planned = small_run(None, compare=ARMS)
    methods = {arm.label: arm.method("lookup") for arm in prepare(planned).arms}
    order = [methods[label] for visit in visits.values() for label in visit.order]
    prefills = [method for method in joined if method is not None]
    assert sorted(map(repr, prefills)) == sorted(map(repr, order))
    runs_of_three = [joined[start : start + 3] for start in range(len(joined)) if joined[start] is not None]
    begins = [part for part in runs_of_three if sorted(map(repr, part)) == sorted(map(repr, methods.values()))]
    assert len(begins) >= len(visits)  # the three arms of each visit, one right after the other


@pytest.mark.slow
def test_batched_run_with_forced_answers_and_traces_are_a_single_run(tmp_path: Path) -> None:
    model = ModelConfig(name="tiny", dtype="float32", device="cpu", max_prompt_tokens=520)
    settings: dict[str, Any] = dict(model=model, max_new_tokens=6, trace=1, fidelity="answer")
    measure_run(small_run(tmp_path / "single", **settings), show=False)
    measure_run(small_run(tmp_path / "batched", batch_size=4, **settings), show=False)
    single, found = ({v.key: untimed(v) for v in read_visits(tmp_path / name)} for name in ("single", "batched"))
    assert len(found) == 6
    for key, visit in found.items():
        for forced in ("answer_kl", "answer_log_likelihood", "gold_kl", "gold_log_likelihood"):
            (ours,), (theirs,) = (one["answers"]["lazy"] for one in (visit, single[key]))
            assert ours["fidelity"].pop(forced) == pytest.approx(theirs["fidelity"].pop(forced), abs=1e-5)
        assert visit == single[key]
    traces = {name: {file.name for file in (tmp_path / name / "traces").iterdir()} for name in ("single", "batched")}
    assert traces["batched"] == traces["single"]
    assert len(traces["single"]) == 2


@pytest.mark.slow
def test_visits_in_a_batch_that_lacks_memory_are_answered_one_arm_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = visits_of(tmp_path / "whole", 8)
    run, answer = decode.Batch.run, decode.generate
    alone: dict[tuple[int, ...], list[Any]] = {}

    def run_out(batch: Any) -> Any:
        if len(batch.running) > 3:
            raise torch.OutOfMemoryError("no memory for 4 rows")
        return run(batch)

    def noted(model: Any, prompt: Any, method: Any, *given: Any, **settings: Any) -> Any:
        alone.setdefault(tuple(prompt.token_ids.tolist()), []).append(method)
        return answer(model, prompt, method, *given, **settings)

    monkeypatch.setattr(decode.Batch, "run", run_out)
    monkeypatch.setattr(decode, "generate", noted)
    found = visits_of(tmp_path / "alone", 8)
    assert [*map(untimed, found.values())] == [untimed(expected[key]) for key in found]
    assert found.keys() == expected.keys()
    assert not any(visit.failures for visit in found.values())
    assert caplog.text.count("start again, one arm at a time: OutOfMemoryError: no memory for 4 rows") == 2  # 8, 4 rows
    planned = prepare(small_run(None))
    methods = {arm.label: arm.method("lookup") for arm in planned.arms}
    orders = {case.prompt.token_ids: found[case.key].order for case in planned.cases}
    assert alone == {ids: [methods[label] for label in order] for ids, order in orders.items()}
    for visit in found.values():  # all of one kind in a run
        costs = [(one.times.total_s, one.times.decode_step_s) for (one,) in visit.answers.values()]
        assert costs == [(None, None)] * 2
        assert all(one.times.ttft_s > 0 for (one,) in visit.answers.values())


@pytest.mark.parametrize("when", ["its request is made", "it joins the batch"])
def test_only_the_answer_that_fails_alone_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    run = small_run(tmp_path, batch_size=8)
    lengths = {case.key: len(case.prompt.token_ids) for case in prepare(run).cases}
    longest = max(lengths.values())
    place, name = (decode.Batch, "add") if when == "it joins the batch" else (decode, "make_request")

    def refusing(original: Any) -> Any:
        def refuse(*given: Any, **settings: Any) -> Any:
            method, tokens = (given[1].method, given[1].prompt) if len(given) == 2 else (given[2], given[1].token_ids)
            if method == Lazy({2: 0.5}) and len(tokens) == longest:
                raise RuntimeError("this prompt fails")
            return original(*given, **settings)

        return refuse

    monkeypatch.setattr(place, name, refusing(getattr(place, name)))
    monkeypatch.setattr(decode, "generate", refusing(decode.generate))
    measure_run(run, show=False)
    visits = read_visits(tmp_path)
    assert len(visits) == len(lengths)
    for visit in visits:
        fails = lengths[visit.key] == longest
        assert set(visit.failures) == ({"lazy"} if fails else set())
        assert set(visit.answers) == ({"baseline"} if fails else {"baseline", "lazy"})


def test_error_for_the_user_ends_a_run_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.Batch, "run", Mock(side_effect=UserError("give another setting")))
    with pytest.raises(UserError, match="give another setting"):
        measure_run(small_run(tmp_path, batch_size=4), show=False)


def test_rows_are_as_many_as_fit_into_memory() -> None:
    spec, methods = ModelSpec("llama2", dtype="bfloat16"), [Baseline(), Lazy()]
    model = Model.of(spec)
    weights, row = model.weights, sum(model.memory(Baseline(), 3500, 500).values()) - model.weights
    for gigabytes in (16, 24, 40, 80):
        rows = fitting_batch(None, spec, methods, 3500, 500, gigabytes * 1e9)
        assert 1 <= rows <= 8
        assert rows == 1 or weights + rows * 3500 * 32 * model.kv_bytes < gigabytes * 1e9
        assert rows == 8 or weights + (rows + 1) * row > 0.8 * gigabytes * 1e9
    assert fitting_batch(None, spec, methods, 3500, 500, None) == 1
    assert fitting_batch(16, spec, methods, 3500, 500, None) == 16


def test_memory_is_for_the_longest_answer_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(return_value=3)
    monkeypatch.setattr("eval.run.local.fitting_batch", asked)
    run = run_of("dataset=needle", "needle.lengths=[300]", "model.thinking_tokens=700", "max_new_tokens=5")
    assert prepare(run).batch_size == 3
    (*_, new_tokens, _) = asked.call_args.args
    assert new_tokens == 5 + 700 == max(case.max_new_tokens for case in prepare(run).cases)


def test_a_method_that_cannot_be_batched_is_refused_before_anything_runs() -> None:
    assert fitting_batch(None, ModelSpec("llama2", dtype="bfloat16"), [Unbatchable()], 3500, 500, 80e9) == 1
    with pytest.raises(UserError, match=r"batch_size=1"):
        fitting_batch(2, ModelSpec("llama2", dtype="bfloat16"), [Unbatchable()], 3500, 500, 80e9)


@pytest.mark.parametrize("experiment", ["table2", "figure7"])
def test_presets_that_show_whole_answers_times_decode_them_one_by_one(experiment: str) -> None:
    assert run_of(f"experiment={experiment}", "model=llama2").config.batch_size == 1
