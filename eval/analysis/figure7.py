"""Figure 7: the share of prompt tokens computed after each step, in each group of layers."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as MplFigure
from matplotlib.ticker import FuncFormatter

from eval.analysis import style
from eval.analysis.columns import STUDIED
from eval.analysis.table import as_figure
from eval.store.record import Answer
from eval.store.results import Results
from eval.store.runs import counted

_LINEAR_STEPS = (
    40  # longer generations get a logarithmic axis, as most changes happen in the first steps
)


def data(results: Results) -> pd.DataFrame:
    """model, label, group (from 1), layers (as shown), step (0: prefill), examples, generating,
    pct_computed.

    pct_computed: 0 to 100, distinct prompt tokens computed so far in the group's layers, mean over
    all `examples`. An example that has ended keeps its last value; `generating` counts those that
    have not.
    """
    rows: Any = style.studied(results)
    parts = []
    for (model, label), part in rows.groupby(["model", "label"], sort=False):
        answers = [(visit.prompt_tokens, answer) for visit, answer in results.answers(part)]
        parts.append(_curves(answers).assign(model=model, label=label))
    if not parts:
        return pd.DataFrame()
    columns = [
        "model",
        "label",
        "group",
        "layers",
        "step",
        "examples",
        "generating",
        "pct_computed",
    ]
    return pd.concat(parts, ignore_index=True).reindex(columns=columns)


@as_figure(
    130,
    "figure7",
    data,
    title="Prompt tokens computed, step by step, in each group of layers (the paper's Figure 7)",
    caption=(
        "Distinct prompt tokens computed so far, in % of the prompt, mean over all examples; the "
        "baseline computes all of them in its prefill. Below: the number of examples still "
        "generating."
    ),
    notes=(
        "An example that has ended keeps its last value, so the right end shows what whole answers "
        "needed (Table 2's quantity, by group). The paper averages 1000 random LongBench examples."
    ),
    command="python run.py experiment=figure7 model=llama2",
)
@style.styled
def plot(frame: Any) -> MplFigure:
    """A panel for each model, a curve for each group of layers; below it, the number of examples
    still generating.
    """
    models, left_out = style.panels_of(frame, ["model"], most=2)
    figure = style.new_figure(6.8, 4.4 * len(models), left_out)
    for part, (_, rows) in zip(
        figure.subfigures(len(models), 1, squeeze=False)[:, 0], models, strict=True
    ):
        upper, lower = part.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        steps = int(rows["step"].max())
        groups = list(rows.groupby(["group", "layers"], sort=True))
        for number, ((_, name), curve) in enumerate(groups):
            look = style.look_of(number, len(groups)) | (
                {"marker": ""} if steps > _LINEAR_STEPS else {}
            )
            upper.plot(curve["step"], curve["pct_computed"], label=str(name), clip_on=False, **look)
        upper.axhline(100, label="baseline", **style.REFERENCE)
        upper.set(
            ylim=(0, 103), xlim=(0, max(steps, 1)), ylabel="% of prompt tokens computed so far"
        )
        examples = counted(rows["examples"].iloc[0], "example")
        label = style.shown_label(rows["label"].iloc[0], STUDIED)
        upper.set_title(
            f"Prompt tokens computed so far:\n{rows['model'].iloc[0]},\n{label}, {examples}"
        )
        style.legend_beside(upper)
        counts = rows[rows["group"] == 1]
        lower.stairs(
            counts["generating"],
            np.append(counts["step"], steps + 1) - 0.5,
            fill=True,
            color="#BDBDBD",
        )
        lower.set(
            ylim=(0, 1.15 * counts["examples"].max()),
            xlabel="generation step (0: prefill)",
            ylabel="examples",
        )
        lower.set_title("still generating", loc="right", fontsize=8, color=style.GREY)
        if steps > _LINEAR_STEPS:
            lower.set_xscale("symlog", linthresh=1)
            lower.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:g}"))
        else:
            lower.xaxis.get_major_locator().set_params(integer=True)
    return figure


def _starts(answer: Answer) -> list[int]:
    """The first layer, from 1, of each group of layers."""
    return [1, *(1 + end for end in accumulate(answer.group_layers[:-1]))]


def _curves(answers: Sequence[tuple[int, Answer]]) -> pd.DataFrame:
    """The curves of all groups in any answer, which merges equal neighbours. answers: each with
    its prompt tokens.
    """
    examples: list[Any] = [(n, _starts(answer), answer.computed) for n, answer in answers]
    starts = sorted({start for _, own_starts, _ in examples for start in own_starts})
    lengths = np.array([len(computed) for _, _, computed in examples])
    steps = np.arange(lengths.max())
    shares = np.empty((len(starts), len(steps), len(examples)))
    for number, (n, own_starts, computed) in enumerate(examples):
        groups = np.searchsorted(own_starts, starts, side="right") - 1
        # an ended example keeps its last value
        rows = np.array(computed)[np.minimum(steps, len(computed) - 1)]
        shares[:, :, number] = 100 * rows[:, groups].T / n
    names = [f"layers {a}\u2013{b - 1}" if b > a + 1 else f"layer {a}" for a, b in pairwise(starts)]
    names.append(f"layers {starts[-1]} and up" if names else "all layers")
    group, step = np.indices(shares.shape[:2]).reshape(2, -1)
    return pd.DataFrame(
        {
            "group": group + 1,
            "layers": np.array(names)[group],
            "step": step,
            "examples": len(examples),
            "generating": (lengths > step[:, None]).sum(axis=1),
            "pct_computed": shares.mean(axis=2).ravel(),
        }
    )
