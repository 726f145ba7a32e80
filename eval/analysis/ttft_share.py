"""When TTFT matters: its share of the generation time, by length of prompt and answer.

The table has every setting; the figure has the method under study.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as MplFigure

from eval.analysis import style
from eval.analysis.columns import (
    LABEL,
    MODEL,
    PROMPT_ENDS,
    SETTING,
    Column,
    cells,
    forms,
    in_order,
    range_names,
    range_of,
)  # fmt: skip
from eval.analysis.known_methods import BASELINE
from eval.analysis.table import Figure, Table
from eval.store.aggregate import mean_interval, with_baselines
from eval.store.results import Results, first_turns

_ANSWER_ENDS = (4, 16, 64, 256)  # upper ends of the ranges of answer lengths, the end token included


def ttft_share(results: Results) -> Table:
    """TTFT's share of the generation time for every setting."""
    frame = _shares(results).rename(columns={"answer": "answer_tokens"})
    frame = frame.assign(prompt_tokens=range_of(frame["prompt_tokens"], PROMPT_ENDS))
    frame = frame[[*SETTING, "id", "ttft_s", "total_s", "ttft_steps", "prompt_tokens", "answer_tokens"]]
    all_prompts, all_answers = {"prompt_tokens": "all"}, {"answer_tokens": "all"}
    parts = [frame.assign(**sums) for sums in ({}, all_prompts, all_answers, all_prompts | all_answers)]
    grouped = pd.concat(parts).groupby([*SETTING, "prompt_tokens", "answer_tokens"], sort=False)
    sums = {name: (name, "sum") for name in ("ttft_s", "total_s")}
    shares: Any = grouped.agg(generations=("id", "size"), **sums, ttft_steps=("ttft_steps", "mean"))
    shares = shares.reset_index()
    shares["share"] = 100 * shares["ttft_s"] / shares["total_s"]
    shares = in_order(shares)
    headings = {("all", "all"): "all"}
    headings |= {(name, "all"): f"prompt {name}" for name in _there(shares["prompt_tokens"], PROMPT_ENDS)}
    headings |= {("all", name): f"answer {name}" for name in _there(shares["answer_tokens"], _ANSWER_ENDS)}
    lines = []
    for _, group in shares.groupby(SETTING, sort=False):
        rows = group.to_dict("records")
        by_length = {headings.get((row["prompt_tokens"], row["answer_tokens"])): row["share"] for row in rows}
        whole = next(row for row in rows if row["prompt_tokens"] == row["answer_tokens"] == "all")
        lines.append(whole | by_length)
    values = pd.DataFrame(lines, columns=[*SETTING, "ttft_steps", *headings.values()])
    columns = [
        MODEL,
        LABEL,
        Column("ttft_steps", "in steps", 1),
        *(Column(heading, heading, 1) for heading in headings.values()),
    ]
    caption = (
        "Per cent of the generation time before the first token: summed TTFT divided by summed generation time, "
        "for generations with a prompt or an answer of this many tokens (the end token counts). The CSV has each "
        "combination of prompt and answer length, and the number of generations. In steps: TTFT in decoding steps, "
        f"mean over generations of several tokens; the paper's baseline: {PAPER['ttft_steps']}. -: no such generation."
    )
    title = "TTFT's share of the generation time"
    return Table("ttft_share", title, caption, shares, cells(values, columns, results), keys=2)


def _shares(results: Results) -> Any:
    """A row for each generation, with ttft_share (0 to 100), ttft_steps and answer, the range of its tokens."""
    frame = with_baselines(first_turns(results.frame))
    frame = frame.dropna(subset="total_s")  # answers in packs have no time of their own
    return frame.assign(
        ttft_share=100 * frame["ttft_s"] / frame["total_s"],
        ttft_steps=frame["ttft_s"] / frame["step_s"],
        answer=range_of(frame["generated_tokens"], _ANSWER_ENDS),
    )


def _there(names: Any, ends: Sequence[int]) -> list[str]:
    """The ranges that occur, in order."""
    return [name for name in range_names(ends) if name in set(names)]


# -------------------------------------------------------------------------------------------------------------- figure

# The paper's introduction: the baseline, Llama 2 7B, on LongBench
PAPER = {"prompt_tokens": 3376, "tokens": 68, "ttft_share": 23.0, "ttft_steps": 21}


def data(results: Results) -> pd.DataFrame:
    """model, paper_model, label, answer ("5-16": 5 to 16 generated tokens), prompt (the power of two nearest to the
    prompts' lengths), examples; their mean prompt_tokens, generated_tokens, ttft_steps (TTFT in decoding steps), and
    ttft_share (0 to 100, of each example's generation time), with ttft_share_low and _high (95 % bootstrap).

    For each model, the LazyLLM setting chosen by `style.studied`, after the baseline.
    """
    frame = _shares(style.studied(results))
    frame = frame.assign(prompt=2 ** np.log2(frame["prompt_tokens"]).round().astype(int))
    rows = []
    for keys, group in frame.groupby(["model", "label", "answer", "prompt"], sort=False):
        low, high = mean_interval(group["ttft_share"].to_numpy())
        means = group[["prompt_tokens", "generated_tokens", "ttft_steps", "ttft_share"]].mean().to_dict()
        named = dict(zip(("model", "label", "answer", "prompt"), keys, strict=True))
        named |= {"paper_model": group["paper_model"].iloc[0], "examples": len(group), **means}
        rows.append(named | {"ttft_share_low": low, "ttft_share_high": high})
    columns = ["model", "paper_model", "label", "answer", "prompt", "examples", "prompt_tokens", "generated_tokens"]
    table: Any = pd.DataFrame(rows, columns=[*columns, "ttft_steps", *forms("ttft_share")])
    return table.sort_values(["model", "label", "answer", "prompt"], key=_place, kind="stable").reset_index(drop=True)


def _place(column: Any) -> Any:
    """Sort keys: the baseline first, answers by length."""
    if column.name == "label":
        return column != BASELINE
    return column.map(range_names(_ANSWER_ENDS).index) if column.name == "answer" else column


@style.styled
def plot(frame: Any) -> MplFigure:
    """One row per model: the baseline on the left, LazyLLM on the right; one curve per range of answer lengths."""
    models, left_out = style.panels_of(frame, ["model"])
    figure = style.new_figure(9.5, 3.7 * len(models), left_out=left_out)
    lines = figure.subplots(len(models), 2, squeeze=False, sharex="row", sharey=True)
    for ((model,), of_model), line in zip(models, lines, strict=True):
        for label, axes in zip(dict.fromkeys(of_model["label"]), line, strict=False):
            _draw_panel(axes, of_model, str(label), _there(frame["answer"], _ANSWER_ENDS))
            axes.set_title(f"{model}: {label}")
        for axes in line[of_model["label"].nunique() :]:  # if no baseline was measured
            axes.set_axis_off()
        line[0].set_ylabel("TTFT, % of the generation time")
    return figure


def _draw_panel(axes: Any, of_model: Any, label: str, answers: Sequence[str]) -> None:
    rows = of_model[of_model["label"] == label]
    last = of_model["prompt_tokens"].max()
    style.log_scale(axes, "x", [2**exponent for exponent in range(4, 18)])
    axes.set(ylim=(0, 103), xlabel="prompt tokens")
    for number, answer in enumerate(answers):
        curve, colour = rows[rows["answer"] == answer], style.shade_of(number, len(answers))
        if curve.empty:
            continue
        look = {"color": colour, "markersize": 5, **style.look_of(number)}
        style.draw(
            axes, curve, "prompt_tokens", "ttft_share", label=f"{answer.replace('-', chr(0x2013))} tokens", **look
        )
    with_paper = _paper_applies(of_model)
    if with_paper:  # in both panels, so that their axes are equal
        last = max(last, PAPER["prompt_tokens"])
    if with_paper and label == "baseline":
        own = (of_model["paper_model"] == "llama2").any()
        x, y = PAPER["prompt_tokens"], PAPER["ttft_share"]
        axes.plot(x, y, marker="o", markersize=8, markerfacecolor="none", markeredgecolor="black", linestyle="none",
                  alpha=1 if own else 0.5)  # fmt: skip
        text = f"paper, Llama 2 7B:\n{PAPER['tokens']} tokens; the first\ntakes {PAPER['ttft_steps']} steps"
        axes.annotate(text, (x, y), xytext=(0, -8), ha="right", va="top", textcoords="offset points", fontsize=7.5,
                      color="black" if own else style.GREY,
                      bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5})  # fmt: skip
    axes.set_xlim(of_model["prompt_tokens"].min() / 1.15, last * 1.15)
    style.legend_beside(axes)
    style.grid(axes)


def _paper_applies(of_model: Any) -> bool:
    """Whether to show the paper's share: for its model, Llama 2, and for models that are not in the paper."""
    return bool((of_model["paper_model"].isna() | (of_model["paper_model"] == "llama2")).all())


FIGURE = Figure(
    name="ttft_share",
    title="When the time to first token matters: its share of the generation time",
    caption=(
        "Mean over examples of TTFT / generation time, by the prompt's length (nearest power of two) and the "
        "number of generated tokens, with 95 % bootstrap intervals; left the baseline, right LazyLLM. "
        "Hollow: the paper's mean over LongBench with Llama 2 7B on an A100. The paper's reviewers asked for this."
    ),
    data=data,
    plot=plot,
)
