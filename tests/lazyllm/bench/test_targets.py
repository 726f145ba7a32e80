"""The table of targets on measurements made up by hand, and the command that measures all of them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from lazyllm.bench import __main__ as bench
from lazyllm.bench import measure_all
from lazyllm.bench.cases import BenchCase, Pair, Run, Untimed, read_reports
from lazyllm.bench.targets import TARGETS, table
from scripts import bench_report


def untimed(peak: int, kv: int = 100, aux: int = 0, waits: tuple[int, int] = (0, 0), share: float = 0.0) -> Untimed:
    return Untimed(1.0, share, *waits, kv, aux, peak)


def run(ttft: float, steps: list[float], revived: list[int]) -> Run:
    return Run(ttft, steps, ttft + sum(steps), revived, 50.0)


# prefill 12 -> 8 s of an ideal 1.5; a step of 2 s that revives (0.5 s beyond the idle one, 8 FLOPs of 80 in 8 s), one
# of 1.5 s that does not, against 1.5 s; 11.5 of 15 s in all
LAZY = BenchCase(
    "paper", 2000, 3, 3, 1.5, 80, 120, [Pair(run(12, [1.5, 1.5], [0, 0]), run(8, [2.0, 1.5], [8, 0]))],
    untimed(300, kv=60, aux=14, waits=(0, 3), share=0.002), untimed(400),
)  # fmt: skip
KEEP = BenchCase(
    "keep1", 2000, 3, 0, 1.0, 120, 120, [Pair(run(12, [1.5, 1.5], [0, 0]), run(12.12, [1.5, 1.5], [0, 0]))],
    untimed(400), untimed(400),
)  # fmt: skip
HF = BenchCase(
    "hf", 2000, 3, 0, 1.0, 120, 120, [Pair(run(12, [1.5, 1.5], [0, 0]), run(12.5, [2.0], [0]))], None, untimed(400)
)


def report(*cases: BenchCase) -> dict:
    return {
        "settings": {"shape": "llama-1b", "against": None}, "device": "a CPU", "cpu": "a CPU", "threads": 1,
        "commit": "abc", "versions": {"torch": "2", "cuda": None}, "cases": [asdict(case) for case in cases],
    }  # fmt: skip


def rows(*cases: BenchCase) -> dict[str, list[str]]:
    lines = table([report(*cases)]).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(cells) == len(TARGETS)
    return {row[0]: row[1:] for row in cells}


def test_targets_that_are_met() -> None:
    found = rows(LAZY, KEEP, HF)
    worst = {what: cells[1].split()[0] for what, cells in found.items()}
    assert worst == {
        "TTFT speedup / ideal speedup, 2,000 tokens and more": "1",
        "baseline's prefill / `model(...)`": "0.96",
        "baseline's step / `model.generate`'s": "0.75",
        "keep ratio 1 / baseline: TTFT, step, whole": "1.01",
        "step in which nothing is revived / baseline's": "1",
        "cost of revival / its FLOPs' time": "0.625",
        "whole generation / baseline's": "1.01",
        "selection, share of TTFT": "0.002",
        "waits in prefill": "0",
        "waits in a step beyond one per boundary": "0",
        "KV + Aux / baseline's KV, Figure 4's schedule": "0.74",
        "growth of the peak beyond weights / the prompt's": "-",
    }
    assert {cells[3] for what, cells in found.items() if "growth" not in what} == {"met"}
    assert found["growth of the peak beyond weights / the prompt's"][2] == "not measured"


def test_targets_that_are_missed() -> None:
    slow = Pair(run(12, [1.5, 1.5], [0, 0]), run(10, [4.5, 3.0], [8, 0]))
    worse = replace(LAZY, pairs=[slow], untimed=untimed(300, kv=70, aux=14, waits=(1, 5), share=0.02))
    quadratic = replace(LAZY, tokens=4000, untimed=untimed(1200))
    hf = replace(HF, pairs=[Pair(run(12, [1.5, 1.5], [0, 0]), run(11, [1.0], [0]))])
    keep = replace(KEEP, pairs=[Pair(run(12, [1.5, 1.5], [0, 0]), run(12, [1.8, 1.8], [0, 0]))])
    found = rows(worse, quadratic, hf, keep)
    assert {what for what, cells in found.items() if not cells[3].startswith("missed")} == set()
    assert found["keep ratio 1 / baseline: TTFT, step, whole"][3] == "missed by 2 of 3"
    assert found["growth of the peak beyond weights / the prompt's"][1].startswith("2 (")
    assert found["waits in a step beyond one per boundary"][1].startswith("2 (")


def test_a_prefill_alone_is_no_generation() -> None:
    alone = replace(LAZY, pairs=[Pair(run(12, [], []), run(8, [], []))])
    assert rows(alone)["whole generation / baseline's"][2] == "not measured"
    assert rows(replace(alone, new_tokens=1))["whole generation / baseline's"][1].startswith("0.667")


def test_a_page_from_files(tmp_path, capsys) -> None:
    short = replace(LAZY, new_tokens=1, pairs=[Pair(run(12, [], []), run(8, [], []))])
    (tmp_path / "a.json").write_text(json.dumps(report(LAZY, KEEP, HF)))
    (tmp_path / "b.json").write_text(json.dumps(report(short, replace(short, tokens=4000))))
    (tmp_path / "other.json").write_text("[1]")
    assert len(read_reports(tmp_path)) == 2
    bench_report.main([str(tmp_path)])
    assert "5 cases of 2 files" in capsys.readouterr().out
    text = (tmp_path / "README.md").read_text()
    assert "TTFT speedup / ideal" in text
    assert "commit abc" in text
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="no file of `lazyllm-bench bench --json`"):
        bench_report.main([str(tmp_path / "empty")])


@pytest.mark.parametrize("parts", [measure_all.ON_CPU, measure_all.ON_AN_ACCELERATOR], ids=["cpu", "accelerator"])
def test_one_command_measures_all(parts, tmp_path, monkeypatch) -> None:
    """Every part is a valid call of the benchmark: shapes, schedules and settings are checked, nothing is timed."""
    measured = []

    def measure(options, model, methods_for, table, device) -> None:
        measured.append((options.shape, options.tokens, list(methods_for(2000))))
        options.json.write_text("{}")

    monkeypatch.setattr(bench, "build", lambda config, spec: None)
    monkeypatch.setattr(bench, "_measure", measure)
    monkeypatch.setattr(measure_all, "ON_CPU", parts)
    first, *_ = parts
    (tmp_path / f"{first}.json").write_text("{}")  # measured already
    measure_all.main([str(tmp_path), "--device", "cpu"])
    assert len(measured) == len(parts) - 1
    assert {file.name for file in tmp_path.iterdir()} == {f"{part}.json" for part in parts}
    with pytest.raises(SystemExit, match="--only everything: give parts of steps"):
        measure_all.main([str(tmp_path), "--device", "cpu", "--only", "everything"])
