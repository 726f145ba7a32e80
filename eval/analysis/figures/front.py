"""The front of a search: score against ideal TTFT speedup, on the tuning half and the held-out half."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure as MplFigure
from matplotlib.lines import Line2D

from eval.analysis.figures.style import COLOURS, GREY, around, grid, legend_beside, new_figure, styled

_BESIDE = {"paper": ("paper's, or earlier", "s", COLOURS[1]), "uniform": ("evenly spaced", "^", COLOURS[2])}
_TUNED = ("found by search", "o", COLOURS[0])


@styled
def plot_front(table: pd.DataFrame, title: str) -> MplFigure:
    """All schedules tried, their front, and the finalists on the held-out half with intervals.

    table: front.csv of `eval.tune.findings`.
    """
    figure = new_figure(7.2, 4.2)
    axes: Any = figure.subplots()
    trials: Any = table[table["kind"] == "trial"]
    axes.plot(
        trials["ideal_speedup"], trials["tuning_score"], "o", color=GREY, markersize=3, alpha=0.5, markeredgewidth=0
    )
    best = trials[trials["on_front"]].sort_values("ideal_speedup")
    axes.step(best["ideal_speedup"], best["tuning_score"], where="pre", color=GREY, linewidth=1)
    for _, row in table[table["kind"] != "trial"].iterrows():
        _, marker, colour = _style(str(row["kind"]))
        drawn: Any = {"marker": marker, "color": colour, "markersize": 6.5, "linestyle": "none"}
        axes.plot(row["ideal_speedup"], row["tuning_score"], markerfacecolor="none", zorder=3, **drawn)
        axes.errorbar(
            row["ideal_speedup"], row["score"], yerr=around(row, "score"), elinewidth=0.9, capsize=2.5, zorder=4,
            **drawn,
        )  # fmt: skip
    axes.set(xlabel="ideal TTFT speedup (FLOPs) on the prompts tuned on", ylabel="score (0 to 100), mean over tasks")
    axes.set_title(title)
    grid(axes)
    _write_legend(axes, [kind for kind in dict.fromkeys(table["kind"]) if kind != "trial"])
    return figure


def _style(kind: str) -> tuple[str, str, str]:
    return _BESIDE.get(kind, _TUNED)


def _write_legend(axes: Any, kinds: list[str]) -> None:
    handles = [
        Line2D([], [], linestyle="none", label=name, marker=marker, color=colour, markersize=6.5)
        for name, marker, colour in dict.fromkeys(map(_style, kinds))
    ]
    hollow: Any = {"color": GREY, "markersize": 6.5, "linestyle": "none"}
    handles += [
        Line2D([], [], marker="o", label="filled: held-out half, 95 %", **hollow),
        Line2D([], [], marker="o", label="hollow: half tuned on", markerfacecolor="none", **hollow),
        Line2D([], [], marker="o", label="every schedule tried", **hollow | {"markersize": 3}),
        Line2D([], [], color=GREY, linewidth=1, label="their front (tuned on)"),
    ]
    legend_beside(axes, handles=handles)
