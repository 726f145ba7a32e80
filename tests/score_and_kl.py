"""LazyLLM's score less static pruning's at equal ideal speedups, and what goes with it.

    python -m tests.score_and_kl OUT.md

reads the records of Figure 5 in results/smollm2 and writes a table. A pair is one row of LongBench
at one speedup; intervals are bootstraps over rows, each drawn with all its pairs.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tests.test_smollm2_results import SPEEDUPS, Row, arms, pair

DRAWS = 10_000
HEADINGS = (
    "pairs", "rows", "n", "LazyLLM, score", "static pruning, score", "LazyLLM - static, points",
    "the same, gold log-likelihood", "KL of the answer, LazyLLM / static",
)  # fmt: skip


def read_pairs() -> pd.DataFrame:
    """Read both methods' answers to each row at each speedup, and how they differ."""
    pairs = []
    for speedup in SPEEDUPS:
        rows = pair(*arms(speedup, "lazy", "static_pruning"))
        pairs += [compare(row, row["other"]) | {"speedup": speedup} for row in rows]
    return pd.DataFrame(pairs)


def compare(lazy: Row, static: Row) -> Row:
    """What a pair's answers are, its groups and its differences."""
    baseline = lazy["baseline"]
    same = {(1, 1): "both", (1, 0): "LazyLLM's only", (0, 1): "static pruning's only"}
    more = len(lazy["token_ids"]) - len(static["token_ids"])
    return {
        "row": f"{lazy['dataset']}/{lazy['id']}",
        "task": lazy["task"],
        "baseline": "scores 0" if baseline["score"] == 0 else "scores above 0",
        "first": same.get((lazy["top1_agrees"], static["top1_agrees"]), "neither"),
        "length": "LazyLLM's" if more > 0 else "static pruning's" if more < 0 else "neither",
        "lazy": 100 * lazy["score"],
        "static": 100 * static["score"],
        "points": 100 * (lazy["score"] - static["score"]),
        "gold": lazy["gold_log_likelihood"] - static["gold_log_likelihood"],
        "ratio": log_ratio(lazy["answer_kl"], static["answer_kl"]),
    }


def log_ratio(first: float, second: float) -> float:
    return math.log(first / second) if min(first, second) > 0 else math.nan


def groups_of(pairs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each group of pairs that gets a line, named."""
    yield "all", pairs
    for name, title in {
        "speedup": "", "task": "", "baseline": "the baseline ", "length": "the longer answer: ",
        "first": "the baseline's first token: ",
    }.items():  # fmt: skip
        for value, group in pairs.groupby(name, sort=False):
            yield f"{title}{value}", group


def interval(pairs: pd.DataFrame, name: str, shape: Callable[[Any], Any] = float) -> str:
    """The mean over pairs and its 95 % interval, each changed by `shape`."""
    rows = pairs.groupby("row")[name].agg(["sum", "count"]).to_numpy()
    drawn = np.random.default_rng(0).integers(0, len(rows), (DRAWS, len(rows)))
    sums = rows[drawn].sum(1)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
    mean, low, high = (shape(value) for value in (pairs[name].mean(), low, high))
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def table(pairs: pd.DataFrame) -> str:
    """Write the groups as a table in Markdown."""
    lines = []
    for name, group in groups_of(pairs):
        cells = [name, group["row"].nunique(), len(group)]
        cells += [f"{group['lazy'].mean():.2f}", f"{group['static'].mean():.2f}"]
        cells += [interval(group, "points"), interval(group, "gold")]
        cells += [interval(group, "ratio", np.exp)]
        lines.append(cells)
    return in_markdown(HEADINGS, lines)


def in_markdown(headings: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Write a table in Markdown, its first column to the left."""
    head, *rows = (f"| {' | '.join(map(str, cells))} |" for cells in (headings, *lines))
    return "\n".join([head, "|---|" + "---:|" * (len(headings) - 1), *rows, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(table(read_pairs()), encoding="utf-8")
