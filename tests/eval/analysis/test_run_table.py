"""What the table of a run shows; test_join_oracle.py checks its numbers."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval.analysis.run_table import MANY, run_json, run_table
from eval.analysis.table import Table
from eval.store.record import Visit
from eval.store.results import Results
from tests.eval.made import over, stored
from tests.eval.store.visits import FAILED, answer, visit

VISITS = [
    visit(1, "hotpotqa", score=1.0), visit(2, "hotpotqa", score=0.0),
    visit(1, "musique", score=1 / 3),
    visit(1, "trec", score=1.0),
]  # fmt: skip


def table_of(visits: list[Visit], *setting: Any, **about: Any) -> Table:
    return run_table(Results([stored(visits, *setting, **about)]), "a run")


def rows_of(table: Table, arm: str = "lazy") -> dict[str, dict[str, Any]]:
    """{name: row} of an arm."""
    return {row["name"]: row for row in table.frame.to_dict("records") if row["method"] == arm}


def failed(dataset: str, row: Any, **changes: Any) -> Visit:
    return visit(row, dataset, arms={"baseline": answer(), "lazy": FAILED}, **changes)


def console_text(table: Table, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table.to_rich(width))
    return console.export_text()


@pytest.mark.usefixtures("two_have_an_interval")
def test_arms_stand_by_dataset_task_and_their_mean() -> None:
    table = table_of(VISITS)
    rows = rows_of(table)
    # a task with one dataset has one row
    assert list(rows) == ["hotpotqa", "musique", "multi_doc_qa", "few_shot", "mean over tasks"]
    assert list(rows_of(table, "baseline")) == list(rows)
    assert [rows[name]["examples"] for name in rows] == [2, 1, 3, 1, 4]
    assert rows["hotpotqa"]["score_low"] == 0
    assert str(rows["mean over tasks"]["score_low"]) == "nan"  # musique has one example
    names = table.cells.iloc[:, 0].tolist()
    assert names[::2] == [
        "hotpotqa",
        "musique",
        "**multi_doc_qa**",
        "**few_shot**",
        "**mean over tasks**",
    ]
    assert list(rows_of(table_of(VISITS[:2]))) == ["multi_doc_qa"]  # one dataset, one task


@pytest.mark.parametrize(
    ("setting", "row"),
    [({"speedup": 1.5}, "lazy 1.5x"), ({"speedup": "table1"}, "lazy table1"), ({}, "lazy")],
)
def test_a_row_names_the_speedup_that_its_arm_is_solved_for(
    setting: dict[str, Any], row: str
) -> None:
    table = table_of(VISITS, "lazy", setting)
    assert {*table.cells["method"]} == {"baseline", row}
    assert {*table.frame["method"]} == {"baseline", "lazy"}


def test_without_a_baseline_there_is_no_speedup() -> None:
    table = table_of([visit(1, baseline=None)], baseline=None)
    assert table.frame[["ttft_speedup", "score_difference"]].isna().all(axis=None)
    assert "TTFT speedup" not in table.cells
    assert "No speedup" in table.caption


@pytest.mark.usefixtures("two_have_an_interval")
def test_json_has_the_numbers_of_the_csv() -> None:
    table = table_of(VISITS)
    lines = list(csv.DictReader(io.StringIO(table.to_csv())))
    content = json.loads(run_json(table, {"identity": {"seed": 0}}))
    assert content["identity"] == {"seed": 0}
    for line, row in zip(lines, content["rows"], strict=True):
        assert (line["name"], line["method"]) == (row["name"], row["method"])
        assert float(line["score"]) == row["score"]["mean"]
    assert content["rows"][1]["score"] == {"mean": 50.0, "low": 0.0, "high": 100.0}
    assert content["rows"][-1]["score"]["low"] is None
    assert content["rows"][0]["kl"] is None


def test_failures_are_counted_and_score_zero_in_a_column_of_their_own() -> None:
    names = (("hotpotqa", 3), ("hotpotqa", 4), ("2wikimqa", 1), ("trec", 2))
    table = table_of([*VISITS, *(failed(*name) for name in names)])
    rows = rows_of(table)
    multi_doc_qa = (25 + 33.33 + 0) / 3  # of 2wikimqa nothing was measured
    found = {name: (row["failed"], row["score_failed_as_zero"]) for name, row in rows.items()}
    whole = (multi_doc_qa + 50) / 2
    assert found == {
        "hotpotqa": (2, 25), "musique": (0, 33.33),
        "multi_doc_qa": (3, pytest.approx(multi_doc_qa)),
        "few_shot": (1, 50), "mean over tasks": (4, pytest.approx(whole)),
    }  # fmt: skip
    assert rows["hotpotqa"]["score"] == 50  # of those that were measured
    assert {row["failed"] for row in rows_of(table, "baseline").values()} == {0}
    cells = table.cells[(table.cells.iloc[:, 0] == "hotpotqa") & (table.cells["method"] == "lazy")]
    assert cells[["score", "failed", "score, failed as 0"]].to_numpy().tolist() == [
        ["50.00", "2", "25.00"]
    ]
    note = "\nlazy: {} failed, left out here; counted as 0, the score is {:.2f}."
    assert note.format("4 answers", whole) in table.caption
    assert "failed" not in table_of(VISITS).to_markdown()
    # of one task; hotpotqa: 100, 0 and the failed one
    assert note.format("1 answer", 33.33) in table_of([*VISITS[:3], failed("hotpotqa", 3)]).caption


def test_an_arm_without_any_answer_is_named() -> None:
    table = table_of([failed("trec", row) for row in (1, 2)])
    assert set(table.frame["method"]) == {"baseline"}
    assert table.caption.splitlines()[-1] == "lazy: no answer, so it has no row: 2 answers failed."


def test_an_arm_with_answers_in_one_range_of_lengths_has_a_row_there() -> None:
    rows = rows_of(table_of([visit(1, "trec"), failed("trec", 2, prompt_tokens=600)]))
    assert [name for name, row in rows.items() if row["kind"] == "length"] == [
        "1-512 prompt tokens"
    ]


def test_failures_that_a_later_visit_mends_or_that_are_not_planned_are_none(tmp_path: Path) -> None:
    visits = [failed("trec", 1), *VISITS, failed("trec", 2), failed("trec", 3)]
    (tmp_path / "examples.json").write_text(json.dumps({"trec": ["row-1", "row-2"]}))
    assert rows_of(table_of(visits, folder=tmp_path))["few_shot"]["failed"] == 1


def test_few_examples_have_no_interval_and_cut_prompts_are_counted() -> None:
    whole = [visit(row, uncut_tokens=100) for row in range(5)]
    rows = [table_of(visits).cells.iloc[1] for visits in (whole[:4], whole)]
    assert [row["score"] for row in rows] == ["50.00", "50.00 ±0.00"]
    assert [row["TTFT, ms"] for row in rows] == ["200.0", "200.0"]  # no column for its interval
    assert "Longer than" not in table_of(whole).caption
    cut = visit(0, uncut_tokens=1000)
    twice = table_of([cut, cut, *whole[1:]])  # of an arm that failed first
    assert "Longer than model.max_prompt_tokens: 1 of 5 prompts" in twice.caption


WHOLE, PRUNED = {"computed": [[100, 100], [100, 100]]}, {"computed": [[100, 60], [100, 100]]}


@pytest.mark.parametrize(
    ("method", "settings", "parameter"),
    [
        ("gemfilter", {"keep": 512}, "keep=512"),
        ("asl", {}, "keep=2048"),  # its default
        ("lazy", {"schedule": {"2": 0.99}}, "schedule={2: 0.99}"),
        ("trianglemix", {}, None),  # these are not meant to leave tokens out
        ("nosuch", {}, None),
    ],
)
def test_prompts_of_which_a_method_kept_all_are_counted(
    method: str, settings: dict[str, Any], parameter: str | None
) -> None:
    """A prompt whose tokens were revived later was pruned; a second visit of one counts once."""
    pruned = visit(3, **PRUNED)
    visits = [visit(1, **WHOLE), visit(2, **WHOLE), pruned, visit(1, **WHOLE)]
    lines = table_of(visits, method, settings).caption.splitlines()
    note = f"lazy kept all tokens of 2 of 3 prompts ({parameter})."
    assert [line for line in lines if "kept all" in line] == [note] * (parameter is not None)
    assert "kept all" not in table_of([pruned], method, settings).caption


def test_prompts_in_which_a_method_skipped_no_attention_are_counted() -> None:
    """By FLOPs: such a prompt's are the baseline's."""
    visits = [visit(row, prefill_flops=flops, **WHOLE) for row, flops in enumerate((300, 90))]
    assert "lazy skipped no attention in 1 of 2 prompts." in table_of(visits, "trianglemix").caption
    assert "no attention" not in table_of(visits).caption
    assert "no attention" not in table_of(visits[1:], "trianglemix").caption


def test_answers_without_an_end_of_thought_are_counted() -> None:
    """Prompts without chat format have no thoughts, so that an empty answer there is one."""
    visits = [
        visit(row, baseline={"text": text}, text="") for row, text in enumerate(("", "", "so"))
    ]
    run = stored([*visits, visit(1, "trec", text="")])
    assert "thought" not in run_table(Results([run]), "").caption
    run.about["config"]["model"]["thinking_tokens"] = 50
    assert [
        line for line in run_table(Results([run]), "").caption.splitlines() if "thought" in line
    ] == [
        "baseline: no end of thought (</think>), or no text after it, in 2 of 3 answers.",
        "lazy: no end of thought (</think>), or no text after it, in 3 of 3 answers.",
    ]


@pytest.mark.parametrize(
    ("visits", "rows", "name"),
    [(VISITS, 5, "mean over tasks"), (VISITS[:3], 3, "multi_doc_qa"), (VISITS[3:], 1, "few_shot")],
)
def test_terminal_shows_means_only_of_many_arms(visits: list[Visit], rows: int, name: str) -> None:
    names = [f"arm {place}" for place in range(MANY)]
    arms = [example.arms | dict.fromkeys(names, example.arms["lazy"]) for example in visits]
    run = stored(
        [
            visit(example.id[4:], example.dataset, arms=answers)
            for example, answers in zip(visits, arms, strict=True)
        ]
    )
    settings = {"name": "static_pruning", "keep": 0.5}
    for place, arm in enumerate(names):
        run.identity["arms"][arm] = {"method": settings | {"layer": place}}
    table = run_table(Results([run]), "")
    text = console_text(table)
    note = f"{MANY + 2} of {rows * (MANY + 2)} rows; the files have all."
    assert (note in text, name in text) == (rows > 1, True)
    assert ("hotpotqa" in text, names[-1] in text) == (False, True)
    assert table.to_markdown().count("hotpotqa") == (MANY + 2) * (rows > 1)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_narrow_terminal_shows_whole_columns_and_names_the_others(width: int) -> None:
    table = table_of(VISITS)
    text = console_text(table, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    caption = " ".join(text.split())
    left_out = (
        caption.partition("terminal has: ")[2].partition(".")[0].split("; ")
        if "Not shown" in caption
        else []
    )
    line = next(line for line in text.splitlines() if "lazy" in line)
    first, values = (
        len(table.cells.columns) - table.keys - len(left_out),
        line.replace("lazy", "").split(),
    )
    assert len(values) == first  # one for each column that is not left out
    assert list(table.cells.columns[table.keys + first :]) == left_out
    assert (width <= 80) == bool(left_out)


def test_several_runs_are_joined_within_themselves_and_show_their_seeds_if_these_differ() -> None:
    visits = {"one": over(("trec",)), "two": over(("trec",), ttft_s=0.1)}
    for seed, names in ((1, ["one, seed 0", "two, seed 1"]), (0, ["one", "two"])):
        seeds = {"one": 0, "two": seed}
        runs = [stored(visits[name], folder=Path(name), seed=seed) for name, seed in seeds.items()]
        table = run_table(Results(runs), "")
        found = table.frame[table.frame["method"] == "lazy"].set_index("run")["ttft_speedup"]
        assert found.to_dict() == {"one": 2, "two": 4}
        assert table.cells["run"].unique().tolist() == names


def test_kl_of_the_first_token_alone_points_to_whole_answers() -> None:
    def table(**values: float) -> Any:
        return table_of(over(("hops",), **values))

    alone, forced = (
        table(kl=0.1),
        table(kl=0.1, answer_kl=0.2, gold_kl=0.3, gold_log_likelihood=-0.5),
    )
    pointer = "fidelity=answer measures whole answers"
    assert (pointer in alone.caption, pointer in forced.caption, pointer in table().caption) == (
        True,
        False,
        False,
    )
    headings = ["answer's KL", "KL, nats", "gold KL", "gold log-likelihood"]
    assert [heading for heading in forced.cells if "KL" in heading or "gold" in heading] == headings
    assert [heading for heading in alone.cells if "KL" in heading] == headings[1:2]
    row = forced.cells[forced.cells["method"] == "lazy"].iloc[0]
    assert [row[heading] for heading in headings] == ["0.20000", "0.10000", "0.30000", "-0.500"]
