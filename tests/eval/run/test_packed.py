"""Answers that decode together: the records of single runs but for times, and what is retried and refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.run import measure
from eval.run.config import AnswersConfig, ModelConfig, TimingConfig
from eval.run.loop import run
from eval.run.prepare import prepare
from eval.run.work import Model, rows_of_answers
from eval.store.aggregate import by_task
from eval.store.folder import read_records
from eval.store.record import Record
from lazyllm.errors import UserError
from lazyllm.methods import Baseline, Lazy
from lazyllm.spec import ModelSpec
from tests.lazyllm.engine.test_batch import Unbatchable
from tests.runs import run_of, small_run

OWN_TIMES = {"ttft_s", "scoring_s", "total_s", "decode_step_s", "total_s_so_far", "peak_memory_bytes", "prefill_mfu"}


def records_of(folder: Path, rows: int, **changes: Any) -> dict[str, Record]:
    result = run(small_run(folder, answers=AnswersConfig(rows=rows), max_new_tokens=6, **changes), show=False)
    assert result.results is not None
    return {record.id + record.dataset: record for record in result.results.runs[0].records}


def untimed(record: Record) -> Any:
    """A record without its times and the memory of the process, logits rounded to what float32 gives."""
    plain = json.loads(record.to_json())
    plain["baseline_ttft_s"] = plain["baseline_ttft_s"] is not None
    for side in ("method", "baseline"):
        if plain[side] is not None:
            plain[side] = {key: value for key, value in plain[side].items() if key not in OWN_TIMES}
            plain[side]["kl"] = None if plain[side]["kl"] is None else round(plain[side]["kl"], 4)
    return plain


@pytest.mark.parametrize("paired", [True, "ttft", False])
def test_packed_records_are_those_of_single_runs_without_times_of_steps(tmp_path: Path, paired: bool | str) -> None:
    timing = TimingConfig(warmup=0, paired=paired)
    single, packed = (records_of(tmp_path / str(rows), rows, timing=timing) for rows in (1, 5))
    assert packed.keys() == single.keys()
    for key, record in packed.items():
        assert untimed(record) == untimed(single[key])
        for measured, alone in ((record.method, single[key].method), (record.baseline, single[key].baseline)):
            if measured is None:
                continue
            assert measured.ttft_s > 0
            assert (measured.total_s, measured.decode_step_s, measured.peak_memory_bytes) == (None, None, None)
            assert alone is not None
            assert alone.total_s is not None


@pytest.mark.slow
def test_packed_shards_with_forced_answers_traces_and_evidence_are_a_single_run(tmp_path: Path) -> None:
    model = ModelConfig(name="tiny", dtype="float32", device="cpu", max_prompt_tokens=520)  # the evidence is not cut
    settings: dict[str, Any] = dict(model=model, max_new_tokens=6, trace=1, fidelity="answer")
    run(small_run(tmp_path / "single", **settings), show=False)
    packed = small_run(tmp_path / "packed", answers=AnswersConfig(rows=4), **settings)
    for shard in ("1/2", "2/2"):
        run(packed.changed(shard=shard), show=False)
    single, found = ({r.key: untimed(r) for r in read_records(tmp_path / name)} for name in ("single", "packed"))
    assert len(found) == 6
    for key, record in found.items():
        for forced in ("answer_kl", "answer_log_likelihood", "gold_kl", "gold_log_likelihood"):
            assert record["method"].pop(forced) == pytest.approx(single[key]["method"].pop(forced), abs=1e-5)
        assert record == single[key]
    assert any(record["method"]["evidence_recall"] is not None for record in found.values())
    traces = {name: {file.name for file in (tmp_path / name / "traces").iterdir()} for name in ("single", "packed")}
    assert traces["packed"] == traces["single"]
    assert len(traces["single"]) == 2


def test_packed_run_has_no_generation_speedup_and_an_identity_of_its_own(tmp_path: Path) -> None:
    single, packed = (small_run(tmp_path, answers=AnswersConfig(rows=rows)) for rows in (1, 4))
    assert prepare(packed).identity == prepare(single).identity | {"answers_rows": 4}
    result = run(packed, show=False)
    assert result.results is not None
    lazy: Any = by_task(result.results.frame).query("method == 'lazy'")
    assert lazy["generation_speedup"].isna().all()
    assert (lazy["ttft_speedup"] > 0).all()


@pytest.mark.slow
def test_examples_in_a_pack_start_again_fewer_at_once_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = records_of(tmp_path / "whole", 8)
    original = measure.Batch.run

    def run_out(pack: Any) -> Any:
        if len(pack.running) > 3:
            raise torch.OutOfMemoryError("no memory for 4 rows")
        return original(pack)

    monkeypatch.setattr(measure.Batch, "run", run_out)
    found = records_of(tmp_path / "fewer", 8)
    assert {key: untimed(record) for key, record in found.items()} == {
        key: untimed(record) for key, record in expected.items()
    }
    retries = re.findall(r"(\d+) examples at once until (\d+) have ended", caplog.text)
    assert retries == [("2", "4"), *[("1", "2")] * 3]  # each two of the four, then the last two of six


def test_only_the_example_that_fails_alone_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = measure.Batch.add

    def refuse(pack: Any, row: Any) -> None:
        if len(row.prompt) == longest:
            raise RuntimeError("this prompt fails")
        original(pack, row)

    run_ = small_run(tmp_path, answers=AnswersConfig(rows=8))
    lengths = [len(case.prompt.token_ids) for case in prepare(run_).cases]
    longest = max(lengths)
    monkeypatch.setattr(measure.Batch, "add", refuse)
    result = run(run_, show=False)
    assert result.results is not None
    assert len(result.results.runs[0].records) == len(lengths) - lengths.count(longest)


def test_rows_are_as_many_as_fit_into_memory() -> None:
    spec, methods = ModelSpec("llama2"), [Baseline(), Lazy()]
    model = Model.of(spec)
    weights, row = model.weights, sum(model.memory(Baseline(), 3500, 500).values()) - model.weights
    for gigabytes in (16, 24, 40, 80):
        rows = rows_of_answers(None, spec, methods, 3500, 500, gigabytes * 1e9)
        assert 1 <= rows <= 8
        assert rows == 1 or weights + rows * 3500 * 32 * model.kv_bytes < gigabytes * 1e9
        assert rows == 8 or weights + (rows + 1) * row > 0.8 * gigabytes * 1e9
    assert rows_of_answers(None, spec, methods, 3500, 500, None) == 1
    assert rows_of_answers(16, spec, methods, 3500, 500, None) == 16


def test_a_method_that_cannot_be_packed_is_refused_before_anything_runs() -> None:
    assert rows_of_answers(None, ModelSpec("llama2"), [Unbatchable()], 3500, 500, 80e9) == 1
    with pytest.raises(UserError, match=r"answers\.rows=1"):
        rows_of_answers(2, ModelSpec("llama2"), [Unbatchable()], 3500, 500, 80e9)


@pytest.mark.parametrize("experiment", ["table2", "figure7"])
def test_presets_that_show_whole_answers_times_decode_them_one_by_one(experiment: str) -> None:
    assert run_of(f"experiment={experiment}", "model=llama2").config.answers.rows == 1
