"""Scoring a folder of official predictions: numbers, output, and all errors."""

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.metrics import dataset_score
from eval.cli import main
from eval.score import as_text, score_folder
from tests.eval import official

SCORED = official.LONGBENCH / "scored"
GOOD = {"pred": "cat", "answers": ["cat"], "all_classes": None, "length": 3}


def write(folder: Path, name: str, *rows: object) -> Path:
    """A prediction file; rows that are strings are written unchanged."""
    file = folder / f"{name}.jsonl"
    file.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows),
        encoding="utf-8",
    )
    return file


@official.needs(SCORED)
def test_real_answers_get_the_official_scores():
    rows = official.shared_rows("scored")
    scores = score_folder(SCORED)
    expected = {
        name: round(100 * sum(r["official_score"] for r in of) / len(of), 2)
        for name, of in rows.items()
    }
    assert {d["dataset"]: d["score"] for d in scores["datasets"]} == expected
    assert {d["dataset"]: d["rows"] for d in scores["datasets"]} == {
        name: len(of) for name, of in rows.items()
    }
    with_rouge = {d["dataset"] for d in scores["datasets"] if d["rouge_score"] is not None}
    assert with_rouge == {"gov_report", "qmsum", "multi_news", "samsum"}
    assert [len(task["datasets"]) for task in scores["tasks"]] == [3, 3, 3, 3, 2, 2]
    for task in scores["tasks"]:
        assert task["score"] == pytest.approx(
            fmean(expected[name] for name in task["datasets"]), abs=0.00501
        )


def test_scores_by_hand(tmp_path):
    write(
        tmp_path,
        "qasper",
        GOOD,
        GOOD | {"pred": "dog"},
        GOOD | {"pred": "cat sat", "answers": ["dog", "cat"]},
    )
    write(tmp_path, "narrativeqa", GOOD)
    write(tmp_path, "samsum", GOOD | {"pred": "\n\ncat dog\nbird", "answers": ["cat"]})
    scores = score_folder(tmp_path)
    assert [(d["dataset"], d["score"], d["rouge_score"]) for d in scores["datasets"]] == [
        ("narrativeqa", 100, None),
        ("qasper", 55.56, None),  # (1 + 0 + 2/3) / 3
        ("samsum", 66.67, 66.67),  # of the first line: P 1/2, R 1
    ]
    assert [(t["task"], t["score"], t["datasets"], t["missing"]) for t in scores["tasks"]] == [
        ("single_doc_qa", 77.78, ["narrativeqa", "qasper"], ["multifieldqa_en"]),
        ("few_shot", 66.67, ["samsum"], ["trec", "triviaqa"]),
    ]


def test_last_lines_class_names_hold_for_all_lines(tmp_path):
    """As in the official eval.py, which reads them again with each line and scores after the
    last.
    """
    row = {"pred": "City and State", "answers": ["City"], "length": 3}
    write(
        tmp_path, "trec", row | {"all_classes": ["City", "State"]}, row | {"all_classes": ["City"]}
    )
    assert score_folder(tmp_path)["datasets"][0]["score"] == 100.0


def test_embedded_suite_is_scored_in_its_own_tasks(tmp_path):
    names = [
        name
        for name, dataset in DATASETS.items()
        if dataset.suite == "embedded" and dataset.metric == "f1"
    ]
    write(tmp_path, names[0], GOOD)
    write(tmp_path, "qasper", GOOD | {"pred": "dog"})
    tasks = [
        (task["suite"], task["datasets"], task["score"]) for task in score_folder(tmp_path)["tasks"]
    ]
    assert tasks == [("longbench", ["qasper"], 0.0), ("embedded", names[:1], 100.0)]


def test_chinese_datasets_and_other_files_are_left_out(tmp_path):
    write(tmp_path, "qasper", GOOD)
    write(tmp_path, "dureader", "not even JSON")
    (tmp_path / "result.json").write_text("{}")
    scores = score_folder(tmp_path)
    assert [d["dataset"] for d in scores["datasets"]] == ["qasper"]
    assert scores["ignored"] == ["dureader.jsonl"]
    assert "dureader.jsonl" in as_text(scores)


def test_lines_are_read_as_by_official_readers(tmp_path):
    # no length, no _id
    row = {"pred": "cat\r\u2028cat", "answers": ["cat\u2028cat"], "all_classes": None}
    text = json.dumps(row, ensure_ascii=False)
    (tmp_path / "qasper.jsonl").write_bytes(f"{text}\r\n\n{text}".encode())
    dataset = score_folder(tmp_path)["datasets"][0]
    assert (dataset["rows"], dataset["score"]) == (2, 100.0)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "no <dataset>.jsonl"),
        ({"dureader": [GOOD]}, "only dureader.jsonl"),
        ({"hotpot": [GOOD]}, "unknown dataset 'hotpot'"),
        ({"qasper": []}, "no lines"),
        ({"trec": [GOOD]}, "trec.jsonl:1: .*all_classes"),
        *(
            ({"qasper": [GOOD, row, GOOD]}, f"qasper.jsonl:2: .*{reason}")
            for row, reason in (
                ("{", "JSON"),
                ({key: GOOD[key] for key in ("answers", "all_classes")}, "field 'pred'"),
                ({key: GOOD[key] for key in ("pred", "answers")}, "field 'all_classes'"),
                (GOOD | {"pred": None}, "field 'pred'"),
                (GOOD | {"answers": "cat"}, "field 'answers'"),
                (GOOD | {"answers": []}, "answers"),
            )
        ),
    ],
)
def test_bad_folder_or_line_ends_with_one_message_and_code_2(tmp_path, capsys, files, reason):
    for name, rows in files.items():
        write(tmp_path, name, *rows)
    assert main(["score", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(f"error: {tmp_path}.*{reason}.*\n", captured.err)


def test_command_prints_a_table_and_json(tmp_path, capsys):
    write(tmp_path, "qasper", GOOD, GOOD | {"pred": "dog"})
    assert main(["score", str(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "qasper single_doc_qa f1 2 50.00" in lines
    assert "single_doc_qa longbench 1 of 3 50.00 without narrativeqa, multifieldqa_en" in lines
    assert main(["score", str(tmp_path), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["datasets"][0]["dataset"] == "qasper"
    assert (
        scores["datasets"][0]["score"] == scores["tasks"][0]["score"] == dataset_score([1.0, 0.0])
    )
