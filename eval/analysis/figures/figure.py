"""A figure: data from stored runs, and a plot of these data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure as MplFigure

from eval.store.results import Results


@dataclass(frozen=True)
class Figure:
    """name: the stem of its files. title, caption: for people; the caption names averages and omissions.

    data: makes the table behind the picture, which is also its CSV; empty if no run has the necessary data.
    plot: draws the picture from this table alone, so also from the CSV; never called with an empty table.
    opens_report: the report opens with the first of these figures that has data.
    """

    name: str
    title: str
    caption: str
    data: Callable[[Results], pd.DataFrame]
    plot: Callable[[pd.DataFrame], MplFigure]
    opens_report: bool = False
