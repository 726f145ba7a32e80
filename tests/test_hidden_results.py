"""The table of docs/turns.md on hidden questions from its rows, by arithmetic alone."""

import csv
import re
from math import exp, log

import pytest

from tests.conftest import ROOT

ARMS = {
    "LazyLLM": "lazy",
    "LazyLLM without revival": "lazy_without_revival",
    "static pruning": "static_pruning",
    "GemFilter": "gemfilter",
    "FastKV": "fastkv",
}
PAGE = (ROOT / "docs" / "turns.md").read_text(encoding="utf-8")
TABLE = re.search(r"\| method \| question seen \|.*\n\|.*\n((?:\|.*\n)+)", PAGE)
LINES = [line.strip("| ").split(" | ") for line in TABLE[1].splitlines()] if TABLE else []


def answer_kl(question: str, arm: str) -> dict[str, float]:
    """By the hash of the prompt's tokens."""
    with (ROOT / "results" / "smollm2" / "hidden.csv").open(encoding="utf-8", newline="") as opened:
        rows = [row for row in csv.DictReader(opened) if (row["question"], row["arm"]) == (question, arm)]
    return {row["prompt_sha256"]: float(row["answer_kl"]) for row in rows}


def test_table_has_all_methods() -> None:
    assert [line[0] for line in LINES] == list(ARMS)


@pytest.mark.parametrize("cells", LINES, ids=lambda cells: cells[0])
def test_means_and_ratios_are_those_of_the_rows(cells: list[str]) -> None:
    name, *shown = cells
    seen, hidden = (answer_kl(question, ARMS[name]) for question in ("seen", "hidden"))
    assert seen.keys() == hidden.keys()  # the same prompts, token by token
    assert len(seen) == int(re.findall(r"(\d+) rows", PAGE)[0])
    for cell, kl in zip(shown, (seen, hidden), strict=False):
        assert float(cell) == pytest.approx(sum(kl.values()) / len(kl), abs=0.0006)
    mean, least, most = map(float, re.findall(r"[\d.]+", shown[2]))
    logs = [log(hidden[prompt] / seen[prompt]) for prompt in seen]
    assert mean == pytest.approx(exp(sum(logs) / len(logs)), abs=0.006)
    assert least <= mean <= most
