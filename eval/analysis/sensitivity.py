"""Sensitivity of score, KL and speed to LazyLLM's schedule: a table of all, Figure 6 of single pruning layers."""

import json
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as MplFigure

from eval.analysis import style
from eval.analysis.columns import KLS, SECTION, SETTING, STUDIED, overall
from eval.analysis.table import EXAMPLES, FIDELITY, KL, MODEL, Column, Rows, as_figure, as_table, cells, forms, measured
from eval.store.results import Results
from eval.store.runs import label_of

_SLOPE = "score_change_per_0.1_keep"
_COLUMNS = (
    MODEL,
    Column("schedule", "schedule"),
    EXAMPLES,
    Column("ttft_speedup", "TTFT speedup", 2, missing="unpaired"),
    Column("score", "score", 2),
    Column("score_difference", "score - baseline", 2, missing="unpaired", interval=False, sign="+"),
    Column("pct_prompt_tokens_computed", "% tokens computed", 1),
    KL,
    *FIDELITY,
    Column(_SLOPE, "points per 0.1 keep", 2, sign="+"),
)


@as_table(
    180,
    title="Sensitivity of score, KL and speed to the schedule",
    caption=(
        "Every schedule of LazyLLM that was run ({{layer: keep ratio}}), by speedup; mean over tasks. Points per 0.1 "
        "keep: score lost for each 0.1 less of the prompt kept after a single pruning layer."
    ),
    notes=(
        "The loss is relative to the next higher ratio that was run after the same layer, or to keeping everything "
        "(the baseline)."
    ),
    command="python run.py -m experiment=figure6 model=tiny",
)
def sensitivity(results: Results) -> Rows:
    """Score, KL and TTFT speedup of every schedule, and the score lost from the next higher keep ratio."""
    frame = overall(results)
    frame = _with_schedules(frame[frame["method"] == STUDIED])
    frame[_SLOPE] = _slopes(frame)
    frame = frame.sort_values([*SECTION, "ttft_speedup"], kind="stable").reset_index(drop=True)
    values = forms(
        "score", "ttft_speedup", "pct_prompt_tokens_computed", *KLS, "gold_log_likelihood", "score_difference"
    )
    frame = frame[[*SETTING, "layers", "keep", "examples", *values, _SLOPE]]
    labels = [label.removeprefix(f"{STUDIED}, ").removeprefix("schedule=") for label in frame["label"]]
    table = cells(frame.assign(schedule=labels), measured(_COLUMNS, frame), results)
    return Rows(frame, table, keys=2)


def _with_schedules(frame: Any) -> Any:
    """With the layers that prune (`2 5`), the share that the last layers keep, and the label of the other settings."""
    schedules = []
    for settings in map(json.loads, frame["settings"]):
        schedule = settings.pop("schedule", None)
        layers, keep = None, np.nan
        if isinstance(schedule, dict):
            layers, keep = " ".join(sorted(schedule, key=int)), float(np.prod(list(schedule.values())))
        schedules.append((layers, keep, label_of("", settings)))
    return frame.join(pd.DataFrame(schedules, index=frame.index, columns=["layers", "keep", "others"]))


def _has_one_layer(frame: Any) -> Any:
    return frame["layers"].notna() & ~frame["layers"].astype(str).str.contains(" ")


def _slopes(frame: Any) -> pd.Series:
    """Change of score per 0.1 of keep, relative to the next higher keep (at most 1) after the same layer.

    NaN for schedules of several pruning layers, as several ratios differ. Scores are differences to the baseline's.
    """
    points = frame[_has_one_layer(frame) & (frame["keep"] < 1)].sort_values("keep", ascending=False)
    groups = points.groupby([*SECTION, "layers", "others"])
    keep = groups["keep"].shift(fill_value=1.0)  # keeping everything is the baseline
    change = points["score_difference"] - groups["score_difference"].shift(fill_value=0.0)
    return 0.1 * change / (keep - points["keep"])


def data(results: Results) -> pd.DataFrame:
    """Means over tasks of LazyLLM with one pruning layer and default settings: model, suite, layer, keep (0 to 1),
    examples, and score, reference_score, score_difference, relative_score, ttft_speedup, kl, answer_kl, gold_kl, with
    `_low` and `_high`.
    """
    table: Any = style.as_published(results.by_task)
    table = _with_schedules(table[(table["level"] == "all") & (table["method"] == STUDIED)])
    table = results.least_different(table[_has_one_layer(table)])
    table = table.astype({"layers": int}).rename(columns={"layers": "layer"})
    values = forms("score", "reference_score", "score_difference", "relative_score", "ttft_speedup", *KLS)
    table = table.sort_values([*SECTION, "keep", "layer"])
    return table[[*SECTION, "layer", "keep", "examples", *values]].reset_index(drop=True)


@as_figure(
    120,
    "figure6",
    data,
    title="Score against the layer of a single pruning point (the paper's Figure 6)",
    caption=(
        "LazyLLM with one pruning layer, mean over tasks: the score, and the KL divergence of the first token's "
        "distribution from the baseline's. The paper claims that scores fall if fewer tokens are kept and rise if "
        "pruning is later; it gives no numbers."
    ),
    notes="Bars: 95 % bootstrap intervals over examples. KL has a log scale.",
    command="python run.py -m experiment=figure6 model=llama2,xgen",
)
@style.styled
def plot(frame: Any) -> MplFigure:
    """One line per model and suite: the score, then each KL that was measured; one curve per kept share."""
    kls = style.kls_in(frame)
    title = "LazyLLM with one pruning layer, mean over tasks"
    figure, sections = style.sections_of(frame, title, 5.6 + 4.4 * len(kls), lambda _: 3.6)
    for part, rows in sections:
        panels = part.subplots(1, 1 + len(kls), squeeze=False)[0]
        _draw_curves(panels[0], rows, "score", "score (0 to 100)")
        panels[0].axhline(rows["reference_score"].mean(), label="baseline", **style.REFERENCE)
        low, high = rows["examples"].min(), rows["examples"].max()
        panels[0].set_title(f"{low if low == high else f'{low} to {high}'} examples")
        for axes, (name, label) in zip(panels[1:], kls.items(), strict=True):
            _draw_curves(axes, rows, name, label)
            axes.set_yscale("log", nonpositive="clip")
        handles, labels = panels[0].get_legend_handles_labels()
        style.legend_beside(panels[-1], handles=handles, labels=labels)
    return figure


def _draw_curves(axes: Any, rows: Any, column: str, label: str) -> None:
    shares = sorted(set(rows["keep"]))
    for number, keep in enumerate(shares):
        look = style.look_of(number, len(shares))
        style.draw(axes, rows[rows["keep"] == keep], "layer", column, label=f"keep {100 * keep:g} %", **look)
    axes.set_xticks(sorted(set(rows["layer"])))
    axes.set(xlabel="layer after which tokens are pruned, once", ylabel=label)
