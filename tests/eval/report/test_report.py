"""The content of the page, without a browser; `test_page.py` opens it in one."""

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from eval.analysis.style import new_figure
from eval.analysis.table import Cell, Figure, Table
from eval.report import write as command
from eval.report.content import content_of
from eval.report.page import answers_of, render, runs_table, warnings
from eval.store.results import Results, read_results
from eval.store.runs import StoredRun
from tests.eval.made import stored, write_run
from tests.eval.store.visits import FAILED, answer, visit

HOSTILE = (
    '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">'
    "<!--<script>{{ 7 * 7 }}&amp;"
)


def entries_of(run: StoredRun, most: int | None = None) -> list[dict[str, Any]]:
    return [entry for entries in answers_of(run, most).values() for entry in entries]


def test_an_answer_has_its_numbers_beside_the_baselines() -> None:
    baseline = {"score": 0.5, "computed": [[100, 100]]}
    one = visit(1, "hotpotqa", baseline, score=0.25, ttft_s=0.16, kl=0.0123, answer_kl=0.5)
    (entry,) = entries_of(stored([one]))
    assert entry["visit"] == one
    theirs, own = entry["answers"].values()
    assert (
        theirs["numbers"] == "score 50.0, TTFT 400.0 ms, 100.0 % of the prompt computed, 2 tokens"
    )
    assert own["numbers"] == (
        "score 25.0 (-25.0), TTFT 160.0 ms (2.50x), 75.0 % of the prompt computed, KL 0.0123, "
        "answer's KL 0.5, 2 tokens"
    )
    assert (own["text"], own["is_same"]) == ("an answer", False)


def test_answers_without_a_score_have_no_difference() -> None:
    (entry,) = entries_of(stored([visit(1, "random", {"score": None}, score=None)]))
    assert "score" not in entry["answers"]["lazy"]["numbers"]


def test_examples_are_limited_in_each_dataset() -> None:
    run = stored([visit(row, dataset) for dataset in ("hotpotqa", "trec") for row in range(3)])
    found = [(entry["visit"].dataset, entry["visit"].id) for entry in entries_of(run, 2)]
    assert found == [(dataset, f"row-{row}") for dataset in ("hotpotqa", "trec") for row in (0, 1)]


def test_an_arm_that_came_back_stands_beside_the_baseline_of_its_own_visit() -> None:
    failed = visit(0, arms={"baseline": answer(text="first", ttft_s=9.0), "lazy": FAILED})
    (entry,) = entries_of(stored([failed, visit(0, ttft_s=0.1)]))  # whose baseline takes 0.4 s
    baseline, own = entry["answers"].values()
    assert baseline["text"] == "first"
    assert "TTFT 100.0 ms (4.00x)" in own["numbers"]


def test_warnings_name_their_runs() -> None:
    fine = [
        stored([visit(row) for row in range(3)], method, folder=Path(method))
        for method in ("lazy", "baseline")
    ]
    assert warnings(fine, None) == []
    alone = stored([visit(baseline=None)], folder=Path("alone"), baseline=None, warmup=0)
    dirty = stored([visit()], folder=Path("dirty"), provenance={"git_commit": "c0ffee+changes"})
    expected = (
        r"without a baseline.*\(alone\)", r"without warm-up.*\(alone\)",
        r"uncommitted code.*\(dirty\)",
        "the first 2 of each dataset's examples",
    )  # fmt: skip
    for text, pattern in zip(warnings([*fine, alone, dirty], 2), expected, strict=True):
        assert re.search(pattern, text)


def test_runs_say_where_they_were_measured() -> None:
    table = runs_table(
        [stored([visit(0), visit(1)], folder=Path("a/run"), provenance={"started": "2026-01-02"})]
    )
    columns = ["model", "arms", "examples", "datasets", "device", "started", "commit", "folder"]
    assert table.cells[columns].to_numpy().tolist() == [
        ["tiny", "baseline, lazy", "2", "1", "a device", "2026-01-02", "abc", "run"]
    ]


def hand_table(results: Results) -> Table:
    """A table as `eval.analysis` makes them; its cells and words are hostile."""
    names = ["b", "a", HOSTILE, "d", "e"]
    scores = [Cell("10.5 ±1", 10.5), Cell("9", 9), Cell("no run"), Cell("100", 100), Cell("9", 9)]
    cells = pd.DataFrame({f"name {HOSTILE}": names, "score": scores}, dtype=object)
    return Table(
        "hand", f"By hand {HOSTILE}", f"Caption {HOSTILE}", cells, cells, notes=f"Notes {HOSTILE}"
    )


def bare_table(results: Results) -> Table:
    """A table that the runs give nothing for."""
    return Table("bare", "Nothing", "", pd.DataFrame(), pd.DataFrame({"task": [], "score": []}))


def draw(frame: pd.DataFrame) -> Any:
    figure = new_figure(14, 3)
    axes = figure.subplots()
    axes.plot(frame["x"], frame["x"], marker="o", label=HOSTILE)
    axes.legend(title=HOSTILE)
    return figure


FULL = Figure(
    f"Drawn {HOSTILE}", f"Caption {HOSTILE}", lambda results: pd.DataFrame({"x": [1.0, 2.0]}), draw
)
TABLES = {"hand": hand_table, "bare": bare_table}
FIGURES = {"hand": FULL, "bare": Figure("Not drawn", "", lambda results: pd.DataFrame(), draw)}


def make_runs(folder: Path) -> Results:
    """Write a run of LazyLLM with 45 visits, one of them hostile; and one of 2 visits without a
    baseline."""
    about: dict[str, Any] = {"prompt_tokens": 1000, "uncut_tokens": 1200}
    visits = [
        visit(
            0,
            "hotpotqa",
            {"text": "so it was then"},
            text="so it is",
            gold=["it is", "so"],
            ttft_s=0.16,
            **about,
        ),
        visit(
            1,
            "hotpotqa",
            {"text": f"{HOSTILE} too"},
            text=HOSTILE,
            prompt_end=HOSTILE,
            gold=[HOSTILE],
            **about,
        ),
        visit(2, "hotpotqa", {"text": "the same"}, text="the same", **about),
        *(visit(row, "trec", text=f"class {row}") for row in range(3, 45)),
    ]
    write_run(folder / "lazy", visits)
    write_run(
        folder / "static",
        [visit(row, baseline=None) for row in (0, 1)],
        "static_pruning",
        baseline=None,
    )
    return read_results([folder])[0]


def test_page_refers_to_nothing_outside_itself_and_escapes_hostile_text(tmp_path: Path) -> None:
    results = make_runs(tmp_path)
    page = render(results, content_of(results, TABLES, FIGURES))
    style_and_script = re.findall(r"(?s)<style>.*?</style>|<script>.*</script>", page)
    assert not any(
        re.search(r"https?:|url\(|@import|fetch\(|XMLHttp", part) for part in style_and_script
    )
    references = re.findall(r"\b(?:src|href|action|data|poster|srcset)=[\"']?([^\"'\s>]*)", page)
    escaped = {"x"}  # of the hostile text, which is text
    assert {
        reference for reference in references if not reference.startswith(("#", "data:"))
    } <= escaped
    assert "default-src 'none'" in page
    assert page.count("</script>") == page.count("<script") == 1
    assert page.count("<img") == 1  # the figure
    assert "<!--<script" not in page
    assert "49" not in re.sub(r"base64,\S+", "", page)  # 7 * 7 is not computed


def test_paper_writes_the_page_below_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_runs(tmp_path / "runs")
    monkeypatch.setattr("eval.analysis.table.tables", lambda: TABLES)
    monkeypatch.setattr("eval.analysis.table.figures", lambda: FIGURES)
    monkeypatch.chdir(tmp_path)  # a clone that ignores runs/ stays clean
    assert command.main(["runs", "--formats", "html"]) == 0
    assert (
        Path("runs/paper/index.html")
        .read_text(encoding="utf-8")
        .lstrip()
        .startswith("<!doctype html>")
    )
    assert command.main(["runs", "--out", "new", "--formats", "html", "--examples", "1"]) == 0
    assert "the first 1 of each dataset" in Path("new/index.html").read_text(encoding="utf-8")
