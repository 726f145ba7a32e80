"""Memory: what a setting stores at the end of an answer and step by step, and how good it is for
its bytes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.columns import (
    BASELINE,
    KLS,
    SECTION,
    SETTING,
    STUDIED,
    overall,
    range_names,
    targets_of,
    with_ends,
)
from eval.analysis.style import as_published
from eval.analysis.table import (
    EXAMPLES,
    FIDELITY,
    KL,
    LABEL,
    MB,
    MODEL,
    Column,
    Rows,
    as_table,
    cells,
    forms,
    measured,
)
from eval.store.record import Answer
from eval.store.results import Results
from eval.store.summary import drawn_means, match_baselines, on_common_examples

NEAR = 0.05  # of the baseline's bytes: settings that differ by more are not at equal memory
END, PREFILL = "end", "prefill"
_STEP_ENDS = (1, 4, 16, 64, 256)  # upper ends of the ranges of decoding steps
_RANGES = [PREFILL, "1", *range_names(_STEP_ENDS)[1:]]
# the sign of what is better
_GOOD = {"score": 1, "gold_log_likelihood": 1} | dict.fromkeys(KLS, -1)
# {a lead: the value that it is of}; that in nats is of the first KL that was measured
_LEADS = {"lead_kl": "", "lead_log_likelihood": "gold_log_likelihood", "lead_score": "score"}
_BYTES = (
    Column("kv_bytes", "KV cache, MB", 3, scale=MB),
    Column("aux_bytes", "Aux Cache, MB", 3, scale=MB),
    Column("cache_bytes", "both, MB", 3, scale=MB),
    Column("cache_ratio", "both / baseline", 3),
    Column("peak_memory_bytes", "peak, MB", 1, scale=MB),
    Column("peak_ratio", "peak / baseline", 3, interval=False),
)
_STEPS = (
    Column("pct_held", "in the Aux Cache, % of the prompt", 1, optional=True),
    Column("aux_share", "Aux Cache, % of the baseline's KV cache", 2, optional=True),
    Column("pct_reviving", "steps that revive, %", 1, optional=True),
    Column("revived", "revived a step", 1, optional=True),
)
_EQUAL = (
    Column("score", "score", 2),
    KL,
    *FIDELITY,
    Column("lazy", "LazyLLM at these bytes", optional=True),
    Column("lead_kl", "LazyLLM's lead, nats", 3, sign="+", optional=True),
    Column("lead_log_likelihood", "its lead, gold log-likelihood", 3, sign="+", optional=True),
    Column("lead_score", "its lead, points", 2, sign="+", optional=True),
)
_COLUMNS = (MODEL, LABEL, Column("steps", "decoding steps"), EXAMPLES, *_BYTES, *_STEPS, *_EQUAL)


@as_table(
    160,
    title="Memory: at the end of an answer, by step, and at equal bytes",
    caption=(
        "End: what a setting stores at the end of an answer, its peak, and how good it is, as "
        "means over tasks; by bytes. The other rows: the prompt's tokens whose hidden state waits "
        "in the Aux Cache after the prefill and in decoding, and its bytes over those of the "
        "baseline's KV cache after as many steps."
    ),
    notes=(
        "MB = 10^6 bytes. KV cache: of stored tokens. Aux Cache: of tokens that may be revived. "
        "Room for more tokens is in the peak alone. Peak: weights included; on a GPU the "
        "allocated memory, on a CPU the process's resident memory, with Python and its libraries. "
        "Ratios are to the baseline on the same examples.\n\nBy step: means over the steps of all "
        "answers that reach them (n), not over tasks; bytes are summed. Revived a step: in the "
        "layers that revive most. A step that revives would run its revived tokens through the "
        "earlier layers once more without the Aux Cache.\n\nLazyLLM at these bytes: its setting "
        f"of the nearest bytes, within {NEAR:g} of the baseline's, of the settings given by a "
        "speedup if there are any. Its lead: how much better it is, on the same examples, in the "
        "KL of the answer, else of the gold answer, else of the first token; its interval is "
        "paired. The baseline and ablations have none. The Aux Cache grows with the answer: a "
        "longer one moves LazyLLM down."
    ),
    command="python run.py -m experiment=figure5 model=smollm2 fidelity=answer",
)
def memory(results: Results) -> Rows:
    """What every setting stores, with its quality and LazyLLM's lead at equal bytes; and LazyLLM's
    caches by step.

    frame: a row for each setting, `steps` being "end", and for each range of decoding steps of a
    setting with an Aux Cache, "prefill" first. examples: of a range of steps, the answers that
    reach it.
    """
    ends = overall(results).sort_values([*SECTION, "cache_ratio"], kind="stable", ignore_index=True)
    ends = ends.join(_leads(ends, results)).assign(steps=END)
    step_values = [column.name for column in _STEPS]
    by_step = pd.DataFrame(_by_step(results), columns=[*SETTING, "steps", "examples", *step_values])
    rows = pd.concat([part for part in (ends, by_step) if len(part)] or [ends])
    # the steps of a setting follow its end
    settings = map(tuple, ends[SETTING].to_numpy().tolist())
    place = {key: number for number, key in enumerate(settings)}
    order = [place[tuple(key)] for key in rows[SETTING].to_numpy().tolist()]
    rows = rows.assign(order=order).sort_values("order", kind="stable", ignore_index=True)
    values = forms(*(column.name for column in _BYTES), "score", *KLS, "gold_log_likelihood")
    names = [*SETTING, "steps", "examples", *values, *step_values, "lazy", *forms(*_LEADS)]
    table = rows.reindex(columns=names)
    return Rows(table, cells(table, measured(_COLUMNS, table), results), keys=3)


def _by_step(results: Results) -> Iterator[dict[str, Any]]:
    """A row for each range of decoding steps of each of LazyLLM's settings that has an Aux
    Cache.
    """
    frame: Any = results.counting
    rows = frame[
        (frame["method"] == STUDIED) & frame.groupby(SETTING)["aux_bytes"].transform("max").gt(0)
    ]
    rows = rows.assign(reference=_bytes_of_a_token(match_baselines(rows, results.frame)))
    for setting, part in rows.groupby(SETTING, sort=False):
        steps = pd.DataFrame(_steps_of(results, part))
        places = np.searchsorted((0, *_STEP_ENDS), steps["step"])
        for place in np.unique(places):
            about = dict(zip(SETTING, setting, strict=True)) | {"steps": _RANGES[int(place)]}
            yield about | _means(steps[places == place])


def _bytes_of_a_token(baselines: Any) -> Any:
    """What the baseline stores for a token, from its rows: the last generated token is not
    stored.
    """
    return baselines["kv_bytes"] / (baselines["prompt_tokens"] + baselines["generated_tokens"] - 1)


def _steps_of(results: Results, rows: Any) -> Iterator[dict[str, Any]]:
    """A row for the prefill and for each decoding step of each of these answers of one setting."""
    answers = [(visit.prompt_tokens, answer) for visit, answer in results.answers(rows)]
    state_bytes = next(
        answer.aux_bytes / _held(n, answer, -1) for n, answer in answers if answer.aux_bytes
    )
    for number, ((n, answer), reference) in enumerate(zip(answers, rows["reference"], strict=True)):
        revived = np.diff(np.array(answer.computed), axis=0).max(axis=1)
        for step in range(len(answer.computed)):
            held = _held(n, answer, step)
            yield {
                "answer": number,
                "step": step,
                "held": held / n,
                "aux_bytes": held * state_bytes,
                "reference_bytes": reference * (n + step),
                "revived": revived[step - 1] if step else np.nan,
            }


def _held(n: int, answer: Answer, step: int) -> int:
    """The prompt's tokens that the last layers have not run after this step: each has one state
    in the Aux Cache.
    """
    return n - answer.computed[step][-1]


def _means(steps: Any) -> dict[str, Any]:
    revived = steps["revived"].dropna()
    return {
        "examples": steps["answer"].nunique(),
        "pct_held": 100 * steps["held"].mean(),
        "aux_share": 100 * steps["aux_bytes"].sum() / steps["reference_bytes"].sum(skipna=False),
        "pct_reviving": 100 * revived.gt(0).mean(),
        "revived": revived.mean(),
    }


def _leads(settings: Any, results: Results) -> pd.DataFrame:
    """LazyLLM's leads, with the index of the settings that are neither the baseline nor
    ablations.
    """
    rivals: Any = as_published(settings).dropna(subset="cache_ratio")
    rivals = rivals[rivals["method"] != BASELINE]
    answers = results.counting
    leads = [_lead(row, rivals, answers) for row in rivals.to_dict("records")]
    return pd.DataFrame(leads, index=rivals.index, columns=["lazy", *forms(*_LEADS)])


def _lead(row: dict[Any, Any], settings: Any, answers: Any) -> dict[str, Any]:
    """LazyLLM's setting of the nearest bytes, and how much better it is; empty for its own, or
    if none is near.
    """
    same: Any = settings[(settings[SECTION] == [row[name] for name in SECTION]).all(axis=1)]
    lazy = same[same["method"] == STUDIED]
    if row["method"] == STUDIED or lazy.empty:
        return {}
    swept = targets_of(lazy).notna()
    lazy = lazy[swept] if swept.any() else lazy
    nearest = lazy.loc[(lazy["cache_ratio"] - row["cache_ratio"]).abs().idxmin()]
    if abs(nearest["cache_ratio"] - row["cache_ratio"]) > NEAR:
        return {}
    there = answers[(answers[SECTION] == [row[name] for name in SECTION]).all(axis=1)]
    pair = there[there["label"].isin([row["label"], nearest["label"]])]
    found: dict[str, Any] = {"lazy": nearest["label"].removeprefix(f"{STUDIED}, ")}
    by = next(
        (name for name in KLS if _lead_in(pair, name, row["label"], nearest["label"]) is not None),
        None,
    )
    for lead, name in _LEADS.items():
        value = name or by
        drawn = None if value is None else _lead_in(pair, value, row["label"], nearest["label"])
        found |= dict(
            zip(forms(lead), (np.nan,) * 3 if drawn is None else with_ends(drawn), strict=True)
        )
    return found


def _lead_in(pair: Any, name: str, label: str, lazy: str) -> np.ndarray | None:
    """LazyLLM's lead in a value, then those of the resamples; None if no example has the value
    of both.
    """
    values: Any = on_common_examples(pair, name)
    if not len(values) or {*values.columns} != {label, lazy}:
        return None
    return _GOOD[name] * (drawn_means(values[[lazy, label]]) @ [1, -1])
