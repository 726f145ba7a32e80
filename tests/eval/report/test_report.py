"""The content of the report's page, without a browser; `test_page.py` opens it in one."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from eval.analysis.style import new_figure
from eval.analysis.table import Cell, Figure, Table
from eval.report import overview
from eval.report import write as command
from eval.report.answers import embed_answers
from eval.report.content import content_of
from eval.report.page import grid, inline_svg, render
from eval.store.results import Results
from eval.store.runs import StoredRun
from eval.store.visit import Visit
from tests.eval.analysis import made
from tests.eval.store.made import LAZY, alone, write_run
from tests.eval.store.visits import measurement, turn, visit

pytestmark = pytest.mark.usefixtures("two_have_an_interval")

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


def test_cell_has_a_number_and_the_rest() -> None:
    cells = [Cell("58.95 ±2.45", 58.951), Cell("−0.5 %", -0.5), Cell("no run"), Cell("2 of 3")]
    assert [cell.parts for cell in cells] == [("58.95", " ±2.45"), ("−0.5", " %"), ("no run", ""), ("2 of 3", "")]


def shown(values: dict[str, list[str]], keys: int = 1, **how: Any) -> dict[str, Any]:
    cells = pd.DataFrame(values, dtype=object)
    return grid(Table("t", "", "", cells, cells, keys), **how)


def test_column_with_a_number_in_any_cell_is_numeric() -> None:
    found = shown({"x": [Cell("1", 1.0), Cell("no run")], "y": ["1", "58.95"]}, filtered=1)
    assert [column["numeric"] for column in found["columns"]] == [True, False]
    assert [cell.value for cell in found["rows"][1]] == [None, None]
    assert found["choices"] == ["1", "58.95"]


def test_what_a_reader_compares_is_shown_at_once_and_other_columns_on_demand() -> None:
    def more(names: str, keys: int, **how: Any) -> list[str]:
        values = {name: ["1", "2" if name == "key" else "1"] for name in names.split(",")}
        return [column["text"] for column in shown(values, keys, **how)["columns"] if column["more"]]

    assert more("key,a,b,c,d,e", 1) == ["e"]
    assert more("key,a,b,c,d,e", 1, filtered=5) == more("key,a,b,c,d,e", 1, whole=True) == []
    assert more("same,key,n,score,% of baseline,TTFT speedup", 2) == ["same", "n", "% of baseline"]


def test_shared_texts_are_embedded_once(tmp_path: Path) -> None:
    ends = [f"prompt {number} " + "x" * 500 for number in range(4)]
    for seed in range(3):
        visits = [example(n, text=f"seed {seed}", end=ends[n], score=n / 3, ttft_s=0.1) for n in range(4)]
        store(tmp_path / f"run-{seed}", {"name": "random_drop", "keep": 0.5, "seed": seed}, visits, seed=seed)
    embedded = embed_answers(Results.read([tmp_path]).runs)
    strings = embedded["strings"]
    assert [text for text in strings if text.startswith("prompt")] == ends
    assert strings.count("a base") == strings.count("because") == 1
    assert len(embedded["records"]) == 12
    one = embedded["records"][5]  # the second example of the second run
    assert (one["run"], strings[one["id"]], strings[one["end"]]) == (1, "row-1", ends[1])
    assert [strings[answer] for answer in one["gold"]] == ["because"]
    baseline, method = one["answers"]
    run = embedded["runs"][1]
    assert (run["arms"][baseline["arm"]], baseline["arm"], run["baseline"]) == ("baseline", 0, 0)
    assert (strings[baseline["text"]], baseline["ttft"], baseline["speedup"]) == ("a base", 0.4, None)
    assert strings[method["text"]] == "seed 1"
    assert method["score"] == pytest.approx(100 / 3, rel=1e-5)
    assert (method["ttft"], method["pct"], method["speedup"], method["differs"]) == (0.1, 75, 4, True)
    assert method["gain"] == pytest.approx(100 / 3 - 50, rel=1e-5)


def test_answers_without_a_score_or_a_ttft_have_no_difference() -> None:
    """Random tokens have no score, and a method that no kernel here runs faster has no TTFT."""
    visit = made.example("lookup", "a", ttft_s=None, score=None, baseline={"score": None})
    embedded = embed_answers([made.stored([visit])])
    _, method = embedded["records"][0]["answers"]
    assert (method["ttft"], method["speedup"], method["score"], method["gain"]) == (None, None, None, None)


def test_examples_are_limited_in_each_run_and_dataset(tmp_path: Path) -> None:
    visits = [example(n, dataset) for dataset in ("hotpotqa", "trec") for n in range(3)]
    store(tmp_path / "a", {"name": "lazy"}, visits)
    store(tmp_path / "b", {"name": "static_pruning"}, visits[:1])
    embedded = embed_answers(Results.read([tmp_path]).runs, 2)
    shown = [(record["run"], record["dataset"], embedded["strings"][record["id"]]) for record in embedded["records"]]
    assert shown == [
        (0, "hotpotqa", "row-0"), (0, "hotpotqa", "row-1"), (0, "trec", "row-0"), (0, "trec", "row-1"),
        (1, "hotpotqa", "row-0"),
    ]  # fmt: skip


def test_every_turn_of_an_example_is_embedded(tmp_path: Path) -> None:
    turns = visit(1, turns=3)
    turns.answers["lazy"] = [measurement(score=score) for score in (0.25, 0.5, 0.75)]
    write_run(tmp_path / "a", [visit(0), turns, visit(2)])
    for most, rows in ((None, 3), (2, 2)):  # turns are no examples
        embedded = embed_answers(Results.read([tmp_path]).runs, most)
        names = ["row-0", "row-1, turn 1", "row-1, turn 2", "row-1, turn 3", "row-2"]
        assert [embedded["strings"][shown["id"]] for shown in embedded["records"]] == names[: rows + 2]
        assert [shown["answers"][1]["score"] for shown in embedded["records"]][1:4] == [25, 50, 75]
    runs = Results.read([write_run(tmp_path / "b", [turns], provenance={"started": "now"})]).runs
    assert dict(overview.summary(runs))["Examples"] == "1, in 1 visit"
    assert overview.runs_table(runs).cells["examples"].tolist() == ["1"]


def test_an_arm_that_came_back_stands_beside_the_baseline_of_its_own_visit(tmp_path: Path) -> None:
    failed = replace(example(0), answers={"baseline": [measurement("first", ttft_s=9.0)]})
    again = example(0, baseline="second", ttft_s=0.1)  # whose baseline takes 0.4 s
    store(tmp_path / "a", {"name": "lazy"}, [failed, again])
    (entry,) = embed_answers(Results.read([tmp_path]).runs)["records"]
    baseline, method = entry["answers"]
    assert (baseline["ttft"], method["ttft"], method["speedup"]) == (9, 0.1, 4)


def test_warnings_name_their_runs(tmp_path: Path) -> None:
    visits = [example(number) for number in range(3)]
    store(tmp_path / "fine", {"name": "lazy"}, visits)
    store(tmp_path / "base", {"name": "baseline"}, visits)
    store(tmp_path / "another suite", {"name": "lazy"}, [example(0, "needle")])  # has means of its own
    assert overview.warnings(Results.read([tmp_path]).runs, None) == []
    store(tmp_path / "alone", {"name": "static_pruning"}, [example(0, baseline=None)], baseline=None, warmup=0)
    store(tmp_path / "dirty", {"name": "random_drop"}, [example(0)], {"git_commit": "c0ffee+changes"})
    expected = (
        r"without a baseline.*\(alone\)", r"without warm-up.*\(alone\)", r"uncommitted code.*\(dirty\)",
        r"2 of the 3.*\(alone, dirty\)", "only the first 2 examples are shown",
    )  # fmt: skip
    for text, pattern in zip(overview.warnings(Results.read([tmp_path]).runs, 2), expected, strict=True):
        assert re.search(pattern, text)


def test_provenance_has_common_values_once_and_others_by_run(tmp_path: Path) -> None:
    store(tmp_path / "a", {"name": "lazy"}, [example(0)])
    store(tmp_path / "b", {"name": "static_pruning"}, [example(0)], {"started": "2026-01-03T00:00:00Z"}, warmup=1)
    common, differing = overview.provenance(Results.read([tmp_path]).runs)
    assert dict(common)["git_commit"] == "c0ffee"
    assert dict(common)["machine.device"] == "one core"
    assert dict(common)["data.hotpotqa"] == "aa bb"
    assert dict(common)["machine.cuda"] == "null"
    assert differing is not None
    assert list(differing.cells) == ["folder", "warmup", "started"]
    assert differing.cells.to_numpy().tolist() == [
        ["a", "5", "2026-01-02T03:04:05Z"], ["b", "1", "2026-01-03T00:00:00Z"]
    ]  # fmt: skip
    (one,) = Results.read([tmp_path / "a"]).runs
    assert overview.provenance([one])[1] is None


def test_results_have_one_row_for_a_task_of_one_dataset(tmp_path: Path) -> None:
    visits = [example(0, score=1.0, ttft_s=0.1), example(1, score=0.5, ttft_s=0.3)]

    def rows(folder: Path) -> list[dict[str, Any]]:
        found = overview.results_table(Results.read([folder])).cells.to_dict("records")
        return [row for row in found if row["setting"] == "lazy, schedule={2: 0.5}"]

    store(tmp_path / "a", {"name": "lazy", "schedule": {"2": 0.5}}, visits)
    (row,) = rows(tmp_path / "a")  # no second row of the task, no third of the mean over one task
    assert row["task or dataset"] == "hotpotqa"
    assert (row["n"].value, row["score"].value) == (2, 75)
    assert row["score"].parts[1] == " ±25.00"  # a resample of two examples may hold either one twice
    assert row["TTFT speedup"].value == 2  # 0.4 + 0.4 over 0.1 + 0.3
    assert (row["TTFT, ms"], row["TTFT, ms"].value, row["% tokens computed"].value) == ("200.0", 0.2, 75)
    more = [example(0, "trec", score=1.0), example(0, "musique", score=0.0)]
    store(tmp_path / "b", {"name": "lazy", "schedule": {"2": 0.5}}, [*visits, *more])
    names = [(row["task or dataset"], row["score"].value) for row in rows(tmp_path / "b")]
    # 37.5 of 75 and 0; then (37.5 + 100) / 2
    assert names == [
        ("mean over tasks", 68.75), ("hotpotqa", 75), ("musique", 0), ("multi_doc_qa", 37.5), ("trec", 100)
    ]  # fmt: skip
    store(tmp_path / "a first run", {"name": "random_drop", "keep": 0.5}, visits[:1])  # whose baseline does not count
    settings = overview.results_table(Results.read([tmp_path])).cells["setting"]
    assert list(dict.fromkeys(settings)) == ["baseline", "random_drop, keep=0.5", "lazy, schedule={2: 0.5}"]


def measured(count: int, score: float, ttft_s: float, baseline: float | None = 0.5) -> list[Visit]:
    """Visits whose baseline has this score and a TTFT of 0.4 s."""
    visits = [example(number, score=score, ttft_s=ttft_s) for number in range(count)]
    if baseline is None:
        return list(map(alone, visits))
    theirs = {"baseline": [measurement("base", baseline, ttft_s=0.4)]}
    return [replace(visit, answers=visit.answers | theirs) for visit in visits]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ({"lazy": measured(20, 0.5, 0.2), "static_pruning": measured(20, 0.25, 0.1)},
         r"lazy .* 2\.00 times .* 50\.00 against 50\.00 .* 2 faster .* only one .* 99%"),
        ({"lazy": measured(20, 0.25, 0.1)},
         r"no setting .* keeps 99% .* lazy .* 4\.00 times .* 25\.00 against 50\.00"),
        # five answers without a baseline are in no comparison
        ({"lazy": [*measured(20, 0.25, 0.1), *measured(25, 1.0, 0.1, baseline=None)[20:]]}, r"25\.00 against 50\.00"),
        ({"lazy": measured(20, 0.0, 0.1, baseline=0.0)}, r"lazy .* 4\.00 times .* baseline scores 0"),
        ({"lazy": measured(1, 0.5, 0.1)}, r"lazy .* 4\.00 times .* within 10 points, 1 example cannot show"),
        ({"lazy": measured(20, 0.5, 0.5)}, "no setting is faster"),
        ({"lazy": measured(20, 0.5, 0.1, baseline=None)}, "no speedup and no kept score"),
        ({"baseline": measured(20, 0.5, 0.1, baseline=None)}, "only the baseline was measured"),
    ],
)  # fmt: skip
def test_finding_claims_no_more_than_was_measured(tmp_path: Path, runs: dict[str, list[Visit]], expected: str) -> None:
    for name, visits in runs.items():
        has_baseline = name == "baseline" or "baseline" in visits[0].answers
        store(tmp_path / name, {"name": name}, visits, **({} if has_baseline else {"baseline": None}))
    (said,) = overview.findings(Results.read([tmp_path]))
    assert re.match(rf"mini on longbench: .*{expected}", said)


def test_settings_of_models_are_in_one_table(tmp_path: Path) -> None:
    for number, changes in enumerate([{}, {}, {"turns": 4, "data": {"hotpotqa": "cc dd"}}]):
        write_run(tmp_path / str(number), [example(number)], LAZY, "mini", **{"data": {"hotpotqa": "aa bb"}} | changes)
    settings = overview.settings_table(Results.read([tmp_path]).runs)
    assert settings is not None
    assert settings.cells.to_numpy().tolist() == [
        ["mini (turns=4, rows of hotpotqa=cc dd)", "turns", "4"],
        ["mini (turns=4, rows of hotpotqa=cc dd)", "rows of hotpotqa", "cc dd"],
    ]  # fmt: skip
    assert overview.settings_table(Results.read([tmp_path / "0"]).runs) is None
    found, others = overview.findings(Results.read([tmp_path]))
    assert found.startswith("mini on longbench: ")
    assert others == "Other settings, in the tables: mini (turns=4, rows of hotpotqa=cc dd)."


def test_figures_in_one_page_share_no_id() -> None:
    drawn = []
    for name in ("one", "two"):
        figure = new_figure(4, 3)
        axes = figure.subplots()
        axes.plot([1, 2], [3, 4], marker="o", label=HOSTILE)
        axes.legend()
        drawn.append(inline_svg(figure, name))
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in drawn]
    assert len(ids[0]) > 10
    assert not ids[0] & ids[1]
    for svg, own in zip(drawn, ids, strict=True):
        assert set(re.findall(r'(?:href="|url\()#([^")]+)', svg)) <= own
        assert "<script" not in svg
        assert "<img" not in svg


def hand_table(results: Results) -> Table:
    """A table as `eval.analysis` makes them; its cells and words are hostile."""
    names = ["b", "a", HOSTILE, "d", "e"]
    scores = [Cell("10.5 ±1", 10.5), Cell("9", 9), Cell("no run"), Cell("100", 100), Cell("9", 9)]
    cells = pd.DataFrame({f"name {HOSTILE}": names, "score": scores}, dtype=object)
    return Table("hand", f"By hand {HOSTILE}", f"Caption {HOSTILE}", cells, cells)


def bare_table(results: Results) -> Table:
    """A table that the runs give nothing for."""
    return Table("bare", "Nothing", "", pd.DataFrame(), pd.DataFrame({"task": [], "score": []}))


def draw(frame: pd.DataFrame) -> Any:
    figure = new_figure(4, 3)
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
    assert page.count("</script>") == page.count("<script") == 2  # one with data and one with code
    assert "<img" not in page
    assert "<!--<script" not in page
    data = re.search(r'(?s)<script type="application/json" id="record-data">(.*?)</script>', page)
    assert data is not None
    assert HOSTILE in json.loads(data[1])["strings"]


def test_paper_writes_the_page_below_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_runs(tmp_path / "runs")
    monkeypatch.setattr("eval.analysis.table.tables", lambda: TABLES)
    monkeypatch.setattr("eval.analysis.table.figures", lambda: FIGURES)
    monkeypatch.chdir(tmp_path)  # a clone that ignores runs/ stays clean
    assert command.main(["runs", "--formats", "html"]) == 0
    assert Path("runs/paper/index.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    out = tmp_path / "new"
    assert command.main(["runs", "--out", str(out), "--formats", "html", "--examples", "1"]) == 0
    assert "only the first example is" in (out / "index.html").read_text(encoding="utf-8")
