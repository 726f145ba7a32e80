"""docs/questions.md: what is computed by hand there, and its table of schedules, recomputed by
arithmetic alone.
"""

import csv
import re
from math import ceil, exp, log

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")
# Llama 2 7B in 16 bits, as many key heads as heads
LAYERS, WIDTH, PROMPT, BYTES = (32, 4096, 3500, 2)
PERCENTILE = re.findall(r"^\| (.+?) \| `(.+)` \| (.+) \|$", PAGE, re.MULTILINE)
# "-", or layers and the share that they keep; and four numbers
_CELLS = r"((?:-|[\d, ]+: [\d.]+)(?: \| [^|]+){4})"
SHIPPED = re.findall(
    rf"^\| (?:baseline|LazyLLM, .*?|static pruning, .*?) \| {_CELLS} \|$", PAGE, re.MULTILINE
)


@pytest.mark.parametrize("cells", [row.split(" | ") for row in SHIPPED])
def test_bytes_that_a_prefill_server_ships(cells: list[str]) -> None:
    """Layer by layer: the tokens that it runs; in the end, those that wait. Static pruning
    clears the first layers.
    """
    cuts, *numbers = cells
    layers, _, keep = cuts.partition(": ")
    after = {int(layer) for layer in layers.split(", ") if layer != "-"}
    tokens, stored = PROMPT, []
    for layer in range(1, LAYERS + 1):
        stored.append(tokens)
        if layer in after:
            tokens = ceil(round(tokens * float(keep), 6))
    is_static = after == {2}
    stored = [tokens] * LAYERS if is_static else stored
    kv = sum(2 * WIDTH * BYTES * n for n in stored)
    aux = 0 if is_static else (PROMPT - tokens) * WIDTH * BYTES
    whole = 2 * LAYERS * WIDTH * BYTES
    expected = [kv / 1e9, aux / 1e9, (kv + aux) / PROMPT / 1e6, 100 * (kv + aux) / PROMPT / whole]
    for cell, value in zip(numbers, expected, strict=True):
        digits = len(cell.partition(".")[2])
        assert float(cell) == pytest.approx(value, abs=0.51 * 10**-digits)


def test_four_ways_to_ship_are_compared() -> None:
    assert len(SHIPPED) == 4


@pytest.mark.parametrize(
    ("share", "layers", "width", "keys"),
    [
        ("1.6 % for Llama 2 7B", 32, 4096, 4096),
        ("6.3 % for Llama 3.1 8B", 32, 4096, 1024),
        ("5.0 % here", 30, 576, 192),
    ],
)
def test_the_aux_cache_is_at_most_this_share_of_the_kv_cache(
    share: str, layers: int, width: int, keys: int
) -> None:
    assert share in PAGE
    assert float(share.partition(" ")[0]) == pytest.approx(
        100 * width / (2 * layers * keys), abs=0.051
    )


def rows_of(schedule: str) -> dict[str, dict[str, str]]:
    """{dataset: numbers} of a schedule in results/smollm2/percentile.csv."""
    with (ROOT / "results" / "smollm2" / "percentile.csv").open(
        encoding="utf-8", newline=""
    ) as opened:
        return {
            row["dataset"]: row
            for row in csv.DictReader(opened)
            if row["arm"] == schedule.replace(" ", "_")
        }


@pytest.mark.parametrize(("name", "schedule", "cells"), PERCENTILE)
def test_schedules_of_one_speed_are_beside_equal_ratios(
    name: str, schedule: str, cells: str
) -> None:
    stored, *ratios = cells.split(" | ")
    rows, equal = rows_of(name), rows_of("uniform")
    assert len(rows) == len(equal) == int(re.findall(r"as many bytes: (\d+) rows", PAGE)[0])
    assert all(
        rows[dataset]["prompt_sha256"] == equal[dataset]["prompt_sha256"] for dataset in equal
    )
    speedups = [float(row["ideal_speedup"]) for row in rows.values()]
    assert sum(speedups) / len(rows) == pytest.approx(
        1.25 if name == "static pruning" else 2, rel=0.02
    )
    assert float(stored) == pytest.approx(
        sum(float(row["stored"]) for row in rows.values()) / len(rows), abs=0.006
    )
    for column, ratio in zip(("kl", "answer_kl", "gold_kl"), ratios, strict=True):
        mean, *ends = map(float, re.findall(r"[\d.]+", ratio))
        logs = [
            log(float(rows[dataset][column]) / float(equal[dataset][column])) for dataset in equal
        ]
        assert mean == pytest.approx(exp(sum(logs) / len(rows)), abs=0.006)
        assert sorted([mean, *ends]) == [ends[0], mean, ends[1]] if ends else name == "uniform"
