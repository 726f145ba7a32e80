"""Figure 5: score relative to the baseline's, and KL, against TTFT speedup, by task and method."""

from collections.abc import Sequence
from typing import Any

import numpy as np
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

_POINTS = ["relative_score", "ttft_speedup"]
_HOLLOW: Any = {"linestyle": "none", "markerfacecolor": "none", "markersize": 8}
_CLAIM: Any = {"linestyle": "none", "color": "black", "marker": "+", "markersize": 11}


def data(results: Results) -> pd.DataFrame:
    """model, suite, task ("all": their mean), source, paper_model, method, label, settings, seeds,
    examples, on_curve; relative_score (100 * score / the baseline's), ttft_speedup, kl, answer_kl
    and gold_kl, with `_low` and `_high`.

    source: "measured"; "paper, Table 1" for the paper's scores and speedups of the model
        `paper_model` (the model itself, or Llama 2 if it is not in the paper); "paper, text" for
        its two claims.
    on_curve: whether a speedup such as `2.0x` gives the setting; for a method without such
        settings, whether no other setting beats it in both score and speedup.
    """
    table: Any = style.as_published(results.by_task)
    table = table[(table["level"] != "dataset") & (table["method"] != BASELINE)]
    table = table[
        table["ttft_speedup"].notna() & table[[*KLS, "relative_score"]].notna().any(axis=1)
    ]
    table = style.drop_partial_means(table).assign(source=MEASURED)
    if table.empty:
        return pd.DataFrame()
    table["on_curve"] = False
    for _, method in table.groupby([*SECTION, "task", "method"]):
        swept = targets_of(method).notna()
        table.loc[method.index, "on_curve"] = swept if swept.any() else _undominated(method)
    parts = []
    for (model, suite), panel in table.groupby(SECTION, sort=False):
        paper_model = panel["paper_model"].iloc[0]
        points = paper_points(
            paper_model if isinstance(paper_model, str) else PAPER_MODELS[0],
            sorted(set(panel["task"])),
        )
        parts += [panel, points.assign(model=model, suite=suite)]
    about = ["task", "source", "paper_model", "method", "label", "settings", "seeds", "examples"]
    columns = [*SECTION, *about, "on_curve", *forms(*_POINTS, *KLS)]
    return pd.concat(parts, ignore_index=True).reindex(columns=columns)


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


@as_figure(
    110,
    "figure5",
    data,
    title="Score against TTFT speedup, task by task (the paper's Figure 5)",
    caption=(
        "KL divergence of every setting from the baseline, over its answer if that was measured, "
        "against its TTFT speedup; below, its score relative to the baseline's. Hollow: the "
        "paper's Table 1; crosses: the claims in its text."
    ),
    notes=(
        "Bars: 95 % bootstrap intervals over examples. Scores of too few examples for an interval "
        "are not drawn beside others. Seeds of a setting are pooled; ablations of "
        "LazyLLM are left out. A curve joins a method's settings that are given by an ideal "
        "speedup (1.5x, 2.0x, ...). If it has none, the curve joins the settings that no other one "
        "of the method beats in both score and speedup, which flatters methods with many settings. "
        "The paper's mean is that of its task means."
    ),
    command="python run.py -m experiment=figure5 model=llama2,xgen",
)
@style.styled
def plot(frame: Any) -> MplFigure:
    """For each model and suite a panel for each task, their mean if there are several, and the
    legend: of the first KL that was measured, then of the scores."""
    figure, sections = style.sections_of(
        frame,
        "KL and score against TTFT speedup",
        11,
        lambda rows: 2.65 * style.task_lines(rows) * len(_measured(rows)),
        most=2,
    )
    styles = style.styles_of(frame["method"])
    for section, rows in sections:
        rows = rows[rows["task"] != "all"] if rows["task"].nunique() == 2 else rows
        values = _measured(rows)
        parts = section.subfigures(len(values), 1, squeeze=False)[:, 0]
        for part, (value, label) in zip(parts, values.items(), strict=True):
            points = _choose_panels(rows.dropna(subset=value), value)  # the paper has no KL
            speedups = points["ttft_speedup"]
            # an axis that holds 1 and 2 has ticks, however close its points are
            reach = min(0.9, speedups.min() / 1.15), max(2.2, speedups.max() * 1.15)
            for task, axes in style.task_panels(part, points).items():
                _draw_task(axes, points[points["task"] == task], styles, value)
                axes.set(xlim=reach)
                if value in KLS:
                    axes.set_yscale("log", nonpositive="clip")
                else:
                    highest = points[["relative_score", "relative_score_high"]].max().max()
                    axes.set(ylim=(-3, max(106.0, 1.05 * highest)))
            part.supxlabel("TTFT speedup over the baseline (times)", fontsize=9)
            part.supylabel(label, fontsize=9)
            _write_legend(part, points, styles, part is parts[0])
    return figure


def _measured(rows: Any) -> dict[str, str]:
    """{each value that was measured and is drawn in panels of its own: its axis label}."""
    labels = dict([*style.kls_in(rows).items()][:1])
    if rows["relative_score"].notna().any():
        labels["relative_score"] = "score, % of the baseline's: higher is better"
    return labels


def _choose_panels(rows: Any, value: str) -> Any:
    """The rows to draw: of scores those with intervals, if any has them."""
    measured = rows[rows["source"] == MEASURED]
    has_interval = measured[f"{value}_low"].notna()
    if value in KLS or not has_interval.any():
        return rows
    rows = rows.drop(measured.index[~has_interval])
    return rows[rows["task"].isin(measured.loc[has_interval, "task"])]


def _undominated(settings: Any) -> np.ndarray:
    """[settings] bool: whether no setting that is at least as fast has a better score."""
    scores = settings.sort_values(["ttft_speedup", "relative_score"], ascending=False)[
        "relative_score"
    ]
    # a share of nothing (NaN) is not
    is_beaten = scores.le(scores.cummax().shift(fill_value=-np.inf))
    return ~is_beaten.reindex(settings.index).to_numpy()


def _draw_task(axes: Any, rows: Any, styles: dict[str, Any], value: str) -> None:
    if value not in KLS:
        axes.axhline(100, **style.REFERENCE)
    axes.axvline(1, **style.REFERENCE)
    paper = rows[rows["source"] == PAPER]
    for method, x, y in paper[["method", "ttft_speedup", value]].itertuples(index=False):
        axes.plot(x, y, **styles[method] | _HOLLOW, alpha=0.9 if _is_own(rows) else 0.45)
    style.draw_methods(axes, rows[rows["source"] == MEASURED], styles, value)
    stated = rows[rows["source"] == CLAIM]
    axes.plot(stated["ttft_speedup"], stated[value], **_CLAIM)
    style.log_scale(axes, "x", (0.1, 0.2, 0.5, 1, 2, 5, 10))


def _is_own(rows: Any) -> bool:
    """Whether the paper's points are of the same model."""
    measured = rows.loc[rows["source"] == MEASURED, "paper_model"]
    return bool(measured.notna().any())


def _write_legend(part: Any, rows: Any, styles: dict[str, Any], has_methods: bool) -> None:
    measured = set(rows.loc[rows["source"] == MEASURED, "method"])
    published = rows[rows["source"] == PAPER]
    names = measured if has_methods else ()
    handles = [Line2D([], [], **look) for name, look in styles.items() if name in names]
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
    is_faint = ~rows.loc[rows["source"] == MEASURED, "on_curve"].astype(bool)
    title = "bars: 95 % intervals" + "\nfaint: off the curve" * bool(is_faint.any())
    part.legend(handles=handles, loc="outside right center", title=title, alignment="left")
