"""All methods on one clock: score against TTFT speedup, measured against ideal speedup, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure as MplFigure
from matplotlib.lines import Line2D

from eval.analysis import style
from eval.analysis.columns import (
    EXAMPLES,
    LABEL,
    MB,
    MODEL,
    SECTION,
    SETTING,
    Column,
    cells,
    forms,
    overall,
    target_of,
)  # fmt: skip
from eval.analysis.known_methods import BASELINE, is_diagnostic, place_of
from eval.analysis.table import COMPUTED, Figure, Table
from eval.store.results import Results
from eval.store.runs import is_ablation

_FIELD = (
    MODEL,
    Column("name", "method"),
    Column("setting", "setting"),
    EXAMPLES,
    Column("score", "score", 2),
    Column("relative_score", "% of baseline", 1),
    Column("ttft_speedup", "TTFT speedup", 2),
    Column("ideal_ttft_speedup", "ideal", 2),
    Column("scoring_share", "scoring, %", 1),
    Column("generation_speedup", "generation speedup", 2),
    Column("kv_bytes", "KV cache, MB", 3, scale=MB),
    Column("pct_prompt_tokens_computed", "% computed", 1),
)
_WITHOUT_SELECTION = ["TTFT speedup", "ideal", "generation speedup", "% computed"]  # of a diagnostic
_MEMORY = (
    MODEL,
    LABEL,
    EXAMPLES,
    Column("kv_bytes", "KV cache, MB", 3, scale=MB),
    Column("aux_bytes", "Aux Cache, MB", 3, scale=MB),
    Column("cache_bytes", "both, MB", 3, scale=MB),
    Column("cache_ratio", "both / baseline", 3, missing="unpaired"),
    Column("peak_memory_bytes", "peak, MB", 1, missing="not known", scale=MB),
    Column("peak_ratio", "peak / baseline", 3, missing="unpaired"),
)


def field(results: Results) -> Table:
    """Score, speed, memory and computed tokens of every setting of every method, mean over tasks."""
    frame = overall(results)
    frame["scoring_share"] = 100 * frame["scoring_s"] / frame["ttft_s"]
    frame["diagnostic"] = frame["method"].map(is_diagnostic).astype(bool)
    values = ["score", "relative_score", "ttft_speedup", "ideal_ttft_speedup", "generation_speedup", "kv_bytes"]
    values = forms(*values, "pct_prompt_tokens_computed")
    frame = frame[[*SETTING, "diagnostic", "examples", "seeds", *values, "scoring_share"]]
    settings = [label.removesuffix(" (diagnostic)").partition(", ")[2] for label in frame["label"]]
    shown = frame.assign(
        name=[place_of(name)[1] for name in frame["method"]],
        setting=[setting or "-" for setting in settings],
        scoring_share=frame["scoring_share"].where(frame["scoring_share"] > 0),
    )
    table = cells(shown, _FIELD, results)
    table.loc[frame["method"] == BASELINE, "% of baseline"] = "100.0"
    table.loc[frame["diagnostic"], _WITHOUT_SELECTION] = "(" + table[_WITHOUT_SELECTION] + ")"
    caption = (
        "Mean over tasks; scores 0 to 100. % of baseline: the score relative to the paired baseline's. "
        "Ideal: the baseline's prefill FLOPs divided by the method's, for the tokens that were computed, scoring "
        "included; -: older records lack FLOPs. Scoring: share of TTFT spent before the prefill. "
        "Generation speedup: of whole answers, which may differ in length. KV cache: at the end, MB = 10^6 bytes. % "
        f"computed: prompt tokens, mean over layers; {COMPUTED}. In brackets: a diagnostic, which is not a method: its "
        "TTFT leaves out the cost of its selection. ±: half of the 95 % bootstrap interval over examples."
    )
    return Table("field", "Every method on one clock", caption, frame, table, keys=3)


def memory(results: Results) -> Table:
    """KV cache, Aux Cache and peak memory of every setting, with the paired baseline's on the same examples."""
    frame = overall(results)
    frame["cache_ratio"] = frame["cache_bytes"] / frame["baseline_cache_bytes"]
    frame["peak_ratio"] = frame["peak_memory_bytes"] / frame["baseline_peak_memory_bytes"]
    columns = ("kv_bytes", "aux_bytes", "cache_bytes", "peak_memory_bytes")
    baseline = [f"baseline_{name}" for name in columns]
    frame = frame[[*SETTING, "examples", "seeds", *forms(*columns), *baseline, "cache_ratio", "peak_ratio"]]
    caption = (
        "Mean over tasks, MB = 10^6 bytes. KV cache and Aux Cache: at the end of a generation. Ratios: to the "
        "paired baseline on the same examples. Peak: during a generation, weights included; on a GPU the allocated "
        "memory, on a CPU the process's resident memory, with Python and its libraries. ±: half of the 95 % bootstrap "
        "interval over examples. unpaired: no baseline was run beside the method."
    )
    title = "Memory: KV cache, Aux Cache and peak by method"
    return Table("memory", title, caption, frame, cells(frame, _MEMORY, results), keys=2)


# -------------------------------------------------------------------------------------------------------------- figure

_TICKS = (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 10)


def data(results: Results) -> pd.DataFrame:
    """model, suite, method, label, examples, on_curve (whether a target speedup such as `2x` gives the setting), and
    the means over tasks of relative_score, ttft_speedup and ideal_ttft_speedup, with `_low` and `_high`.

    All settings except the baseline.
    """
    frame = overall(style.usual(results))
    frame = frame[frame["method"] != BASELINE].dropna(subset=["relative_score", "ttft_speedup"])
    frame = frame.assign(on_curve=frame["settings"].map(target_of).notna())
    values = forms("relative_score", "ttft_speedup", "ideal_ttft_speedup")
    return frame[[*SECTION, "method", "label", "examples", "on_curve", *values]]


@style.styled
def plot(frame: Any) -> MplFigure:
    """One row per model and suite: the score on the left, ideal speedups on the right, then the legend."""
    panels, left_out = style.panels_of(frame, SECTION)
    figure = style.new_figure(11, 4.4 * len(panels), left_out=left_out)
    parts = style.titled_parts(figure, [f"{model}, {suite}, mean over tasks" for (model, suite), _ in panels])
    for part, (_, rows) in zip(parts, panels, strict=True):
        styles = style.styles_of(rows["method"])
        scores, ideals, legend = part.subplots(1, 3, width_ratios=[3, 2.3, 1.1])
        _draw_scores(scores, rows, styles)
        _draw_ideals(ideals, rows.dropna(subset=["ideal_ttft_speedup"]), styles)
        _write_legend(legend, rows, styles)
    return figure


def _draw_scores(axes: Any, rows: Any, styles: dict[str, style.MethodStyle]) -> None:
    axes.axhline(100, **style.REFERENCE)
    axes.axvline(1, **style.REFERENCE)
    for method, points in rows.groupby("method", sort=False):
        on_curve = points["on_curve"].astype(bool)
        others, curve = points[~on_curve], points[on_curve].sort_values("ideal_ttft_speedup")
        look = _look(method, styles)
        axes.plot(others["ttft_speedup"], others["relative_score"], **look | {"linestyle": "none", "alpha": 0.45})
        style.draw(axes, curve, "ttft_speedup", "relative_score", with_x=True, **look)
    axes.set(xlabel="measured TTFT speedup over the paired baseline", ylabel="score, % of the paired baseline's")
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.set_title("What is kept of the score")
    style.log_scale(axes, "x", _TICKS)
    style.grid(axes)


def _draw_ideals(axes: Any, rows: Any, styles: dict[str, style.MethodStyle]) -> None:
    if rows.empty:  # records without FLOPs
        axes.set_axis_off()
        return
    for method, points in rows.groupby("method", sort=False):
        ordered = points.sort_values("ideal_ttft_speedup")
        look: dict[str, Any] = _look(method, styles) | {"linestyle": "none"}
        style.draw(axes, ordered, "ideal_ttft_speedup", "ttft_speedup", **look)
    axes.axline((1, 1), (2, 2), **style.REFERENCE)
    axes.set(xlabel="ideal TTFT speedup (FLOPs of what was computed)", ylabel="measured TTFT speedup")
    axes.set_title("How much of the ideal is reached (dotted: all)")
    reach = 0.9 * min(1, rows["ttft_speedup"].min()), 1.1 * rows["ideal_ttft_speedup"].max()
    axes.set(xlim=reach, ylim=reach)
    style.log_scale(axes, "x", _TICKS)
    style.log_scale(axes, "y", _TICKS)
    style.grid(axes)


def _look(method: str, styles: dict[str, style.MethodStyle]) -> dict[str, Any]:
    """The style of a method's marks; hollow for a diagnostic."""
    look = styles[method].drawn | {"markersize": 5.5}
    return look | {"markerfacecolor": "white", "linewidth": 1.0} if is_diagnostic(method) else look


def _write_legend(axes: Any, rows: Any, styles: dict[str, style.MethodStyle]) -> None:
    axes.set_axis_off()
    notes = {name: ":\nits price is not in its TTFT" if is_diagnostic(name) else "" for name in styles}
    names = {name: f"{mark.name}{notes[name]}" for name, mark in styles.items()}
    handles = [Line2D([], [], label=label, **_look(name, styles)) for name, label in names.items()]
    if not rows["on_curve"].astype(bool).all():
        handles.append(Line2D([], [], label="faint: other settings", color=style.GREY, marker="o", linestyle="none",
                              alpha=0.45, markersize=5.5))  # fmt: skip
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(-0.25, 0.5), handlelength=3)


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


# ---------------------------------------------------------------------------------------------------------- comparison


@style.styled
def plot_comparison(table: pd.DataFrame, title: str, methods: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
    """The methods of one command (`compare`): score against TTFT speedup, one colour per method.

    Small marks are tasks; the large one, with its intervals, is the mean over tasks.
    table: the frame of `eval.analysis.run_table.compared_table`. methods: {label in the table: the method's name and
    settings}, for labels that are not method names; a method's first label that is not an ablation gets its style.
    Returns a matplotlib figure.
    """
    figure = style.new_figure(7.2, 4.4)
    axes = figure.subplots()
    whole = table["task"].iloc[-1]  # the mean over tasks, or the only task
    looks: dict[str, str] = {}
    for label in map(str, table["method"].unique()):
        method = (methods or {}).get(label, {})
        name = method.get("name", label)
        looks[label] = label if name in looks.values() or is_ablation(method) else name
    styles = style.styles_of(looks.values())
    for label, name in looks.items():
        rows: Any = table[table["method"] == label]
        mark: dict[str, Any] = {"color": styles[name].colour, "marker": styles[name].marker}
        tasks, mean = rows[rows["task"] != whole], rows[rows["task"] == whole]
        axes.scatter(tasks["ttft_speedup"], tasks["score"], s=22, alpha=0.55, linewidths=0, **mark)
        mark |= {"markersize": 10, "markeredgecolor": "white", "linestyle": "none", "label": label}
        style.draw(axes, mean, "ttft_speedup", "score", with_x=True, capsize=3, elinewidth=None, **mark)
    axes.set(xlabel="TTFT speedup over the paired baseline", ylabel="score (0 to 100)", ylim=(-4, 104))
    axes.set_title(title, fontsize=11)
    style.grid(axes)
    style.legend_beside(axes, title=f"large: {whole}\nsmall: one task", alignment="left")
    return figure
