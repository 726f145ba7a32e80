"""Pictures of stored results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # files only: no screen is needed or opened

import matplotlib.pyplot as plt
import pandas as pd

# Okabe and Ito's colours, told apart by colour-blind readers too
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot_comparison(table: pd.DataFrame, title: str) -> Any:
    """Score against TTFT speedup, one colour a method.

    Small marks are tasks; the large one, with its intervals, is the mean over tasks.
    table: as `eval.summary.compared_csv` writes it. Returns a matplotlib figure.
    """
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    overall = table["task"].iloc[-1]  # the mean over tasks, or the only task
    for number, method in enumerate(dict.fromkeys(table["method"])):
        rows = table[table["method"] == method]
        style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        tasks = rows[rows["task"] != overall]
        axes.scatter(tasks["ttft_speedup"], tasks["score"], s=22, alpha=0.55, linewidths=0, **style)
        mean: Any = rows[rows["task"] == overall]
        for _, row in mean.iterrows():
            axes.errorbar(
                row["ttft_speedup"], row["score"],
                xerr=_around(row, "ttft_speedup"), yerr=_around(row, "score"),
                markersize=10, markeredgecolor="white", capsize=3, linestyle="none", label=method, **style,
            )  # fmt: skip
    axes.set_xlabel("TTFT speedup over the paired baseline")
    axes.set_ylabel("score (0 to 100)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylim(-4, 104)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title=f"large: {overall}\nsmall: one task", alignment="left", loc="center left",
                bbox_to_anchor=(1.0, 0.5))  # fmt: skip
    return figure


def save(figure: Any, stem: Path, suffixes: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write the figure as `stem` with each suffix, and close it. Returns the paths."""
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in suffixes]
    for path in paths:
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return paths


def _around(row: Any, column: str) -> list[list[float]] | None:
    """The interval as distances from the mean, for `errorbar`; None where there is none."""
    low, mean, high = row[f"{column}_low"], row[column], row[f"{column}_high"]
    if pd.isna(low) or pd.isna(high):
        return None
    return [[max(0.0, mean - low)], [max(0.0, high - mean)]]
