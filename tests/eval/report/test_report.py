"""The content of the report's page, without a browser; `test_page.py` opens it in one."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import eval.report
import lazyllm
from eval import cli
from eval.analysis.figures import Figure
from eval.analysis.figures.style import new_figure
from eval.analysis.table import Table
from eval.benchmarks.datasets import DATASETS, load_rows
from eval.benchmarks.prompts import build_prompt
from eval.report import __main__ as command
from eval.report import overview
from eval.report.grid import grid
from eval.report.page import inline_svg, render
from eval.report.record_browser import embed_records, embed_trace, last_layers, revived
from eval.store.record import Record, Trace
from eval.store.results import Results, find_runs
from eval.store.runs import StoredRun
from lazyllm.methods import Baseline, Lazy, Method, RandomDrop, StaticPruning
from tests.conftest import ROOT
from tests.eval.store.made import measurement, record, with_turns, write_run

HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1"><!--<script>{{ 7 * 7 }}&amp;'
MACHINE = {"device": "one core", "cpu": "one core", "cpu_count": 1, "threads": 1, "platform": "Linux", "cuda": None}
PROVENANCE = {"git_commit": "c0ffee", "started": "2026-01-02T03:04:05Z", "versions": {"torch": "9"}, "machine": MACHINE}


def store(
    folder: Path,
    method: dict,
    records: Sequence[Record],
    paired: bool = True,
    seed: int = 0,
    warmup: int = 5,
    **changes,
) -> None:
    """Write a run folder by hand. changes: of its provenance."""
    identity = {"seed": seed, "paired": paired, "warmup": warmup, "data": {"hotpotqa": "aa bb"}}
    write_run(folder, list(records), method, "mini", provenance=PROVENANCE | changes, **identity)


def example(
    number: int,
    dataset: str = "hotpotqa",
    text: str = "an answer",
    baseline: str | None = "a base",
    end: str = "Question: why?",
    gold: Sequence[str] = ("because",),
    **changes: Any,
) -> Record:
    """A record; changes: of the method's measurement. The baseline has a score of 0.5 and a TTFT of 0.4 s."""
    theirs = None if baseline is None else measurement(baseline, ttft_s=0.4, pct_prompt_tokens_computed=100.0)
    method = measurement(text, **changes)
    return Record(dataset, f"row-{number}", "abc", 1000, 1200, method, theirs, end, list(gold))


# Six prompt tokens, four layers, pruning after layers 1 and 3; generated tokens (from position 6) are pruned too.
TRACE = Trace(
    dataset="hotpotqa",
    id="row-0",
    tokens=["A", " quiet", " road", ".", "\n", HOSTILE],
    generated=[" so", " it", " is"],
    importance=[[0.125, 0.25, 0.0625, 0.03125, 0.5, 0.01], *([[0.5, 0.1, 0.1, 0.1, 0.1, 0.1]] * 3)],
    selected=[
        {1: [0, 2, 3, 5], 3: [2, 5]},
        {1: [0, 1, 5, 6], 3: [1, 5, 6]},
        {1: [1, 2, 4, 6, 7], 3: [2, 4, 7]},
    ],
    group_starts=[1, 2, 4],
    computed=[[6, 4, 2], [6, 5, 3], [6, 6, 4]],
)
LAST_LAYERS = [[3, 1, 4, 3, 1, 4], [3, 4, 1, 1, 1, 4, 4], [1, 3, 4, 1, 4, 1, 3, 4]]  # by hand
REVIVED = [[], [1], [4]]  # by hand: token 2 has passed all layers in prefill


# ---------------------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("text", "value", "parts"),
    [
        ("58.95 ±2.45", 58.95, ("58.95", " ±2.45")),
        ("-0.5", -0.5, ("-0.5", "")),
        ("−0.5 %", -0.5, ("−0.5", " %")),
        ("1,024", 1024, ("1,024", "")),
        ("2.43 (2.40–2.47)", 2.43, ("2.43", " (2.40–2.47)")),
        ("3e-05", 3e-5, ("3e-05", "")),
        ("**2.5**", 2.5, ("**2.5**", "")),
        ("-", None, ("-", "")),
        ("", None, ("", "")),
    ],
)
def test_cells_are_sorted_by_their_number(text: str, value: float | None, parts: tuple[str, str]) -> None:
    found = grid("t", "", "", pd.DataFrame({"x": ["1", text]}))
    assert found.columns[0].numeric
    assert found.rows[1][0].value == value
    assert found.rows[1][0].parts == parts


@pytest.mark.parametrize("text", ["2wikimqa", "lazy, keep=0.5", "v2", "2026-01-02"])
def test_a_column_with_any_other_text_is_not_numeric(text: str) -> None:
    found = grid("t", "", "", pd.DataFrame({"x": ["1", text], "y": ["", None]}))
    assert [column.numeric for column in found.columns] == [False, False]
    assert [cell.text for cell in found.rows[1]] == [text, ""]


def test_what_follows_the_keys_is_numeric_whatever_it_says() -> None:
    table = pd.DataFrame({"task": ["1", "code"], "score": ["no run", "+5.5 ±1"], "unpaired": ["unpaired", "unpaired"]})
    found = grid("t", "", "", table, keys=1)
    assert [column.numeric for column in found.columns] == [False, True, True]
    assert [cell.value for cell in found.rows[0]] == [None, None, None]
    assert [cell.value for cell in found.rows[1]] == [None, 5.5, None]


def test_choices_are_those_of_the_column() -> None:
    table = pd.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "x"]})
    assert grid("t", "", "", table, filtered="b").choices() == ["x", "y"]
    assert grid("t", "", "", table).choices() == []


def test_layers_of_a_trace_by_hand() -> None:
    found = last_layers(TRACE)
    assert [depth.tolist() for depth in found] == LAST_LAYERS
    assert revived(found) == REVIVED
    embedded = embed_trace(TRACE)
    assert embedded["levels"] == [1, 3, 4]
    assert embedded["steps"] == ["102102", "1200022", "01202012"]
    assert (embedded["revived"], embedded["anew"], embedded["layers"]) == (REVIVED, [True] * 3, 4)


def test_a_step_without_a_selection_stays_with_the_prefills() -> None:
    dropped = Trace("trec", "a", ["a", "b", "c"], ["d", "e"], [[0.5, 0.2, 0.3]] * 2, [{0: [0, 2]}, {}], [1], [[2], [2]])
    assert [depth.tolist() for depth in last_layers(dropped)] == [[2, 0, 2], [2, 0, 2, 2]]
    assert embed_trace(dropped)["revived"] == [[], []]
    assert embed_trace(dropped)["anew"] == [True, False]


@pytest.fixture(scope="module")
def tiny_and_a_prompt() -> tuple[Any, list[int]]:
    """The tiny model and an example of the embedded suite whose answers are long."""
    model, tokenizer = lazyllm.load_model("tiny", dtype="float32", device="cpu")
    loaded = load_rows(DATASETS["digest"], None, "raise")
    return model, list(build_prompt(loaded.examples[0], loaded.template, tokenizer).token_ids)


@pytest.mark.parametrize(
    "method",
    [
        Lazy(), Lazy({2: 0.3}), Lazy({1: 0.5, 8: 0.5}), Lazy({2: 0.3, 5: 0.6}, prune_generated=True),
        Lazy({2: 0.3, 5: 0.6}, revive=False), StaticPruning(2, 0.3), RandomDrop(0.5), Baseline(),
    ],
)  # fmt: skip
def test_what_is_drawn_is_what_was_computed(tiny_and_a_prompt: tuple[Any, list[int]], method: Method) -> None:
    """Compared with the engine's counters, which count batches independently of selections."""
    model, prompt = tiny_and_a_prompt
    out = lazyllm.generate(model, prompt, method, max_new_tokens=16)
    steps, layers = out.computed.shape
    unimportant = [[0.0] * len(prompt)] * layers
    words = ["word"] * len(prompt)
    traced = Trace("digest", "0", words, ["word"] * steps, unimportant, out.selected, [], [])
    depths = last_layers(traced)
    assert steps > 1
    reached = np.zeros(len(prompt))
    for depth, computed in zip(depths, out.computed, strict=True):
        reached = np.maximum(reached, depth[: len(prompt)])
        assert [int((reached >= layer).sum()) for layer in range(1, layers + 1)] == computed.tolist()
    assert any(revived(depths)) == (isinstance(method, Lazy) and method.revive)


def test_texts_that_runs_share_are_embedded_once(tmp_path: Path) -> None:
    ends = [f"prompt {number} " + "x" * 500 for number in range(4)]
    for seed in range(3):
        records = [example(n, text=f"seed {seed}", end=ends[n], score=n / 3, ttft_s=0.1) for n in range(4)]
        store(tmp_path / f"run-{seed}", {"name": "random_drop", "keep": 0.5, "seed": seed}, records, seed=seed)
    embedded = embed_records(find_runs([tmp_path]))
    strings = embedded["strings"]
    assert [text for text in strings if text.startswith("prompt")] == ends
    assert strings.count("a base") == strings.count("because") == 1
    assert len(embedded["records"]) == 12
    one = embedded["records"][5]  # the second example of the second run
    assert (embedded["runs"][one["run"]]["seed"], strings[one["id"]], strings[one["end"]]) == (1, "row-1", ends[1])
    assert [strings[answer] for answer in one["gold"]] == ["because"]
    assert strings[one["method"]["text"]] == "seed 1"
    assert one["method"]["score"] == pytest.approx(100 / 3, rel=1e-5)
    assert (one["method"]["ttft"], one["method"]["pct"], one["baseline"]["ttft"]) == (0.1, 75, 0.4)


def test_most_is_of_each_run_and_dataset(tmp_path: Path) -> None:
    records = [example(n, dataset) for dataset in ("hotpotqa", "trec") for n in range(3)]
    store(tmp_path / "a", {"name": "lazy"}, records)
    store(tmp_path / "b", {"name": "static_pruning"}, records[:1])
    embedded = embed_records(find_runs([tmp_path]), 2)
    shown = [(record["run"], record["dataset"], embedded["strings"][record["id"]]) for record in embedded["records"]]
    assert shown == [
        (0, "hotpotqa", "row-0"), (0, "hotpotqa", "row-1"), (0, "trec", "row-0"), (0, "trec", "row-1"),
        (1, "hotpotqa", "row-0"),
    ]  # fmt: skip


def test_every_turn_of_an_example_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [record(0), with_turns(), record(2)])
    for most, rows in ((None, 3), (2, 2)):  # turns are no examples
        embedded = embed_records(find_runs([tmp_path]), most)
        names = ["row-0", "row-1, turn 1", "row-1, turn 2", "row-1, turn 3", "row-2"]
        assert [embedded["strings"][shown["id"]] for shown in embedded["records"]] == names[: rows + 2]
        assert [shown["method"]["score"] for shown in embedded["records"]][2:4] == [50, 75]


def test_a_clean_set_of_runs_has_no_warning_and_others_are_named(tmp_path: Path) -> None:
    records = [example(number) for number in range(3)]
    store(tmp_path / "fine", {"name": "lazy"}, records)
    store(tmp_path / "base", {"name": "baseline"}, [example(n, baseline=None) for n in range(3)], paired=False)
    assert overview.warnings(find_runs([tmp_path]), None) == []
    store(tmp_path / "alone", {"name": "static_pruning"}, [example(0, baseline=None)], paired=False, warmup=0)
    store(tmp_path / "dirty", {"name": "random_drop"}, [example(0, end="")], git_commit="c0ffee+changes")
    found = overview.warnings(find_runs([tmp_path]), 2)
    expected = [
        ("without a paired baseline", "(alone)"),
        ("without warm-up", "(alone)"),
        ("uncommitted code", "(dirty)"),
        ("the records below lack", "(dirty)"),
        ("lack 2 of the 3 examples", "alone, dirty"),
        ("only the first 2 records", "shown"),
    ]
    assert len(found) == len(expected)
    for text, (said, named) in zip(found, expected, strict=True):
        assert said in text
        assert named in text


def test_provenance_says_what_is_common_once_and_what_differs_by_run(tmp_path: Path) -> None:
    store(tmp_path / "a", {"name": "lazy"}, [example(0)])
    store(tmp_path / "b", {"name": "static_pruning"}, [example(0)], started="2026-01-03T00:00:00Z", warmup=1)
    common, differing = overview.provenance(find_runs([tmp_path]))
    assert dict(common)["git_commit"] == "c0ffee"
    assert dict(common)["machine.device"] == "one core"
    assert dict(common)["data.hotpotqa"] == "aa bb"
    assert dict(common)["machine.cuda"] == "null"
    assert differing is not None
    assert [column.heading for column in differing.columns] == ["folder", "warmup", "started"]
    assert [[cell.text for cell in row] for row in differing.rows] == [
        ["a", "5", "2026-01-02T03:04:05Z"],
        ["b", "1", "2026-01-03T00:00:00Z"],
    ]
    (one,) = find_runs([tmp_path / "a"])
    assert overview.provenance([one])[1] is None


def test_results_by_hand(tmp_path: Path) -> None:
    records = [example(0, score=1.0, ttft_s=0.1), example(1, score=0.5, ttft_s=0.3)]
    store(tmp_path / "a", {"name": "lazy", "schedule": {"2": 0.5}}, records)
    found = overview.results_grid(Results(find_runs([tmp_path])))
    headings = [column.heading for column in found.columns]
    rows = [dict(zip(headings, row, strict=True)) for row in found.rows]
    lazy = [row for row in rows if row["setting"].text == "lazy, schedule={2: 0.5}"]
    assert [row["task or dataset"].text for row in lazy] == ["mean over tasks", "hotpotqa", "multi_doc_qa"]
    for row in lazy:
        assert (row["n"].value, row["score"].value, row["baseline score"].value) == (2, 75, 50)
        assert row["score"].parts[1] == " (50.00–100.00)"  # a resample of two examples may hold either one twice
        assert row["TTFT speedup"].value == 2  # 0.4 + 0.4 over 0.1 + 0.3
        assert (row["TTFT, s"].value, row["% tokens computed"].value) == (0.2, 75)


def test_what_was_found_is_said_in_a_sentence_by_hand(tmp_path: Path) -> None:
    store(tmp_path / "a", {"name": "lazy", "schedule": {"2": 0.5}}, [example(0, score=0.25, ttft_s=0.1)])
    assert overview.findings(Results(find_runs([tmp_path]))) == [
        "mini, longbench: settings faster than the baseline: 1; of these 0 keep 99% of its score. The best score: "
        "lazy, schedule={2: 0.5}, 4.00 times as fast to the first token, score 25.00 against 50.00 (examples: 1)."
    ]
    store(tmp_path / "b", {"name": "static_pruning", "keep": 0.5}, [example(0, score=0.5, ttft_s=0.2)])
    store(tmp_path / "c", {"name": "oracle", "keep": 0.5}, [example(0, score=0.5, ttft_s=0.1)])  # no method
    (found,) = overview.findings(Results(find_runs([tmp_path])))
    assert (
        "baseline: 2; of these 1 keep 99% of its score. The fastest of these: static_pruning, keep=0.5, 2.00" in found
    )


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


# ----------------------------------------------------------------------------------------------------------------- page


def hand_table(results: Results) -> Table:
    """A table as `eval.analysis.tables` makes them; its cells and words are hostile."""
    names = ["b", "a", HOSTILE, "d", "e"]
    cells = pd.DataFrame({f"name {HOSTILE}": names, "score": ["10.5 ±1", "9", "no run", "100", "9"]})
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


TABLES = {"hand": hand_table, "bare": bare_table}
FIGURES = {
    "full": Figure(
        "full", f"Drawn {HOSTILE}", f"Caption {HOSTILE}", lambda results: pd.DataFrame({"x": [1.0, 2.0]}), draw
    ),
    "empty": Figure("empty", "Not drawn", "", lambda results: pd.DataFrame(), draw),
}


def make_runs(folder: Path) -> list[StoredRun]:
    """A lazy run with 45 records, one of them hostile, and a trace; and an unpaired run with 2 records."""
    records = [
        example(0, text="so it is", baseline="so it was then", gold=["it is", "so"], score=0.25, ttft_s=0.16),
        example(1, text=HOSTILE, baseline=f"{HOSTILE} too", end=HOSTILE, gold=[HOSTILE], score=1.0, ttft_s=0.05),
        example(2, text="the same", baseline="the same", end="Question: an odd one?", score=0.5, ttft_s=2.0),
        *(example(number, "trec", text=f"class {number}", score=0.75) for number in range(3, 45)),
    ]
    store(folder / "lazy", {"name": "lazy", "schedule": {"2": 0.5}}, records)
    store(
        folder / "static", {"name": "static_pruning", "keep": 0.5}, [example(n, baseline=None) for n in (0, 1)], False
    )
    (folder / "lazy" / "traces").mkdir()
    (folder / "lazy" / "traces" / "one.json").write_text(TRACE.to_json(), encoding="utf-8")
    return find_runs([folder])


def test_the_page_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    page = render(Results(make_runs(tmp_path)), TABLES, FIGURES)
    style_and_script = re.findall(r"(?s)<style>.*?</style>|<script>.*</script>", page)
    assert not any(re.search(r"https?:|url\(|@import|fetch\(|XMLHttp", part) for part in style_and_script)
    references = re.findall(r"\b(?:src|href|action|data|poster|srcset)=[\"']?([^\"'\s>]*)", page)
    escaped = {"x"}  # of the hostile text, which is text
    assert {reference for reference in references if not reference.startswith(("#", "data:"))} <= escaped
    assert "default-src 'none'" in page


def test_no_text_can_close_a_script_or_become_markup(tmp_path: Path) -> None:
    page = render(Results(make_runs(tmp_path)), TABLES, FIGURES)
    assert page.count("</script>") == page.count("<script") == 3  # two with data and one with code
    assert "<img" not in page
    assert "<!--<script" not in page
    data = re.search(r'(?s)<script type="application/json" id="record-data">(.*?)</script>', page)
    assert data is not None
    assert HOSTILE in json.loads(data[1])["strings"]


def test_colours_are_told_from_what_they_stand_on() -> None:
    """A contrast of at least 4.5 (WCAG 2) for every text colour on each of its backgrounds, in both schemes."""
    style = (Path(eval.report.__file__).parent / "report.css").read_text(encoding="utf-8")
    schemes = [
        dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in re.findall(r":root \{([^}]*)\}", style)[:2]
    ]
    for colours in schemes:
        for text in ("ink", "soft", "accent", "good", "bad", "revived"):
            for ground in ("paper", "card"):
                assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for ground in ("shade", "warn", "mark"):
            assert _contrast(colours["ink"], colours[ground]) >= 4.5, ground


def _contrast(one: str, other: str) -> float:
    darker, lighter = sorted(_luminance(colour) for colour in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_wheel_holds_every_file_of_the_page() -> None:
    folder = Path(eval.report.__file__).parent
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["eval"]
    beside = {file.name for file in folder.iterdir() if file.is_file() and file.suffix != ".py"}
    assert beside == {
        file.name for pattern in patterns for file in folder.parent.glob(pattern) if file.parent == folder
    }
    assert len(beside) == 5


# -------------------------------------------------------------------------------------------------------------- command


def test_the_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    make_runs(tmp_path / "runs")
    monkeypatch.setattr("eval.analysis.tables.TABLES", TABLES)
    monkeypatch.setattr("eval.analysis.figures.FIGURES", FIGURES)
    out = tmp_path / "new" / "page.html"
    assert command.main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert str(out) in capsys.readouterr().out
    assert command.main([str(tmp_path / "runs"), "--out", str(out), "--records", "1"]) == 0
    assert "only the first 1 records" in out.read_text(encoding="utf-8")


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    make_runs(tmp_path / "runs")
    (tmp_path / "runs" / "lazy" / "traces" / "two.json").write_text("{}")
    assert cli.main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "page.html")]) == 2
    assert "two.json: not a trace" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
    for number in ("0", "-1", "many"):
        with pytest.raises(SystemExit):
            command.main([str(tmp_path), "--records", number])
