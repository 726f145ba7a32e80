"""The run loop in process: what happens when an example cannot be measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import eval.measure
from eval.config import ModelConfig, RunConfig, TimingConfig
from eval.record import Record
from eval.run import RunError, run
from eval.runs import as_frame, find_runs
from eval.store import read_run
from lazyllm import Generation, ModelError

generate = eval.measure.generate


def config_of(out: Path) -> RunConfig:
    return RunConfig(
        model=ModelConfig(name="tiny", dtype="float32", device="cpu"),
        method={"name": "lazy", "schedule": {2: 0.5}},
        dataset={"lookup": True, "shots": True},
        timing=TimingConfig(warmup=0),
        limit=3,
        max_new_tokens=2,
        threads=1,
        out=str(out),
    )


def failing(monkeypatch: pytest.MonkeyPatch, errors: dict[int, Exception]) -> None:
    """Let the generations of those numbers, in order of their calls, fail."""
    calls = 0

    def generate_or_fail(*arguments, **settings) -> Generation:
        nonlocal calls
        calls += 1
        if calls - 1 in errors:
            raise errors[calls - 1]
        return generate(*arguments, **settings)

    monkeypatch.setattr(eval.measure, "generate", generate_or_fail)


def test_an_example_that_fails_is_written_down_and_the_others_go_on(tmp_path: Path, monkeypatch, caplog) -> None:
    # two generations an example: the method of the first fails, and the baseline (second run) of the fourth
    errors = {1: torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB"), 7: FloatingPointError("logits not finite")}
    failing(monkeypatch, errors)
    run(config_of(tmp_path / "run"), show=False)
    _, records = read_run(tmp_path / "run")
    failures = [json.loads(line) for line in (tmp_path / "run" / "failures.jsonl").read_text().splitlines()]
    assert len(records) == 4
    assert [(one["dataset"], one["reason"]) for one in failures] == [
        ("lookup", "OutOfMemoryError: CUDA out of memory. Tried 2 GiB"),
        ("shots", "FloatingPointError: logits not finite"),
    ]
    assert all("generate_or_fail" in one["traceback"] for one in failures)
    assert "2 of 6 examples failed and are not in the table, the first: lookup" in caplog.text
    assert "2 examples failed and are left out" in (tmp_path / "run" / "summary.md").read_text()

    monkeypatch.setattr(eval.measure, "generate", generate)
    caplog.clear()
    run(config_of(tmp_path / "run"), show=False)  # tries them again
    assert len(read_run(tmp_path / "run")[1]) == 6
    assert "failed" not in caplog.text


def test_a_run_in_which_all_fails_says_why(tmp_path: Path, monkeypatch) -> None:
    failing(monkeypatch, dict.fromkeys(range(12), RuntimeError("no kernel image")))
    with pytest.raises(RunError, match=r"all 6 examples failed, the first: lookup.*RuntimeError: no kernel image"):
        run(config_of(tmp_path / "run"), show=False)
    assert not (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "failures.jsonl").read_text().count("\n") == 6


def test_shards_measure_each_example_once_and_the_last_makes_the_table(tmp_path: Path) -> None:
    whole = run(config_of(tmp_path / "whole"), show=False)
    shards = [replace(config_of(tmp_path / "run"), shard=f"{number}/3") for number in (1, 2, 3)]
    results = [run(shard, show=False) for shard in shards]
    assert [result.summary is None for result in results] == [True, True, False]
    about, records = read_run(tmp_path / "run")
    assert about["identity"] == read_run(tmp_path / "whole")[0]["identity"]
    assert about["config"]["shard"] is None
    files = [(tmp_path / "run" / f"records-{number}-of-3.jsonl").read_text().splitlines() for number in (1, 2, 3)]
    assert [len(file) for file in files] == [2, 2, 2]
    lines = [Record.from_json(line) for file in files for line in file]
    assert lines == records

    def outcome(folder: str) -> dict:
        return {one.key: (one.prompt_sha256, one.method.token_ids) for one in read_run(tmp_path / folder)[1]}

    assert outcome("run") == outcome("whole")
    assert len(lines) == len(outcome("run")) == 6
    assert whole.summary is not None
    assert results[2].summary is not None
    assert [row.examples for row in results[2].summary.rows] == [row.examples for row in whole.summary.rows]
    assert len(as_frame(find_runs([tmp_path / "run"]))) == 6


def test_what_other_shards_have_measured_is_not_measured_again(tmp_path: Path, monkeypatch) -> None:
    for shard in ("1/2", "1/1"):
        run(replace(config_of(tmp_path / "run"), shard=shard), show=False)
    counts = {
        name: (tmp_path / "run" / f"records-{name}.jsonl").read_text().count("\n") for name in ("1-of-2", "1-of-1")
    }
    assert sum(counts.values()) == 6
    assert min(counts.values()) >= 2
    failing(monkeypatch, dict.fromkeys(range(99), RuntimeError("measured again")))
    assert run(config_of(tmp_path / "run"), show=False).summary is not None
    # more shards than examples: some have nothing to do
    assert run(replace(config_of(tmp_path / "new"), shard="7/7"), show=False).summary is None


def test_a_job_that_breaks_off_says_why(tmp_path: Path, monkeypatch) -> None:
    def no_model(*_: object, **__: object) -> None:
        raise ModelError("no such weights")

    monkeypatch.setattr("eval.run.load_weights", no_model)
    with pytest.raises(ModelError):
        run(config_of(tmp_path / "run"), show=False)
    begin, end = (json.loads(line) for line in (tmp_path / "run" / "jobs.jsonl").read_text().splitlines())
    assert (begin["event"], begin["examples"]) == ("begin", 6)
    assert (end["event"], end["error"]) == ("end", "ModelError: no such weights")
