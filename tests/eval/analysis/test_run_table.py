import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval.analysis.run_table import MANY, run_json, run_table
from eval.analysis.table import Table
from eval.store.results import Results
from eval.store.runs import StoredRun
from eval.store.visit import Failure, Visit
from tests.eval.analysis.made import ARM, conversation, example, stored
from tests.eval.store.made import alone
from tests.eval.store.visits import changed


def pair(dataset: str, name: str, own: tuple[float, float, float], baseline: tuple[float, float, float]) -> Visit:
    """A visit from (score, TTFT, total) of the arm and of the baseline."""
    keys = ("score", "ttft_s", "total_s")
    return example(dataset, name, baseline=dict(zip(keys, baseline, strict=True)), **dict(zip(keys, own, strict=True)))


VISITS = [
    pair("hotpotqa", "a", (1.0, 1.0, 2.0), (0.5, 3.0, 4.0)),
    pair("hotpotqa", "b", (0.0, 1.0, 2.0), (0.5, 1.0, 2.0)),
    pair("musique", "a", (1 / 3, 1.0, 1.0), (0.0, 4.0, 1.5)),
    pair("trec", "a", (1.0, 2.0, 2.0), (1.0, 2.0, 2.0)),
]


def rows_of(table: Table, arm: str = ARM) -> dict[str, dict[str, Any]]:
    """{name: row} of an arm."""
    return {row["name"]: row for row in table.frame.to_dict("records") if row["method"] == arm}


def failed(dataset: str, name: str, *arms: str) -> Visit:
    """A visit in which these arms could not answer; the others answer as the baseline does."""
    visit = example(dataset, name)
    failures = dict.fromkeys(arms, Failure(reason="NaN", traceback=""))
    answers = {arm: answer for arm, answer in visit.answers.items() if arm not in arms}
    return replace(visit, answers=answers, failures=failures)


def console_text(table: Table, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table.to_rich(width))
    return console.export_text()


def test_arm_without_any_answer_is_named() -> None:
    table = run_table(Results([stored([failed("trec", name, ARM) for name in "ab"])]), "")
    assert {row["method"] for row in table.frame.to_dict("records")} == {"baseline"}
    assert table.caption.splitlines()[-1] == f"{ARM}: no answer, so it has no row: 2 answers failed."


def test_arm_with_answers_in_one_range_of_lengths_has_a_row_there() -> None:
    long = replace(failed("trec", "b", ARM), turns=example("trec", "b", 600).turns)
    rows = rows_of(run_table(Results([stored([example("trec", "a", 100), long])]), ""))
    assert [name for name, row in rows.items() if row["kind"] == "length"] == ["1-512 prompt tokens"]


@pytest.mark.usefixtures("two_have_an_interval")
def test_run_table_has_arms_by_dataset_task_and_their_mean() -> None:
    """Every value comes from `eval.store.aggregate`, whose tests check them."""
    table = run_table(Results([stored(VISITS)]), "")
    rows, baseline = rows_of(table), rows_of(table, "baseline")
    # a task with one dataset has one row
    assert list(rows) == list(baseline) == ["hotpotqa", "musique", "multi_doc_qa", "few_shot", "mean over tasks"]
    assert [rows[name]["examples"] for name in rows] == [2, 1, 3, 1, 4]
    assert rows["multi_doc_qa"]["score"] == pytest.approx((50 + 33.33) / 2)
    assert baseline["multi_doc_qa"]["score"] == pytest.approx((50 + 0) / 2)
    assert rows["mean over tasks"]["ttft_speedup"] == 2
    assert baseline["mean over tasks"]["ttft_speedup"] == 1
    assert rows["hotpotqa"]["score_low"] == 0
    assert str(rows["mean over tasks"]["score_low"]) == "nan"  # musique has one example, so there is no interval
    names = table.cells.iloc[:, 0].tolist()
    assert names[::2] == ["hotpotqa", "musique", "**multi_doc_qa**", "**few_shot**", "**mean over tasks**"]
    short = rows_of(run_table(Results([stored(VISITS[:2])]), ""))
    assert list(short) == ["multi_doc_qa"]  # one dataset, one task
    assert short["multi_doc_qa"]["ttft_speedup"] == rows["hotpotqa"]["ttft_speedup"]


def test_run_table_without_baseline_has_no_speedup() -> None:
    run = stored([alone(visit) for visit in VISITS])
    run.identity["baseline"] = None
    table = run_table(Results([run]), "a run")
    assert table.frame[["ttft_speedup", "score_difference"]].isna().all(axis=None)
    assert "TTFT speedup" not in table.cells
    assert "No speedup" in table.caption


@pytest.mark.usefixtures("two_have_an_interval")
def test_run_table_has_the_same_numbers_in_every_form() -> None:
    table = run_table(Results([stored(VISITS)]), "a run")
    lines = list(csv.DictReader(io.StringIO(table.to_csv())))
    content = json.loads(run_json(table, {"identity": {"seed": 0}}))
    assert content["identity"] == {"seed": 0}
    text, markdown = console_text(table), table.to_markdown()
    assert "\nScores 0 to 100." in text
    for row, line, in_json in zip(table.frame.to_dict("records"), lines, content["rows"], strict=True):
        assert (line["name"], line["method"]) == (in_json["name"], in_json["method"]) == (row["name"], row["method"])
        assert float(line["score"]) == in_json["score"]["mean"] == row["score"]
        shown = f"{row['score']:.2f}"
        assert any(row["method"] in line and shown in line for line in text.splitlines())
        assert any(row["name"] in line and row["method"] in line and shown in line for line in markdown.splitlines())
    assert content["rows"][1]["score"] == {"mean": 50.0, "low": 0.0, "high": 100.0}
    assert content["rows"][-1]["score"]["low"] is None
    assert content["rows"][0]["kl"] is None


def test_failures_are_counted_and_score_zero_in_a_column_of_their_own() -> None:
    names = (("hotpotqa", "x"), ("hotpotqa", "y"), ("2wikimqa", "x"), ("trec", "x"))
    visits = [*VISITS, *(failed(*name, ARM) for name in names)]
    table = run_table(Results([stored(visits)]), "title")
    rows, baseline = rows_of(table), rows_of(table, "baseline")
    assert {name: row["failed"] for name, row in rows.items()} == {
        "hotpotqa": 2, "musique": 0, "multi_doc_qa": 3, "few_shot": 1, "mean over tasks": 4,
    }  # fmt: skip
    assert {row["failed"] for row in baseline.values()} == {0}
    assert rows["hotpotqa"]["score"] == 50  # of those that were measured
    assert rows["hotpotqa"]["score_failed_as_zero"] == 25
    assert rows["few_shot"]["score_failed_as_zero"] == 50
    multi_doc_qa = (25 + 33.33 + 0) / 3  # of 2wikimqa nothing was measured
    assert rows["multi_doc_qa"]["score_failed_as_zero"] == pytest.approx(multi_doc_qa)
    assert rows["mean over tasks"]["score_failed_as_zero"] == pytest.approx((multi_doc_qa + 50) / 2)
    cells = table.cells[(table.cells.iloc[:, 0] == "hotpotqa") & (table.cells["method"] == ARM)]
    assert cells[["score", "failed", "score, failed as 0"]].to_numpy().tolist() == [["50.00", "2", "25.00"]]
    as_zero = f"{(multi_doc_qa + 50) / 2:.2f}"
    assert f"\n{ARM}: 4 answers failed, left out here; counted as 0, the score is {as_zero}." in table.caption
    assert "failed" not in run_table(Results([stored(VISITS)]), "").to_markdown()
    one_task = run_table(Results([stored([*VISITS[:3], failed("hotpotqa", "x", ARM)])]), "")
    as_zero = f"{(33.33 * 2 / 2 + 33.33) / 2:.2f}"  # hotpotqa: 100, 0 and the failed one
    assert f"\n{ARM}: 1 answer failed, left out here; counted as 0, the score is {as_zero}." in one_task.caption


def test_failures_that_a_later_visit_mends_or_that_are_not_planned_are_none(tmp_path: Path) -> None:
    visits = [failed("trec", "a", ARM), *VISITS, failed("trec", "b", ARM), failed("trec", "c", ARM)]
    run = stored(visits, folder=tmp_path)
    (tmp_path / "examples.json").write_text(json.dumps({"trec": ["a", "b"]}))
    assert rows_of(run_table(Results([run]), ""))["few_shot"]["failed"] == 1


def test_run_table_shows_no_interval_of_few_examples_and_counts_cut_prompts() -> None:
    alike = [pair("hotpotqa", str(number), (0.5, 0.125, 0.5), (1.0, 0.25, 1.0)) for number in range(5)]
    shown = [run_table(Results([stored(visits)]), "").cells.iloc[1] for visits in (alike[:4], alike)]
    assert [row["score"] for row in shown] == ["50.00", "50.00 ±0.00"]
    assert [row["TTFT, ms"] for row in shown] == ["125.0", "125.0"]  # no column for its interval
    assert "Longer than" not in run_table(Results([stored(alike)]), "").caption
    cut = replace(alike[0], turns=[replace(alike[0].turns[0], tokens_before_truncation=1000)])
    twice = Results([stored([cut, cut, *alike[1:]])])  # of an arm that failed first
    assert "Longer than model.max_prompt_tokens: 1 of 5 prompts" in run_table(twice, "").caption


WHOLE, PRUNED = {"computed": [[100, 100], [100, 100]]}, {"computed": [[100, 60], [100, 100]]}


@pytest.mark.parametrize(
    ("method", "settings", "note"),
    [
        ("gemfilter", {"keep": 512}, "the arm kept all tokens of 2 of 3 prompts (keep=512)."),
        ("gemfilter", {}, "the arm kept all tokens of 2 of 3 prompts (keep=1024)."),  # its default
        ("asl", {}, "the arm kept all tokens of 2 of 3 prompts (keep=2048)."),
        ("uniprefill", {"p": 0.9}, "the arm kept all tokens of 2 of 3 prompts (p=0.9)."),
        ("lazy", {"schedule": {"2": 0.99}}, "the arm kept all tokens of 2 of 3 prompts (schedule={2: 0.99})."),
        ("trianglemix", {}, None),  # these are not meant to leave tokens out
        ("transformers", {}, None),
        ("nosuch", {}, None),
    ],
)
def test_prompts_of_which_a_method_kept_all_are_counted(method: str, settings: dict, note: str | None) -> None:
    """A prompt whose tokens were revived later was pruned; a second visit of one counts once."""
    visits = [example("trec", name, **own) for name, own in (("a", WHOLE), ("b", WHOLE), ("c", PRUNED), ("a", WHOLE))]
    lines = run_table(Results([stored(visits, method, settings)]), "").caption.splitlines()
    assert [line for line in lines if "kept all" in line] == ([] if note is None else [note])
    [pruned] = [example("trec", "a", **PRUNED)]
    assert "kept all" not in run_table(Results([stored([pruned], method, settings)]), "").caption


def test_prompts_in_which_a_method_skipped_no_attention_are_counted() -> None:
    """By FLOPs: such a prompt's are the baseline's."""
    visits = [
        example("trec", name, prefill_flops=flops, baseline={"prefill_flops": 100}, **WHOLE)
        for name, flops in {"a": 100, "b": 90}.items()
    ]
    note = "the arm skipped no attention in 1 of 2 prompts."
    assert note in run_table(Results([stored(visits, "trianglemix", {})]), "").caption
    assert "no attention" not in run_table(Results([stored(visits, "lazy", {})]), "").caption
    assert "no attention" not in run_table(Results([stored(visits[1:], "trianglemix", {})]), "").caption


def test_answers_without_an_end_of_thought_are_counted() -> None:
    """Prompts without chat format have no thoughts, so that an empty answer there is one."""
    visits = [
        example("hotpotqa", name, text="", baseline={"text": text})
        for name, text in {"a": "", "b": "", "c": "so"}.items()
    ]
    run = stored([*visits, example("trec", "a", text="")])
    assert "thought" not in run_table(Results([run]), "").caption
    run.about["config"]["model"]["thinking_tokens"] = 50
    assert [line for line in run_table(Results([run]), "").caption.splitlines() if "thought" in line] == [
        "baseline: no end of thought (</think>), or no text after it, in 2 of 3 answers.",
        "the arm: no end of thought (</think>), or no text after it, in 3 of 3 answers.",
    ]


def test_a_conversation_is_in_the_range_of_its_whole_prompt() -> None:
    long = conversation("hotpotqa", "long", [9000, 20], [{"score": 1.0}, {"score": 0.0}], [{}, {}])
    table = run_table(Results([stored([long, example("hotpotqa", "short", 100, score=0.25)])]), "")
    rows = rows_of(table)
    scores = {name: row["score"] for name, row in rows.items() if row["kind"] == "length"}
    assert scores == {"1-512 prompt tokens": 25, "8193+ prompt tokens": 50}
    assert (rows["multi_doc_qa"]["examples"], rows["multi_doc_qa"]["turns"]) == (2, 3)
    assert "turns" in table.cells


def test_seeds_of_a_setting_are_one_row() -> None:
    visit = example("trec", "a", score=0.2, baseline={"score": 0.4})
    again = [changed(answer, score=0.6, ttft_s=0.1) for answer in visit.answers[ARM]]
    answers = {"baseline": visit.answers["baseline"], "drop seed 0": visit.answers[ARM], "drop seed 1": again}
    run = stored([replace(visit, answers=answers)], "random_drop", {"keep": 0.5})
    arms: Any = run.identity["arms"]
    first = arms.pop(ARM)["method"]
    arms |= {f"drop seed {seed}": {"method": first | {"seed": seed}} for seed in (0, 1)}
    (row,) = (row for row in run_table(Results([run]), "").frame.to_dict("records") if row["method"] != "baseline")
    assert (row["examples"], row["score"]) == (1, 40)
    assert row["ttft_speedup"] == pytest.approx((0.4 + 0.4) / (0.2 + 0.1))


def with_arms(number: int, visits: list[Visit]) -> StoredRun:
    """A run of this many arms after the baseline, all with the same answers."""
    names = [f"arm {place}" for place in range(number)]
    run = stored([replace(visit, answers=visit.answers | dict.fromkeys(names, visit.answers[ARM])) for visit in visits])
    for place, name in enumerate(names):
        run.identity["arms"][name] = {"method": {"name": "static_pruning", "layer": place, "keep": 0.5}}
    return run


def test_terminal_shows_means_only_of_many_arms() -> None:
    table = run_table(Results([with_arms(MANY, VISITS)]), "")
    shown = console_text(table)
    assert f"{MANY + 2} of {5 * (MANY + 2)} rows; the files have all." in shown
    assert "mean over tasks" in shown
    assert "multi_doc_qa" not in shown
    assert f"arm {MANY - 1}" in shown
    assert table.to_markdown().count("hotpotqa") == MANY + 2
    assert "rows; the files have all" not in console_text(run_table(Results([with_arms(MANY, VISITS[-1:])]), ""))
    of_one_task = console_text(run_table(Results([with_arms(MANY, VISITS[:3])]), ""))
    assert f"{MANY + 2} of {3 * (MANY + 2)} rows; the files have all." in of_one_task
    assert "multi_doc_qa" in of_one_task


@pytest.mark.parametrize("width", [60, 80, 100])
def test_narrow_terminal_shows_whole_columns_and_names_the_others(width: int) -> None:
    table = run_table(Results([stored(VISITS)]), "")
    shown = console_text(table, width)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    caption = " ".join(shown.split())
    left_out = caption.partition("terminal has: ")[2].partition(".")[0].split("; ") if "Not shown" in caption else []
    line = next(line for line in shown.splitlines() if ARM in line)
    first, values = len(table.cells.columns) - table.keys - len(left_out), line.replace(ARM, "").split()
    assert len(values) == first  # one for each column that is not left out
    assert list(table.cells.columns[table.keys + first :]) == left_out
    assert (width <= 80) == bool(left_out)


def test_several_runs_are_one_table_each_joined_within_itself() -> None:
    slow = [pair("trec", "a", (1.0, 2.0, 2.0), (1.0, 8.0, 8.0))]
    table = run_table(Results([stored(VISITS[3:], folder=Path("one")), stored(slow, folder=Path("two"))]), "")
    found = table.frame[table.frame["method"] == ARM].set_index("run")["ttft_speedup"]
    assert found.to_dict() == {"one": 1, "two": 4}


def test_several_runs_show_the_seed_in_which_they_differ() -> None:
    runs = [stored(VISITS[3:], folder=Path(name), seed=seed) for name, seed in (("one", 0), ("two", 1))]
    table = run_table(Results(runs), "")
    assert table.cells["run"].unique().tolist() == ["one, seed 0", "two, seed 1"]
    assert table.frame["run"].unique().tolist() == ["one", "two"]
    alike = run_table(Results([runs[0], stored(VISITS[3:], folder=Path("two"))]), "")
    assert alike.cells["run"].unique().tolist() == ["one", "two"]


def test_kl_of_the_first_token_alone_points_to_whole_answers() -> None:
    def table(**own: float) -> Any:
        return run_table(Results([stored([example("hops", row, **own) for row in "ab"])]), "")

    alone, forced = table(kl=0.1), table(kl=0.1, answer_kl=0.2, gold_kl=0.3, gold_log_likelihood=-0.5)
    pointer = "fidelity=answer measures whole answers"
    assert (pointer in alone.caption, pointer in forced.caption, pointer in table().caption) == (True, False, False)
    shown = ["KL, nats", "answer's KL", "gold KL", "gold log-likelihood"]
    assert [heading for heading in forced.cells if "KL" in heading or "gold" in heading] == shown
    assert [heading for heading in alone.cells if "KL" in heading] == shown[:1]
    row = forced.cells[forced.cells["method"] == ARM].iloc[0]
    assert [row[heading] for heading in shown] == ["0.10000", "0.20000", "0.30000", "-0.500"]
