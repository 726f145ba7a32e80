"""Later questions on the same context: quality, time saved, and the turn from which a method no longer pays off."""

import json
from collections import Counter
from typing import Any

import pandas as pd
from matplotlib.figure import Figure as MplFigure
from matplotlib.ticker import MaxNLocator

from eval.analysis import style
from eval.analysis.columns import BASELINE, SECTION, SETTING, in_order, rows_by
from eval.analysis.table import EXAMPLES, LABEL, MB, MODEL, Column, Rows, as_figure, as_table, cells, forms
from eval.store.results import Results

_VALUES = (
    "score", "score_difference", "kl", "ttft_speedup", "speedup_so_far", "tokens_computed", "tokens_computed_so_far",
    "revived_tokens", "kv_bytes", "aux_bytes", "total_s_so_far",
)  # fmt: skip
_TURNS = (1, 2, 4, 8, 16, 32)  # in the table as shown; the CSV has all
_COLUMNS = (
    MODEL,
    LABEL,
    Column("turn", "turn"),
    EXAMPLES,
    Column("score", "score", 2),
    Column("score_difference", "score - baseline", 2, missing="unpaired", sign="+"),
    Column("kl", "KL, nats", 4),
    Column("ttft_speedup", "TTFT speedup", 2),
    Column("speedup_so_far", "speedup so far", 2),
    Column("tokens_computed", "computed", 1, interval=False),
    Column("revived_tokens", "revived", 1, interval=False),
    Column("stored_bytes", "KV + Aux, MB", 2, scale=MB),
)


@as_table(
    150,
    title="Later questions on the same context, by turn",
    caption=(
        "Rows with several questions, by question, mean over tasks; a later turn continues from the method's own "
        "earlier answers. KL and speedups compare with the baseline's same turn."
    ),
    notes=(
        "TTFT speedup: of this turn alone. Speedup so far: of whole answers, all turns up to this one; below 1, the "
        "method has cost more time than the baseline. Computed, revived: prompt tokens in this turn, mean over layers. "
        "KV + Aux: of tokens that are stored, and of those that may be revived. turns=recompute: each turn runs the "
        "whole text anew. Other turns, datasets and tasks are in the CSV."
    ),
    command="python run.py experiment=turns",
)
def turns(results: Results) -> Rows:
    """Every setting by turn. frame: datasets, tasks and their mean; cells: the mean."""
    frame: Any = by_turn(results)
    shown = frame[(frame["level"] == "all") & frame["turn"].isin(_TURNS)]
    table = cells(shown.assign(stored_bytes=shown["kv_bytes"] + shown["aux_bytes"]), _COLUMNS, results)
    return Rows(frame, table, keys=3)


def by_turn(results: Results) -> pd.DataFrame:
    """A row for each setting, turn, and dataset, task or "all", for settings with several questions.

    speedup_so_far: the baseline's time for all turns up to this one, divided by the method's. Other values: as in
    `eval.store.aggregate.by_task`, over rows with such a turn. turns: what the method does in later turns.
    """
    among = results.frame.assign(total_s=results.frame["total_s_so_far"])  # for the speedup so far
    frame: Any = among[among["counts"]]
    frame = frame[frame.groupby(SETTING)["turn"].transform("max") > 1]
    rows = rows_by(frame, "turn", among)
    for row in rows:
        row["turns"] = json.loads(row["settings"]).get("turns", "continue")
        row |= {f"speedup_so_far{end}": row[f"generation_speedup{end}"] for end in ("", "_low", "_high")}
    columns = [*SETTING, "turns", "turn", "level", "name", "task", "examples", *forms(*_VALUES)]
    return in_order(pd.DataFrame(rows, columns=columns))


_PANELS = {  # {value: (axis label, whether the axis is logarithmic)}
    "score": ("score", False),
    "kl": ("KL to the baseline, nats", False),
    "ttft_speedup": ("TTFT speedup of the turn", True),
    "speedup_so_far": ("speedup of all turns so far", True),
    "revived_tokens": ("revived tokens, mean over layers", False),
}
_TITLES = {"continue": "each later turn goes on", "recompute": "each later turn runs the whole text again"}


def data(results: Results) -> pd.DataFrame:
    """model, suite, method, label, turns (continue or recompute), turn, examples, and means over tasks: score, kl,
    ttft_speedup, speedup_so_far and revived_tokens, with `_low` and `_high`; also of the baseline."""
    frame = by_turn(results)
    values = forms("score", "kl", "ttft_speedup", "speedup_so_far", "revived_tokens")
    columns = [*SECTION, "method", "label", "turns", "turn", "examples", *values]
    return frame.loc[frame["level"] == "all", columns].reset_index(drop=True)


@as_figure(
    150,
    "turns",
    data,
    title="Later questions on the same context",
    caption=(
        "Rows with several questions, mean over tasks by question. Left: each turn continues from what the method has "
        "stored; right: each turn runs the whole text again and selects tokens for the new question."
    ),
    notes=(
        "KL and speedups compare with the baseline's same turn, which continues from its whole KV cache. Speedup so "
        "far: of whole answers, all turns up to this one; below the dotted line, the method has cost more time than "
        "the baseline. Bars: 95 % bootstrap intervals over rows."
    ),
    command="python run.py experiment=turns",
)
@style.styled
def plot(frame: Any) -> MplFigure:
    """One block per model and suite, one row per value, a column for methods that continue and one for others."""
    title = "What each later question gets, mean over tasks"
    figure, sections = style.sections_of(frame, title, 9.5, lambda _: 2.3 * len(_PANELS), most=2)
    for part, section in sections:
        rows, baseline = section[section["method"] != BASELINE], section[section["label"] == BASELINE]
        titles = {turns: title for turns, title in _TITLES.items() if turns in set(rows["turns"])}
        panels = part.subplots(len(_PANELS), len(titles), sharex=True, sharey="row", squeeze=False)
        for (value, (label, is_log)), line in zip(_PANELS.items(), panels, strict=True):
            line[0].set_ylabel(label)
            for axes, turns in zip(line, titles, strict=True):
                _draw_panel(axes, rows[rows["turns"] == turns], value, style.styles_of(rows["method"]))
                if value == "score":
                    axes.plot(baseline["turn"], baseline["score"], label="baseline", **style.REFERENCE)
            if is_log:
                style.log_scale(line[0], "y")
            else:
                line[0].set_ylim(bottom=0, top=104 if value == "score" else None)
        for title, upper, lower in zip(titles.values(), panels[0], panels[-1], strict=True):
            upper.set_title(title)
            lower.set_xlabel("question")
            lower.xaxis.set_major_locator(MaxNLocator(integer=True))
        curves: dict[str, Any] = {}
        for axes in panels[0]:
            curves |= {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        if "baseline" in curves:
            curves["baseline"] = curves.pop("baseline")  # last
        style.legend_beside(panels[0, -1], handles=curves.values(), labels=curves)
    return figure


def _draw_panel(axes: Any, rows: Any, value: str, styles: Any) -> None:
    curves = sorted(rows.groupby(["label", "method"], sort=False), key=lambda curve: len(curve[0][0]))
    drawn = Counter[str]()
    for (label, method), curve in curves:  # a method's simplest setting gets the method's own style
        number = drawn[method]
        drawn[method] += 1
        shown = style.shown_label(label.replace(", turns=recompute", ""), method)
        look = styles[method] | {"label": shown, "markersize": 4}
        if number:
            look |= {"linestyle": style.LINES[number % len(style.LINES)], "markerfacecolor": "white"}
        style.draw(axes, curve, "turn", value, **look)
    if value.startswith(("ttft_", "speedup")):
        axes.axhline(1, **style.REFERENCE)
