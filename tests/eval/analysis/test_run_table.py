from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eval.store.record import Failure, Record
from rich.console import Console

from eval.analysis.run_table import compared_table, run_json, run_table
from eval.analysis.table import Table
from eval.store.folder import open_store
from eval.store.results import Results
from tests.eval.analysis.made import stored
from tests.eval.store.made import measurement


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


def results_of(records: list[Record], folder: Path = Path("none"), failures: list[Failure] | None = None) -> Results:
    if failures:
        with open_store(folder, {"method": {}}, {}) as store:
            for failure in failures:
                store.fail(failure)
    return Results([stored(records, folder=folder)])


def rows_of(table: Table) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in table.frame.to_dict("records")}


def console_text(table: Table) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table.to_rich())
    return console.export_text()


def test_run_table_has_datasets_tasks_and_their_mean() -> None:
    """Every value comes from `eval.store.aggregate`, whose tests check them."""
    table = run_table(results_of(RECORDS), "")
    rows, shown = rows_of(table), list(table.cells.iloc[:, 0])
    assert list(rows) == ["hotpotqa", "musique", "multi_doc_qa", "trec", "few_shot", "mean over tasks"]
    assert shown == ["hotpotqa", "musique", "**multi_doc_qa**", "**few_shot**: trec", "**mean over tasks**"]
    assert [rows[name]["examples"] for name in rows] == [2, 1, 3, 1, 1, 4]
    assert rows["multi_doc_qa"]["score"] == pytest.approx((50 + 33.33) / 2)
    assert rows["mean over tasks"]["ttft_speedup"] == 2
    assert rows["hotpotqa"]["score_low"] == 0
    assert str(rows["mean over tasks"]["score_low"]) == "nan"  # musique has one example, so there is no interval
    alone = rows_of(run_table(results_of(RECORDS[:2]), ""))
    assert list(alone) == ["hotpotqa", "multi_doc_qa"]  # no mean over one task
    assert alone["hotpotqa"] == pytest.approx(rows["hotpotqa"], nan_ok=True)


def test_run_table_without_baseline_has_no_speedup() -> None:
    table = run_table(results_of([replace(record, baseline=None) for record in RECORDS]), "a run")
    assert table.frame[["ttft_speedup", "baseline_score"]].isna().all(axis=None)
    assert set(table.cells["TTFT speedup"]) == {"-"}
    assert "No speedup" in table.caption


def test_run_table_has_the_same_numbers_in_every_form() -> None:
    table = run_table(results_of(RECORDS), "a run")
    lines = list(csv.DictReader(io.StringIO(table.to_csv())))
    content = json.loads(run_json(table, {"identity": {"seed": 0}}))
    assert content["identity"] == {"seed": 0}
    text, markdown = console_text(table), table.to_markdown()
    assert "\nScores 0 to 100." in text
    for row, line, in_json in zip(table.frame.to_dict("records"), lines, content["rows"], strict=True):
        assert line["name"] == in_json["name"] == row["name"]
        assert float(line["score"]) == in_json["score"]["mean"] == row["score"]
        shown = f"{row['score']:.2f}"
        assert any(row["name"] in line and shown in line for line in text.splitlines())
        assert any(row["name"] in line and shown in line for line in markdown.splitlines())
    assert content["rows"][0]["score"] == {"mean": 50.0, "low": 0.0, "high": 100.0}
    assert content["rows"][-1]["score"]["low"] is None
    assert content["rows"][0]["kl"] is None


def test_compared_table_joins_methods_by_task() -> None:
    others = [replace(record, method=record.baseline) for record in RECORDS if record.dataset != "trec"]
    table = compared_table({"fast": results_of(RECORDS), "slow": results_of(others)}, "two")
    by_key = {(line["task"], line["method"]): line for line in csv.DictReader(io.StringIO(table.to_csv()))}
    assert list(by_key) == [
        ("multi_doc_qa", "baseline"), ("multi_doc_qa", "fast"), ("multi_doc_qa", "slow"),
        ("few_shot", "baseline"), ("few_shot", "fast"),
        ("mean over tasks", "baseline"), ("mean over tasks", "fast"),
    ]  # fmt: skip
    assert float(by_key["multi_doc_qa", "fast"]["score"]) == pytest.approx((50 + 33.33) / 2)
    assert float(by_key["multi_doc_qa", "slow"]["score"]) == float(by_key["multi_doc_qa", "baseline"]["score"]) == 25
    assert float(by_key["multi_doc_qa", "fast"]["ttft_speedup"]) == 3
    assert float(by_key["multi_doc_qa", "slow"]["ttft_speedup"]) == 1
    text, markdown = console_text(table), table.to_markdown()
    for task, method in by_key:
        assert sum(task in line and method in line for line in text.splitlines()) == 1
        assert f"| {task} | {method} |" in markdown
    long = compared_table({"a method, with=many, settings=given" * 2: results_of(RECORDS)}, "one")
    assert "…" not in console_text(long)  # its name takes several lines, and no number is cut


def test_failures_are_counted_and_score_zero_in_a_column_of_their_own(tmp_path: Path) -> None:
    names = (("hotpotqa", "x"), ("hotpotqa", "y"), ("2wikimqa", "x"), ("trec", "x"))
    failures = [Failure(*name, "NaN", "") for name in names]
    failed = results_of(RECORDS, tmp_path, failures)
    table = run_table(failed, "title")
    rows = rows_of(table)
    assert {name: row["failed"] for name, row in rows.items()} == {
        "hotpotqa": 2, "musique": 0, "multi_doc_qa": 3, "trec": 1, "few_shot": 1, "mean over tasks": 4,
    }  # fmt: skip
    assert rows["hotpotqa"]["score"] == 50  # of those that were measured
    assert rows["hotpotqa"]["score_failed_as_zero"] == 25
    assert rows["trec"]["score_failed_as_zero"] == 50
    multi_doc_qa = (25 + 33.33 + 0) / 3  # of 2wikimqa nothing was measured
    assert rows["multi_doc_qa"]["score_failed_as_zero"] == pytest.approx(multi_doc_qa)
    assert rows["mean over tasks"]["score_failed_as_zero"] == pytest.approx((multi_doc_qa + 50) / 2)
    assert list(table.cells)[2:6] == ["score", "failed", "score, failed as 0", "baseline score"]
    assert table.cells.iloc[0, 2:5].tolist() == ["50.00", "2", "25.00"]

    compared = compared_table({"static": results_of(RECORDS), "lazy": failed}, "two")
    of_task = compared.cells[compared.cells["task"] == "multi_doc_qa"].set_index("method")
    assert of_task["failed"].to_dict() == {"baseline": "-", "static": "0", "lazy": "3"}
    assert of_task.loc["lazy", "score, failed as 0"] == f"{multi_doc_qa:.2f}"
    text = f"4 examples failed, left out here; counted as 0, the score is {(multi_doc_qa + 50) / 2:.2f}."
    assert text in table.caption
    assert f"\nlazy: {text}" in compared.caption
    for table in (run_table(results_of(RECORDS), ""), compared_table({"a": results_of(RECORDS)}, "")):
        assert "failed" not in table.to_markdown()


def test_run_table_leaves_out_failures_of_examples_that_are_not_planned(tmp_path: Path) -> None:
    failed = results_of(RECORDS, tmp_path, [Failure("trec", "b", "NaN", ""), Failure("trec", "c", "NaN", "")])
    (tmp_path / "examples.json").write_text(json.dumps({"trec": ["a", "b"]}))
    assert rows_of(run_table(failed, ""))["trec"]["failed"] == 1


def test_run_table_shows_no_interval_of_few_examples_and_counts_cut_prompts() -> None:
    alike = [pair("hotpotqa", str(number), (0.5, 0.125, 0.5), (1.0, 0.25, 1.0)) for number in range(5)]
    shown = [run_table(results_of(records), "").cells.iloc[0] for records in (alike[:4], alike)]
    assert [row["score"] for row in shown] == ["50.00", "50.00 ±0.00"]
    assert [row["TTFT, ms"] for row in shown] == ["125.0", "125.0"]  # no column for its interval
    assert "longer than" not in run_table(results_of(alike), "").caption
    cut = replace(alike[0], prompt_tokens_before_truncation=alike[0].prompt_tokens + 1)
    assert "1 of 5 prompts are longer than model.max" in run_table(results_of([cut, *alike[1:]]), "").caption
