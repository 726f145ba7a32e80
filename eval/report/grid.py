"""Tables of the page: each cell has its text, and the number that its column is sorted by."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pandas as pd

# a number at the beginning of a cell, before its unit or interval: "58.95 ±2.45", "85.2 %", "1,024"
_NUMBER = re.compile(r"([+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)(?:$|[\s%±(\[*])", re.IGNORECASE)
_EMPTY = {"", "-", "–", "—"}


@dataclass(frozen=True)
class Heading:
    """text: as shown. numeric: whether the column is sorted by number and aligned to the right."""

    text: str
    numeric: bool


@dataclass(frozen=True)
class Cell:
    """text: as shown. value: its number, by which a numeric column is sorted; None without a number."""

    text: str
    value: float | None

    @property
    def parts(self) -> tuple[str, str]:
        """(number, the rest: a space, then an interval or unit); (text, "") without a number."""
        end = -1 if self.value is None else self.text.find(" ", 1)
        return (self.text, "") if end < 0 else (self.text[:end], self.text[end:])


@dataclass(frozen=True)
class Grid:
    """A table on the page.

    name: unique on the page. filtered: a column whose values can be filtered, or None.
    """

    name: str
    title: str
    caption: str
    columns: tuple[Heading, ...]
    rows: tuple[tuple[Cell, ...], ...]
    filtered: int | None = None

    def choices(self) -> list[str]:
        """The values of the filtered column, in order of their first rows."""
        return [] if self.filtered is None else list(dict.fromkeys(row[self.filtered].text for row in self.rows))


def grid(
    name: str, title: str, caption: str, cells: pd.DataFrame, filtered: int | None = None, keys: int | None = None
) -> Grid:
    """The grid of a table of texts.

    keys: number of columns that name the row; they are numeric if every cell begins with a number or is empty. Later
    columns are numeric, even with cells such as "unpaired".
    """
    columns, shown = [], []
    for number, heading in enumerate(map(str, cells.columns)):
        texts = cells.iloc[:, number].astype(object).fillna("").map(str)
        filled = [text for text in texts if text.strip() not in _EMPTY]
        is_key = keys is None or number < keys
        numeric = not is_key or (bool(filled) and all(_number(text) is not None for text in filled))
        columns.append(Heading(heading, numeric))
        shown.append([Cell(text, _number(text) if numeric else None) for text in texts])
    return Grid(name, title, caption, tuple(columns), tuple(zip(*shown, strict=True)), filtered)


def _number(text: str) -> float | None:
    number = _NUMBER.match(text.strip().lstrip("*").replace("−", "-"))
    return None if number is None else float(number[1].replace(",", ""))
