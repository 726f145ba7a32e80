"""The frame of a run: a row for each arm's answer in each visit, with the numbers that follow from
what is stored.

A new number that follows from stored ones is a line in `DERIVED`, also for old runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.datasets import DATASETS
from eval.store.record import SCALES, Answer, Visit

Derive = Callable[[Visit, Answer], float | None]


def time_tokens(answer: Answer) -> tuple[float, ...] | None:
    """Seconds from the start to each token; None if steps were not timed, as those of batches."""
    steps = answer.decode_step_s
    return None if steps is None else tuple(accumulate([answer.ttft_s, *steps]))


def _time_answer(_: Visit, answer: Answer) -> float | None:
    times = time_tokens(answer)
    return None if times is None else times[-1]


def _average_step(_: Visit, answer: Answer) -> float | None:
    steps = answer.decode_step_s
    return float(np.mean(steps)) if steps else None


def _compute_share(visit: Visit, answer: Answer) -> float:
    computed = answer.computed_per_layer[-1] + answer.scoring_tokens
    return 100 * computed / visit.prompt_tokens


# {column: how it follows from what is stored; None for what is unknown}
DERIVED: dict[str, Derive] = {
    "total_s": _time_answer,
    "step_s": _average_step,
    "generated_tokens": lambda _, answer: len(answer.token_ids),
    "pct_prompt_tokens_computed": _compute_share,
    "attention_ceiling": lambda visit, _: visit.attention_ceiling,
}
MEASURED = (*SCALES, *DERIVED)  # the numbers of an answer
COLUMNS = [
    "model", "paper_model", "run", "folder", "arm", "method", "settings", "label", "speedup",
    "seed", "is_baseline",
    "dataset", "task", "suite", "id", "groups", "prompt_tokens", "visit", "counts", *MEASURED,
    "token_s",
]  # fmt: skip


def numbers_of(visit: Visit, answer: Answer) -> dict[str, float]:
    """{column of `MEASURED`: value} of an answer in units of the frame; NaN for what is unknown."""
    stored = {name: _scale(getattr(answer, name), scale) for name, scale in SCALES.items()}
    return stored | {name: _scale(derive(visit, answer), 1) for name, derive in DERIVED.items()}


def _scale(value: float | None, scale: float) -> float:
    return float("nan") if value is None else value * scale


def frame_visits(
    visits: Iterable[Visit], arms: Mapping[str, Any], **constants: Any
) -> pd.DataFrame:
    """A run's part of `eval.store.results.Results.frame`, as if no other run counted instead.

    arms: {label: `StoredArm`}, in the order of tables. constants: columns that are equal in all
    rows.
    """
    keys, numbers = list[tuple[Any, ...]](), list[dict[str, float]]()
    token_s = list[tuple[float, ...] | None]()
    times, answered = dict[tuple[str, str], int](), set[tuple[str, str, str]]()
    for visit in visits:
        number = times[visit.key] = times.get(visit.key, -1) + 1
        about = visit.dataset, visit.id, visit.groups, visit.prompt_tokens, number
        for arm, answer in visit.answers.items():
            keys.append((arm, *about, (*visit.key, arm) not in answered))
            answered.add((*visit.key, arm))
            numbers.append(numbers_of(visit, answer))
            token_s.append(time_tokens(answer))
    names = ["arm", "dataset", "id", "groups", "prompt_tokens", "visit", "counts"]
    frame: Any = pd.DataFrame(keys, columns=names)
    frame = frame.join(pd.DataFrame(numbers, columns=[*MEASURED], dtype=float))
    frame["token_s"] = pd.Series(token_s, dtype=object)
    for column in ("method", "settings", "label", "speedup", "seed", "is_baseline"):
        values = {name: getattr(arm, column) for name, arm in arms.items()}
        frame[column] = frame["arm"].map(values)
    for column in ("task", "suite"):
        values = {name: getattr(dataset, column) for name, dataset in DATASETS.items()}
        frame[column] = frame["dataset"].map(values)
    frame = frame.assign(**constants)
    # arms in the order of tables, whatever was measured first
    places = frame["arm"].map({name: place for place, name in enumerate(arms)})
    return frame.iloc[places.argsort(kind="stable")].reset_index(drop=True)[COLUMNS]
