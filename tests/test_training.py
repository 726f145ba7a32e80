"""`scripts/dev/training.py`: a training that stops and resumes equals one that does not stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.dev import train_coder, train_tiny
from tests.test_train_coder import TEXTS


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (train_tiny, ["--save-every", "1", "--tokens-per-step", "256"]),
        (train_coder, ["--tokens-per-step", "512", "--tokens", "2560"]),
    ],
)
def test_resuming_is_bit_identical(
    script: Any, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_coder, "library_files", lambda: TEXTS)
    monkeypatch.setattr(train_coder, "test_files", lambda modules: {})
    monkeypatch.setattr(train_coder, "LENGTHS", (512,) * 4)

    def run(work: Path, steps: int) -> Any:
        given = ["--work", str(work), "--steps", str(steps), "--log-every", "1", "--warmup", "2", *options]
        return script.train(script.parse(given))

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    at_once = run(whole, 2)
    run(parts, 1)
    resumed = run(parts, 2)
    for a, b in zip(at_once.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert at_once.rng.getstate() == resumed.rng.getstate()
    assert at_once.tokens == resumed.tokens
    assert [len((work / "log.csv").read_text().splitlines()) for work in (whole, parts)] == [3, 3]
    if script is train_tiny:
        assert (parts / "model" / "model.safetensors").exists()
        return
    assert at_once.means == resumed.means
    assert not (parts / "before_fall.pt").exists()
    assert run(parts, 0).done()
    assert (parts / "before_fall.pt").exists()
    train_coder.save(parts, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").stat().st_size < 20e6
