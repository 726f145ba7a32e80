"""Figure 5: score relative to the baseline's against TTFT speedup, by task and method, and the same
with the KL.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure as MplFigure
from matplotlib.lines import Line2D

from eval.analysis import style
from eval.analysis.claims import claims
from eval.analysis.columns import BASELINE, KLS, SECTION, STUDIED, targets_of
from eval.analysis.paper_tables import MODEL_NAMES, PAPER_MODELS, paper_values
from eval.analysis.table import as_figure, forms
from eval.store.results import Results

MEASURED, PAPER, CLAIM = "measured", "paper, Table 1", "paper, text"

_SETTING = [*SECTION, "task", "method", "label", "settings", "seeds", "examples", "on_curve"]
_HOLLOW: Any = {"linestyle": "none", "markerfacecolor": "none", "markersize": 8}
_SCORE = {"relative_score": "score, % of the baseline's:\nhigher is better"}
_CLAIM: Any = {"linestyle": "none", "color": "black", "marker": "+", "markersize": 11}


def data(results: Results) -> pd.DataFrame:
    """model, suite, task ("all": their mean), method, label, settings, seeds, examples, on_curve,
    source, paper_model; relative_score (100 * score / the baseline's) and ttft_speedup, with `_low`
    and `_high`.

    on_curve: whether a speedup such as `2.0x` gives the setting.
    source: "measured"; "paper, Table 1" for the paper's scores and speedups of the model
        `paper_model` (the model itself, or Llama 2 if it is not in the paper); "paper, text" for
        its two claims.
    """
    parts = []
    for (model, suite), panel in _measure(results, "relative_score").groupby(SECTION, sort=False):
        paper_model = panel["paper_model"].iloc[0]
        points = paper_points(
            paper_model if isinstance(paper_model, str) else PAPER_MODELS[0],
            sorted(set(panel["task"])),
        )
        parts += [panel, points.assign(model=model, suite=suite)]
    if not parts:
        return pd.DataFrame()
    columns = [*_SETTING, "source", "paper_model", *forms("relative_score", "ttft_speedup")]
    return pd.concat(parts, ignore_index=True).reindex(columns=columns)


def kl_data(results: Results) -> pd.DataFrame:
    """Return the columns of `data` without the paper's points, and with kl, answer_kl and gold_kl,
    in nats, instead of the relative score.
    """
    columns = [*_SETTING, "source", *forms("ttft_speedup", *KLS)]
    return _measure(results, *KLS).reindex(columns=columns)


def _measure(results: Results, *values: str) -> Any:
    """Choose the settings that have any of these values, in each task and as means over tasks."""
    table: Any = style.as_published(results.by_task)
    table = table[(table["level"] != "dataset") & (table["method"] != BASELINE)]
    table = table[table["ttft_speedup"].notna() & table[list(values)].notna().any(axis=1)]
    table = style.drop_partial_means(table)
    return table.assign(source=MEASURED, on_curve=targets_of(table).notna())


def paper_points(paper_model: str, tasks: Sequence[str]) -> pd.DataFrame:
    """The paper's points in the given tasks. "all" has the means of its scores and of its speedups
    over the tasks.

    paper_model: llama2 or xgen. The claims in the paper's text are for Llama 2.
    """
    values: Any = pd.Series(paper_values())
    numbers = ["score", "ttft_speedup"]
    table: Any = (
        values[paper_model].unstack(sort=False)[numbers].reset_index(names=["task", "method"])
    )
    means = table.groupby("method", sort=False)[numbers].mean().reset_index().assign(task="all")
    table = pd.concat([table, means], ignore_index=True)
    baseline = table[table["method"] == BASELINE].set_index("task")["score"]
    table["relative_score"] = 100 * table["score"] / table["task"].map(baseline)
    table = table[(table["method"] != BASELINE) & table["task"].isin(tasks)].assign(source=PAPER)
    if paper_model == "llama2" and "multi_doc_qa" in tasks:
        stated = [
            (claim.arguments["speedup"], claim.paper[paper_model])
            for claim in claims()
            if claim.measure == "kept_at"
        ]
        text = pd.DataFrame(stated, columns=["ttft_speedup", "relative_score"], dtype=float)
        text = text.assign(task="multi_doc_qa", method=STUDIED, source=CLAIM)
        table = pd.concat([table, text], ignore_index=True)
    return table.assign(paper_model=paper_model).drop(columns="score")


_NOTES = (
    "Bars: 95 % bootstrap intervals over examples. Seeds of a setting are pooled; ablations of "
    "LazyLLM are left out. A curve joins a method's settings that are given by an ideal speedup "
    "(1.5x, 2.0x, ...). The mean is that of task means."
)
_COMMAND = "python run.py -m experiment=figure5 model=llama2,xgen"


@as_figure(
    111,
    "figure5_kl",
    kl_data,
    title="KL against TTFT speedup, task by task",
    caption=(
        "KL divergence of every setting from the baseline, over its answer if that was measured, "
        "against its TTFT speedup."
    ),
    notes=_NOTES,
    command=f"{_COMMAND} fidelity=answer",
)
@as_figure(
    110,
    "figure5",
    data,
    title="Score against TTFT speedup, task by task (the paper's Figure 5)",
    caption=(
        "Score of every setting relative to the baseline's against its TTFT speedup. Hollow: the "
        "paper's Table 1; crosses: the claims in its text."
    ),
    notes=f"{_NOTES} Scores of too few examples for an interval are not drawn beside others.",
    command=_COMMAND,
)
@style.styled
def plot(frame: Any) -> MplFigure:
    """For each model and suite a panel for each task, their mean if there are several, and the
    legend: of the scores, or of the first KL that was measured.
    """
    has_kl = "kl" in frame
    title = f"{'KL' if has_kl else 'Score'} against TTFT speedup"
    figure, sections = style.sections_of(
        frame, title, 11, lambda rows: 2.65 * style.task_lines(rows), most=2
    )
    styles = style.styles_of(frame["method"])
    for part, rows in sections:
        rows = rows[rows["task"] != "all"] if rows["task"].nunique() == 2 else rows
        labels = style.kls_in(rows) if has_kl else _SCORE
        value, label = next(iter(labels.items()))
        rows = rows.dropna(subset=value) if has_kl else _choose_panels(rows)
        speedups = rows["ttft_speedup"]
        # an axis that holds 1 and 2 has ticks, however close its points are
        reach = min(0.9, speedups.min() / 1.15), max(2.2, speedups.max() * 1.15)
        for task, axes in style.task_panels(part, rows).items():
            _draw_task(axes, rows[rows["task"] == task], styles, value)
            axes.set(xlim=reach)
            if has_kl:
                axes.set_yscale("log", nonpositive="clip")
            else:
                highest = rows[[value, f"{value}_high"]].max().max()
                axes.set(ylim=(-3, max(106.0, 1.05 * highest)))
        part.supxlabel("TTFT speedup over the baseline (times)", fontsize=9)
        part.supylabel(label, fontsize=9)
        _write_legend(part, rows, styles)
    return figure


def _choose_panels(rows: Any) -> Any:
    """The scores to draw: those with intervals, if any has them."""
    measured = rows[rows["source"] == MEASURED]
    has_interval = measured["relative_score_low"].notna()
    if not has_interval.any():
        return rows
    rows = rows.drop(measured.index[~has_interval])
    return rows[rows["task"].isin(measured.loc[has_interval, "task"])]


def _draw_task(axes: Any, rows: Any, styles: dict[str, Any], value: str) -> None:
    axes.axvline(1, **style.REFERENCE)
    for method, points in rows[rows["source"] == MEASURED].groupby("method", sort=False):
        _draw_method(axes, points, styles[method], value)
    if value in _SCORE:
        axes.axhline(100, **style.REFERENCE)
        paper = rows[rows["source"] == PAPER]
        for method, x, y in paper[["method", "ttft_speedup", value]].itertuples(index=False):
            axes.plot(x, y, **styles[method] | _HOLLOW, alpha=0.9 if _is_own(rows) else 0.45)
        stated = rows[rows["source"] == CLAIM]
        axes.plot(stated["ttft_speedup"], stated[value], **_CLAIM)
    style.log_scale(axes, "x", (0.1, 0.2, 0.5, 1, 2, 5, 10))


def _draw_method(axes: Any, points: Any, look: dict[str, Any], value: str) -> None:
    """Draw a curve through the settings `on_curve`; others are faint, unless there is no curve."""
    x = "ttft_speedup"
    on_curve = points["on_curve"].astype(bool)
    others, alone = points[~on_curve], look | {"linestyle": "none"}
    if on_curve.any():
        style.draw(axes, points[on_curve].sort_values(x), x, value, with_x=True, **look)
        axes.plot(others[x], others[value], **alone, alpha=0.4)
    else:
        style.draw(axes, others, x, value, with_x=True, **alone)


def _is_own(rows: Any) -> bool:
    """Whether the paper's points are of the same model."""
    measured = rows.loc[rows["source"] == MEASURED, "paper_model"]
    return bool(measured.notna().any())


def _write_legend(part: Any, rows: Any, styles: dict[str, Any]) -> None:
    measured = set(rows.loc[rows["source"] == MEASURED, "method"])
    published = rows[rows["source"] == PAPER]
    handles = [Line2D([], [], **look) for name, look in styles.items() if name in measured]
    if len(published):
        name = MODEL_NAMES[published["paper_model"].iloc[0]]
        whose = (
            f"the paper's, {name}" if _is_own(rows) else f"the paper's (of {name},\non LongBench)"
        )
        handles.append(
            Line2D([], [], label=f"hollow: {whose}", marker="o", color=style.GREY, **_HOLLOW)
        )
    handles += [
        Line2D([], [], **look | _HOLLOW | {"label": f"{look['label']} (the paper's only)"})
        for name, look in styles.items()
        if name in set(published["method"]) - measured
    ]
    stated = rows[rows["source"] == CLAIM].sort_values("ttft_speedup")
    if len(stated):
        pairs = zip(stated["ttft_speedup"], stated["relative_score"], strict=True)
        points = ", ".join(f"{speedup:g}x at {score:g} %" for speedup, score in pairs)
        handles.append(Line2D([], [], label=f"the paper's claims:\n{points}", **_CLAIM))
    kinds = rows[rows["source"] == MEASURED].groupby("method")["on_curve"].nunique()
    title = "bars: 95 % intervals" + "\nfaint: off the curve" * bool((kinds > 1).any())
    part.legend(handles=handles, loc="outside right center", title=title, alignment="left")
