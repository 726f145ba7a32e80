"""The tables of results/smollm2/*.csv from their rows, by arithmetic alone."""

import csv
import re
from math import exp, log

import pytest
import yaml

from tests.conftest import ROOT

FOLDER = ROOT / "results" / "smollm2"
COLUMNS = {"the first token": "kl", "the baseline's answer": "answer_kl", "the gold answer": "gold_kl"}
ARMS = {
    "LazyLLM": "lazy schedule",
    "with": "lazy schedule",
    "without revival": "lazy_without_revival schedule",
    "static pruning": "static_pruning keep",
    "random drop": "random_drop keep",
}
QUESTIONS = (ROOT / "docs/questions.md").read_text()
PERCENTILE = re.findall(r"^\| (.+?) \| `(.+)` \| (.+) \|$", QUESTIONS, re.MULTILINE)
TABLE = (FOLDER / "README.md").read_text().partition("| ideal speedup |")[2].partition("\n\n")[0]
LINES = [line.strip("| ").split(" | ") for line in f"| ideal speedup |{TABLE}".splitlines()]


def rows_of(arm: str, file: str = "revival.csv") -> dict[str, dict[str, str]]:
    with (FOLDER / file).open(encoding="utf-8", newline="") as opened:
        return {row["dataset"]: row for row in csv.DictReader(opened) if row["arm"] == arm}


@pytest.mark.parametrize("cells", LINES[2:], ids=lambda cells: " ".join(cells[:2]))
def test_ratios_are_geometric_means_of_the_rows(cells: list[str]) -> None:
    speed, measure, *ratios = cells
    for heading, ratio in zip(LINES[0][2:], ratios, strict=True):
        first, second = heading.split(" / ")
        above, below = (rows_of(f"{ARMS[name]}={speed}") for name in (first, second))
        assert len(above) == len(below) == 16
        column = COLUMNS[measure]
        logs = [log(float(above[name][column]) / float(below[name][column])) for name in above]
        mean, least, most = map(float, re.findall(r"[\d.]+", ratio))
        assert mean == pytest.approx(exp(sum(logs) / 16), abs=0.006)
        assert least <= mean <= most


@pytest.mark.parametrize(("name", "schedule", "cells"), PERCENTILE)
def test_schedules_of_one_speed_are_beside_equal_ratios(name: str, schedule: str, cells: str) -> None:
    stored, *ratios = cells.split(" | ")
    rows, equal = (rows_of(arm.replace(" ", "_"), "percentile.csv") for arm in (name, "uniform"))
    assert len(rows) == len(equal) == int(re.findall(r"as many bytes: (\d+) rows", QUESTIONS)[0])
    assert all(rows[dataset]["prompt_sha256"] == equal[dataset]["prompt_sha256"] for dataset in equal)
    speedups = [float(row["ideal_speedup"]) for row in rows.values()]
    assert sum(speedups) / len(rows) == pytest.approx(1.25 if name == "static pruning" else 2, rel=0.02)
    assert float(stored) == pytest.approx(sum(float(row["stored"]) for row in rows.values()) / len(rows), abs=0.006)
    for column, ratio in zip(("kl", "answer_kl", "gold_kl"), ratios, strict=True):
        mean, *ends = map(float, re.findall(r"[\d.]+", ratio))
        logs = [log(float(rows[dataset][column]) / float(equal[dataset][column])) for dataset in equal]
        assert mean == pytest.approx(exp(sum(logs) / len(rows)), abs=0.006)
        assert sorted([mean, *ends]) == [ends[0], mean, ends[1]] if ends else name == "uniform"


def test_schedules_of_one_speed_are_those_of_the_experiment() -> None:
    asked = yaml.safe_load((ROOT / "conf/experiment/percentile.yaml").read_text(encoding="utf-8"))["compare"]
    assert {name.replace(" ", "_") for name, _, _ in PERCENTILE} == set(asked)
    for name, shown, _ in PERCENTILE:
        arm, (layers, _, keep) = asked[name.replace(" ", "_")], shown.partition(": ")
        schedule = arm.get("schedule") or {arm["layer"]: arm["keep"]}
        assert layers.split(", ") == [str(layer) for layer in schedule]
        ratios = [str(ratio) for ratio in schedule.values()]
        assert keep.split(", ") == ratios or (keep == ratios[0] and len(set(ratios)) == 1)
