"""All methods on one clock: score against TTFT speedup, and measured against ideal speedup."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure as MplFigure
from matplotlib.lines import Line2D

from eval.analysis.figures.figure import Figure
from eval.analysis.figures.style import (
    GREY,
    MethodStyle,
    around,
    grid,
    log_scale,
    new_figure,
    styled,
    styles_of,
    titled_parts,
)  # fmt: skip
from eval.analysis.known_methods import BASELINE, is_diagnostic
from eval.analysis.tables.cells import forms, overall, target_of
from eval.store.results import Results

_VALUES = ("relative_score", "ttft_speedup", "ideal_ttft_speedup")
_TICKS = (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 10)


def data(results: Results) -> pd.DataFrame:
    """model, suite, method, label, examples, on_curve (whether a target speedup such as `2x` gives the setting), and
    the means over tasks of relative_score, ttft_speedup and ideal_ttft_speedup, with `_low` and `_high`.

    All settings except the baseline.
    """
    frame = overall(results)
    frame = frame[frame["method"] != BASELINE].dropna(subset=["relative_score", "ttft_speedup"])
    frame = frame.assign(on_curve=frame["settings"].map(target_of).notna())
    return frame[["model", "suite", "method", "label", "examples", "on_curve", *forms(*_VALUES)]]


@styled
def plot(frame: Any) -> MplFigure:
    """One row per model and suite: the score on the left, ideal speedups on the right, then the legend."""
    panels = list(frame.groupby(["model", "suite"], sort=False))
    figure = new_figure(11, 4.4 * len(panels))
    parts = titled_parts(figure, [f"{model}, {suite}, mean over tasks" for (model, suite), _ in panels])
    for part, (_, rows) in zip(parts, panels, strict=True):
        styles = styles_of(rows["method"])
        scores, ideals, legend = part.subplots(1, 3, width_ratios=[3, 2.3, 1.1])
        _draw_scores(scores, rows, styles)
        _draw_ideals(ideals, rows.dropna(subset=["ideal_ttft_speedup"]), styles)
        _write_legend(legend, rows, styles)
    return figure


def _draw_scores(axes: Any, rows: Any, styles: dict[str, MethodStyle]) -> None:
    axes.axhline(100, color=GREY, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.axvline(1, color=GREY, linewidth=0.8, linestyle=(0, (1, 2)))
    for method, points in rows.groupby("method", sort=False):
        on_curve = points["on_curve"].astype(bool)
        others, curve = points[~on_curve], points[on_curve].sort_values("ideal_ttft_speedup")
        look = _look(method, styles)
        axes.plot(others["ttft_speedup"], others["relative_score"], **look | {"linestyle": "none", "alpha": 0.45})
        axes.errorbar(
            curve["ttft_speedup"], curve["relative_score"], xerr=around(curve, "ttft_speedup"),
            yerr=around(curve, "relative_score"), elinewidth=0.8, capsize=2, **look,
        )  # fmt: skip
    axes.set(xlabel="measured TTFT speedup over the paired baseline", ylabel="score, % of the paired baseline's")
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.set_title("What is kept of the score")
    log_scale(axes, "x", _TICKS)
    grid(axes)


def _draw_ideals(axes: Any, rows: Any, styles: dict[str, MethodStyle]) -> None:
    for method, points in rows.groupby("method", sort=False):
        ordered = points.sort_values("ideal_ttft_speedup")
        axes.errorbar(
            ordered["ideal_ttft_speedup"], ordered["ttft_speedup"], yerr=around(ordered, "ttft_speedup"),
            elinewidth=0.8, capsize=2, **_look(method, styles) | {"linestyle": "none"},
        )  # fmt: skip
    if rows.empty:  # records without FLOPs
        axes.set_axis_off()
        return
    axes.axline((1, 1), (2, 2), color=GREY, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set(xlabel="ideal TTFT speedup (FLOPs of what was computed)", ylabel="measured TTFT speedup")
    axes.set_title("How much of the ideal is reached (dotted: all)")
    reach = 0.9 * min(1, rows["ttft_speedup"].min()), 1.1 * rows["ideal_ttft_speedup"].max()
    axes.set(xlim=reach, ylim=reach)
    log_scale(axes, "x", _TICKS)
    log_scale(axes, "y", _TICKS)
    grid(axes)


def _look(method: str, styles: dict[str, MethodStyle]) -> dict[str, Any]:
    """The style of a method's marks; hollow for a diagnostic."""
    look = styles[method].drawn | {"markersize": 5.5}
    return look | {"markerfacecolor": "white", "linewidth": 1.0} if is_diagnostic(method) else look


def _write_legend(axes: Any, rows: Any, styles: dict[str, MethodStyle]) -> None:
    axes.set_axis_off()
    handles = [Line2D([], [], label=_name(method, style), **_look(method, styles)) for method, style in styles.items()]
    if not rows["on_curve"].astype(bool).all():
        handles.append(Line2D([], [], label="faint: other settings", color=GREY, marker="o", linestyle="none",
                              alpha=0.45, markersize=5.5))  # fmt: skip
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(-0.25, 0.5), handlelength=3)


def _name(method: str, style: MethodStyle) -> str:
    return f"{style.name}:\nits price is not in its TTFT" if is_diagnostic(method) else style.name


FIGURE = Figure(
    name="field",
    title="All methods at the same ideal TTFT speedups",
    caption=(
        "Left: the score that each method keeps against its measured TTFT speedup, mean over tasks; a curve joins the "
        "settings of a method that are given by a target speedup (1.5x, 2x, ...). Right: the measured speedup against "
        "the ideal one, from the FLOPs of the computed tokens, scoring included. Hollow: a diagnostic, which keeps the "
        "tokens that the full model's own answer attends to; its TTFT leaves out the cost of that, so it is not a "
        "method and is not ranked. Bars: 95 % bootstrap intervals over examples."
    ),
    data=data,
    plot=plot,
    opens_report=True,
)
