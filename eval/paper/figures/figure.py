"""What a figure is: data from stored runs, and a picture of that data alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure as MplFigure

from eval.store.results import Results


@dataclass(frozen=True)
class Figure:
    """name: the stem of its files. title, caption: for people; the caption says what was averaged and left out.

    data: the table behind the picture, as its CSV holds it; empty if no run has what the figure needs.
    plot: draws that table alone, so that a picture can be made again from its CSV. Not for an empty table.
    opens_report: whether it says the most about the runs; the first such figure with data stands above all else.
    """

    name: str
    title: str
    caption: str
    data: Callable[[Results], pd.DataFrame]
    plot: Callable[[pd.DataFrame], MplFigure]
    opens_report: bool = False
