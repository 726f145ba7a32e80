"""Sensitivity of score, speed and KL to the schedule: heat maps of all single pruning points that were run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as MplFigure

from eval.analysis.figures.figure import Figure
from eval.analysis.figures.figure6 import single_points
from eval.analysis.figures.style import GREY, new_figure, styled
from eval.store.results import Results

_MAP = ["model", "suite"]

# (column, title, digits, scale of colours)
_PANELS = (
    ("relative_score", "Score, % of the paired baseline's", "{:.0f}", None),
    ("ttft_speedup", "TTFT speedup over the baseline", "{:.2f}", None),
    ("kl", "KL, first token, nats", "{:.1g}", LogNorm),
)


def data(results: Results) -> pd.DataFrame:
    """`single_points` of each model and suite that has several."""
    points: Any = single_points(results)
    return points[points.duplicated(_MAP, keep=False)].reset_index(drop=True)


@styled
def plot(frame: Any) -> MplFigure:
    """One row per model and suite: maps of score, speedup and, if measured, KL, by layer and kept share."""
    rows = list(frame.groupby(_MAP, sort=False))
    layers = max(points["layer"].nunique() for _, points in rows)
    panels = [panel for panel in _PANELS if frame[panel[0]].notna().any()]
    figure = new_figure(max(7.0, len(panels) * (1.6 + 0.52 * layers)), 0.5 + 2.6 * len(rows))
    for line, ((model, suite), points) in zip(
        figure.subplots(len(rows), len(panels), squeeze=False), rows, strict=True
    ):
        for axes, (column, title, digits, scale) in zip(line, panels, strict=True):
            cells = points.pivot(index="keep", columns="layer", values=column)
            _draw_map(axes, cells, digits, scale() if scale else None)
            axes.set_title(f"{title}\n{model}, {suite}, mean over tasks")
    return figure


def _draw_map(axes: Any, cells: Any, digits: str, norm: Any) -> None:
    values = cells.to_numpy()
    shown = np.ma.masked_invalid(values) if norm is None else np.ma.masked_less_equal(values, 0)
    picture = axes.pcolormesh(shown, cmap="cividis", norm=norm, edgecolors="white", linewidth=1)
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
    title="How sensitive score, speed and KL are to the schedule",
    caption=(
        "LazyLLM with a single pruning layer: the share of the score that it keeps, the TTFT speedup, and the KL "
        "divergence of the first token's distribution from the paired baseline's, for every layer and kept share that "
        "was run, mean over tasks. The paper's reviewers asked for this; intervals are in the CSV."
    ),
    data=data,
    plot=plot,
)
