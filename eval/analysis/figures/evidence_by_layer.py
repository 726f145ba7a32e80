"""The share of the evidence that each layer computes in prefill, by task, for right and wrong answers."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure as MplFigure
from matplotlib.lines import Line2D

from eval.analysis.evidence_shares import OUTCOMES, evidence_shares
from eval.analysis.figures.figure import Figure
from eval.analysis.figures.style import GREY, MethodStyle, grid, new_figure, styled, styles_of, titled_parts
from eval.analysis.known_methods import BASELINE
from eval.benchmarks.datasets import TASKS
from eval.store.results import Results

_LINES = dict(zip(OUTCOMES, ("-", (0, (3, 2))), strict=True))
_COLUMNS = 4


def data(results: Results) -> pd.DataFrame:
    """`evidence_shares` of one setting per method: the one with most examples, then with most wrong answers."""
    frame: Any = evidence_shares(results)
    frame = frame[frame["method"] != BASELINE]
    first = frame[frame["layer"] == 1]
    wrong = first[first["outcome"] == OUTCOMES[1]].groupby("label")["examples"].sum()
    counts = first.groupby(["model", "suite", "method", "label"], as_index=False)["examples"].sum()
    counts["wrong"] = counts["label"].map(wrong).fillna(0)
    counts = counts.sort_values(["examples", "wrong", "label"], ascending=[False, False, True], kind="stable")
    chosen = counts.drop_duplicates(["model", "suite", "method"])[["model", "suite", "method", "label"]]
    return frame.merge(chosen).reset_index(drop=True)


@styled
def plot(frame: Any) -> MplFigure:
    """For each model and suite, a panel for each task and one for the legend."""
    panels = list(frame.groupby(["model", "suite"], sort=False))
    styles = styles_of(frame["method"])
    rows = [-(-(panel["task"].nunique() + 1) // _COLUMNS) for _, panel in panels]
    figure = new_figure(11, 2.6 * sum(rows))
    parts = titled_parts(figure, [f"{model}, {suite}" for (model, suite), _ in panels], rows)
    for part, (_, panel), height in zip(parts, panels, rows, strict=True):
        cells = part.subplots(height, _COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
        _draw_panel(part, cells, panel, styles)
    return figure


def _draw_panel(part: Any, cells: Any, panel: Any, styles: dict[str, MethodStyle]) -> None:
    tasks = [task for task in TASKS if task in set(panel["task"])]
    for axes, task in zip(cells, tasks, strict=False):
        for (_, outcome), rows in panel[panel["task"] == task].groupby(["method", "outcome"], sort=False):
            rows = rows.sort_values("layer")
            style = styles[rows["method"].iloc[0]]
            axes.plot(
                rows["layer"], rows["in_prefill"], color=style.colour, linestyle=_LINES[outcome], marker=style.marker,
                markersize=4, label=f"{rows['examples'].iloc[0]}", drawstyle="steps-mid",
            )  # fmt: skip
        axes.set(title=task, ylim=(-4, 104))
        axes.tick_params(labelbottom=True, labelleft=True)
        axes.legend(title="n", fontsize=7, title_fontsize=7, handlelength=2.4, loc="lower left")
        grid(axes)
    for axes in cells[len(tasks) :]:
        axes.set_axis_off()
    part.supxlabel("layer", fontsize=9)
    part.supylabel("evidence computed in prefill, %", fontsize=9)
    labels = panel.drop_duplicates("method").set_index("method")["label"]
    handles = [Line2D([], [], color=styles[name].colour, marker=styles[name].marker, label=label)
               for name, label in labels.items()]  # fmt: skip
    handles += [Line2D([], [], color=GREY, linestyle=_LINES[kind], label=f"{kind} answers") for kind in OUTCOMES]
    cells[len(tasks)].legend(handles=handles, loc="center left")


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
