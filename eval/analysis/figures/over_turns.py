"""Later questions on the same context: quality, time saved, and the turn from which a method no longer pays off."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure as MplFigure
from matplotlib.ticker import MaxNLocator

from eval.analysis.figures.figure import Figure
from eval.analysis.figures.style import (
    GREY,
    LINES,
    around,
    grid,
    legend_beside,
    log_scale,
    new_figure,
    styled,
    styles_of,
    titled_parts,
)  # fmt: skip
from eval.analysis.tables.by_turn import by_turn
from eval.analysis.tables.cells import forms
from eval.store.results import Results

_VALUES = ("score", "baseline_score", "kl", "ttft_speedup", "speedup_so_far", "revived_tokens")
_PANELS = {  # {value: (axis label, whether the axis is logarithmic)}
    "score": ("score", False),
    "kl": ("KL to the baseline, nats", False),
    "ttft_speedup": ("TTFT speedup of the turn", True),
    "speedup_so_far": ("speedup of all turns so far", True),
    "revived_tokens": ("revived tokens, mean over layers", False),
}
_TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 10)


def data(results: Results) -> pd.DataFrame:
    """model, suite, method, label, turns (continue or again), turn, examples, and the means over tasks of score,
    baseline_score, kl, ttft_speedup, speedup_so_far and revived_tokens, with `_low` and `_high`."""
    frame = by_turn(results)
    columns = ["model", "suite", "method", "label", "turns", "turn", "examples", *forms(*_VALUES)]
    return frame.loc[frame["level"] == "all", columns].reset_index(drop=True)


@styled
def plot(frame: Any) -> MplFigure:
    """One block per model and suite, one row per value; left, methods that continue; right, those that start again."""
    blocks = list(frame.groupby(["model", "suite"], sort=False))
    figure = new_figure(9.5, 2.3 * len(_PANELS) * len(blocks))
    parts = titled_parts(figure, [f"{model}, {suite}, mean over tasks" for (model, suite), _ in blocks])
    for part, (_, rows) in zip(parts, blocks, strict=True):
        panels = part.subplots(len(_PANELS), 2, sharex=True, sharey="row", squeeze=False)
        for column, (turns, title) in enumerate({"continue": "goes on", "again": "runs the whole text again"}.items()):
            of_kind = rows[rows["turns"] == turns]
            for axes, (value, (label, is_log)) in zip(panels[:, column], _PANELS.items(), strict=True):
                _draw(axes, of_kind, value, styles_of(rows["method"]))
                _scale(axes, value, is_log)
                if column == 0:
                    axes.set_ylabel(label)
            panels[0, column].set_title(f"each later turn {title}")
            panels[-1, column].set_xlabel("question")
        lines = {
            label: line for axes in panels[0] for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        names = dict.fromkeys([*map(_name, rows["label"]), "baseline"])
        legend_beside(panels[0, 1], handles=[lines[name] for name in names], labels=list(names))
    return figure


def _draw(axes: Any, rows: Any, value: str, styles: Any) -> None:
    drawn: dict[str, int] = {}
    curves = {str(label): curve for label, curve in rows.groupby("label", sort=False)}
    for label in sorted(curves, key=len):  # a method's simplest setting gets the method's own style
        curve = curves[label]
        method = curve["method"].iloc[0]
        number = drawn[method] = drawn.get(method, -1) + 1
        look = styles[method].drawn
        if number:
            look |= {"linestyle": LINES[number % len(LINES)], "markerfacecolor": "white"}
        axes.errorbar(
            curve["turn"], curve[value], yerr=around(curve, value), label=_name(label),
            elinewidth=0.7, capsize=1.5, markersize=4, **look,
        )  # fmt: skip
    if value == "score" and len(rows):
        baseline = rows.groupby("turn")["baseline_score"].mean()
        axes.plot(baseline.index, baseline, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)), label="baseline")
    elif value.startswith(("ttft_", "speedup")):
        axes.axhline(1, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)))


def _name(label: str) -> str:
    """The label without the setting that the column names."""
    return label.replace(", turns=again", "")


def _scale(axes: Any, value: str, is_log: bool) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if is_log:
        log_scale(axes, "y", _TICKS)
    else:
        axes.set_ylim(bottom=0, top=104 if value == "score" else None)
    grid(axes)


FIGURE = Figure(
    name="turns",
    title="Later questions on the same context",
    caption=(
        "Rows with several questions, mean over tasks by question. Left: each turn continues from what the method has "
        "stored. Right: each turn runs the whole text again and selects tokens for the new question. KL and speedups "
        "compare with the baseline's same turn, which continues from its whole KV cache. Speedup so far: of whole "
        "answers, all turns up to this one; below the dotted line, the method has cost more time than the baseline. "
        "Bars: 95 % bootstrap intervals over rows."
    ),
    data=data,
    plot=plot,
)
