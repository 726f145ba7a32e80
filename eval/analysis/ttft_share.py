"""When TTFT matters: its share of the generation time, by length of prompt and answer.

The table has every setting; the figure has the method under study.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as MplFigure

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
from eval.analysis.style import (
    GREY,
    draw,
    grid,
    legend_beside,
    log_scale,
    look_of,
    new_figure,
    shade_of,
    studied,
    styled,
)  # fmt: skip
from eval.analysis.table import Figure, Table
from eval.store.aggregate import mean_interval, with_baselines
from eval.store.results import Results, first_turns

_ANSWER_ENDS = (4, 16, 64, 256)  # upper ends of the table's ranges of answer lengths, the end token included


def ttft_share(results: Results) -> Table:
    """TTFT's share of the generation time for every setting."""
    frame = with_baselines(first_turns(results.frame)).dropna(
        subset="total_s"
    )  # answers in packs have no time of their own
    frame = frame.assign(
        prompt_tokens=range_of(frame["prompt_tokens"], PROMPT_ENDS),
        answer_tokens=range_of(frame["generated_tokens"], _ANSWER_ENDS),
    )
    frame = frame[[*SETTING, "id", "ttft_s", "total_s", "prompt_tokens", "answer_tokens"]]
    all_prompts, all_answers = {"prompt_tokens": "all"}, {"answer_tokens": "all"}
    parts = [frame.assign(**sums) for sums in ({}, all_prompts, all_answers, all_prompts | all_answers)]
    grouped = pd.concat(parts).groupby([*SETTING, "prompt_tokens", "answer_tokens"], sort=False)
    shares: Any = grouped.agg(generations=("id", "size"), ttft_s=("ttft_s", "sum"), total_s=("total_s", "sum"))
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
        lines.append(rows[0] | by_length)
    values = pd.DataFrame(lines, columns=[*SETTING, *headings.values()])
    columns = [MODEL, LABEL, *(Column(heading, heading, 1) for heading in headings.values())]
    caption = (
        "Per cent of the generation time before the first token: summed TTFT divided by summed generation time, "
        "for generations with a prompt or an answer of this many tokens (the end token counts). The CSV has each "
        "combination of prompt and answer length, and the number of generations. -: no generation of this length."
    )
    title = "TTFT's share of the generation time"
    return Table("ttft_share", title, caption, shares, cells(values, columns, results), keys=2)


def _there(names: Any, ends: Sequence[int]) -> list[str]:
    """The ranges that occur, in order."""
    return [name for name in range_names(ends) if name in set(names)]


# -------------------------------------------------------------------------------------------------------------- figure

# The paper's introduction: the baseline, Llama 2 7B, on LongBench
PAPER = {"prompt_tokens": 3376, "tokens": 68, "ttft_share": 23.0}

_ANSWERS = ((1, 4), (5, 16), (17, 64), (65, 256), (257, 1024))


def data(results: Results) -> pd.DataFrame:
    """model, paper_model, label, answer ("5-16": 5 to 16 generated tokens), prompt (the power of two nearest to the
    prompts' lengths), examples; their mean prompt_tokens, generated_tokens, and ttft_share (0 to 100, of each example's
    generation time), with ttft_share_low and _high (95 % bootstrap).

    For each model, the LazyLLM setting chosen by `studied` and its paired baseline.
    """
    frame: Any = first_turns(studied(results).frame)
    if frame.empty:
        return pd.DataFrame()
    methods = [_generations(frame, prefix, label) for prefix, label in (("baseline_", BASELINE), ("", None))]
    both: Any = pd.concat(methods, ignore_index=True)
    both = both.dropna(subset="total_s").assign(ttft_share=lambda rows: 100 * rows["ttft_s"] / rows["total_s"])
    both["answer"] = [_answer(int(tokens)) for tokens in both["generated_tokens"]]
    both["prompt"] = 2 ** np.log2(both["prompt_tokens"]).round().astype(int)
    rows = []
    for keys, group in both.groupby(["model", "label", "answer", "prompt"], sort=False):
        low, high = mean_interval(group["ttft_share"].to_numpy())
        means = group[["prompt_tokens", "generated_tokens", "ttft_share"]].mean().to_dict()
        named = dict(zip(("model", "label", "answer", "prompt"), keys, strict=True))
        named |= {"paper_model": group["paper_model"].iloc[0], "examples": len(group), **means}
        rows.append(named | {"ttft_share_low": low, "ttft_share_high": high})
    order = [f"{low}-{high}" for low, high in _ANSWERS] + [_answer(_ANSWERS[-1][1] + 1)]
    columns = ["model", "paper_model", "label", "answer", "prompt", "examples", "prompt_tokens", "generated_tokens"]
    table = pd.DataFrame(rows, columns=[*columns, *forms("ttft_share")])
    table["answer"] = pd.Categorical(table["answer"], order, ordered=True)
    table = table.sort_values(["answer", "prompt"]).sort_values(
        ["model", "label"],
        key=lambda column: column.ne(BASELINE) if column.name == "label" else column,
        kind="stable",
    )
    return table.astype({"answer": str}).reset_index(drop=True)


@styled
def plot(frame: Any) -> MplFigure:
    """One row per model: the baseline on the left, LazyLLM on the right; one curve per range of answer lengths."""
    models = list(dict.fromkeys(frame["model"]))
    figure = new_figure(9.5, 3.7 * len(models))
    answers = sorted(set(frame["answer"]), key=lambda answer: int(answer.split("-")[0].rstrip("+")))
    for model, line in zip(
        models, figure.subplots(len(models), 2, squeeze=False, sharex="row", sharey=True), strict=True
    ):
        of_model = frame[frame["model"] == model]
        for label, axes in zip(dict.fromkeys(of_model["label"]), line, strict=False):
            _draw_panel(axes, of_model, str(label), answers)
            axes.set_title(f"{model}: {label}")
        for axes in line[of_model["label"].nunique() :]:  # if no baseline was measured
            axes.set_axis_off()
        line[0].set_ylabel("TTFT, % of the generation time")
    return figure


def _generations(frame: Any, prefix: str, label: str | None) -> pd.DataFrame:
    columns = {f"{prefix}{name}": name for name in ("ttft_s", "total_s", "generated_tokens")}
    chosen = frame[["model", "paper_model", "label", "prompt_tokens", *columns]].rename(columns=columns)
    return chosen if label is None else chosen.assign(label=label)


def _answer(tokens: int) -> str:
    return next((f"{low}-{high}" for low, high in _ANSWERS if tokens <= high), f"{_ANSWERS[-1][1] + 1}+")


def _draw_panel(axes: Any, of_model: Any, label: str, answers: Sequence[str]) -> None:
    rows = of_model[of_model["label"] == label]
    last = of_model["prompt_tokens"].max()
    log_scale(axes, "x", [2**exponent for exponent in range(4, 18)])
    axes.set(ylim=(0, 103), xlabel="prompt tokens")
    for number, answer in enumerate(answers):
        curve, colour = rows[rows["answer"] == answer], shade_of(number, len(answers))
        if curve.empty:
            continue
        look = {"color": colour, "markersize": 5, **look_of(number)}
        draw(axes, curve, "prompt_tokens", "ttft_share", label=f"{answer.replace('-', chr(0x2013))} tokens", **look)
    with_paper = _paper_applies(of_model)
    if with_paper:  # in both panels, so that their axes are equal
        last = max(last, PAPER["prompt_tokens"])
    if with_paper and label == "baseline":
        own = (of_model["paper_model"] == "llama2").any()
        x, y = PAPER["prompt_tokens"], PAPER["ttft_share"]
        axes.plot(x, y, marker="o", markersize=8, markerfacecolor="none", markeredgecolor="black", linestyle="none",
                  alpha=1 if own else 0.5)  # fmt: skip
        axes.annotate(f"paper, Llama 2 7B:\n{PAPER['tokens']} tokens", (x, y), xytext=(0, -8), ha="right", va="top",
                      textcoords="offset points", fontsize=7.5, color="black" if own else GREY,
                      bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5})  # fmt: skip
    axes.set_xlim(of_model["prompt_tokens"].min() / 1.15, last * 1.15)
    legend_beside(axes)
    grid(axes)


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
