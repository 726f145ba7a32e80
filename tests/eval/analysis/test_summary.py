from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from eval.analysis.summary import Summary, SummaryRow, compared_table, summarise, summary_table, to_json
from eval.store.record import Failure, Record
from tests.eval.store.made import measurement


def _rows(summary: Summary) -> dict[str, SummaryRow]:
    return {row.name: row for row in summary.rows}


def pair(dataset: str, name: str, method: tuple[float, float, float], baseline: tuple[float, float, float]) -> Record:
    """A record from (score, TTFT, total) of the method and of its baseline."""
    measured = [measurement(score=score, ttft_s=ttft, total_s=total) for score, ttft, total in (method, baseline)]
    return Record(dataset, name, "", 10, 10, measured[0], measured[1])


RECORDS = [
    pair("hotpotqa", "a", (1.0, 1.0, 2.0), (0.5, 3.0, 4.0)),
    pair("hotpotqa", "b", (0.0, 1.0, 2.0), (0.5, 1.0, 2.0)),
    pair("musique", "a", (1 / 3, 1.0, 1.0), (0.0, 4.0, 1.5)),
    pair("trec", "a", (1.0, 2.0, 2.0), (1.0, 2.0, 2.0)),
]


def test_rows_and_their_values() -> None:
    """Every value comes from `eval.store.aggregate`, whose tests check them."""
    rows = _rows(summarise(RECORDS))
    assert list(rows) == ["hotpotqa", "musique", "multi_doc_qa", "trec", "few_shot", "mean over tasks"]
    assert [rows[name].examples for name in rows] == [2, 1, 3, 1, 1, 4]
    assert rows["multi_doc_qa"]["score"].mean == pytest.approx((50 + 33.33) / 2)
    assert rows["mean over tasks"]["ttft_speedup"].mean == 2
    assert rows["hotpotqa"]["score"].low is not None
    assert rows["mean over tasks"]["score"].low is None  # one example has no interval, nor do means that include it


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    alone = _rows(summarise([record for record in RECORDS if record.dataset == "hotpotqa"]))
    assert alone["hotpotqa"] == _rows(summarise(RECORDS))["hotpotqa"]


def test_without_a_baseline_there_is_no_speedup() -> None:
    summary = summarise([replace(record, baseline=None) for record in RECORDS])
    assert all(row.values["ttft_speedup"] is None and row.values["baseline_score"] is None for row in summary.rows)
    assert "No speedup" in summary_table(summary, "a run").to_markdown()


def test_the_same_numbers_in_every_form() -> None:
    summary = summarise(RECORDS)
    lines = list(csv.DictReader(io.StringIO(summary_table(summary, "").to_csv())))
    content = json.loads(to_json(summary, {"identity": {"seed": 0}}))
    assert content["identity"] == {"seed": 0}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(summary_table(summary, "a run").to_rich())
    text, markdown = console.export_text(), summary_table(summary, "a run").to_markdown()
    for row, line, stored in zip(summary.rows, lines, content["rows"], strict=True):
        assert (line["name"], stored["name"]) == (row.name, row.name)
        assert float(line["score"]) == stored["score"]["mean"] == row["score"].mean
        shown = f"{row['score'].mean:.2f}"
        assert any(row.name in line and shown in line for line in text.splitlines())
        assert any(row.name in line and shown in line for line in markdown.splitlines())


def test_no_record_no_table() -> None:
    with pytest.raises(ValueError, match="no record"):
        summarise([])


def test_a_comparison_joins_methods_by_task() -> None:
    one = summarise(RECORDS)
    other = summarise([replace(record, method=record.baseline) for record in RECORDS if record.dataset != "trec"])
    lines = list(csv.DictReader(io.StringIO(compared_table({"fast": one, "slow": other}, "").to_csv())))
    by_key = {(line["task"], line["method"]): line for line in lines}
    assert list(by_key) == [
        ("multi_doc_qa", "baseline"), ("multi_doc_qa", "fast"), ("multi_doc_qa", "slow"),
        ("few_shot", "baseline"), ("few_shot", "fast"),
        ("mean over tasks", "baseline"), ("mean over tasks", "fast"),
    ]  # fmt: skip
    assert float(by_key["multi_doc_qa", "fast"]["score"]) == pytest.approx((50 + 33.33) / 2)
    assert float(by_key["multi_doc_qa", "slow"]["score"]) == float(by_key["multi_doc_qa", "baseline"]["score"]) == 25
    assert float(by_key["multi_doc_qa", "fast"]["ttft_speedup"]) == 3
    assert float(by_key["multi_doc_qa", "slow"]["ttft_speedup"]) == 1
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(compared_table({"fast": one, "slow": other}, "two").to_rich())
    text, markdown = console.export_text(), compared_table({"fast": one, "slow": other}, "two").to_markdown()
    for task, method in by_key:
        assert sum(task in line and method in line for line in text.splitlines()) == 1
        assert f"| {task} | {method} |" in markdown


def test_failures_are_counted_and_the_score_shown_with_them_as_zero() -> None:
    failures = [Failure(dataset, "x", "NaN", "") for dataset in ("hotpotqa", "hotpotqa", "2wikimqa", "trec")]
    summary = summarise(RECORDS, failures)
    rows = _rows(summary)
    assert {name: row.failed for name, row in rows.items()} == {
        "hotpotqa": 2, "musique": 0, "multi_doc_qa": 3, "trec": 1, "few_shot": 1, "mean over tasks": 4,
    }  # fmt: skip
    assert rows["hotpotqa"]["score"].mean == 50  # of those that were measured
    assert rows["hotpotqa"].score_failed_as_zero == 25
    assert rows["trec"].score_failed_as_zero == 50
    multi_doc_qa = (25 + 33.33 + 0) / 3  # of 2wikimqa nothing was measured
    assert rows["multi_doc_qa"].score_failed_as_zero == pytest.approx(multi_doc_qa)
    assert rows["mean over tasks"].score_failed_as_zero == pytest.approx((multi_doc_qa + 50) / 2)
    text = f"4 examples failed and are left out; if they count as 0, the score is {(multi_doc_qa + 50) / 2:.2f}."
    assert text in summary_table(summary, "title").to_markdown()
    assert f"lazy: {text}" in compared_table({"static": summarise(RECORDS), "lazy": summary}, "title").to_markdown()


def test_tables_show_the_score_with_and_without_what_failed() -> None:
    """Side by side in every form; without failures there are no such columns."""
    summary = summarise(RECORDS, [Failure("hotpotqa", "x", "NaN", ""), Failure("hotpotqa", "y", "NaN", "")])
    markdown = summary_table(summary, "a run").to_markdown()
    assert "| score | failed | score, failed as 0 | baseline score |" in markdown
    (line,) = [line.split(" | ") for line in markdown.splitlines() if line.startswith("| hotpotqa |")]
    assert line[1] == "2"
    assert line[2].startswith("50.00")
    assert line[3:5] == ["2", "25.00"]
    compared = compared_table({"lazy": summary, "static": summarise(RECORDS)}, "two").to_markdown()
    lines = {tuple(line.split(" | ")[:2]): line.split(" | ") for line in compared.splitlines()}
    assert lines["| multi_doc_qa", "lazy"][4:6] == ["2", f"{(25 + 33.33) / 2:.2f}"]
    assert lines["| multi_doc_qa", "static"][4:6] == ["0", f"{(50 + 33.33) / 2:.2f}"]
    assert lines["| multi_doc_qa", "baseline"][4:6] == ["-", "-"]
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(compared_table({"lazy": summary}, "").to_csv()))}
    assert rows["lazy"]["failed"] == "2"
    for untouched in (
        summary_table(summarise(RECORDS), "a run").to_markdown(),
        compared_table({"a": summarise(RECORDS)}, "one").to_markdown(),
    ):
        assert "failed" not in untouched


def test_few_examples_have_no_interval_and_cut_prompts_are_counted() -> None:
    alike = [pair("hotpotqa", str(number), (0.5, 0.125, 0.5), (1.0, 0.25, 1.0)) for number in range(5)]
    shown = [summary_table(summarise(records), "").cells.iloc[0] for records in (alike[:4], alike)]
    assert [row["score"] for row in shown] == ["50.00", "50.00 ±0.00"]
    assert [row["TTFT, ms"] for row in shown] == ["125.0", "125.0"]  # no column for its interval
    assert "longer than" not in summary_table(summarise(alike), "").caption
    cut = replace(alike[0], prompt_tokens_before_truncation=alike[0].prompt_tokens + 1)
    assert "1 of 5 prompts are longer than model.max" in summary_table(summarise([cut, *alike[1:]]), "").caption
