"""A comparison of methods (`compare`, `experiment=demo`): score against speedup."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from eval.analysis.figures.style import around, grid, legend_beside, new_figure, styled, styles_of
from eval.store.runs import is_ablation


@styled
def plot_comparison(table: pd.DataFrame, title: str, methods: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
    """Score against TTFT speedup, one colour per method.

    Small marks are tasks; the large one, with its intervals, is the mean over tasks.
    table: the frame of `eval.analysis.run_table.compared_table`. methods: {label in the table: the method's name and
    settings}, for labels that are not method names; a method's first label that is not an ablation gets its style.
    Returns a matplotlib figure.
    """
    figure = new_figure(7.2, 4.4)
    axes = figure.subplots()
    overall = table["task"].iloc[-1]  # the mean over tasks, or the only task
    looks: dict[str, str] = {}
    for label in map(str, table["method"].unique()):
        method = (methods or {}).get(label, {})
        name = method.get("name", label)
        looks[label] = label if name in looks.values() or is_ablation(method) else name
    styles = styles_of(looks.values())
    for label, name in looks.items():
        rows = table[table["method"] == label]
        style: dict[str, Any] = {"color": styles[name].colour, "marker": styles[name].marker}
        tasks = rows[rows["task"] != overall]
        axes.scatter(tasks["ttft_speedup"], tasks["score"], s=22, alpha=0.55, linewidths=0, **style)
        mean: Any = rows[rows["task"] == overall]
        for _, row in mean.iterrows():
            axes.errorbar(
                row["ttft_speedup"], row["score"],
                xerr=around(row, "ttft_speedup"), yerr=around(row, "score"),
                markersize=10, markeredgecolor="white", capsize=3, linestyle="none", label=label, **style,
            )  # fmt: skip
    axes.set(xlabel="TTFT speedup over the paired baseline", ylabel="score (0 to 100)", ylim=(-4, 104))
    axes.set_title(title, fontsize=11)
    grid(axes)
    legend_beside(axes, title=f"large: {overall}\nsmall: one task", alignment="left")
    return figure
