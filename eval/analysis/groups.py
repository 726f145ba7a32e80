"""Scores by a suite's groups of rows, such as length or difficulty."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pandas as pd

from eval.analysis.columns import EXAMPLES, LABEL, MODEL, SETTING, Column, cells, forms, in_order
from eval.analysis.table import Table
from eval.store.aggregate import rows_of, with_baselines
from eval.store.results import Results

_COLUMNS = (
    MODEL,
    LABEL,
    Column("group", "rows"),
    EXAMPLES,
    Column("score", "score", 2),
    Column("baseline_score", "baseline score", 2, missing="unpaired"),
    Column("pct_answered", "answered, %", 1, interval=False),
    Column("answered_score", "score of these", 2),
    Column("ttft_speedup", "TTFT speedup", 2, missing="unpaired"),
)
_VALUES = forms("score", "baseline_score", "pct_answered", "answered_score", "ttft_speedup")


def groups(results: Results) -> Table:
    """Scores of every setting by group of rows. frame: datasets, tasks and their mean; cells: the mean."""
    frame = with_baselines(results.frame)
    frame = in_order(frame[frame["groups"].str.len() > 0])
    rows = [
        {**dict(zip(SETTING, setting, strict=True)), "group": group, **row}
        for setting, examples in frame.groupby(SETTING, sort=False)
        for group, part in _parts(examples)
        for row in rows_of(part)
    ]
    table: Any = pd.DataFrame(rows, columns=[*SETTING, "group", "level", "name", "task", "examples", *_VALUES])
    caption = (
        "Mean over tasks of the rows of each group. answered: answers that are not empty; score of these: without "
        "empty answers, which score 0, in the denominator. ±: half of the 95 % bootstrap interval over "
        "examples. Datasets and tasks are in the CSV."
    )
    shown = cells(table[table["level"] == "all"], _COLUMNS, results)
    return Table("groups", "Scores by group of rows", caption, table, shown, keys=3)


def _parts(examples: Any) -> Iterator[tuple[str, Any]]:
    """("all", every row), then (group, its rows). Lengths are sorted by their first number, names alphabetically."""
    yield "all", examples
    parts = examples.explode("groups").groupby("groups")
    for group in sorted(parts.groups, key=_place):
        yield group, parts.get_group(group)


def _place(group: str) -> tuple[str, int, str]:
    number = re.search(r"\d+", group)
    return group.partition("=")[0], int(number[0]) if number else 0, group
