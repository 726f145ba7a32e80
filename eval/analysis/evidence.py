"""Evidence, the tokens that hold the answer: the share that each layer computes, for right and wrong answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as MplFigure
from matplotlib.lines import Line2D

from eval.analysis.columns import EXAMPLES, LABEL, MODEL, SECTION, Column, cells, in_order
from eval.analysis.known_methods import BASELINE
from eval.analysis.style import GREY, MethodStyle, grid, new_figure, panels_of, styled, styles_of, titled_parts
from eval.analysis.table import Figure, Table
from eval.benchmarks.datasets import DATASETS, TASKS
from eval.store.results import Results
from eval.store.runs import StoredRun

OUTCOMES = ("right", "wrong")
FULL_SCORE = 1 - 1e-6  # ROUGE does not quite reach 1
_KEYS = [*SECTION, "method", "label", "task", "outcome", "layer"]
_STORED = ["dataset", "id", "method.score", "method.evidence_prefill", "method.evidence_revived"]
_COLUMNS = (
    MODEL,
    LABEL,
    Column("task", "task"),
    Column("outcome", "answers"),
    EXAMPLES,
    Column("in_prefill", "% in prefill", 1),
    Column("revived", "% revived", 1),
    Column("largest_loss", "largest loss"),
)


def evidence_shares(results: Results) -> pd.DataFrame:
    """model, suite, method, label, task, outcome (right: full score; wrong: less), layer (from 1), examples;
    in_prefill, revived: per cent of the evidence's tokens that the layer computes in prefill, and later.

    Means over the examples with known evidence; seeds are pooled. Empty if there are no such examples.
    """
    parts = [_of_run(run) for run in results.runs]
    shares = pd.concat(parts or [pd.DataFrame(columns=[*_KEYS, "seed", "dataset", "id", "in_prefill", "revived"])])
    shares = shares.drop_duplicates([*_KEYS, "seed", "dataset", "id"])  # two runs may hold the same example
    means: Any = shares.groupby(_KEYS).agg(
        examples=("id", "size"), in_prefill=("in_prefill", "mean"), revived=("revived", "mean")
    )
    return means.reset_index().sort_values("task", key=lambda tasks: tasks.map(TASKS.index), kind="stable")


def _of_run(run: StoredRun) -> pd.DataFrame:
    """One row per example with known evidence, and layer."""
    examples = [row for row in run.table(_STORED).to_pylist() if row["method.evidence_prefill"] is not None]
    layers = len(examples[0]["method.evidence_prefill"]) if examples else 0
    datasets = [DATASETS[row["dataset"]] for row in examples]
    facts = {
        "suite": [dataset.suite for dataset in datasets],
        "task": [dataset.task for dataset in datasets],
        "outcome": [OUTCOMES[row["method.score"] < FULL_SCORE] for row in examples],
        "dataset": [row["dataset"] for row in examples],
        "id": [row["id"] for row in examples],
    }
    by_layer = {name: np.repeat(np.array(values, dtype=object), layers) for name, values in facts.items()}
    by_layer |= {"layer": np.tile(np.arange(1, layers + 1), len(examples))}
    for column, name in (("in_prefill", "prefill"), ("revived", "revived")):
        by_layer[column] = 100 * np.array([row[f"method.evidence_{name}"] for row in examples], dtype=float).ravel()
    return pd.DataFrame(by_layer).assign(model=run.model, method=run.method, label=run.label, seed=run.seed)


def evidence(results: Results) -> Table:
    """The share of evidence that each setting computes, by task, for right and for wrong answers."""
    frame = in_order(evidence_shares(results))
    groups = frame.groupby([*SECTION, "label", "task", "outcome"], sort=False)
    groups = [group.sort_values("layer") for _, group in groups]
    last = pd.concat([group.tail(1) for group in groups] or [frame])
    losses = [_largest_loss(group["in_prefill"].tolist()) for group in groups]
    caption = (
        "Share of the evidence (the prompt's tokens that hold the answer) that the last layer computes in prefill, and "
        "later in decoding (revived): mean over the examples with known evidence, separately for right answers (full "
        "score) and wrong ones. Largest loss: the layer after which prefill drops the largest part of the evidence, in "
        "points. Every layer is in the CSV."
    )
    title = "Evidence: the tokens that hold the answer, computed in the last layer"
    return Table("evidence", title, caption, frame, cells(last.assign(largest_loss=losses), _COLUMNS, results), keys=4)


def _largest_loss(shares: list[float]) -> str:
    """shares: in per cent, for each layer; before layer 1 it is 100."""
    losses = [before - share for before, share in zip([100.0, *shares], shares, strict=False)]
    lost = max(losses)
    return "none" if lost == 0 else f"{-lost:.1f} after layer {losses.index(lost)}"


# -------------------------------------------------------------------------------------------------------------- figure

_LINES = dict(zip(OUTCOMES, ("-", (0, (3, 2))), strict=True))
_IN_A_ROW = 4


def data(results: Results) -> pd.DataFrame:
    """`evidence_shares` of one setting per method: the one with most examples, then with most wrong answers."""
    frame: Any = evidence_shares(results)
    frame = frame[frame["method"] != BASELINE]
    first = frame[frame["layer"] == 1]
    wrong = first[first["outcome"] == OUTCOMES[1]].groupby("label")["examples"].sum()
    counts = first.groupby([*SECTION, "method", "label"], as_index=False)["examples"].sum()
    counts["wrong"] = counts["label"].map(wrong).fillna(0)
    counts = counts.sort_values(["examples", "wrong", "label"], ascending=[False, False, True], kind="stable")
    settings = counts.drop_duplicates([*SECTION, "method"])[[*SECTION, "method", "label"]]
    return frame.merge(settings).reset_index(drop=True)


@styled
def plot(frame: Any) -> MplFigure:
    """For each model and suite, a panel for each task and one for the legend."""
    panels, left_out = panels_of(frame, SECTION)
    styles = styles_of(frame["method"])
    rows = [-(-(panel["task"].nunique() + 1) // _IN_A_ROW) for _, panel in panels]
    figure = new_figure(11, 2.6 * sum(rows), left_out=left_out)
    parts = titled_parts(figure, [f"{model}, {suite}" for (model, suite), _ in panels], rows)
    for part, (_, panel), height in zip(parts, panels, rows, strict=True):
        places = part.subplots(height, _IN_A_ROW, sharex=True, sharey=True, squeeze=False).ravel()
        _draw_panel(part, places, panel, styles)
    return figure


def _draw_panel(part: Any, places: Any, panel: Any, styles: dict[str, MethodStyle]) -> None:
    tasks = [task for task in TASKS if task in set(panel["task"])]
    for axes, task in zip(places, tasks, strict=False):
        for (method, outcome), rows in panel[panel["task"] == task].groupby(["method", "outcome"], sort=False):
            rows = rows.sort_values("layer")
            axes.plot(
                rows["layer"], rows["in_prefill"], markersize=4, label=f"{rows['examples'].iloc[0]}",
                drawstyle="steps-mid", **styles[method].drawn | {"linestyle": _LINES[outcome]},
            )  # fmt: skip
        axes.set(title=task, ylim=(-4, 104))
        axes.tick_params(labelbottom=True, labelleft=True)
        axes.legend(title="n", fontsize=7, title_fontsize=7, handlelength=2.4, loc="lower left")
        grid(axes)
    for axes in places[len(tasks) :]:
        axes.set_axis_off()
    part.supxlabel("layer", fontsize=9)
    part.supylabel("evidence computed in prefill, %", fontsize=9)
    labels = panel.drop_duplicates("method").set_index("method")["label"]
    handles = [Line2D([], [], color=styles[name].colour, marker=styles[name].marker, label=label)
               for name, label in labels.items()]  # fmt: skip
    handles += [Line2D([], [], color=GREY, linestyle=_LINES[kind], label=f"{kind} answers") for kind in OUTCOMES]
    places[len(tasks)].legend(handles=handles, loc="center left")


FIGURE = Figure(
    name="evidence",
    title="Evidence computed in prefill, layer by layer, of right and wrong answers",
    caption=(
        "Share of the evidence (the prompt's tokens that hold the answer) that each layer computes in prefill: mean "
        "over the examples (n) with a right answer (full score), and with a wrong one. One setting per method: the one "
        "run on most examples; of equal ones, that with most wrong answers. The table of the same name has the other "
        "settings, and the share that decoding revives."
    ),
    data=data,
    plot=plot,
)
