import csv
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from eval.analysis.style import new_figure
from eval.analysis.table import Figure, figures, tables
from eval.report.write import main, write_paper
from eval.store.results import Results
from lazyllm.errors import UserError
from tests.conftest import ROOT
from tests.eval.store.made import write_run
from tests.eval.store.visits import visit

PRESET = {"name": "lazy", "schedule": "table1", "prune_generated": False, "revive": True}


def figure(name: str, data: pd.DataFrame) -> Figure:
    """A figure of nothing, with these data."""
    about, draw = f"About {name}.", lambda frame: new_figure(1, 1)
    return Figure(f"Picture {name}", about, lambda results: data, draw, command=f"run {name}")


TABLES = tables()
SOME, NONE = {"some": figure("some", pd.DataFrame({"a": [1]}))}, {"some": figure("some", pd.DataFrame())}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("written") / "runs"
    visits = [visit(number, dataset) for dataset in ("hotpotqa", "2wikimqa", "musique") for number in range(2)]
    write_run(folder / "one", visits, PRESET, model="llama2", paper="llama2", warmup=1)
    write_run(folder / "two", [visit(0, "hops"), visit(1, "hops")], warmup=1)
    return Results.read([folder])


def test_paper_has_every_table_and_figure_and_says_what_had_no_run(runs: Results, tmp_path: Path) -> None:
    both = SOME | {"none": figure("none", pd.DataFrame())}
    paths = write_paper(runs, tmp_path, TABLES, both)
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in write_paper(runs, tmp_path, TABLES, both)] == first
    made = {name: make(runs) for name, make in TABLES.items()}
    with_runs = {name for name, table in made.items() if len(table.frame)}
    assert {"field", "table1", "verdicts"} <= with_runs < made.keys()
    expected = {"README.md", "provenance.json", "index.html"}
    expected |= {f"tables/{name}.{suffix}" for name in with_runs for suffix in ("md", "csv", "tex")}
    expected |= {f"figures/some.{suffix}" for suffix in ("svg", "pdf", "png", "csv")}
    there = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert there == {str(path.relative_to(tmp_path)) for path in paths} == expected
    index = paths[0].read_text()
    assert set(re.findall(r"\]\(([^)]+)\)", index)) == there - {"README.md"}
    assert "About some." in index
    assert "- Picture none: `run none`\n" in index
    assert "- What revival is worth: `python run.py experiment=revival model=smollm2 " in index
    assert (tmp_path / "figures" / "some.csv").read_text() == "a\n1\n"
    for name in with_runs:
        assert made[name].to_markdown("##") in index
        rows = list(csv.DictReader((tmp_path / "tables" / f"{name}.csv").open()))
        assert len(rows) == len(made[name].frame)


def test_a_page_of_somebody_else_is_kept(runs: Results, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# How these were made\n")
    paths = write_paper(runs, tmp_path, {}, SOME, ["png"])
    assert (tmp_path / "README.md").read_text() == "# How these were made\n"
    assert paths[0] == tmp_path / "index.md"
    assert "About some." in paths[0].read_text()


def test_paper_removes_what_an_earlier_call_wrote_and_has_no_run_now(runs: Results, tmp_path: Path) -> None:
    write_paper(runs, tmp_path, {"field": TABLES["field"]}, SOME)
    write_paper(runs, tmp_path, {"field": TABLES["revival"]}, NONE)
    assert {file.name for file in tmp_path.rglob("*") if file.is_file()} == {
        "README.md",
        "provenance.json",
        "index.html",
    }


def test_paper_writes_only_the_formats_asked_for_and_names_what_it_makes(
    runs: Results, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="eval.report.content"):
        paths = write_paper(runs, tmp_path, {"table1": TABLES["table1"]}, SOME, ["md", "png"])
    assert caplog.messages == ["1 of 2: table table1", "2 of 2: figure some"]
    assert {path.suffix for path in paths} == {".md", ".png", ".json"}
    assert set(re.findall(r"\]\(([^)]+)\)", paths[0].read_text())) == {
        str(path.relative_to(tmp_path)) for path in paths[1:]
    }


def test_provenance_names_every_run(runs: Results, tmp_path: Path) -> None:
    write_paper(runs, tmp_path, {}, {})
    text = (tmp_path / "provenance.json").read_text()
    folder = runs.runs[1].folder
    assert str(folder.parent) not in text
    one, two = json.loads(text)
    assert (one["folder"], one["model"], one["examples"]) == ("one", "llama2", 6)
    assert one["arms"]["lazy"]["method"] == PRESET
    assert one["fingerprint"] == runs.runs[0].about["fingerprint"]
    assert two["visits_sha256"] == {"visits.jsonl": hashlib.sha256((folder / "visits.jsonl").read_bytes()).hexdigest()}
    assert two["provenance"]["git_commit"] == "abc"


@pytest.mark.slow
def test_command_writes_the_real_figures(runs: Results, tmp_path: Path, capsys: Any) -> None:
    folder = runs.runs[0].folder.parent
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 0
    assert "from 2 runs" in capsys.readouterr().out
    for name, one in figures().items():
        there = (tmp_path / "out" / "figures" / f"{name}.png").exists()
        assert there == (not one.data(runs).empty)
    with pytest.raises(UserError, match="no such folder"):
        main([str(tmp_path / "absent"), "--out", str(tmp_path / "out")])


def test_import_of_the_command_loads_nothing_slow() -> None:
    code = "import sys, eval.report.write; print({'pandas', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
def test_committed_tables_are_those_of_the_committed_records(tmp_path: Path) -> None:
    """results/smollm2 goes stale if a table changes: results/smollm2/README.md has the command that makes it."""
    committed = ROOT / "results" / "smollm2"
    write_paper(Results.read([committed / "records"]), tmp_path, TABLES, {}, ["md"])
    names = {file.name for file in (committed / "tables").iterdir()}
    assert names == {file.name for file in (tmp_path / "tables").iterdir()}
    for made in (tmp_path / "tables").iterdir():
        assert made.read_text() == (committed / "tables" / made.name).read_text()
