"""Evidence, the tokens that hold the answer: the share that each layer computes, for right and wrong answers."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as MplFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from eval.analysis import style
from eval.analysis.columns import BASELINE, SECTION, in_order
from eval.analysis.table import EXAMPLES, LABEL, MODEL, Column, Rows, as_figure, as_table, cells
from eval.benchmarks.datasets import TASKS
from eval.store.results import Results

FULL_SCORE = 100 - 1e-4  # a perfect ROUGE score is slightly below 1
_SHARES = ["in_prefill", "revived"]
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

    Means over the answers with known evidence; seeds and turns are pooled. Empty if there are no such answers.
    """
    rows: Any = results.counting.dropna(subset="evidence_recall")
    answers = [answer.evidence for _, answer in results.answers(rows) if answer.evidence is not None]
    shares = rows[[*SECTION, "method", "label", "task"]].assign(
        outcome=np.where(rows["score"] < FULL_SCORE, "wrong", "right"),
        in_prefill=[answer.evidence_prefill for answer in answers],
        revived=[answer.evidence_revived for answer in answers],
    )
    shares = shares.explode(_SHARES)
    shares["layer"] = 1 + shares.groupby(level=0).cumcount()
    shares[_SHARES] = 100 * shares[_SHARES].astype(float)
    groups = shares.groupby([*SECTION, "method", "label", "task", "outcome", "layer"])
    means: Any = groups.agg(examples=("in_prefill", "size"), **{name: (name, "mean") for name in _SHARES})
    return means.reset_index().sort_values("task", key=lambda tasks: tasks.map(TASKS.index), kind="stable")


@as_table(
    220,
    title="Evidence: the tokens that hold the answer, computed in the last layer",
    caption=(
        "Share of the evidence, the prompt's tokens that hold the answer, that the last layer computes in prefill, or "
        "later in decoding (revived). Right answers have the full score."
    ),
    notes=(
        "n: answers with known evidence; those of several seeds and turns count each. Largest loss: the layer after "
        "which prefill drops the largest part of the evidence, in points. Every layer is in the CSV."
    ),
    command="python run.py model=tiny method=lazy",
)
def evidence(results: Results) -> Rows:
    """The share of evidence that each setting computes, by task, for right and for wrong answers."""
    frame = in_order(evidence_shares(results))
    groups = frame.groupby([*SECTION, "label", "task", "outcome"], sort=False)
    losses = groups["in_prefill"].transform(_largest_loss)
    last = frame.assign(largest_loss=losses).loc[groups.tail(1).index]
    return Rows(frame, cells(last, _COLUMNS, results), keys=4)


def _largest_loss(shares: pd.Series) -> str:
    """shares: in per cent, for each layer; before layer 1 it is 100."""
    gains = np.diff([100.0, *shares])
    return "none" if gains.min() == 0 else f"{gains.min():.1f} after layer {gains.argmin()}"


_LINES: dict[str, Any] = {"right": "-", "wrong": (0, (3, 2))}


def data(results: Results) -> pd.DataFrame:
    """`evidence_shares` of one setting per method: the one with most examples, then with most wrong answers."""
    frame: Any = evidence_shares(results)
    frame = frame[frame["method"] != BASELINE]
    first = frame[frame["layer"] == 1]
    first = first.assign(wrong=first["examples"].where(first["outcome"] == "wrong", 0))
    counts = first.groupby([*SECTION, "method", "label"])[["examples", "wrong"]].sum().reset_index()
    counts = counts.sort_values(["examples", "wrong", "label"], ascending=[False, False, True], kind="stable")
    settings = counts.drop_duplicates([*SECTION, "method"])[[*SECTION, "method", "label"]]
    return frame.merge(settings)


@as_figure(
    220,
    "evidence",
    data,
    title="Evidence computed in prefill, layer by layer, of right and wrong answers",
    caption=(
        "Share of the evidence, the prompt's tokens that hold the answer, that each layer computes in prefill. Right "
        "answers have the full score."
    ),
    notes=(
        "Mean over the answers (n), seeds and turns included. One setting per method: the one with most answers; of "
        "equal ones, that with most wrong ones. The table of the same name has the other settings, and the share that "
        "decoding revives."
    ),
    command="python run.py model=tiny method=lazy",
)
@style.styled
def plot(frame: Any) -> MplFigure:
    """For each model and suite, a panel for each task and one for the legend."""
    figure, sections = style.sections_of(
        frame, "Evidence computed in prefill, layer by layer", 11, lambda rows: 2.6 * style.task_lines(rows)
    )
    styles = style.styles_of(frame["method"])
    for part, section in sections:
        panels = style.task_panels(part, section)
        for (task, method, outcome), rows in section.groupby(["task", "method", "outcome"], sort=False):
            look = {"label": f"{rows['examples'].iloc[0]}", "markersize": 4, "linestyle": _LINES[outcome]}
            panels[task].plot(rows["layer"], rows["in_prefill"], drawstyle="steps-mid", **styles[method] | look)
        for axes in panels.values():
            axes.set(ylim=(-4, 104))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            style.legend_beside(axes, title="n", fontsize=7, title_fontsize=7, handlelength=2.4)
        part.supxlabel("layer", fontsize=9)
        part.supylabel("computed in prefill, %", fontsize=9)
        labels = section.drop_duplicates("method").set_index("method")["label"]
        looks: Any = [styles[name] | {"label": style.shown_label(label, name)} for name, label in labels.items()]
        for kind, line in _LINES.items():
            looks.append({"color": style.GREY, "linestyle": line, "label": f"{kind} answers"})
        part.legend(handles=[Line2D([], [], **look) for look in looks], loc="outside right center")
    return figure
