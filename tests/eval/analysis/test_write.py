from __future__ import annotations

import csv
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from eval.analysis.figures import FIGURES
from eval.analysis.tables import TABLES
from eval.analysis.write import main, write_paper
from eval.store.results import Results
from lazyllm.errors import UserError
from tests.eval.store.made import record, write_run

ROOT = Path(__file__).resolve().parents[3]
PRESET = {"name": "lazy", "schedule": "table1", "prune_generated": False, "revive": True}


def figure(name: str, data: pd.DataFrame) -> Any:
    """A figure whose picture is its data as text."""
    return SimpleNamespace(
        name=name,
        title=f"Picture {name}",
        caption=f"About {name}.",
        data=lambda results: data,
        plot=pd.DataFrame.to_csv,
    )


def save(picture: str, stem: Path, suffixes: Any) -> list[Path]:
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in suffixes]
    for path in paths:
        path.write_text(picture)
    return paths


@pytest.fixture
def runs(tmp_path: Path) -> Results:
    records = [record(number, dataset) for dataset in ("hotpotqa", "2wikimqa", "musique") for number in range(2)]
    write_run(tmp_path / "runs" / "one", records, PRESET, model="llama2", paper="llama2")
    write_run(tmp_path / "runs" / "two", [record(0, "hops"), record(1, "hops")])
    return Results.read([tmp_path / "runs"])


def test_everything_is_written_and_listed(runs: Results, tmp_path: Path) -> None:
    figures = {"some": figure("some", pd.DataFrame({"a": [1]})), "none": figure("none", pd.DataFrame())}
    paths = write_paper(runs, tmp_path / "out", TABLES, figures, save)
    expected = {"README.md", "provenance.json"}
    expected |= {f"tables/{name}.{suffix}" for name in TABLES for suffix in ("md", "csv", "tex")}
    expected |= {f"figures/some.{suffix}" for suffix in ("svg", "pdf", "png", "csv")}
    there = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert there == {str(path.relative_to(tmp_path / "out")) for path in paths} == expected
    index = paths[0].read_text()
    assert set(re.findall(r"\]\(([^)]+)\)", index)) == there - {"README.md"}
    assert "About some." in index
    assert "## Picture none\n\nNo run for this figure." in index
    assert "- Picture none\n" in index
    assert (tmp_path / "out" / "figures" / "some.csv").read_text() == "a\n1\n"
    for name, make in TABLES.items():
        assert make(runs).to_markdown("##") in index
        rows = list(csv.DictReader((tmp_path / "out" / "tables" / f"{name}.csv").open()))
        assert len(rows) == len(make(runs).frame)


def test_what_had_no_run(runs: Results, tmp_path: Path) -> None:
    index = write_paper(runs, tmp_path / "out", TABLES, {}, save)[0].read_text()
    missing = [line for line in index.splitlines() if line.startswith("- Table 1")]
    assert [line.split(": ", 2)[2] for line in missing] == [
        "llama2 on longbench: baseline (5 of 6 tasks), random_drop, static_pruning, prompt_compression, "
        "lazy (5 of 6 tasks)",
        "xgen on longbench: everything",
        "tiny on embedded: everything",  # its one run has not the preset
    ]


def test_a_picture_of_an_earlier_time_does_not_stay(runs: Results, tmp_path: Path) -> None:
    write_paper(runs, tmp_path, TABLES, {"some": figure("some", pd.DataFrame({"a": [1]}))}, save)
    write_paper(runs, tmp_path, TABLES, {"some": figure("some", pd.DataFrame())}, save)
    assert list((tmp_path / "figures").iterdir()) == []


def test_provenance_names_every_run(runs: Results, tmp_path: Path) -> None:
    write_paper(runs, tmp_path / "out", TABLES, {}, save)
    text = (tmp_path / "out" / "provenance.json").read_text()
    assert str(tmp_path) not in text
    one, two = json.loads(text)
    assert (one["folder"], one["model"], one["examples"], one["method"]) == ("one", "llama2", 6, PRESET)
    assert one["fingerprint"] == runs.runs[0].about["fingerprint"]
    records = (tmp_path / "runs" / "two" / "records.jsonl").read_bytes()
    assert two["records_sha256"] == {"records.jsonl": hashlib.sha256(records).hexdigest()}
    assert two["provenance"]["git_commit"] == "abc"


def test_twice_the_same_bytes(runs: Results, tmp_path: Path) -> None:
    written = [write_paper(runs, tmp_path / name, TABLES, {}, save) for name in ("a", "b")]
    for first, second in zip(*written, strict=True):
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_the_command_with_the_real_figures(runs: Results, tmp_path: Path, capsys: Any) -> None:
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert "from 2 runs" in capsys.readouterr().out
    for name, figure in FIGURES.items():
        there = (tmp_path / "out" / "figures" / f"{name}.png").exists()
        assert there == (not figure.data(runs).empty)
    with pytest.raises(UserError, match="no such folder"):
        main([str(tmp_path / "absent"), "--out", str(tmp_path / "out")])


def test_nothing_slow_is_imported_before_the_arguments_are_right() -> None:
    code = "import sys, eval.analysis.write; print({'pandas', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
