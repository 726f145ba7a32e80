"""The field's methods against LazyLLM at equal ideal and at equal measured speedups.

    python -m tests.equal_speed OUT.md

reads the records of Figure 5 and of the field in results/smollm2 and writes a table. All numbers of
a line are of the same rows of LongBench. LazyLLM's KL at a measured speedup lies on the line
through its two nearest settings, with logarithms of KL and speedup. Intervals are bootstraps over
the rows of each dataset; there is none if LazyLLM lacks the speedup in a resample.
"""

import json
import random
import sys
from collections.abc import Sequence
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import quantiles
from typing import Any

from tests.score_and_kl import in_markdown
from tests.test_smollm2_results import FOLDER, SHOWN, SPEEDUPS, Row, group_by, read

DRAWS = 1000
HEADINGS = (
    "method", "setting", "ideal speedup", "rows", "TTFT speedup", "answer's KL",
    "KL / LazyLLM's at this ideal speedup", "KL / LazyLLM's at this TTFT speedup",
)  # fmt: skip
Lazy = dict[tuple[str, str], dict[str, Row]]  # {dataset and id: {speedup: LazyLLM's answer}}


def read_lazy() -> Lazy:
    """Read LazyLLM's answers at five speeds."""
    answers: Lazy = {}
    for speedup in SPEEDUPS:
        for row in read("figure5", f"lazy speedup={speedup}"):
            answers.setdefault((row["dataset"], row["id"]), {})[speedup] = row
    return answers


def compare(rows: list[Row], ideal: str) -> tuple[float, float, float | None, float | None]:
    """A method's TTFT speedup, its KL, and this over LazyLLM's at equal speedups of both kinds;
    None where LazyLLM has no such speedup. rows: with LazyLLM's answers under "lazy".
    """
    speedup_of, kl_of = SHOWN["TTFT speedup"], SHOWN["answer's KL"]
    speedup, kl = speedup_of(rows), kl_of(rows)
    settings = {name: [row["lazy"][name] for row in rows] for name in SPEEDUPS}
    points = sorted((log(speedup_of(lazy)), log(kl_of(lazy))) for lazy in settings.values())
    same = kl / kl_of(settings[ideal]) if ideal in settings else None
    for (left, low), (right, high) in pairwise(points):
        if left <= log(speedup) <= right:
            at = low + (high - low) * (log(speedup) - left) / (right - left)
            return speedup, kl, same, kl / exp(at)
    return speedup, kl, same, None


def make_line(rows: list[Row], arm: dict[str, Any]) -> list[Any]:
    """Make the cells of an arm. rows: as of `compare`. arm: as run.json has it."""
    (_, method), *given = arm["method"].items()
    if "speedup" in arm:
        ideal = f"{arm['speedup']:g}x"
        (solved,) = {json.dumps(parameters) for parameters in arm["parameters"].values()}
        settings = [f"{key}={value}: solved" for key, value in json.loads(solved).items()]
    else:
        ideal = "-"
        settings = [f"{key}={value}: its authors'" for key, value in given]
    speedup, kl, *ratios = compare(rows, ideal)
    datasets, generator = group_by(rows, "dataset"), random.Random(0)
    drawn = []
    for _ in range(DRAWS):
        resample = [row for part in datasets for row in generator.choices(part, k=len(part))]
        drawn.append(compare(resample, ideal)[2:])
    cells = map(write_ratio, ratios, zip(*drawn, strict=True))
    return [method, *settings, ideal, len(rows), f"{speedup:.2f}", f"{kl:.3f}", *cells]


def write_ratio(ratio: float | None, drawn: Sequence[float | None]) -> str:
    """Write a ratio and the 95 % interval of those of the resamples."""
    if ratio is None:
        return "-"
    known = [value for value in drawn if value is not None]
    if len(known) < len(drawn):
        return f"{ratio:.2f}"
    ends = quantiles(known, n=40)
    return f"{ratio:.2f} [{ends[0]:.2f}, {ends[-1]:.2f}]"


def table() -> str:
    """Write the table in Markdown."""
    lines, lazy = [], read_lazy()
    for experiment in ("field15", "field2"):
        file = next((FOLDER / "records").glob(f"smollm2-{experiment}-*/run.json"))
        arms = json.loads(file.read_text())["identity"]["arms"]
        arms.pop("baseline")
        for label, arm in arms.items():
            rows = [
                row | {"lazy": lazy[row["dataset"], row["id"]]}
                for row in read(experiment, label)
                if (row["dataset"], row["id"]) in lazy
            ]
            lines.append(make_line(rows, arm))
    return in_markdown(HEADINGS, lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(table(), encoding="utf-8")
