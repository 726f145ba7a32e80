import csv
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from eval.analysis.style import new_figure
from eval.analysis.table import Figure, figures, legend, tables
from eval.report.write import main, write_groups, write_paper
from eval.store.results import Results, read_results, share
from lazyllm.errors import UserError
from tests.conftest import ROOT
from tests.eval.made import TABLE1, over, stored, write_run

TABLES = tables()
# of results/smollm2, not by `paper`
WRITTEN_APART = {
    "README.md", "records", "percentile.csv", "queue.log", "recomputed.csv", "equal_speed.md",
    "score_and_kl.md", "speed_and_kl.png",
}  # fmt: skip


def figure(name: str, **data: list[int]) -> dict[str, Figure]:
    """A figure of nothing, with these data."""
    about, frame = f"About {name}.", pd.DataFrame(data)
    return {
        name: Figure(
            f"Picture {name}",
            about,
            lambda results: frame,
            lambda _: new_figure(1, 1),
            command=f"run {name}",
        )
    }


SOME = figure("some", a=[1])


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def links_in(index: Path) -> set[str]:
    return set(re.findall(r"\]\(([^)]+)\)", index.read_text()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("written") / "runs"
    visits = over(("hotpotqa", "2wikimqa", "musique"))
    write_run(folder / "one", visits, "lazy", TABLE1["lazy"], model="llama2", paper="llama2")
    write_run(folder / "two", over(("hops",)))
    return read_results([folder])[0]


def test_paper_has_every_table_and_figure_and_says_what_had_no_run(
    runs: Results, tmp_path: Path
) -> None:
    both = SOME | figure("none")
    paths = write_paper(runs, tmp_path, TABLES, both)
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in write_paper(runs, tmp_path, TABLES, both)] == first
    made = {name: make(runs) for name, make in TABLES.items()}
    with_runs = {name for name, table in made.items() if len(table.frame)}
    assert {"field", "table1", "verdicts"} <= with_runs < made.keys()
    expected = {"README.md", "provenance.json", "index.html"}
    expected |= {f"tables/{name}.{suffix}" for name in with_runs for suffix in ("md", "csv", "tex")}
    expected |= {f"figures/some.{suffix}" for suffix in ("svg", "pdf", "png", "csv")}
    assert files_in(tmp_path) == {str(path.relative_to(tmp_path)) for path in paths} == expected
    assert links_in(paths[0]) == expected - {"README.md"}
    index = paths[0].read_text()
    assert "About some." in index
    assert "- Picture none: `run none`\n" in index
    assert "- What revival is worth: `python run.py experiment=revival" in index
    assert (tmp_path / "figures" / "some.csv").read_text() == "a\n1\n"
    for name in with_runs:
        assert made[name].to_markdown("##") in index
        assert len(list(csv.DictReader((tmp_path / "tables" / f"{name}.csv").open()))) == len(
            made[name].frame
        )


def test_a_page_of_somebody_else_is_kept(runs: Results, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# How these were made\n")
    paths = write_paper(runs, tmp_path, {}, SOME, ["png"])
    assert (tmp_path / "README.md").read_text() == "# How these were made\n"
    assert paths[0] == tmp_path / "index.md"
    assert "About some." in paths[0].read_text()


def test_paper_removes_what_an_earlier_call_wrote_and_has_no_run_now(
    runs: Results, tmp_path: Path
) -> None:
    write_paper(runs, tmp_path, {"field": TABLES["field"]}, SOME)
    write_paper(runs, tmp_path, {"field": TABLES["revival"]}, figure("some"))
    assert files_in(tmp_path) == {"README.md", "provenance.json", "index.html"}


def test_paper_writes_only_the_formats_asked_for_and_names_what_it_makes(
    runs: Results, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="eval.report.content"):
        paths = write_paper(runs, tmp_path, {"table1": TABLES["table1"]}, SOME, ["md", "png"])
    assert caplog.messages == ["1 of 2: table table1", "2 of 2: figure some"]
    assert {path.suffix for path in paths} == {".md", ".png", ".json"}
    assert links_in(paths[0]) == {str(path.relative_to(tmp_path)) for path in paths[1:]}


def test_provenance_names_every_run(runs: Results, tmp_path: Path) -> None:
    write_paper(runs, tmp_path, {}, {})
    text = (tmp_path / "provenance.json").read_text()
    folder = runs.runs[1].folder
    assert str(folder.parent) not in text
    first, second = json.loads(text)
    assert (first["folder"], first["model"], first["examples"]) == ("one", "llama2", 6)
    assert first["arms"]["lazy"]["speedup"] == "table1"
    assert first["fingerprint"] == runs.runs[0].about["fingerprint"]
    assert second["visits_sha256"] == {
        "visits.jsonl": hashlib.sha256((folder / "visits.jsonl").read_bytes()).hexdigest()
    }
    assert second["provenance"]["git_commit"] == "abc"


@pytest.mark.slow
def test_command_writes_the_real_figures_below_runs(
    runs: Results, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs.runs[0].folder.parents[1])  # a clone that ignores runs/ stays clean
    assert main(["runs", "--examples", "1"]) == 0
    page = Path("runs/paper/index.html").read_text(encoding="utf-8")
    assert "the first 1 of each dataset" in page
    assert "from 2 runs" in capsys.readouterr().out
    drawn = {file.stem for file in Path("runs/paper/figures").glob("*.png")}
    assert drawn == {name for name, picture in figures().items() if not picture.data(runs).empty}
    with pytest.raises(UserError, match="no such folder"):
        main(["absent", "--out", "out"])


def test_import_of_the_command_loads_nothing_slow() -> None:
    code = "import sys, eval.report.write; print({'pandas', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_groups_have_folders_of_their_own_and_share_the_verdicts(
    runs: Results, tmp_path: Path
) -> None:
    shared = ("field", "verdicts")
    made = {name: TABLES[name] for name in shared}
    write_paper(runs, tmp_path, made, SOME)  # what an earlier call wrote of all runs in one table
    short = stored(over(("lcc",)), "static_pruning", TABLE1["static_pruning"], engine="NEW")
    groups = share([*runs.runs, short])
    first, second = (group.name for group in groups)
    paths = write_groups(groups, tmp_path, made, SOME, ["md"])
    written = {"README.md", "provenance.json", "tables/field.md"}
    expected = {f"{name}/{file}" for name in (first, second) for file in written} | {
        "README.md",
        "tables/verdicts.md",
    }
    assert files_in(tmp_path) == {str(path.relative_to(tmp_path)) for path in paths} == expected
    index = paths[0].read_text()
    assert paths[0] == tmp_path / "README.md"
    assert links_in(paths[0]) == {f"{name}/README.md" for name in (first, second)} | {
        "tables/verdicts.md"
    }
    assert f"\nRuns that differ in engine (1, NEW) share no table: {first}; {second}.\n" in index
    table = TABLES["verdicts"](*groups)
    assert table.to_markdown("##") in index
    assert legend([table]) in index
    assert "Published claims" not in (tmp_path / first / "README.md").read_text()
    assert [
        run["folder"] for run in json.loads((tmp_path / second / "provenance.json").read_text())
    ] == [short.folder.name]
    (alone,) = share(runs.runs)
    assert (
        write_groups([alone], tmp_path / "alone", {}, SOME)[0] == tmp_path / "alone" / "README.md"
    )


@pytest.mark.slow
def test_committed_tables_are_those_of_the_committed_records(tmp_path: Path) -> None:
    """results/smollm2 goes stale if a table changes: results/smollm2/README.md has the command that
    makes it."""
    committed = ROOT / "results" / "smollm2"
    (tmp_path / "README.md").write_text("Somebody else's.\n")
    groups = read_results([committed / "records"])
    made = [
        path.relative_to(tmp_path) for path in write_groups(groups, tmp_path, TABLES, {}, ["md"])
    ]
    assert {*made} >= {Path("index.md"), Path("tables/verdicts.md")}
    for file in made:
        if file.name != "README.md":  # which has the figures too
            assert (tmp_path / file).read_text() == (committed / file).read_text(), file
    there = {file.relative_to(committed) for file in committed.rglob("*") if file.is_file()}
    there = {file for file in there if file.parts[0] not in WRITTEN_APART}
    pictures = {
        Path(group.name, "figures", f"{name}.png")
        for group in groups
        for name, picture in figures().items()
        if not picture.data(group).empty
    }
    assert there == {*made} | pictures
