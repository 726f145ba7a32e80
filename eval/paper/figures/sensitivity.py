"""How much score and speed depend on the schedule: every single pruning point that was run, in two heat maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as MplFigure

from eval.paper.figures.figure import Figure
from eval.paper.figures.figure6 import single_points
from eval.paper.figures.style import GREY, new_figure, styled
from eval.store.results import Results

_MAP = ["model", "suite"]

_PANELS = (
    ("relative_score", "Score, % of the paired baseline's", "{:.0f}", "cividis"),
    ("ttft_speedup", "TTFT speedup over the paired baseline", "{:.2f}", "cividis"),
)


def data(results: Results) -> pd.DataFrame:
    """`single_points` of each model and suite that has several: one cell is no map."""
    points: Any = single_points(results)
    return points[points.duplicated(_MAP, keep=False)].reset_index(drop=True)


@styled
def plot(frame: Any) -> MplFigure:
    """A row a model and suite: score on the left, speedup on the right, layers by kept shares."""
    rows = list(frame.groupby(_MAP, sort=False))
    layers = max(points["layer"].nunique() for _, points in rows)
    figure = new_figure(max(7.0, 2 * (1.6 + 0.52 * layers)), 0.5 + 2.6 * len(rows))
    for line, ((model, suite), points) in zip(figure.subplots(len(rows), 2, squeeze=False), rows, strict=True):
        for axes, (column, title, digits, colours) in zip(line, _PANELS, strict=True):
            _draw_map(axes, points.pivot(index="keep", columns="layer", values=column), digits, colours)
            axes.set_title(f"{title}\n{model}, {suite}, mean over tasks")
    return figure


def _draw_map(axes: Any, cells: Any, digits: str, colours: str) -> None:
    values = cells.to_numpy()
    picture = axes.pcolormesh(np.ma.masked_invalid(values), cmap=colours, edgecolors="white", linewidth=1)
    for row, column in np.ndindex(*values.shape):
        is_there = np.isfinite(values[row, column])
        shade = picture.norm(values[row, column]) if is_there else 1.0
        axes.text(
            column + 0.5, row + 0.5, digits.format(values[row, column]) if is_there else "no run", ha="center",
            va="center", fontsize=8, color=("white" if shade < 0.55 else "black") if is_there else GREY,
        )  # fmt: skip
    axes.set_xticks(np.arange(values.shape[1]) + 0.5, cells.columns)
    axes.set_yticks(np.arange(values.shape[0]) + 0.5, [f"{100 * keep:g} %" for keep in cells.index])
    axes.set(xlabel="pruned after layer", ylabel="kept share")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


FIGURE = Figure(
    name="sensitivity",
    title="How sensitive score and speed are to the schedule",
    caption=(
        "LazyLLM with a single pruning layer: what is kept of the score (left) and the TTFT speedup (right) for every "
        "layer and kept share that was run, mean over tasks. Asked by the paper's reviewers; intervals are in the CSV."
    ),
    data=data,
    plot=plot,
)
