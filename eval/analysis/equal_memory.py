"""Equal memory: how good each setting is by the bytes that it stores, beside LazyLLM's setting of the nearest bytes."""

from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.columns import BASELINE, KLS, SECTION, SETTING, STUDIED, overall, target_of, with_ends
from eval.analysis.style import as_published
from eval.analysis.table import EXAMPLES, FIDELITY, KL, LABEL, MODEL, Column, Rows, as_table, cells, forms, measured
from eval.store.aggregate import drawn_means, on_common_examples
from eval.store.results import Results, first_turns

NEAR = 0.05  # of the baseline's bytes: settings that differ by more are not at equal memory
_GOOD = {"score": 1, "gold_log_likelihood": 1} | dict.fromkeys(KLS, -1)  # the sign of what is better
# {a lead: the value that it is of}; that in nats is of the first KL that was measured
_LEADS = {"lead_kl": "", "lead_log_likelihood": "gold_log_likelihood", "lead_score": "score"}
_COLUMNS = (
    MODEL,
    LABEL,
    EXAMPLES,
    Column("cache_ratio", "KV + Aux / baseline", 3),
    Column("score", "score", 2),
    KL,
    *FIDELITY,
    Column("lazy", "LazyLLM at these bytes"),
    Column("lead_kl", "LazyLLM's lead, nats", 3, sign="+"),
    Column("lead_log_likelihood", "its lead, gold log-likelihood", 3, sign="+", optional=True),
    Column("lead_score", "its lead, points", 2, sign="+"),
)


@as_table(
    165,
    title="Methods at equal memory",
    caption=(
        "Settings by the bytes that they store at the end of an answer, KV cache and Aux Cache, over the baseline's. "
        "LazyLLM's lead: how much better its setting of the nearest bytes is, on the same examples."
    ),
    notes=(
        f"Nearest: within {NEAR:g} of the baseline's bytes, of the settings given by a speedup if there are any. The "
        "lead is in the KL of the answer, else of the gold answer, else of the first token; its interval is paired. "
        "Means over tasks, seeds pooled; ablations are left out. The Aux Cache grows with the answer: "
        "a longer one moves LazyLLM down."
    ),
    command="python run.py -m experiment=figure5 model=smollm2 fidelity=answer",
)
def equal_memory(results: Results) -> Rows:
    """Every setting by the memory of its caches, with LazyLLM's lead over it at equal memory."""
    frame: Any = as_published(overall(results))
    frame = frame[frame["method"] != BASELINE].dropna(subset="cache_ratio")
    frame = frame.sort_values([*SECTION, "cache_ratio"], kind="stable")
    answers = first_turns(results.counting)
    leads = [_lead(row, frame, answers) for row in frame.to_dict("records")]
    values = forms("cache_ratio", "score", *KLS, "gold_log_likelihood")
    added = pd.DataFrame(leads, index=frame.index, columns=["lazy", *forms(*_LEADS)])
    table = frame[[*SETTING, "examples", *values]].join(added).reset_index(drop=True)
    return Rows(table, cells(table, measured(_COLUMNS, table), results), keys=2)


def _lead(row: dict[Any, Any], settings: Any, answers: Any) -> dict[str, Any]:
    """LazyLLM's setting of the nearest bytes, and how much better it is; empty for its own, or if none is near."""
    same: Any = settings[(settings[SECTION] == [row[name] for name in SECTION]).all(axis=1)]
    lazy = same[same["method"] == STUDIED]
    if row["method"] == STUDIED or lazy.empty:
        return {}
    swept = lazy["settings"].map(target_of).notna()
    lazy = lazy[swept] if swept.any() else lazy
    nearest = lazy.loc[(lazy["cache_ratio"] - row["cache_ratio"]).abs().idxmin()]
    if abs(nearest["cache_ratio"] - row["cache_ratio"]) > NEAR:
        return {}
    there = answers[(answers[SECTION] == [row[name] for name in SECTION]).all(axis=1)]
    pair = there[there["label"].isin([row["label"], nearest["label"]])]
    found: dict[str, Any] = {"lazy": nearest["label"].removeprefix(f"{STUDIED}, ")}
    by = next((name for name in KLS if _lead_in(pair, name, row["label"], nearest["label"]) is not None), None)
    for lead, name in _LEADS.items():
        value = name or by
        drawn = None if value is None else _lead_in(pair, value, row["label"], nearest["label"])
        found |= dict(zip(forms(lead), (np.nan,) * 3 if drawn is None else with_ends(drawn), strict=True))
    return found


def _lead_in(pair: Any, name: str, label: str, lazy: str) -> np.ndarray | None:
    """LazyLLM's lead in a value, then those of the resamples; None if no example has the value of both."""
    values: Any = on_common_examples(pair, name)
    if not len(values) or {*values.columns} != {label, lazy}:
        return None
    return _GOOD[name] * (drawn_means(values[[lazy, label]]) @ [1, -1])
