"""The Aux Cache step by step: what it holds, and what it saves."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.columns import SETTING, STUDIED, in_order, range_names
from eval.analysis.table import LABEL, MODEL, Column, Rows, as_table, cells
from eval.store.aggregate import beside
from eval.store.results import Results, first_turns
from eval.store.visit import Cost

_STEP_ENDS = (1, 4, 16, 64, 256)  # upper ends of the ranges of decoding steps
_PREFILL = "prefill"
_RANGES = [_PREFILL, "1", *range_names(_STEP_ENDS)[1:]]
_COLUMNS = (
    MODEL,
    LABEL,
    Column("steps", "decoding steps"),
    Column("answers", "answers"),
    Column("pct_held", "in the Aux Cache, % of the prompt", 1),
    Column("aux_share", "Aux Cache, % of the baseline's KV cache", 2),
    Column("pct_reviving", "steps that revive, %", 1),
    Column("revived", "revived a step", 1),
)


@as_table(
    162,
    title="The Aux Cache, step by step",
    caption=(
        "After the prefill and in decoding: the prompt's tokens whose hidden state waits in the Aux Cache, and its "
        "bytes over those of the baseline's KV cache after as many steps. A step that revives would run its revived "
        "tokens through the earlier layers once more without the Aux Cache."
    ),
    notes=(
        "Means over the steps of all answers that reach them, not over tasks; bytes are summed. Revived a step: in the "
        "layers that revive most. Settings without an Aux Cache are left out."
    ),
    command="python run.py experiment=figure7 model=smollm2",
)
def aux_cache(results: Results) -> Rows:
    """What the Aux Cache holds by decoding step, and how many steps and tokens it serves, of LazyLLM's settings."""
    frame: Any = first_turns(results.counting)
    rows = frame[(frame["method"] == STUDIED) & frame.groupby(SETTING)["aux_bytes"].transform("max").gt(0)]
    rows = rows.assign(reference=_bytes_of_a_token(beside(rows, results.frame)))
    found = []
    for setting, part in rows.groupby(SETTING, sort=False):
        steps = pd.DataFrame(_steps_of(results, part))
        places = np.searchsorted((0, *_STEP_ENDS), steps["step"])
        for place in np.unique(places):
            about = dict(zip(SETTING, setting, strict=True)) | {"steps": _RANGES[int(place)]}
            found.append(about | _means(steps[places == place]))
    table = pd.DataFrame(found, columns=[*SETTING, *(column.name for column in _COLUMNS[2:])])
    table = in_order(table).reset_index(drop=True)
    return Rows(table, cells(table, _COLUMNS, results), keys=3)


def _bytes_of_a_token(baselines: Any) -> Any:
    """What the baseline stores for a token, from its rows: the last generated token is not stored."""
    return baselines["kv_bytes"] / (baselines["prompt_tokens"] + baselines["generated_tokens"] - 1)


def _steps_of(results: Results, rows: Any) -> Iterator[dict[str, Any]]:
    """A row for the prefill and for each decoding step of each of these answers of one setting."""
    answers = [(asked.tokens, answer.cost) for asked, answer in results.answers(rows)]
    state_bytes = next(cost.aux_bytes / _held(n, cost, -1) for n, cost in answers if cost.aux_bytes)
    for number, ((n, cost), reference) in enumerate(zip(answers, rows["reference"], strict=True)):
        revived = np.diff(np.array(cost.computed), axis=0).max(axis=1)
        for step in range(len(cost.computed)):
            held = _held(n, cost, step)
            yield {
                "answer": number,
                "step": step,
                "held": held / n,
                "aux_bytes": held * state_bytes,
                "reference_bytes": reference * (n + step),
                "revived": revived[step - 1] if step else np.nan,
            }


def _held(n: int, cost: Cost, step: int) -> int:
    """The prompt's tokens that the last layers have not run after this step: each has one state in the Aux Cache."""
    return n - cost.computed[step][-1]


def _means(steps: Any) -> dict[str, Any]:
    revived = steps["revived"].dropna()
    return {
        "answers": steps["answer"].nunique(),
        "pct_held": 100 * steps["held"].mean(),
        "aux_share": 100 * steps["aux_bytes"].sum() / steps["reference_bytes"].sum(skipna=False),
        "pct_reviving": 100 * revived.gt(0).mean(),
        "revived": revived.mean(),
    }
