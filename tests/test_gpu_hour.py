"""The first hour on a GPU, played on the CPU with a tiny shape."""

import json
from pathlib import Path

import pytest

from lazyllm import bench
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
    rounding = json.loads((tmp_path / "rounding.json").read_text())["results"]
    assert set(rounding) == {"baseline", "lazy", "static_pruning", "fastkv", "gemfilter"}
    for found in rounding.values():
        exact = found["torch.float64"]
        assert (exact["same_tokens"], exact["largest_error_of_first_logits"] < 1e-9) == (True, True)
    together = json.loads((tmp_path / "together.json").read_text())["results"]
    assert [together[f"batch of {rows}, lazy"]["same_answers"] for rows in (8, 16)] == [8, 16]
    names = [case["name"] for case in json.loads((tmp_path / "llama2_hf.json").read_text())["cases"]]
    assert names == ["paper", "hf"]
    rows = [line for line in (tmp_path / "summary.md").read_text().splitlines() if line.startswith("| ")]
    assert [row.split()[1] for row in rows if "---:" not in row] == ["method", "paper", "hf"]
    assert len({row.count(" | ") for row in rows}) == 1
    capsys.readouterr()
    assert gpu_hour.main([str(tmp_path), *parts]) == 0
    assert "---" not in capsys.readouterr().out.partition("# The first hour")[0]


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
