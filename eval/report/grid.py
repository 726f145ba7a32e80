"""Tables of the page: each cell has its text, and the number that its column is sorted by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

# a number at the beginning of a cell, before its unit or interval: "58.95 ±2.45", "85.2 %", "1,024"
_NUMBER = re.compile(r"([+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)(?:$|[\s%±(\[*])", re.IGNORECASE)
_EMPTY = {"", "-", "–", "—"}


@dataclass(frozen=True)
class Column:
    """heading: as shown. numeric: whether the column is sorted by number and aligned to the right."""

    heading: str
    numeric: bool


@dataclass(frozen=True)
class Cell:
    """text: as shown. value: its number, by which a numeric column is sorted; None without a number."""

    text: str
    value: float | None

    @property
    def parts(self) -> tuple[str, str]:
        """(number, the rest: a space, then an interval or unit); (text, "") without a number."""
        if self.value is None:
            return self.text, ""
        end = self.text.find(" ", 1)
        return (self.text, "") if end < 0 else (self.text[:end], self.text[end:])


@dataclass(frozen=True)
class Grid:
    """A table on the page.

    name: unique on the page. filtered: a column whose values can be filtered, or None. without_run: rows without
    values from a run, folded below the others.
    """

    name: str
    title: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    filtered: int | None = None
    without_run: tuple[tuple[Cell, ...], ...] = ()

    def choices(self) -> list[str]:
        """The values of the filtered column, in order of their first rows."""
        return [] if self.filtered is None else list(dict.fromkeys(row[self.filtered].text for row in self.rows))


def grid(
    name: str,
    title: str,
    caption: str,
    cells: pd.DataFrame,
    filtered: str | None = None,
    keys: int | None = None,
    has_run: Sequence[bool] | None = None,
) -> Grid:
    """The grid of a table of texts.

    keys: number of columns that name the row. Later columns are numeric, even with cells such as "no run". Key columns
    are numeric if every cell begins with a number or is empty. has_run: per row, whether a run gives its values; None
    if all have one.
    """
    headings = [str(column) for column in cells.columns]
    filled = cells.astype(object).where(cells.notna(), "")
    texts = [[str(value) for value in filled.iloc[:, index]] for index in range(len(headings))]
    known = len(headings) if keys is None else keys
    columns = [
        Column(heading, index >= known or _is_numeric(column))
        for index, (heading, column) in enumerate(zip(headings, texts, strict=True))
    ]
    shown = [
        [Cell(text, _number(text) if column.numeric else None) for text in of_column]
        for column, of_column in zip(columns, texts, strict=True)
    ]
    rows = tuple(zip(*shown, strict=True))
    there = [True] * len(rows) if has_run is None else list(has_run)
    return Grid(
        name,
        title,
        caption,
        tuple(columns),
        rows=tuple(row for row, has in zip(rows, there, strict=True) if has),
        filtered=None if filtered is None else headings.index(filtered),
        without_run=tuple(row for row, has in zip(rows, there, strict=True) if not has),
    )


def _is_numeric(texts: Sequence[str]) -> bool:
    filled = [text for text in texts if text.strip() not in _EMPTY]
    return bool(filled) and all(_number(text) is not None for text in filled)


def _number(text: str) -> float | None:
    found = _NUMBER.match(text.strip().lstrip("*").replace("−", "-"))
    return None if found is None else float(found[1].replace(",", ""))
