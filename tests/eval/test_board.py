"""The board: committed results agree with their answers; results that disagree or lack their origin are refused."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval import cli
from eval.benchmarks.datasets import DATASETS, load_rows
from eval.board import board_page, read_board
from eval.store.folder import PLANNED
from eval.store.visit import Visit
from tests.conftest import ROOT
from tests.eval.store.made import LAZY, PROVENANCE, write_run
from tests.eval.store.visits import measurement, turn

pytestmark = pytest.mark.usefixtures("two_have_an_interval")

BOARD = ROOT / "results" / "board"
NUMBER = re.compile(r"\d+\.\d+")


def answer(
    row: str = "row-1", text: str = "because", score: float = 1.0, dataset: str = "hotpotqa", gold: str = "because"
) -> Visit:
    """A visit with this gold answer, which the baseline gives."""
    answers = {
        "baseline": [measurement(gold, 1.0, ttft_s=0.4)],
        "lazy": [measurement(text, score, kl=0.25)],
    }
    asked = [replace(turn(), answers=[gold])]
    return Visit(dataset=dataset, id=row, turns=asked, order=["baseline", "lazy"], answers=answers)


# By hand: in "because of", one of two words is right, and the one gold word is found: 2 * (1/2 * 1) / (1/2 + 1).
TWO = [answer(), answer("row-2", "because of", 2 / 3)]


def submit(folder: Path, visits: list[Visit] = TWO, **changes: Any) -> Path:
    """A submission of one raw run; returns the run's folder. changes: of its identity and provenance."""
    usual: dict[str, Any] = {"data": {"hotpotqa": "aa bb v1"}}
    run = write_run(folder / "tiny-lazy-abc", visits, **(usual | changes))
    (run / PLANNED).write_text(json.dumps({visits[0].dataset: [visit.id for visit in visits]}))
    (folder / "README.md").write_text("# Two rows\n\nBy hand.\n")
    return run


def refused(board: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The message with which the command refuses a board."""
    assert cli.main(["board", str(board)]) == 2
    assert not (board / "README.md").exists()
    return capsys.readouterr().err


@pytest.mark.slow
def test_committed_page_agrees_with_committed_answers() -> None:
    board = read_board(BOARD)
    assert [problem for submission in board for problem in submission.problems] == []
    page, committed = board_page(board, BOARD), (BOARD / "README.md").read_text(encoding="utf-8")
    assert NUMBER.sub("#", page) == NUMBER.sub("#", committed), "make it anew: lazyllm-bench board"
    numbers, expected = ([float(number) for number in NUMBER.findall(text)] for text in (page, committed))
    assert numbers == pytest.approx(expected, abs=0.011)  # a processor's order of summation may change the last digit
    links = re.findall(r"\]\((.*?)\)", page)
    assert links
    assert [link for link in links if not (BOARD / link).is_dir()] == []


def test_submission_gets_its_row_also_gzipped(tmp_path) -> None:
    submit(tmp_path / "raw" / "board" / "two")
    out = tmp_path / "page" / "board.md"
    assert cli.main(["board", str(tmp_path / "raw" / "board"), "--out", str(out)]) == 0
    rows = [line.strip("| ").split(" | ") for line in out.read_text().splitlines() if line.startswith("|")]
    lazy = dict(zip(rows[0], next(row for row in rows if row[0].startswith("lazy")), strict=True))
    assert lazy["score"].startswith("83.33 ±")  # (100 + 66.67) / 2
    assert lazy["KL, nats"] == "0.25000 ±0.00000"
    assert lazy["TTFT speedup"] == "2.00 ±0.00"  # 0.4 s against 0.2 s
    assert lazy["runs"] == "[two abc](../raw/board/two/tiny-lazy-abc)"
    board = tmp_path / "raw" / "board"
    page = board_page(read_board(board), board)
    file = board / "two" / "tiny-lazy-abc" / "visits.jsonl"
    (file.parent / "visits.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()
    assert board_page(read_board(board), board) == page


@pytest.mark.parametrize("arm", ["lazy", "baseline"])
def test_board_refuses_changed_scores_and_answers(tmp_path, capsys, arm: str) -> None:
    run = submit(tmp_path / "board" / "two")
    first, second = map(json.loads, (run / "visits.jsonl").read_text().splitlines())
    first["answers"][arm][0]["text"] = "because of"
    second["answers"][arm][0]["score"] = 0.9
    (run / "visits.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (first, second)))
    said = refused(tmp_path / "board", capsys)
    true = {"lazy": "0.666667", "baseline": "1"}[arm]
    assert f"hotpotqa, row row-1, {arm}: stored score 1, computed 0.666667" in said
    assert f"hotpotqa, row row-2, {arm}: stored score 0.9, computed {true}" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"provenance": PROVENANCE | {"git_commit": None}}, "lacks git_commit"),
        ({"provenance": PROVENANCE | {"git_commit": "abc+changes"}}, "uncommitted changes"),
        ({"provenance": {"git_commit": "abc"}}, "lacks versions, machine"),
        ({"data": {}}, "lacks the data hash of hotpotqa"),
        (
            {"visits": [replace(TWO[0], turns=[replace(turn(), answers=[])])]},
            "row-1, lazy: cannot be scored here: answers is empty",
        ),
    ],
)
def test_board_refuses_runs_without_provenance_or_gold_answers(tmp_path, capsys, changes, said: str) -> None:
    submit(tmp_path / "board" / "two", **changes)
    assert said in refused(tmp_path / "board", capsys)


def test_board_refuses_removed_records_and_edited_runs(tmp_path, capsys) -> None:
    run = submit(tmp_path / "board" / "two")
    (run / PLANNED).write_text('{"hotpotqa": ["row-1", "row-2", "row-3"]}')
    said = refused(tmp_path / "board", capsys)
    assert "no record of 2 planned answers, such as hotpotqa, row row-3, baseline" in said
    (run / PLANNED).unlink()
    about = json.loads((run / "run.json").read_text())
    about["identity"]["arms"]["lazy"]["method"] = LAZY | {"schedule": {"2": 0.1}}
    (run / "run.json").write_text(json.dumps(about))
    said = refused(tmp_path / "board", capsys)
    assert "lacks examples.json" in said
    assert "the fingerprint differs from the identity's" in said
    (run.parent / "README.md").write_text("no title")
    assert "expected a title in its first line" in refused(tmp_path / "board", capsys)


def test_class_names_come_from_the_rows_of_the_run(tmp_path, capsys) -> None:
    """Half a point for an answer that names two classes, as the official metric gives it."""
    dataset = DATASETS["shots"]
    rows = load_rows(dataset)
    row = rows.examples[0]
    gold = row.answers[0]
    text = f"{gold} {next(name for name in row.all_classes if name not in gold and gold not in name)}"
    visits = [answer(row.id, text, 0.5, "shots", gold)]
    submit(tmp_path / "board" / "two", visits, data={"shots": rows.data_sha256[:16] + " b"})
    assert [problem for submission in read_board(tmp_path / "board") for problem in submission.problems] == []
    submit(tmp_path / "other" / "two", visits, data={"shots": "aa bb v1"})
    said = refused(tmp_path / "other", capsys)
    assert "class names are in the rows of shots, which differ here from the run's" in said
