"""Tables of the page: each cell has its text, and the number that its column is sorted by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from eval.analysis.table import Cell

# what a reader compares: these columns are shown before a reader asks for more
COMPARED = ("score", "TTFT speedup", "% computed", "% tokens computed", "KL, nats")
MOST = 4  # columns of a table without any of them


@dataclass(frozen=True)
class Heading:
    """text: as shown. numeric: whether the column is sorted by number and aligned to the right. more: whether a reader
    has to ask for it."""

    text: str
    numeric: bool
    more: bool


@dataclass(frozen=True)
class Grid:
    """A table on the page.

    name: unique on the page. notes: shown on demand. filtered: a column whose values can be filtered, or None.
    """

    name: str
    title: str
    caption: str
    notes: str
    columns: tuple[Heading, ...]
    rows: tuple[tuple[Cell, ...], ...]
    filtered: int | None = None

    def choices(self) -> list[str]:
        """The values of the filtered column, in order of their first rows."""
        return [] if self.filtered is None else list(dict.fromkeys(str(row[self.filtered]) for row in self.rows))


def grid(
    name: str,
    title: str,
    caption: str,
    cells: pd.DataFrame,
    filtered: int | None = None,
    keys: int | None = None,
    notes: str = "",
) -> Grid:
    """The grid of a table of `Cell`s, numbers and texts. A column with a number in any cell is numeric.

    keys: number of columns that name the row. Those with the same text in every row are shown on demand, as are all
    other columns but `COMPARED`, or the first `MOST` of a table without these. None: all are shown at once.
    """
    shown = [[_shown(value) for value in cells.iloc[:, number]] for number in range(cells.shape[1])]
    headings = [str(heading) for heading in cells.columns]
    first = set(range(len(headings)))
    if keys is not None:
        named = [number for number in range(keys) if number == keys - 1 or len({*cells.iloc[:, number]}) > 1]
        others = range(keys, len(headings))
        first = {*named, *([number for number in others if headings[number] in COMPARED] or others[:MOST])}
    columns = tuple(
        Heading(heading, any(cell.value is not None for cell in column), number not in first | {filtered})
        for number, (heading, column) in enumerate(zip(headings, shown, strict=True))
    )
    return Grid(name, title, caption, notes, columns, tuple(zip(*shown, strict=True)), filtered)


def _shown(value: Any) -> Cell:
    if isinstance(value, str):
        return value if isinstance(value, Cell) else Cell(value)
    return Cell("") if pd.isna(value) else Cell(f"{value:,}", float(value))
