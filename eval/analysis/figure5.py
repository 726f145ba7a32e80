"""Figure 5: score relative to the baseline's, and KL of the first token, against TTFT speedup, by task and method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as MplFigure
from matplotlib.lines import Line2D

from eval.analysis import style
from eval.analysis.columns import SECTION, forms, target_of
from eval.analysis.known_methods import BASELINE, STUDIED
from eval.analysis.paper_tables import MODEL_NAMES, PAPER_MODELS, published
from eval.analysis.table import Figure
from eval.benchmarks.datasets import TASKS
from eval.store.results import Results

MEASURED, PAPER, CLAIM = "measured", "paper, Table 1", "paper, text"
# Section 5 of the paper, Llama 2 7B, multi-document QA: 2.34x at a loss of 1 % at most, 3.0x at 10 % at most
CLAIMS = ((2.34, 99.0), (3.0, 90.0))

_IN_A_ROW = 4
_TITLES = {"all": "mean over tasks"}
_POINTS = ["relative_score", "ttft_speedup"]
_HEIGHTS = {"relative_score": "score, % of the paired baseline's", "kl": "KL from the baseline's first token, nats"}


def data(results: Results) -> pd.DataFrame:
    """model, suite, task ("all": their mean), source, paper_model, method, label, settings, seeds, examples, on_curve;
    relative_score (100 * score / the paired baseline's), ttft_speedup and kl, with `_low` and `_high`.

    source: "measured"; "paper, Table 1" for the paper's scores and speedups of the model `paper_model` (the model
        itself, or Llama 2 if it is not in the paper); "paper, text" for its two claims.
    on_curve: whether a speedup such as `2.0x` gives the setting; for a method without such settings, whether no other
        setting beats it in both score and speedup.
    """
    table: Any = style.as_published(results).by_task
    table = table[(table["level"] != "dataset") & (table["method"] != BASELINE)]
    table = table.dropna(subset=_POINTS).assign(source=MEASURED)
    if table.empty:
        return pd.DataFrame()
    table["on_curve"] = False
    parts = []
    for (model, suite), panel in table.groupby(SECTION, sort=False):
        panel = panel.copy()
        for _, method in panel.groupby(["task", "method"]):
            swept = method["settings"].map(target_of).notna()
            panel.loc[method.index, "on_curve"] = swept if swept.any() else _undominated(method)
        own = panel["paper_model"].iloc[0]
        points = paper_points(own if isinstance(own, str) else PAPER_MODELS[0], sorted(set(panel["task"])))
        parts += [panel, points.assign(model=model, suite=suite)]
    columns = [*SECTION, "task", "source", "paper_model", "method", "label", "settings", "seeds", "examples"]
    return pd.concat(parts, ignore_index=True).reindex(columns=[*columns, "on_curve", *forms(*_POINTS, "kl")])


def paper_points(paper_model: str, tasks: Sequence[str]) -> pd.DataFrame:
    """The paper's points in the given tasks. "all" has the means of its scores and of its speedups over the tasks.

    paper_model: llama2 or xgen. The claims in the paper's text are for Llama 2.
    """
    table: Any = published("table1").rename(
        columns={f"{paper_model}_score": "score", f"{paper_model}_ttft_speedup": "ttft_speedup"}
    )[["task", "method", "score", "ttft_speedup"]]
    means: Any = table.groupby("method", sort=False)[["score", "ttft_speedup"]].mean().reset_index().assign(task="all")
    table = pd.concat([table, means], ignore_index=True)
    baseline = table[table["method"] == BASELINE].set_index("task")["score"]
    table["relative_score"] = 100 * table["score"] / table["task"].map(baseline)
    table = table[(table["method"] != BASELINE) & table["task"].isin(tasks)].assign(source=PAPER)
    if paper_model == "llama2" and "multi_doc_qa" in tasks:
        claims = [{"ttft_speedup": speedup, "relative_score": score} for speedup, score in CLAIMS]
        table = pd.concat(
            [table, pd.DataFrame(claims).assign(task="multi_doc_qa", method=STUDIED, source=CLAIM)], ignore_index=True
        )
    return table.assign(paper_model=paper_model).drop(columns="score")


@style.styled
def plot(frame: Any) -> MplFigure:
    """For each model and suite a panel for each task, their mean and the legend; the same of KL if it was measured."""
    sections, left_out = style.panels_of(frame, SECTION)
    blocks = [
        (f"{model}, {suite}", rows.dropna(subset=column), column)
        for (model, suite), rows in sections
        for column in _HEIGHTS
        if rows[column].notna().any()
    ]
    lines = [-(-(len(set(rows["task"])) + 1) // _IN_A_ROW) for _, rows, _ in blocks]
    figure = style.new_figure(11, 2.65 * sum(lines), left_out=left_out)
    parts = style.titled_parts(figure, [title for title, _, _ in blocks], lines)
    for part, (_, rows, column), height in zip(parts, blocks, lines, strict=True):
        _draw_panel(part, rows, style.styles_of(frame["method"]), column, height)
    return figure


def _undominated(settings: Any) -> np.ndarray:
    """[settings] bool: whether no setting that is at least as fast has a better score."""
    order = settings.sort_values(["ttft_speedup", "relative_score"], ascending=False)
    best = order["relative_score"].cummax()
    is_new = order["relative_score"].gt(best.shift(fill_value=-np.inf))
    return is_new.reindex(settings.index).to_numpy()


def _draw_panel(part: Any, rows: Any, styles: dict[str, style.MethodStyle], column: str, lines: int) -> None:
    cells = part.subplots(lines, _IN_A_ROW, sharex=True, sharey=True, squeeze=False).ravel()
    tasks = [task for task in (*TASKS, "all") if task in set(rows["task"])]
    low, high = rows["ttft_speedup"].min() / 1.15, rows["ttft_speedup"].max() * 1.15
    top = max(106.0, 1.05 * rows["relative_score"].max())
    for task, axes in zip(tasks, cells, strict=False):
        _draw_task(axes, rows[rows["task"] == task], styles, column)
        axes.set_title(_TITLES.get(task, task))
        style.log_scale(axes, "x", (0.1, 0.2, 0.5, 1, 2, 3, 5, 10))
        axes.set(xlim=(low, high))
        if column == "kl":
            axes.set_yscale("log", nonpositive="clip")
        else:
            axes.set(ylim=(-3, top))
        axes.tick_params(labelbottom=True, labelleft=True)
    for axes in cells[len(tasks) :]:
        axes.set_axis_off()
    part.supxlabel("TTFT speedup over the paired baseline (times)", fontsize=9)
    part.supylabel(_HEIGHTS[column], fontsize=9)
    _write_legend(cells[len(tasks)], rows, styles)


def _draw_task(axes: Any, rows: Any, styles: dict[str, style.MethodStyle], column: str) -> None:
    if column != "kl":
        axes.axhline(100, **style.REFERENCE)
    axes.axvline(1, **style.REFERENCE)
    published_alpha = 0.9 if _is_own(rows) else 0.45
    for method, points in rows[rows["source"] == PAPER].groupby("method"):
        mark = styles[method]
        axes.plot(
            points["ttft_speedup"], points[column], linestyle="none", marker=mark.marker, markersize=8,
            markerfacecolor="none", markeredgecolor=mark.colour, markeredgewidth=1.4, alpha=published_alpha, zorder=2,
        )  # fmt: skip
    for method, points in rows[rows["source"] == MEASURED].groupby("method"):
        mark = styles[method]
        on_curve = points["on_curve"].astype(bool)
        others, curve = points[~on_curve], points[on_curve].sort_values("ttft_speedup")
        axes.plot(others["ttft_speedup"], others[column], **mark.drawn | {"linestyle": "none"},
                  markersize=3.5, alpha=0.35, markeredgewidth=0)  # fmt: skip
        style.draw(axes, curve, "ttft_speedup", column, with_x=True, markersize=5, capsize=0, zorder=3, **mark.drawn)
    for _, claim in rows[rows["source"] == CLAIM].iterrows():
        x, y = claim["ttft_speedup"], claim[column]
        axes.plot(x, y, marker="+", markersize=11, markeredgewidth=1.3, color="black", linestyle="none", zorder=4)
    style.grid(axes)


def _is_own(rows: Any) -> bool:
    """Whether the paper's points are of the same model."""
    measured = rows.loc[rows["source"] == MEASURED, "paper_model"]
    return bool(measured.notna().any())


def _write_legend(axes: Any, rows: Any, styles: dict[str, style.MethodStyle]) -> None:
    measured = set(rows.loc[rows["source"] == MEASURED, "method"])
    published = rows[rows["source"] == PAPER]
    hollow: Any = {"linestyle": "none", "markerfacecolor": "none", "markersize": 8}
    handles = [Line2D([], [], label=mark.name, markersize=5, **mark.drawn) for method, mark in styles.items()
               if method in measured]  # fmt: skip
    if len(published):  # the paper has no KL
        name = MODEL_NAMES[published["paper_model"].iloc[0]]
        whose = f"the paper's, {name}" if _is_own(rows) else f"the paper's (of {name},\non LongBench)"
        handles.append(Line2D([], [], label=f"hollow: {whose}", marker="o", color=style.GREY, **hollow))
    handles += [
        Line2D([], [], label=f"{mark.name} (the paper's only)", **mark.drawn | hollow)
        for method, mark in styles.items()
        if method in set(published["method"]) - measured
    ]
    if (rows["source"] == CLAIM).any():
        claims = ", ".join(f"{speedup:g}x at {score:g} %" for speedup, score in CLAIMS)
        handles.append(
            Line2D([], [], color="black", label=f"the paper's claims:\n{claims}", **hollow | {"marker": "+"})
        )
    axes.legend(handles=handles, loc="center left", title="small and faint: the method's\nother settings",
                alignment="left")  # fmt: skip


FIGURE = Figure(
    name="figure5",
    title="Score against TTFT speedup, task by task (the paper's Figure 5)",
    caption=(
        "Scores of every setting, relative to the paired baseline's, without ablations of LazyLLM; bars are "
        "95 % bootstrap intervals over examples. Seeds of a setting are pooled. A curve joins a method's settings that "
        "are given by an ideal speedup (1.5x, 2.0x, ...). If it has none, the curve joins the settings that no other "
        "one of the method beats in both score and speedup, which flatters methods with many settings. Hollow: the "
        "paper's Table 1, with the mean of its task means; crosses: the claims in its text on multi-document QA. "
        "Below, on a log scale: the KL divergence of the first token's distribution from the baseline's, which does "
        "not saturate like a score."
    ),
    data=data,
    plot=plot,
    opens_report=True,
)
