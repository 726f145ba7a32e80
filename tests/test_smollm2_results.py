"""results/smollm2's table from its rows, by arithmetic alone."""

import csv
import re
from math import exp, log

import pytest

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
TABLE = (FOLDER / "README.md").read_text().partition("| ideal speedup |")[2].partition("\n\n")[0]
LINES = [line.strip("| ").split(" | ") for line in f"| ideal speedup |{TABLE}".splitlines()]


def rows_of(arm: str) -> dict[str, dict[str, str]]:
    with (FOLDER / "revival.csv").open(encoding="utf-8", newline="") as opened:
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
