"""The first hour on a GPU, played on the CPU with a tiny shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import gpu_hour


@pytest.mark.slow
def test_parts_write_their_files_and_are_left_out_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHAPES", "tiny")
    assert gpu_hour.main([str(tmp_path), "checks", "llama2_hf"]) == 0
    checks = json.loads((tmp_path / "checks.json").read_text())["results"]
    assert set(checks) == {"baseline", "lazy", "static_pruning", "fastkv", "gemfilter"}
    for found in checks.values():
        exact = found["torch.float64"]
        assert (exact["same_tokens"], exact["same_counts"], exact["largest_error_of_first_logits"] < 1e-9) == (
            True,
        ) * 3
    names = [case["name"] for case in json.loads((tmp_path / "llama2_hf.json").read_text())["cases"]]
    assert names == ["paper", "hf"]
    rows = [line for line in (tmp_path / "summary.md").read_text().splitlines() if line.startswith("| ")]
    assert [row.split()[1] for row in rows if "---:" not in row] == ["method", "paper", "hf"]
    assert len({row.count(" | ") for row in rows}) == 1
    capsys.readouterr()
    assert gpu_hour.main([str(tmp_path), "checks", "llama2_hf"]) == 0
    assert "---" not in capsys.readouterr().out.partition("# The first hour")[0]


def test_every_part_is_an_argument_line_of_the_bench() -> None:
    from lazyllm.bench import _parser

    assert len(gpu_hour.PARTS) + 2 <= 8  # files: the parts, the checks and the summary
    for arguments in gpu_hour.PARTS.values():
        _parser().parse_args(arguments)
