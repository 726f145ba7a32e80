"""The content of the page, without a browser; `test_page.py` opens it in one."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from eval.analysis.style import new_figure
from eval.analysis.table import Cell, Figure, Table
from eval.report import write as command
from eval.report.content import content_of
from eval.report.page import answers_of, render, runs_table, warnings
from eval.store.results import Results
from eval.store.runs import StoredRun
from eval.store.visit import Visit
from tests.eval.analysis import made
from tests.eval.store.made import LAZY, write_run
from tests.eval.store.visits import measurement, turn, visit

HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1"><!--<script>{{ 7 * 7 }}&amp;'
MACHINE = {"device": "one core", "cpu": "one core", "cpu_count": 1, "threads": 1, "platform": "Linux", "cuda": None}
PROVENANCE = {"git_commit": "c0ffee", "started": "2026-01-02T03:04:05Z", "versions": {"torch": "9"}, "machine": MACHINE}


def store(folder: Path, method: dict, visits: list[Visit], changes: dict[str, str] | None = None, **identity) -> None:
    """Write a run folder by hand. changes: of its provenance."""
    identity = {"warmup": 5, "data": {"hotpotqa": "aa bb"}} | identity
    if "baseline" in identity:  # without one
        identity["arms"] = {"lazy": {"method": method}}
    elif method == {"name": "baseline"}:
        identity["arms"] = {"baseline": {"method": method}}
        visits = [replace(visit, answers={"baseline": visit.answers["lazy"]}) for visit in visits]
    write_run(folder, visits, method, "mini", provenance=PROVENANCE | (changes or {}), **identity)


def example(
    number: int,
    dataset: str = "hotpotqa",
    text: str = "an answer",
    baseline: str | None = "a base",
    end: str = "Question: why?",
    gold: Sequence[str] = ("because",),
    **changes: Any,
) -> Visit:
    """A visit; changes: of the method's measurement. The baseline has a score of 0.5 and a TTFT of 0.4 s."""
    answers = {"lazy": [measurement(text, **changes)]}
    if baseline is not None:
        answers["baseline"] = [measurement(baseline, ttft_s=0.4, pct_prompt_tokens_computed=100.0)]
    asked = [replace(turn(), tokens=1000, tokens_before_truncation=1200, end=end, answers=list(gold))]
    return Visit(dataset=dataset, id=f"row-{number}", turns=asked, order=[*answers], answers=answers)


def shown_in(folder: Path, most: int | None = None) -> list[tuple[str, str, str]]:
    """(folder of a run, dataset, name) of each entry."""
    return [
        (run.folder.name, dataset, entry["name"])
        for run in Results.read([folder]).runs
        for dataset, entries in answers_of(run, most).items()
        for entry in entries
    ]


def test_an_answer_has_its_numbers_beside_the_baselines(tmp_path: Path) -> None:
    store(tmp_path / "a", {"name": "lazy"}, [example(1, score=0.25, ttft_s=0.16, kl=0.0123, answer_kl=0.5)])
    (run,) = Results.read([tmp_path]).runs
    (entry,) = answers_of(run)["hotpotqa"]
    assert (entry["asked"].end, entry["asked"].answers) == ("Question: why?", ["because"])
    baseline, method = entry["answers"].values()
    assert baseline["numbers"] == "score 50.0, TTFT 400.0 ms, 100.0 % of the prompt computed, 2 tokens"
    assert method["numbers"] == (
        "score 25.0 (-25.0), TTFT 160.0 ms (2.50x), 75.0 % of the prompt computed, KL 0.0123, answer's KL 0.5, 2 tokens"
    )
    assert (method["text"], method["is_same"]) == ("an answer", False)


def test_answers_without_a_score_or_a_ttft_have_no_difference() -> None:
    """Random tokens have no score, and a method that no kernel here runs faster has no TTFT."""
    visit = made.example("lookup", "a", ttft_s=None, score=None, baseline={"score": None})
    (entry,) = answers_of(made.stored([visit]))["lookup"]
    assert [part for part in ("score", "TTFT") if part in entry["answers"][made.ARM]["numbers"]] == []


def test_examples_are_limited_in_each_run_and_dataset(tmp_path: Path) -> None:
    visits = [example(n, dataset) for dataset in ("hotpotqa", "trec") for n in range(3)]
    store(tmp_path / "a", {"name": "lazy"}, visits)
    store(tmp_path / "b", {"name": "static_pruning"}, visits[:1])
    assert shown_in(tmp_path, 2) == [
        ("a", "hotpotqa", "row-0"), ("a", "hotpotqa", "row-1"), ("a", "trec", "row-0"), ("a", "trec", "row-1"),
        ("b", "hotpotqa", "row-0"),
    ]  # fmt: skip


def test_every_turn_of_an_example_is_shown(tmp_path: Path) -> None:
    turns = visit(1, turns=3)
    turns.answers["lazy"] = [measurement(score=score) for score in (0.25, 0.5, 0.75)]
    write_run(tmp_path / "a", [visit(0), turns, visit(2)])
    names = ["row-0", "row-1, turn 1", "row-1, turn 2", "row-1, turn 3", "row-2"]
    for most, rows in ((None, 3), (2, 2)):  # turns are no examples
        assert [name for _, _, name in shown_in(tmp_path, most)] == names[: rows + 2]
    (run,) = Results.read([tmp_path]).runs
    numbers = [entry["answers"]["lazy"]["numbers"] for entry in answers_of(run)["hotpotqa"]]
    assert [text.split()[1] for text in numbers[1:4]] == ["25.0", "50.0", "75.0"]


def test_an_arm_that_came_back_stands_beside_the_baseline_of_its_own_visit(tmp_path: Path) -> None:
    failed = replace(example(0), answers={"baseline": [measurement("first", ttft_s=9.0)]})
    again = example(0, baseline="second", ttft_s=0.1)  # whose baseline takes 0.4 s
    store(tmp_path / "a", {"name": "lazy"}, [failed, again])
    (run,) = Results.read([tmp_path]).runs
    (entry,) = answers_of(run)["hotpotqa"]
    baseline, method = entry["answers"].values()
    assert baseline["text"] == "first"
    assert "TTFT 100.0 ms (4.00x)" in method["numbers"]


def test_warnings_name_their_runs(tmp_path: Path) -> None:
    visits = [example(number) for number in range(3)]
    store(tmp_path / "fine", {"name": "lazy"}, visits)
    store(tmp_path / "base", {"name": "baseline"}, visits)
    assert warnings(Results.read([tmp_path]).runs, None) == []
    store(tmp_path / "alone", {"name": "static_pruning"}, [example(0, baseline=None)], baseline=None, warmup=0)
    store(tmp_path / "dirty", {"name": "random_drop"}, [example(0)], {"git_commit": "c0ffee+changes"})
    expected = (
        r"without a baseline.*\(alone\)", r"without warm-up.*\(alone\)", r"uncommitted code.*\(dirty\)",
        "the first 2 of each dataset's examples",
    )  # fmt: skip
    for text, pattern in zip(warnings(Results.read([tmp_path]).runs, 2), expected, strict=True):
        assert re.search(pattern, text)


def test_runs_say_where_they_were_measured_and_in_what_they_differ(tmp_path: Path) -> None:
    for number, changes in enumerate([{}, {}, {"turns": 4, "data": {"hotpotqa": "cc dd"}}]):
        identity = {"data": {"hotpotqa": "aa bb"}} | changes
        write_run(tmp_path / str(number), [example(number)], LAZY, "mini", provenance=PROVENANCE, **identity)
    rows = runs_table(Results.read([tmp_path]).runs).cells.to_dict("records")
    assert [row["differs from most runs in"] for row in rows] == ["-", "-", "turns=4, rows of hotpotqa=cc dd"]
    assert [(row["device"], row["commit"], row["examples"], row["arms"]) for row in rows] == [
        ("one core", "c0ffee", "1", "baseline, lazy")
    ] * 3


def hand_table(results: Results) -> Table:
    """A table as `eval.analysis` makes them; its cells and words are hostile."""
    names = ["b", "a", HOSTILE, "d", "e"]
    scores = [Cell("10.5 ±1", 10.5), Cell("9", 9), Cell("no run"), Cell("100", 100), Cell("9", 9)]
    cells = pd.DataFrame({f"name {HOSTILE}": names, "score": scores}, dtype=object)
    return Table("hand", f"By hand {HOSTILE}", f"Caption {HOSTILE}", cells, cells, notes=f"Notes {HOSTILE}")


def bare_table(results: Results) -> Table:
    """A table that the runs give nothing for."""
    return Table("bare", "Nothing", "", pd.DataFrame(), pd.DataFrame({"task": [], "score": []}))


def draw(frame: pd.DataFrame) -> Any:
    figure = new_figure(14, 3)
    axes = figure.subplots()
    axes.plot(frame["x"], frame["x"], marker="o", label=HOSTILE)
    axes.legend(title=HOSTILE)
    return figure


FULL = Figure(f"Drawn {HOSTILE}", f"Caption {HOSTILE}", lambda results: pd.DataFrame({"x": [1.0, 2.0]}), draw)
TABLES = {"hand": hand_table, "bare": bare_table}
FIGURES = {"hand": FULL, "bare": Figure("Not drawn", "", lambda results: pd.DataFrame(), draw)}


def make_runs(folder: Path) -> list[StoredRun]:
    """A run of LazyLLM with 45 visits, one of them hostile; and one of 2 visits without a baseline."""
    visits = [
        example(0, text="so it is", baseline="so it was then", gold=["it is", "so"], score=0.25, ttft_s=0.16),
        example(1, text=HOSTILE, baseline=f"{HOSTILE} too", end=HOSTILE, gold=[HOSTILE], score=1.0, ttft_s=0.05),
        example(2, text="the same", baseline="the same", end="Question: an odd one?", score=0.5, ttft_s=2.0),
        *(example(number, "trec", text=f"class {number}", score=0.75) for number in range(3, 45)),
    ]
    store(folder / "lazy", {"name": "lazy", "schedule": {"2": 0.5}}, visits)
    unpaired = [example(number, baseline=None) for number in (0, 1)]
    store(folder / "static", {"name": "static_pruning", "keep": 0.5}, unpaired, baseline=None)
    return Results.read([folder]).runs


def test_page_refers_to_nothing_outside_itself_and_escapes_hostile_text(tmp_path: Path) -> None:
    results = Results(make_runs(tmp_path))
    page = render(results, content_of(results, TABLES, FIGURES))
    style_and_script = re.findall(r"(?s)<style>.*?</style>|<script>.*</script>", page)
    assert not any(re.search(r"https?:|url\(|@import|fetch\(|XMLHttp", part) for part in style_and_script)
    references = re.findall(r"\b(?:src|href|action|data|poster|srcset)=[\"']?([^\"'\s>]*)", page)
    escaped = {"x"}  # of the hostile text, which is text
    assert {reference for reference in references if not reference.startswith(("#", "data:"))} <= escaped
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
    assert Path("runs/paper/index.html").read_text(encoding="utf-8").lstrip().startswith("<!doctype html>")
    out = tmp_path / "new"
    assert command.main(["runs", "--out", str(out), "--formats", "html", "--examples", "1"]) == 0
    assert "the first 1 of each dataset" in (out / "index.html").read_text(encoding="utf-8")
