"""Figure 7: the share of prompt tokens computed after each step, in each group of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as MplFigure
from matplotlib.ticker import FuncFormatter

from eval.analysis import style
from eval.analysis.table import Figure
from eval.store.results import Results
from eval.store.runs import StoredRun

_LINEAR_STEPS = 40  # longer generations get a logarithmic axis, as most changes happen in the first steps


def data(results: Results) -> pd.DataFrame:
    """model, label, group (from 1), layers (for people), step (0: prefill), examples, generating, pct_computed.

    pct_computed: 0 to 100, distinct prompt tokens computed so far in the group's layers, mean over all `examples`. An
    example that has ended keeps its last value; `generating` counts those that have not.
    """
    runs = style.studied(results).runs
    parts = []
    for model, label in dict.fromkeys((run.model, run.label) for run in runs):
        parts.append(_curves([run for run in runs if run.model == model]).assign(model=model, label=label))
    if not parts:
        return pd.DataFrame()
    columns = ["model", "label", "group", "layers", "step", "examples", "generating", "pct_computed"]
    return pd.concat(parts, ignore_index=True).reindex(columns=columns)


@style.styled
def plot(frame: Any) -> MplFigure:
    """A panel for each model, a curve for each group of layers; below it, the number of examples still generating."""
    models, left_out = style.panels_of(frame, ["model"])
    figure = style.new_figure(6.8, 4.4 * len(models), left_out=left_out)
    for part, (_, rows) in zip(figure.subfigures(len(models), 1, squeeze=False)[:, 0], models, strict=True):
        upper, lower = part.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        _draw_curves(upper, rows)
        _draw_examples(lower, rows)
        upper.set_ylabel("% of prompt tokens computed so far")
        lower.set_ylabel("examples")
    return figure


def _curves(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """The curves of all groups that occur in any record; records merge neighbouring groups with equal counts."""
    names = ["prompt_tokens", "method.group_starts", "method.computed"]
    examples = [tuple(row.values()) for run in runs for row in run.table(names).to_pylist()]
    starts = sorted({start for _, own_starts, _ in examples for start in own_starts})
    lengths = np.array([len(computed) for _, _, computed in examples])
    steps = np.arange(lengths.max())
    shares = np.empty((len(starts), len(steps), len(examples)))
    for number, (prompt_tokens, own_starts, computed) in enumerate(examples):
        groups = np.searchsorted(own_starts, starts, side="right") - 1
        rows = np.array(computed)[np.minimum(steps, len(computed) - 1)]  # an ended example keeps its last value
        shares[:, :, number] = 100 * rows[:, groups].T / prompt_tokens
    group, step = np.indices(shares.shape[:2]).reshape(2, -1)
    return pd.DataFrame(
        {
            "group": group + 1,
            "layers": np.array(_layer_names(starts))[group],
            "step": step,
            "examples": len(examples),
            "generating": (lengths > step[:, None]).sum(axis=1),
            "pct_computed": shares.mean(axis=2).ravel(),
        }
    )


def _layer_names(starts: Sequence[int]) -> list[str]:
    # records lack the number of layers
    names = [
        f"layer {start}" if start == end else f"layers {start}\u2013{end}"
        for start, end in zip(starts, [following - 1 for following in starts[1:]], strict=False)
    ]
    return [*names, f"layers {starts[-1]} and up" if len(starts) > 1 else "all layers"]


def _draw_curves(axes: Any, frame: Any) -> None:
    steps = int(frame["step"].max())
    for (_, name), curve in frame.groupby(["group", "layers"], sort=True):
        number = int(curve["group"].iloc[0]) - 1
        axes.plot(
            curve["step"], curve["pct_computed"], color=style.COLOURS[number % len(style.COLOURS)],
            **style.look_of(number), markersize=4.5 if steps <= _LINEAR_STEPS else 0, label=str(name), clip_on=False,
        )  # fmt: skip
    axes.axhline(100, label="baseline", **style.REFERENCE)
    axes.set_ylim(0, 103)
    axes.set_xlim(0, max(steps, 1))
    axes.set_title(f"{frame['model'].iloc[0]}: {frame['label'].iloc[0]}, {frame['examples'].iloc[0]} examples")
    style.legend_beside(axes)
    style.grid(axes)


def _draw_examples(axes: Any, frame: Any) -> None:
    counts = frame[frame["group"] == frame["group"].min()]
    steps = int(counts["step"].max())
    edges = np.append(counts["step"], steps + 1) - 0.5
    axes.stairs(counts["generating"], edges, fill=True, color="#BDBDBD")
    axes.set_ylim(0, 1.15 * counts["examples"].max())
    axes.set_xlabel("generation step (0: prefill)")
    axes.annotate(
        "still generating", (1, 1), xycoords="axes fraction", ha="right", va="top", fontsize=8, color=style.GREY
    )
    if steps > _LINEAR_STEPS:
        axes.set_xscale("symlog", linthresh=1)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:g}"))
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)


FIGURE = Figure(
    name="figure7",
    title="Prompt tokens computed, step by step, in each group of layers (the paper's Figure 7)",
    caption=(
        "Distinct prompt tokens computed so far, in % of the prompt, mean over all examples. An example that has "
        "ended keeps its last value, so the right end shows what whole answers needed (Table 2's quantity, by group). "
        "The baseline computes all of them in its prefill. Below: the number of examples still generating. The paper "
        "averages 1000 random LongBench examples."
    ),
    data=data,
    plot=plot,
)
