"""The first hour on a GPU, played on the CPU with a tiny shape."""

import json
from pathlib import Path

import pytest
import torch

from lazyllm import bench
from lazyllm.machine import ACCELERATORS
from scripts import gpu_hour


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHAPES", "tiny")


@pytest.mark.slow
def test_parts_write_their_files_and_are_left_out_the_next_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [*gpu_hour.CHECKS, "llama2_hf"]
    assert gpu_hour.main([str(tmp_path), *parts]) == 0
    checks = json.loads((tmp_path / "checks.json").read_text())["results"]
    assert set(checks) == {"baseline", "lazy", "static_pruning", "fastkv", "gemfilter"}
    for found in checks.values():
        exact = found["torch.float64"]
        assert (exact["same_tokens"], exact["same_counts"], exact["largest_error_of_first_logits"] < 1e-9) == (
            True,
        ) * 3
    together = json.loads((tmp_path / "together.json").read_text())["results"]
    assert [together[f"batch of {rows}, lazy"]["same_answers"] for rows in (8, 16)] == [8, 16]
    assert together["sampling"]["same_again"]
    commands = json.loads((tmp_path / "commands.json").read_text())["results"]
    assert commands["run"]["code"] == 0
    assert commands["serve"]["answer"]["choices"]
    names = [case["name"] for case in json.loads((tmp_path / "llama2_hf.json").read_text())["cases"]]
    assert names == ["paper", "hf"]
    rows = [line for line in (tmp_path / "summary.md").read_text().splitlines() if line.startswith("| ")]
    assert [row.split()[1] for row in rows if "---:" not in row] == ["method", "paper", "hf"]
    assert len({row.count(" | ") for row in rows}) == 1
    capsys.readouterr()
    assert gpu_hour.main([str(tmp_path), *parts]) == 0
    assert "---" not in capsys.readouterr().out.partition("# The first hour")[0]


@pytest.mark.parametrize("killed_at", range(3))
def test_a_killed_part_goes_on_after_its_last_case(
    killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def cases(device: torch.device) -> gpu_hour.Cases:
        def measure(name: str) -> int:
            ran.append(name)
            if len(ran) == killed_at + 1:
                raise KeyboardInterrupt
            return len(ran)

        return ((name, lambda name=name: measure(name)) for name in "abc")

    monkeypatch.setitem(gpu_hour.CHECKS, "made", cases)
    file = tmp_path / "made.partial"
    with pytest.raises(KeyboardInterrupt):
        gpu_hour.run_part("made", str(file))
    gpu_hour.run_part("made", str(file))
    assert "".join(ran) == "abc"[: killed_at + 1] + "abc"[killed_at:]  # only the case that was killed ran twice
    assert [*json.loads(file.read_text())["results"]] == ["a", "b", "c"]


def test_a_case_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setitem(gpu_hour.CHECKS, "made", lambda device: iter([("a", fails), ("b", lambda: 1)]))
    gpu_hour.run_part("made", str(tmp_path / "made.partial"))
    assert json.loads((tmp_path / "made.partial").read_text())["results"] == {"a": "RuntimeError: no kernel", "b": 1}


@pytest.mark.parametrize("killed_at", [0, 1, 3])
def test_the_bench_goes_on_after_its_last_case(killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cells, shown = tmp_path / "bench.json", bench.cells_of, list[str]()
    schedules = [f"{{{layer}: 0.5}}" for layer in (1, 2, 3)]
    arguments = ["--shape", gpu_hour._TINY, "--tokens", "20", "30", "--new-tokens", "2", "--repeats", "1"]
    arguments += ["--warmup", "0", "--device", "cpu", "--json", str(file)]
    arguments += [word for schedule in schedules for word in ("--method", schedule)]
    written = bench.write_whole

    def kill(path: Path, content: str) -> None:
        if len(json.loads(content)["cases"]) == killed_at + 1:
            raise KeyboardInterrupt
        written(path, content)

    monkeypatch.setattr(bench, "write_whole", kill)
    with pytest.raises(KeyboardInterrupt):
        bench.main(arguments)
    held = json.loads(file.read_text())["cases"] if killed_at else []
    assert len(held) == killed_at
    monkeypatch.setattr(bench, "write_whole", written)
    monkeypatch.setattr(bench, "cells_of", lambda case: [shown.append(case.name) or "", *cells(case)[1:]])
    bench.main(arguments)
    cases = json.loads(file.read_text())["cases"]
    assert cases[:killed_at] == held  # as they were measured
    assert [(case["tokens"], case["name"]) for case in cases] == [(n, name) for n in (20, 30) for name in schedules]
    assert len(shown) == 6
    bench.main([*arguments, "--seed", "1"])  # another run begins anew
    again = json.loads(file.read_text())
    assert (again["settings"]["seed"], len(again["cases"])) == (1, 6)
    assert again["cases"][0] != cases[0]


def test_every_part_ends_in_time_on_an_a100() -> None:
    for part in gpu_hour.PARTS:
        assert gpu_hour.seconds_of(part, ACCELERATORS["a100"]) < 480  # of 540, at half of the card's rates


def test_plan_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """llama3.1-8b on 128,000 tokens: the baseline alone, LazyLLM alone, two pairs; 2.03 PFLOP of linear maps each."""
    linear = 128_000 * 32 * 2 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336)
    attention = 32 * 4 * 4096 * 128_000 * 128_001 / 2
    a_step = max(2 * 2 * 8.03e9 / 2.04e12, 32 * 0.6e-3)  # reading the weights, or starting the kernels
    expected = 60 + 6 * (2 * (linear + attention) / 312e12 + a_step)
    assert gpu_hour.seconds_of("128k", ACCELERATORS["a100"]) == pytest.approx(expected, rel=0.01)
    assert gpu_hour.main(["--plan"]) == 0
    table = capsys.readouterr().out
    assert len([line for line in table.splitlines() if line.startswith("| ")]) == 1 + len(gpu_hour.PARTS)
    assert "Minutes at most" in table
