"""Figure 6: the score, and the first token's KL divergence, against the layer of a single pruning point."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure as MplFigure

from eval.analysis.figures.figure import Figure
from eval.analysis.figures.style import GREY, LINES, MARKERS, around, grid, legend_beside, new_figure, styled
from eval.analysis.known_methods import STUDIED
from eval.analysis.tables.cells import forms
from eval.store.results import Results
from eval.store.runs import is_ablation

_VALUES = ("score", "baseline_score", "relative_score", "ttft_speedup", "kl")


def single_points(results: Results) -> pd.DataFrame:
    """Means over tasks of LazyLLM's runs with one pruning layer and default settings: model, suite, layer, keep (0 to
    1), examples, and score, baseline_score, relative_score, ttft_speedup, kl, with `_low` and `_high`.
    """
    table: Any = results.by_task
    table = table[(table["level"] == "all") & (table["method"] == STUDIED)]
    columns = ["model", "suite", "layer", "keep", "examples", *forms(*_VALUES)]
    points = [_single_point(json.loads(settings)) for settings in table["settings"]]
    points = pd.DataFrame(points, index=table.index, columns=["layer", "keep"])
    table = table.join(points).dropna(subset="layer").astype({"layer": int, "keep": float})
    return table.sort_values(["model", "suite", "keep", "layer"])[columns].reset_index(drop=True)


@styled
def plot(frame: Any) -> MplFigure:
    """One panel per model and suite, with one curve per kept share; below it a panel of KL, if it was measured."""
    panels = list(frame.groupby(["model", "suite"], sort=False))
    has_kl = frame["kl"].notna().any()
    figure = new_figure(5.6 * len(panels), 4 + 3.4 * has_kl)
    columns = figure.subplots(1 + has_kl, len(panels), squeeze=False).T
    for column, ((model, suite), rows) in zip(columns, panels, strict=True):
        _draw_scores(column[0], rows)
        column[0].set_title(f"{model}, {suite}: mean over tasks, {_counts(rows['examples'])} examples")
        if has_kl:
            _draw_curves(column[1], rows, "kl", "KL from the baseline's first token, nats")
            column[1].set_yscale("log", nonpositive="clip")
    return figure


def _counts(examples: Any) -> str:
    low, high = examples.min(), examples.max()
    return str(low) if low == high else f"{low} to {high}"


def shade_of(number: int, total: int) -> str:
    """The shade of an ordered value, from dark to light; the lightest is still legible on white."""
    return to_hex(colormaps["viridis"](0.78 * number / max(1, total - 1)))


def _single_point(settings: dict[str, Any]) -> tuple[int | None, float | None]:
    """(layer, keep), or (None, None) for other settings."""
    schedule = settings["schedule"]
    if is_ablation(settings) or not isinstance(schedule, dict) or len(schedule) != 1:
        return None, None
    ((layer, keep),) = schedule.items()
    return int(layer), float(keep)


def _draw_scores(axes: Any, rows: Any) -> None:
    drawn = rows[["score", "score_low", "score_high", "baseline_score"]].to_numpy()
    low, high = np.nanmin(drawn), np.nanmax(drawn)  # intervals and baseline may be missing
    margin = 0.06 * max(high - low, 1)
    axes.set(ylim=(low - margin, high + margin))
    baseline = float(np.mean(rows["baseline_score"]))
    if np.isfinite(baseline):
        axes.axhline(baseline, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)), label="baseline")
    _draw_curves(axes, rows, "score", "score (0 to 100)")


def _draw_curves(axes: Any, rows: Any, column: str, label: str) -> None:
    shares = sorted(set(rows["keep"]))
    for number, keep in enumerate(shares):
        curve, colour = rows[rows["keep"] == keep], shade_of(number, len(shares))
        axes.errorbar(
            curve["layer"], curve[column], yerr=around(curve, column), color=colour, elinewidth=0.8, capsize=2,
            marker=MARKERS[number % len(MARKERS)], linestyle=LINES[number % len(LINES)], markersize=5,
            label=f"keep {100 * keep:g} %",
        )  # fmt: skip
    axes.set_xticks(sorted(set(rows["layer"])))
    axes.set(xlabel="layer after which tokens are pruned, once", ylabel=label)
    legend_beside(axes)
    grid(axes)


FIGURE = Figure(
    name="figure6",
    title="Score against the layer of a single pruning point (the paper's Figure 6)",
    caption=(
        "LazyLLM with one pruning layer, mean over tasks, with 95 % bootstrap intervals over examples: the score, and "
        "on a log scale the KL divergence of the first token's distribution from the paired baseline's. The paper "
        "claims that scores fall if fewer tokens are kept and rise if pruning is later; it gives no numbers to "
        "overlay."
    ),
    data=single_points,
    plot=plot,
)
