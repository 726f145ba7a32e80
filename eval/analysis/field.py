"""All methods: score against TTFT speedup, measured against ideal speedup, TTFT's share, and memory."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure as MplFigure
from matplotlib.lines import Line2D

from eval.analysis import columns, style
from eval.analysis.columns import BASELINE, SECTION, SETTING, overall, range_of, ranges_in
from eval.analysis.table import (
    EXAMPLES,
    FIDELITY,
    KEPT,
    LABEL,
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
from eval.store.results import Results, first_turns

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
_ANSWER_ENDS = (4, 16, 64, 256)  # upper ends of the ranges of answer lengths, the end token included
_MEMORY = (
    Column("kv_bytes", "KV cache, MB", 3, scale=MB),
    Column("aux_bytes", "Aux Cache, MB", 3, scale=MB),
    Column("cache_bytes", "both, MB", 3, scale=MB),
    Column("cache_ratio", "both / baseline", 3, missing="unpaired", interval=False),
    Column("peak_memory_bytes", "peak, MB", 1, missing="not known", scale=MB),
    Column("peak_ratio", "peak / baseline", 3, missing="unpaired", interval=False),
)


@as_table(
    10,
    title="Every method: score, speed and memory",
    caption="Mean over tasks of the score, 0 to 100, and of the speedups over the baseline of the same visits.",
    notes=(
        "% of baseline: the score relative to the baseline's. Scoring: share of TTFT spent before the prefill. "
        "Ideal without attention: the most that methods can reach that skip attention alone. Generation speedup: to "
        "the last token of the shorter answer; whole-answer speedup: to the last token of each. KV cache: at the end, "
        "MB = 10^6 bytes.{unsolved}"
    ),
    command="python run.py -m experiment=field model=tiny",
)
def field(results: Results) -> Rows:
    """Score, speed, memory and computed tokens of every setting of every method, mean over tasks."""
    frame = overall(results)
    scoring = 100 * frame["scoring_s"] / frame["ttft_s"]
    values = forms(*(column.name for column in _VALUES if column.name != "scoring_share"))
    frame = frame[[*SETTING, "examples", "seeds", *values]].assign(scoring_share=scoring)
    named = zip(frame["label"], frame["method"], strict=True)
    settings = ["-" if label == method else label.removeprefix(f"{method}, ") for label, method in named]
    names = [columns.place_of(name)[1] for name in frame["method"]]
    shown = frame.assign(name=names, setting=settings, scoring_share=scoring.where(scoring > 0))
    values = {"unsolved": f" {columns.unsolved(frame)}".rstrip()}
    return Rows(frame, cells(shown, measured(_FIELD, frame), results), keys=3, values=values)


@as_table(
    160,
    title="Memory: KV cache, Aux Cache and peak by method",
    caption=(
        "KV cache and Aux Cache at the end of a generation, and the peak during it, mean over tasks. Ratios are to the "
        "baseline on the same examples."
    ),
    notes=(
        "MB = 10^6 bytes. KV cache: of stored tokens. Aux Cache: of tokens that may be revived. Room for more tokens "
        "is in the peak alone. Peak: weights included; on a GPU the allocated memory, on a CPU the process's resident "
        "memory, with Python and its libraries."
    ),
    command="python run.py model=tiny method=lazy",
)
def memory(results: Results) -> Rows:
    """KV cache, Aux Cache and peak memory of every setting, and their ratios to the baseline's on the same examples."""
    frame = overall(results)
    frame = frame[[*SETTING, "examples", "seeds", *forms(*(column.name for column in _MEMORY))]]
    shown = cells(frame, (MODEL, LABEL, EXAMPLES, *_MEMORY), results)
    return Rows(frame, shown, keys=2)


@as_table(
    170,
    title="TTFT's share of the generation time",
    caption=(
        "Per cent of the generation time before the first token, by tokens of prompt or answer. TTFT, steps: TTFT "
        "divided by a decoding step's time; 21 for the paper's baseline."
    ),
    notes=(
        "A share is summed TTFT divided by summed generation time; steps are a mean over generations of several "
        "tokens. The end token counts. The CSV has each combination of prompt and answer length, and the number of "
        "generations."
    ),
    command="python run.py model=tiny method=lazy",
)
def ttft_share(results: Results) -> Rows:
    """TTFT's share of the generation time for every setting, by length of prompt and of answer."""
    frame: Any = first_turns(results.counting)
    frame = frame.dropna(subset="total_s")  # answers that decoded together have no total time
    frame = frame.assign(
        prompt_tokens=range_of(frame["prompt_tokens"]),
        answer_tokens=range_of(frame["generated_tokens"], _ANSWER_ENDS),
        ttft_steps=frame["ttft_s"] / frame["step_s"],
    )
    lengths = ["prompt_tokens", "answer_tokens"]
    grouped = columns.with_sums(frame, *lengths).groupby([*SETTING, *lengths], sort=False)
    counted = {"generations": ("id", "size"), "ttft_s": ("ttft_s", "sum"), "total_s": ("total_s", "sum")}
    shares: Any = columns.in_order(grouped.agg(**counted, ttft_steps=("ttft_steps", "mean")).reset_index())
    shares["share"] = 100 * shares["ttft_s"] / shares["total_s"]
    headings = {("all", "all"): "all"}
    headings |= {(name, "all"): f"prompt {name}" for name in ranges_in(shares["prompt_tokens"])}
    headings |= {("all", name): f"answer {name}" for name in ranges_in(shares["answer_tokens"], _ANSWER_ENDS)}
    whole = shares[shares[lengths].eq("all").all(axis=1)]
    by_part = shares.pivot(index=SETTING, columns=lengths, values="share").reindex(columns=[*headings])
    whole = whole.join(by_part.set_axis([*headings.values()], axis=1), on=SETTING)
    shown = [MODEL, LABEL, Column("ttft_steps", "TTFT, steps", 1)]
    shown += [Column(heading, heading, 1) for heading in headings.values()]
    return Rows(shares, cells(whole, shown, results), keys=2)


def data(results: Results) -> pd.DataFrame:
    """model, suite, method, label, examples, on_curve, and the means over tasks of relative_score, ttft_speedup and
    ideal_ttft_speedup, with `_low` and `_high`. All settings except the baseline and ablations of LazyLLM.

    on_curve: whether a target speedup such as `2x` gives the setting, or the method has no other.
    """
    frame: Any = style.as_published(overall(results))
    frame = frame[frame["method"] != BASELINE].dropna(subset=["relative_score", "ttft_speedup"])
    frame = style.of_all_tasks(results.least_different(frame))
    is_alone = ~frame.duplicated([*SECTION, "method"], keep=False)
    frame = frame.assign(on_curve=frame["settings"].map(columns.target_of).notna() | is_alone)
    values = forms("relative_score", "ttft_speedup", "ideal_ttft_speedup")
    return frame[[*SECTION, "method", "label", "examples", "on_curve", *values]]


@as_figure(
    10,
    "field",
    data,
    title="Every method: score and measured speed",
    caption=(
        "Left: the score that each method keeps against its measured TTFT speedup, mean over tasks. Right: the "
        "measured speedup against the ideal one, from the FLOPs of the computed tokens, scoring included."
    ),
    notes=(
        "A curve joins the settings of a method that are given by a target speedup (1.5x, 2x, ...); a method's only "
        "setting is as dark. No speedup gives that of a method whose number of tokens depends on the prompt. Bars: "
        "95 % bootstrap intervals over examples."
    ),
    command="python run.py -m experiment=field model=tiny",
)
@style.styled
def plot(frame: Any) -> MplFigure:
    """One row per model and suite: the score on the left, ideal speedups on the right, then the legend."""
    figure, sections = style.sections_of(frame, "Score and TTFT speedup, mean over tasks", 11, lambda _: 4.4)
    for part, rows in sections:
        styles = style.styles_of(rows["method"])
        scores, ideals, legend = part.subplots(1, 3, width_ratios=[3, 2.3, 1.1])
        scores.axhline(100, **style.REFERENCE)
        scores.axvline(1, **style.REFERENCE)
        style.draw_methods(scores, rows, styles, "ttft_speedup", "relative_score")
        scores.set(xlabel="measured TTFT speedup over the baseline", ylabel="score, % of the baseline's")
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
    axes.set(xlabel="ideal TTFT speedup (FLOPs of what was computed)", ylabel="measured TTFT speedup")
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
