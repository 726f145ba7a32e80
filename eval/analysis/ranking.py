"""Methods side by side, ranked by KL at equal ideal speedups."""

import re
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis import columns
from eval.analysis.columns import BASELINE, KLS, SECTION, with_ends
from eval.analysis.table import (
    EXAMPLES,
    FIDELITY,
    KL,
    MODEL,
    Column,
    Rows,
    as_table,
    cells,
    forms,
    measured,
)
from eval.store.results import Results
from eval.store.summary import drawn_means, match_baselines, on_common_examples

MISSED = 0.1  # of its target: a setting whose ideal speedup is farther from it is not ranked
# {value: digits shown}: ranked by the first that all methods of a speedup have
_KLS = dict.fromkeys(KLS, 5)
_VALUES = _KLS | {"score": 2}
_COLUMNS = (
    MODEL,
    Column("speedup", "ideal speedup", sorted_by="target"),
    Column("rank", "rank"),
    Column("setting", "method"),
    EXAMPLES,
    Column("ttft_speedup", "TTFT speedup", 2),
    *FIDELITY[:2],
    KL,
    Column("stored", "stored, % of baseline's", 1, interval=False, optional=True),
    Column("ranked_by", "ranked by"),
    Column("kl_shown", "KL - rank 1's", sorted_by="kl_shown_difference"),
    Column("score", "score", _VALUES["score"]),
    Column("score_shown", "score - rank 1's", sorted_by="score_difference"),
)


@as_table(
    200,
    title="Methods ranked at equal ideal speedups",
    caption=(
        "Settings given by an ideal TTFT speedup, ranked by KL. Differences are to the method "
        "ranked first, on the same examples, with both ends of their paired 95 % interval."
    ),
    notes=(
        "The KL of the answer ranks, else that of the gold answer, else that of the first token. "
        "Means over tasks, on the examples that all methods of that speedup have; seeds are "
        "pooled. The TTFT speedup is measured: methods of one ideal speedup differ in it, as time "
        "depends on more than FLOPs. Stored: bytes of KV and Aux Cache at the end of an answer "
        "over the baseline's, as equal speed is not equal memory.{unranked}"
    ),
    command="python run.py -m experiment=figure5 model=tiny",
)
def ranking(results: Results) -> Rows:
    """KL and score of all methods by ideal speedup, with each method's difference to the first on
    the same examples.

    Settings whose prefills missed the speedup by more than a tenth, or that no speedup gives, are
    not ranked: the notes name them. stored: the bytes at the end, in % of the baseline's.
    """
    frame: Any = results.counting
    frame = frame.assign(target=columns.targets_of(frame))
    unsolved = columns.unsolved_methods(frame)
    frame = frame[frame["method"] != BASELINE].dropna(subset=["target", "kl"])
    reasons = _unranked(results)
    left_out = frame.set_index([*SECTION, "label"]).index.map(reasons.get)
    frame, others = frame[left_out.isna()], list(dict.fromkeys(left_out.dropna()))
    baselines = match_baselines(frame, results.frame)
    frame = frame.assign(
        stored=frame["kv_bytes"] + frame["aux_bytes"],
        stored_unpruned=baselines["kv_bytes"] + baselines["aux_bytes"],
    )
    rows: list[dict[str, Any]] = []
    keys = [*SECTION, "target"]
    for key, group in frame.groupby(keys, sort=True):
        rows += [dict(zip(keys, key, strict=True)) | row for row in _ranked(group)]
    speeds: Any = results.by_task.query("level == 'all'").set_index([*SECTION, "label"])
    values = forms(*_VALUES, *(f"{name}_difference" for name in _VALUES))
    names = [*SECTION, "target", "rank", "ranked_by", "method", "label", "examples", "stored"]
    table = pd.DataFrame(rows, columns=[*names, *values])
    table = table.join(speeds[[*forms("ttft_speedup")]], on=[*SECTION, "label"])
    display = table.assign(
        speedup=[f"{target:g}x" for target in table["target"]],
        setting=[
            re.sub(r"\w+=[\d.]+x(, )?", "", label).removesuffix(", ") for label in table["label"]
        ],
        score_shown=[_difference(row, "score") for row in rows],
        kl_shown=[_difference(row, row["ranked_by"]) for row in rows],
        kl_shown_difference=[row[f"{row['ranked_by']}_difference"] for row in rows],
        ranked_by=[_NAMES[row["ranked_by"]] for row in rows],
    )
    others += [f"{unsolved}, whose speed is measured, not set"] if unsolved else []
    unranked = f" Not ranked: {'; '.join(others)}." if others else ""
    return Rows(
        table,
        cells(display, measured(_COLUMNS, display), results),
        keys=4,
        values={"unranked": unranked},
    )


def _unranked(results: Results) -> dict[tuple[str, str, str], str]:
    """{(model, suite, label): the setting and why it has no rank} of those that have none."""
    reasons = {}
    frame: Any = results.by_task
    for row in frame[frame["level"] == "all"].to_dict("records"):
        target, ideal = row["speedup"], row["ideal_ttft_speedup"]
        # answers without it give NaN
        if isinstance(target, float | int) and abs(ideal - target) > MISSED * target + 1e-9:
            key = row["model"], row["suite"], row["label"]
            reasons[key] = f"{row['label']}, whose prefills had an ideal speedup of {ideal:.2f}"
    return reasons


def _ranked(group: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of one speedup, the smallest KL first: of several KLs, the first that all
    settings have.
    """
    names = group.drop_duplicates("label").set_index("label")["method"]
    values = {name: on_common_examples(group, name) for name in _VALUES}
    values = {
        name: value
        for name, value in values.items()
        if set(value.columns) == set(names.index) and len(value)
    }
    if not (by := [name for name in _KLS if name in values]):
        return []
    drawn = {name: drawn_means(value) for name, value in values.items()}
    stored = _share_of_bytes(group)
    order = np.argsort(drawn[by[0]][0], kind="stable")
    rows = []
    for rank, number in enumerate(order, start=1):
        label = values[by[0]].columns[number]
        row = {
            "rank": rank,
            "ranked_by": by[0],
            "method": names[label],
            "label": label,
            "examples": len(values[by[0]]),
            "stored": stored.get(label, np.nan),
        }
        for name, means in drawn.items():
            row |= dict(zip(forms(name), with_ends(means[:, number]), strict=True))
            difference = with_ends(means[:, number] - means[:, order[0]])
            row |= dict(zip(forms(f"{name}_difference"), difference, strict=True))
        rows.append(row)
    return rows


def _share_of_bytes(group: Any) -> dict[str, float]:
    """{label: bytes at the end, in % of the baseline's} of the settings beside a baseline."""
    group = group.dropna(subset="stored_unpruned")
    stored, baseline = (on_common_examples(group, name) for name in ("stored", "stored_unpruned"))
    if not len(stored):
        return {}
    shares = 100 * drawn_means(stored)[0] / drawn_means(baseline)[0]
    return dict(zip(stored.columns, shares, strict=True))


def _difference(row: dict[str, Any], name: str) -> str:
    """Both ends of the interval, as the ends of a difference may differ in sign; `-` of rank 1
    and without scores.
    """
    if row["rank"] == 1 or f"{name}_difference" not in row:
        return "-"
    mean, low, high = (f"{row[form]:+.{_VALUES[name]}f}" for form in forms(f"{name}_difference"))
    return mean if low == "+nan" else f"{mean} ({low}, {high})"


_NAMES = {"answer_kl": "answer", "gold_kl": "gold", "kl": "first token"}
