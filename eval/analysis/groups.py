"""Scores by groups of rows: a suite's own, and ranges of prompt lengths; needle in a haystack as heat maps."""

import re
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as MplFigure

from eval.analysis.columns import SETTING, in_order, prompt_lengths, range_of, rows_by
from eval.analysis.style import GREY, new_figure, panels_of, shown_label, styled
from eval.analysis.table import EXAMPLES, LABEL, MODEL, Column, Rows, as_figure, as_table, cells, forms
from eval.store.results import Results

_COLUMNS = (
    MODEL,
    LABEL,
    Column("group", "rows"),
    EXAMPLES,
    Column("score", "score", 2),
    Column("score_difference", "score - baseline", 2, missing="unpaired", sign="+"),
    Column("pct_answered", "answered, %", 1, interval=False),
    Column("answered_score", "score if answered", 2),
    Column("ttft_speedup", "TTFT speedup", 2, missing="unpaired"),
)
_VALUES = forms("score", "score_difference", "pct_answered", "answered_score", "ttft_speedup")


@as_table(
    140,
    title="Scores by group of rows",
    caption=(
        "Mean over tasks of the rows of each group. Answered: answers that are not empty; score if answered: "
        "their mean score, without the empty ones."
    ),
    notes="Datasets and tasks are in the CSV.",
    command="python run.py model=tiny method=lazy",
)
def groups(results: Results) -> Rows:
    """Scores of every setting by group of rows. frame: datasets, tasks and their mean; cells: the mean."""
    frame = with_lengths(results.counting)
    frame = frame[frame["groups"].str.len() > 0]
    frame = frame.assign(group=[["all", *names] for names in frame["groups"]]).explode("group")
    frame = frame.sort_values("group", key=lambda groups: groups.map(_place), kind="stable")
    columns = [*SETTING, "group", "level", "name", "task", "examples", *_VALUES]
    table = in_order(pd.DataFrame(rows_by(frame, "group", results.frame), columns=columns))
    shown = cells(table[table["level"] == "all"], _COLUMNS, results)
    return Rows(table, shown, keys=3)


def with_lengths(frame: Any) -> Any:
    """The frame whose rows are also in the group of their range of prompt tokens: a later turn in the first one's.

    Not if the suite groups its rows by length, or if the prompts of a model on a suite are all in one range.
    """
    ranges = pd.Series(range_of(prompt_lengths(frame)), frame.index)
    several: Any = ranges.groupby([frame["model"], frame["suite"]]).transform("nunique")
    grouped = [
        [*names, *([f"tokens={name}"] if adds > 1 and not any(own.startswith("length=") for own in names) else [])]
        for names, name, adds in zip(frame["groups"], ranges, several, strict=True)
    ]
    return frame.assign(groups=pd.Series(grouped, frame.index, dtype=object))


def _place(group: str) -> tuple[bool, str, int, str]:
    """The sort key of groups: all rows first, then names alphabetically, and lengths by their first number."""
    number = re.search(r"\d+", group)
    return group != "all", group.partition("=")[0], int(number[0]) if number else 0, group


_IN_A_ROW = 4
_AXES = ("length", "depth")


def data(results: Results) -> pd.DataFrame:
    """model, suite, method, settings, label, length, depth, examples, score (mean over rows with both groups)."""
    frame: Any = results.counting
    facts = [dict(group.split("=", 1) for group in groups) for groups in frame["groups"]]
    frame = frame.assign(**{axis: [fact.get(axis) for fact in facts] for axis in _AXES}).dropna(subset=list(_AXES))
    frame = in_order(frame.astype(dict.fromkeys(_AXES, int)))
    means = frame.groupby([*SETTING, *_AXES], sort=False).agg(examples=("id", "nunique"), score=("score", "mean"))
    return means.reset_index()


@as_figure(
    190,
    "needle",
    data,
    title="Needle in a haystack: score by length and depth",
    caption=(
        "Each cell: mean score of the prompts of that length with the needle at that depth; 0 % is the beginning. The "
        "table of scores by group has intervals for each length and each depth."
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
            "\n".join([*wrap(model, 30), *wrap(shown_label(label, method), 30, max_lines=2, placeholder="…")])
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
    shown = np.ma.masked_invalid(values.to_numpy(dtype=float))
    picture = axes.pcolormesh(shown, cmap="cividis", edgecolors="white", vmin=0, vmax=100, linewidth=0.5)
    axes.set_xticks(np.arange(values.shape[1]) + 0.5, values.columns, rotation=45)
    axes.set_yticks(np.arange(values.shape[0]) + 0.5, values.index)
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    for row, column in zip(*np.nonzero(np.ma.getmaskarray(shown)), strict=True):
        axes.text(column + 0.5, row + 0.5, "no run", ha="center", va="center", fontsize=7, color=GREY)
    axes.set_ylim(len(values), 0)
    return picture
