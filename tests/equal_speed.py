"""The field's methods against LazyLLM at equal ideal and at equal measured speedups.

    python -m tests.equal_speed OUT.md

reads the records of Figure 5 and of the field in results/smollm2 and writes a table. All numbers of
a line are of the same rows of LongBench. LazyLLM's KL at a measured speedup lies on the line
through its two nearest settings, with logarithms of KL and speedup. Intervals are bootstraps over
the rows of each dataset.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import quantiles
from typing import Any

from tests.test_smollm2_results import FOLDER, SHOWN, Row, group_by, read

SPEEDUPS = ("1.2x", "1.5x", "2x", "2.5x", "3x")
DRAWS = 1000
HEADINGS = (
    "method", "setting", "ideal speedup", "rows", "TTFT speedup", "answer's KL",
    "KL / LazyLLM's at this ideal speedup", "KL / LazyLLM's at this TTFT speedup",
)  # fmt: skip
Pair = tuple[Row, dict[str, Row]]  # a method's answer to a row, and LazyLLM's {at a speedup: it}


def key_of(row: Row) -> tuple[str, str]:
    return row["dataset"], row["id"]


def read_pairs(experiment: str, arm: str) -> list[Pair]:
    """Read a method's answers, each with LazyLLM's at five speeds, to the rows of both."""
    lazy = {
        speedup: {key_of(row): row for row in read("figure5", f"lazy speedup={speedup}")}
        for speedup in SPEEDUPS
    }
    rows = {key_of(row): row for row in read(experiment, arm)}
    return [
        (row, {speedup: lazy[speedup][key] for speedup in SPEEDUPS})
        for key, row in rows.items()
        if key in lazy["2x"]
    ]


def compare(pairs: Sequence[Pair], ideal: str) -> tuple[float, float, float | None, float | None]:
    """A method's TTFT speedup, its KL, and this over LazyLLM's at equal speedups of both kinds;
    None where LazyLLM has no such speedup.
    """
    number, kl_of = SHOWN["TTFT speedup"], SHOWN["answer's KL"]
    rows = [row for row, _ in pairs]
    speedup, kl = number(rows), kl_of(rows)
    settings = {name: [lazy[name] for _, lazy in pairs] for name in SPEEDUPS}
    points = sorted((log(number(lazy)), log(kl_of(lazy))) for lazy in settings.values())
    same = kl / kl_of(settings[ideal]) if ideal in settings else None
    for (left, low), (right, high) in pairwise(points):
        if left <= log(speedup) <= right:
            at = low + (high - low) * (log(speedup) - left) / (right - left)
            return speedup, kl, same, kl / exp(at)
    return speedup, kl, same, None


def draw(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Yield resamples of the pairs, each dataset's among themselves."""
    rows = [row | {"pair": pair} for pair in pairs for row in [pair[0]]]
    datasets = group_by(rows, "dataset")
    generator = random.Random(0)
    for _ in range(DRAWS):
        drawn = [row for part in datasets for row in generator.choices(part, k=len(part))]
        yield [row["pair"] for row in drawn]


def write_line(experiment: str, label: str, arm: dict[str, Any]) -> str:
    """Write the table's line of an arm. arm: as run.json has it."""
    name, *given = arm["method"].items()
    if "speedup" in arm:
        ideal = f"{arm['speedup']:g}x"
        (solved,) = {json.dumps(parameters) for parameters in arm["parameters"].values()}
        settings = [f"{key}={value}: solved" for key, value in json.loads(solved).items()]
    else:
        ideal = "-"
        settings = [f"{key}={value}: its authors'" for key, value in given]
    pairs = read_pairs(experiment, label)
    speedup, kl, *ratios = compare(pairs, ideal)
    drawn = [compare(resample, ideal)[2:] for resample in draw(pairs)]
    cells = [name[1], *settings, ideal, len(pairs), f"{speedup:.2f}", f"{kl:.3f}"]
    for ratio, values in zip(ratios, zip(*drawn, strict=True), strict=True):
        known = [value for value in values if value is not None]
        if ratio is None or len(known) < DRAWS:
            cells.append("-" if ratio is None else f"{ratio:.2f}")
            continue
        ends = quantiles(known, n=40)
        cells.append(f"{ratio:.2f} [{ends[0]:.2f}, {ends[-1]:.2f}]")
    return "| " + " | ".join(map(str, cells)) + " |"


def table() -> str:
    """Write the table in Markdown."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---|---|" + "---:|" * (len(HEADINGS) - 2)]
    for experiment in ("field15", "field2"):
        file = next((FOLDER / "records").glob(f"smollm2-{experiment}-*/run.json"))
        arms = json.loads(file.read_text())["identity"]["arms"]
        lines += [
            write_line(experiment, label, arm) for label, arm in arms.items() if label != "baseline"
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(table(), encoding="utf-8")
