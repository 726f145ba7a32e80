"""All methods: score against TTFT speedup, and measured against ideal speedup."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure as MplFigure
from matplotlib.lines import Line2D

from eval.analysis import columns, style
from eval.analysis.columns import BASELINE, SECTION, SETTING, overall
from eval.analysis.table import (
    EXAMPLES,
    FIDELITY,
    KEPT,
    MB,
    MODEL,
    Column,
    Rows,
    as_figure,
    as_table,
    cells,
    forms,
    measured,
)
from eval.store.results import Results

_VALUES = (
    Column("score", "score", 2),
    KEPT,
    *FIDELITY,
    Column("ttft_speedup", "TTFT speedup", 2),
    Column("ideal_ttft_speedup", "ideal", 2),
    Column("scoring_share", "scoring, %", 1),
    Column("equal_length_speedup", "generation speedup", 2),
    Column("generation_speedup", "whole-answer speedup", 2),
    Column("kv_bytes", "KV cache, MB", 3, scale=MB),
    Column("pct_prompt_tokens_computed", "% computed", 1),
    Column("attention_ceiling", "ideal without attention", 2, missing="not known", interval=False),
)
_FIELD = (MODEL, Column("name", "method"), Column("setting", "setting"), EXAMPLES, *_VALUES)


@as_table(
    10,
    title="Every method: score, speed and memory",
    caption="Mean over tasks of the score, 0 to 100, and of the speedups over the baseline of the "
    "same visits.",
    notes=(
        "% of baseline: the score relative to the baseline's. Scoring: share of TTFT spent before "
        "the prefill. Ideal without attention: the most that methods can reach that skip attention "
        "alone. Generation speedup: to the last token of the shorter answer; whole-answer speedup: "
        "to the last token of each. KV cache: at the end, MB = 10^6 bytes.{unsolved}"
    ),
    command="python run.py -m experiment=field model=tiny",
)
def field(results: Results) -> Rows:
    """Score, speed, memory and computed tokens of every setting of every method, mean over
    tasks.
    """
    frame = overall(results)
    scoring = 100 * frame["scoring_s"] / frame["ttft_s"]
    values = forms(*(column.name for column in _VALUES if column.name != "scoring_share"))
    frame = frame[[*SETTING, "speedup", "examples", "seeds", *values]].assign(scoring_share=scoring)
    named = zip(frame["label"], frame["method"], strict=True)
    settings = [
        "-" if label == method else label.removeprefix(f"{method}, ") for label, method in named
    ]
    names = [columns.place_of(name)[1] for name in frame["method"]]
    display = frame.assign(name=names, setting=settings, scoring_share=scoring.where(scoring > 0))
    values = {"unsolved": f" {columns.unsolved(frame)}".rstrip()}
    return Rows(frame, cells(display, measured(_FIELD, frame), results), keys=3, values=values)


def data(results: Results) -> pd.DataFrame:
    """model, suite, method, label, examples, on_curve, and the means over tasks of relative_score,
    ttft_speedup and ideal_ttft_speedup, with `_low` and `_high`. All settings except the baseline
    and ablations of LazyLLM.

    on_curve: whether a target speedup such as `2x` gives the setting, or the method has no other.
    """
    frame: Any = style.as_published(overall(results))
    frame = frame[frame["method"] != BASELINE].dropna(subset=["relative_score", "ttft_speedup"])
    frame = style.drop_partial_means(frame)
    is_alone = ~frame.duplicated([*SECTION, "method"], keep=False)
    frame = frame.assign(on_curve=columns.targets_of(frame).notna() | is_alone)
    values = forms("relative_score", "ttft_speedup", "ideal_ttft_speedup")
    return frame[[*SECTION, "method", "label", "examples", "on_curve", *values]]


@as_figure(
    10,
    "field",
    data,
    title="Every method: score and measured speed",
    caption=(
        "Left: the score that each method keeps against its measured TTFT speedup, mean over "
        "tasks. Right: the measured speedup against the ideal one, from the FLOPs of the computed "
        "tokens, scoring included."
    ),
    notes=(
        "A curve joins the settings of a method that are given by a target speedup (1.5x, 2x, "
        "...); a method's only setting is as dark. No speedup gives that of a method whose number "
        "of tokens depends on the prompt. Bars: 95 % bootstrap intervals over examples."
    ),
    command="python run.py -m experiment=field model=tiny",
)
@style.styled
def plot(frame: Any) -> MplFigure:
    """One row per model and suite: the score on the left, ideal speedups on the right, then the
    legend.
    """
    figure, sections = style.sections_of(
        frame, "Score and TTFT speedup, mean over tasks", 11, lambda _: 4.4
    )
    for part, rows in sections:
        styles = style.styles_of(rows["method"])
        scores, ideals, legend = part.subplots(1, 3, width_ratios=[3, 2.3, 1.1])
        scores.axhline(100, **style.REFERENCE)
        scores.axvline(1, **style.REFERENCE)
        style.draw_methods(scores, rows, styles, "ttft_speedup", "relative_score")
        scores.set(
            xlabel="measured TTFT speedup over the baseline", ylabel="score, % of the baseline's"
        )
        scores.set_ylim(bottom=min(0, scores.get_ylim()[0]))
        scores.set_title("Score kept, by TTFT speedup")
        style.log_scale(scores, "x")
        with_ideal = rows.dropna(subset="ideal_ttft_speedup")
        if with_ideal.empty:  # records without FLOPs
            ideals.set_axis_off()
        else:
            _draw_ideals(ideals, with_ideal, styles)
        _write_legend(legend, rows, styles)
    return figure


def _draw_ideals(axes: Any, rows: Any, styles: dict[str, Any]) -> None:
    for method, points in rows.groupby("method", sort=False):
        look: dict[str, Any] = styles[method] | {"linestyle": "none"}
        style.draw(axes, points, "ideal_ttft_speedup", "ttft_speedup", **look)
    axes.axline((1, 1), (2, 2), **style.REFERENCE)
    axes.set(
        xlabel="ideal TTFT speedup (FLOPs of what was computed)", ylabel="measured TTFT speedup"
    )
    axes.set_title("Measured against ideal speedup (dotted: equal)")
    speedups = rows[["ttft_speedup", "ideal_ttft_speedup"]].to_numpy()
    reach = 0.9 * min(1, speedups.min()), 1.1 * speedups.max()
    axes.set(xlim=reach, ylim=reach)
    style.log_scale(axes, "x")
    style.log_scale(axes, "y")


def _write_legend(axes: Any, rows: Any, styles: dict[str, Any]) -> None:
    axes.set_axis_off()
    handles = [Line2D([], [], **look) for look in styles.values()]
    if not rows["on_curve"].astype(bool).all():
        faint: Any = {"color": style.GREY, "marker": "o", "linestyle": "none", "alpha": 0.4}
        handles.append(Line2D([], [], label="faint: other settings", **faint))
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(-0.25, 0.5), handlelength=3)
