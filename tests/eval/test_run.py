"""The run loop in process: what happens when an example cannot be measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import eval.measure
from eval.config import ModelConfig, RunConfig, TimingConfig
from eval.run import RunError, run
from eval.store import read_run
from lazyllm import Generation

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
