"""Needle in a haystack: score by length of the prompt and depth of the needle, as heat maps."""

from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as MplFigure

from eval.analysis.columns import SETTING, in_order
from eval.analysis.style import GREY, new_figure, panels_of, shown_label, styled
from eval.analysis.table import as_figure
from eval.store.results import Results

_IN_A_ROW = 4
_AXES = ("length", "depth")


def data(results: Results) -> pd.DataFrame:
    """model, suite, method, settings, label, length, depth, examples, score (mean over rows with
    both groups).
    """
    frame: Any = results.counting
    facts = [dict(group.split("=", 1) for group in groups) for groups in frame["groups"]]
    frame = frame.assign(**{axis: [fact.get(axis) for fact in facts] for axis in _AXES}).dropna(
        subset=list(_AXES)
    )
    frame = in_order(frame.astype(dict.fromkeys(_AXES, int)))
    means = frame.groupby([*SETTING, *_AXES], sort=False).agg(
        examples=("id", "nunique"), score=("score", "mean")
    )
    return means.reset_index()


@as_figure(
    190,
    "needle",
    data,
    title="Needle in a haystack: score by length and depth",
    caption=(
        "Each cell: mean score of the prompts of that length with the needle at that depth; 0 % is "
        "the beginning."
    ),
    command="python run.py dataset=needle",
)
@styled
def plot(frame: Any) -> MplFigure:
    """A panel for each setting: lengths from left to right, depths from top to bottom."""
    panels, left_out = panels_of(frame, SETTING, most=4 * _IN_A_ROW)
    columns = min(_IN_A_ROW, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(0.8 + 2.6 * columns, 0.4 + 2.8 * lines, left_out)
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    picture: Any = None
    for place, ((model, _, method, _, label), rows) in zip(axes.flat, panels, strict=False):
        picture = _draw_map(place, rows.pivot(index="depth", columns="length", values="score"))
        place.set_title(
            "\n".join(
                [
                    *wrap(model, 30),
                    *wrap(shown_label(label, method), 30, max_lines=2, placeholder="…"),
                ]
            )
        )
    for place in axes.flat[len(panels) :]:
        place.set_visible(False)
    for place in axes.flat[max(0, len(panels) - columns) : len(panels)]:  # no panel below
        place.tick_params(labelbottom=True)
    for place in axes[:, 0]:
        place.set_ylabel("depth of the needle, %")
    figure.supxlabel("length of the prompt, tokens", fontsize=9)
    figure.colorbar(picture, ax=axes, label="score (0 to 100)", shrink=0.8)
    return figure


def _draw_map(axes: Any, values: Any) -> Any:
    scores = np.ma.masked_invalid(values.to_numpy(dtype=float))
    picture = axes.pcolormesh(
        scores, cmap="cividis", edgecolors="white", vmin=0, vmax=100, linewidth=0.5
    )
    axes.set_xticks(np.arange(values.shape[1]) + 0.5, values.columns, rotation=45)
    axes.set_yticks(np.arange(values.shape[0]) + 0.5, values.index)
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    for row, column in zip(*np.nonzero(np.ma.getmaskarray(scores)), strict=True):
        axes.text(
            column + 0.5, row + 0.5, "no run", ha="center", va="center", fontsize=7, color=GREY
        )
    axes.set_ylim(len(values), 0)
    return picture
