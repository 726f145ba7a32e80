"""Columns of tables: a value with its interval as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from eval.analysis.table import cell


def forms(*names: str) -> list[str]:
    """The columns of values and their intervals."""
    return [f"{name}{end}" for name in names for end in ("", "_low", "_high")]


@dataclass(frozen=True)
class Column:
    """A column of a table as people read it.

    name: the column of the values; `<name>_low` and `<name>_high`, if there are such columns, hold the interval.
    digits: after the decimal point; None for text and whole numbers. missing: shown if the value was not measured.
    scale: divisor, such as 1e6 for bytes shown in MB. sign: "+" to sign positive values too.
    """

    name: str
    heading: str
    digits: int | None = None
    missing: str = "-"
    scale: float = 1
    interval: bool = True
    sign: str = ""

    def text(self, row: Mapping[Any, Any]) -> str:
        """The cell of a row of values."""
        value = row[self.name]
        if pd.isna(value):
            return self.missing
        if self.digits is None:
            return str(value)
        ends = [row.get(f"{self.name}_{end}") if self.interval else None for end in ("low", "high")]
        low, high = (None if end is None else end / self.scale for end in ends)
        return cell(value / self.scale, low, high, self.digits, self.sign)


def cells(values: pd.DataFrame, columns: Sequence[Column]) -> pd.DataFrame:
    """The text of each row of values, by heading."""
    rows = values.to_dict("records")
    return pd.DataFrame([{column.heading: column.text(row) for column in columns} for row in rows])
