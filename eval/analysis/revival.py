"""What revival is worth: ratios of the KLs of LazyLLM with and without it, of static pruning and
of random drop.
"""

import json
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.columns import KLS, SECTION, STUDIED, targets_of, with_ends
from eval.analysis.table import MODEL, Cell, Column, Rows, as_table, cells, forms
from eval.store.results import Results
from eval.store.runs import is_ablation
from eval.store.summary import drawn_means, on_common_examples

WITH, WITHOUT, STATIC, RANDOM = "LazyLLM", "without revival", "static pruning", "random drop"
_PAIRS = ((WITH, WITHOUT), (WITHOUT, STATIC), (WITH, STATIC), (STATIC, RANDOM))
_KINDS = {"static_pruning": STATIC, "random_drop": RANDOM}
_KLS = {"answer_kl": "the baseline's answer", "gold_kl": "the gold answer", "kl": "the first token"}
_KEYS = [*SECTION, "target", "kl", "examples"]


@as_table(
    190,
    title="What revival is worth",
    caption=(
        "Ratios of KLs at one ideal speedup, with both ends of their 95 % interval: below 1, the "
        "first of the two is nearer to the baseline."
    ),
    notes=(
        "KL of: over the baseline's answer, given to each method as its own; over the gold answer; "
        "of the first token, before revival begins. A ratio is paired: the geometric mean over "
        "rows of a dataset, then datasets, then tasks, of rows in which neither KL is 0. Seeds are "
        "pooled."
    ),
    command="python run.py experiment=revival model=smollm2 dataset=all subset=mini "
    "data.dir=FOLDER",
)
def revival(results: Results) -> Rows:
    """Ratios of KLs of LazyLLM with and without revival, static pruning and random drop, by
    ideal speedup.
    """
    rows: Any = results.counting
    rows = rows.assign(
        target=targets_of(rows), label=list(map(_kind, rows["method"], rows["settings"]))
    )
    rows = rows.dropna(subset=["target", "label"])
    made = []
    for key, group in rows.groupby([*SECTION, "target"], sort=True):
        for name in KLS if WITHOUT in set(group["label"]) else ():
            if ratios := _ratios(group, name):
                made.append(dict(zip(_KEYS, (*key, name), strict=False)) | ratios)
    names = [f"{first} / {second}" for first, second in _PAIRS]
    table = pd.DataFrame(made, columns=[*_KEYS, *forms(*names)])
    display = table.assign(
        speedup=[f"{target:g}x" for target in table["target"]],
        of=[_KLS[name] for name in table["kl"]],
        **{name: [_cell(row, name) for row in made] for name in names},
    )
    columns = [MODEL, Column("speedup", "ideal speedup", sorted_by="target"), Column("of", "KL of")]
    columns += [Column("examples", "n"), *(Column(name, name) for name in names)]
    text = cells(display, columns, results)
    for name in names:  # a cell has a number to sort by
        text[name] = display[name].to_list()
    return Rows(table, text, keys=3)


def _kind(method: str, settings: str) -> str | None:
    """What a setting is in this table; None for nothing of it."""
    if method == STUDIED:
        values = json.loads(settings)
        if is_ablation(values | {"revive": True}):  # another ablation
            return None
        return WITHOUT if is_ablation(values) else WITH
    return _KINDS.get(method)


def _ratios(group: Any, name: str) -> dict[str, Any]:
    """Of one KL at one speedup, each pair's ratio with both ends of its interval; empty if no
    row has any.
    """
    found: dict[str, Any] = {}
    for first, second in _PAIRS:
        values: Any = on_common_examples(group[group["label"].isin([first, second])], name)
        if {*values.columns} != {first, second}:
            continue
        logs = np.log(values[(values > 0).all(axis=1)])
        if len(logs):
            ratio = np.exp(drawn_means(logs[[first, second]]) @ [1, -1])
            found |= dict(zip(forms(f"{first} / {second}"), with_ends(ratio), strict=True))
            found.setdefault("examples", len(logs))
    return found


def _cell(row: dict[str, Any], name: str) -> Cell:
    """`0.57 [0.43, 0.73]`, as a ratio's interval is not symmetrical."""
    if name not in row:
        return Cell("-")
    value, low, high = (row[form] for form in forms(name))
    text = f"{value:.2f}" if np.isnan(low) else f"{value:.2f} [{low:.2f}, {high:.2f}]"
    return Cell(text, value)
