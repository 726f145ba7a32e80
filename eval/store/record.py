"""One example's outcome: what the store holds a line of, and all that tables are made from."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from datetime import datetime
from types import NoneType
from typing import Any

import numpy as np

from eval.benchmarks.datasets import DATASETS

# The types that a stored line's values may have
_MEASURED: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("token_ids", "decode_step_s", "group_starts", "computed"), (list,)),
    **dict.fromkeys(("score", "ttft_s", "scoring_s", "total_s", "pct_prompt_tokens_computed"), (int, float)),
    **dict.fromkeys(("kv_bytes", "aux_bytes"), (int,)),
    "text": (str,),
    "rouge_l": (int, float, NoneType),
    "peak_memory_bytes": (int, NoneType),
}
_OF_THE_EXAMPLE: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("prompt_sha256", "prompt_end"), (str,)),
    **dict.fromkeys(("prompt_tokens", "prompt_tokens_before_truncation"), (int,)),
    "answers": (list,),
}
PROMPT_END = 600  # characters of a prompt that its record keeps, for people to read


@dataclass(frozen=True)
class Measurement:
    """One generation, scored.

    text: the answer as it was scored, before the first-line rule of some datasets. token_ids: its tokens.
    score: the dataset's metric, 0 to 1. rouge_l: rouge-score's ROUGE-L where the metric is ROUGE, else None.
    ttft_s, scoring_s, total_s, decode_step_s: seconds, as in `lazyllm.Generation`.
    pct_prompt_tokens_computed: 0 to 100, mean over layers, at the end.
    group_starts: first layer (from 1) of each run of layers that computed the same prompt tokens.
    computed: [steps][groups] distinct prompt tokens computed so far.
    kv_bytes, aux_bytes: held at the end. peak_memory_bytes: the device's (the process's on CPU), weights included.
    """

    text: str
    token_ids: list[int]
    score: float
    rouge_l: float | None
    ttft_s: float
    scoring_s: float
    total_s: float
    decode_step_s: list[float]
    pct_prompt_tokens_computed: float
    group_starts: list[int]
    computed: list[list[int]]
    kv_bytes: int
    aux_bytes: int
    peak_memory_bytes: int | None

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Measurement:
        """The measurement of a stored line's values. Raises ValueError or TypeError where they are none.

        Of lists only is looked at that they are lists: there are hundreds of thousands of lines to read.
        """
        one = cls(**values)
        check_measurement(values)
        return one


@dataclass(frozen=True)
class Line:
    """What the store holds a line of: something about one example."""

    dataset: str
    id: str

    @property
    def key(self) -> tuple[str, str]:
        return self.dataset, self.id

    def check_key(self) -> None:
        """Raise ValueError or TypeError where dataset and id are none."""
        _check_key(self.dataset, self.id)

    def to_json(self) -> str:
        """One line of JSON, without a newline at its end."""
        return json.dumps(asdict(self), ensure_ascii=True, separators=(",", ":"))


@dataclass(frozen=True)
class Record(Line):
    """One example: its prompt, and what the method and the paired baseline (None if not paired) made of it.

    prompt_end: the last `PROMPT_END` characters of the prompt's text. answers: the gold answers. Both are for reports
    that set them beside the answer; empty in records of before they were kept.
    """

    prompt_sha256: str
    prompt_tokens: int
    prompt_tokens_before_truncation: int
    method: Measurement
    baseline: Measurement | None
    prompt_end: str = ""
    answers: list[str] = field(default_factory=list)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The record of a line. Raises ValueError, TypeError or KeyError where it is none."""
        return cls.of(_values(line))

    @classmethod
    def of(cls, values: dict[str, Any]) -> Record:
        """The record of a line's values, which it takes over.

        Raises ValueError, TypeError or KeyError where they are none.
        """
        method, baseline = values.pop("method"), values.pop("baseline")
        paired = None if baseline is None else Measurement.from_values(baseline)
        one = cls(**values, method=Measurement.from_values(method), baseline=paired)
        check_example(vars(one))
        return one


@dataclass(frozen=True)
class Failure(Line):
    """An example that could not be measured. reason: for people, one line. traceback: where it happened."""

    reason: str
    traceback: str

    @classmethod
    def from_json(cls, line: str) -> Failure:
        """The failure of a line. Raises ValueError or TypeError where it is none."""
        one = cls(**_values(line))
        one.check_key()
        _check("reason", one.reason, str)
        _check("traceback", one.traceback, str)
        return one


def job_event(line: str) -> dict[str, Any]:
    """A line of jobs.jsonl: "event", which is begin or end, its "time", and more. Raises as `Record.from_json`."""
    values = _values(line)
    if values["event"] not in ("begin", "end"):
        raise ValueError(f"event is {values['event']!r}, not begin or end")
    datetime.fromisoformat(values["time"])
    return values


def compact_counts(computed: np.ndarray) -> tuple[list[int], list[list[int]]]:
    """(group_starts, computed) of [steps, layers] counts: neighbouring layers that always agree are one group."""
    differs = (computed[:, 1:] != computed[:, :-1]).any(axis=0)
    first = np.concatenate([[0], 1 + np.flatnonzero(differs)])
    return (first + 1).tolist(), computed[:, first].tolist()


def check_measurement(values: dict[str, Any]) -> None:
    """Refuse a measurement's values, none missing, of which one is none. Raises ValueError or TypeError."""
    for name, types in _MEASURED.items():
        _check(name, values[name], *types)


def check_example(values: dict[str, Any]) -> None:
    """Refuse a record's values, none missing, of which one is none; its measurements are not looked at.

    Raises ValueError or TypeError.
    """
    _check_key(values["dataset"], values["id"])
    for name, types in _OF_THE_EXAMPLE.items():
        _check(name, values[name], *types)


def _check_key(dataset: Any, one: Any) -> None:
    _check("dataset", dataset, str)
    _check("id", one, str)
    if dataset not in DATASETS:
        raise ValueError(f"there is no dataset {dataset!r}")


def _values(line: str) -> dict[str, Any]:
    values = json.loads(line)
    _check("the line", values, dict)
    return values


def _check(name: str, value: Any, *types: type) -> None:
    """Raise TypeError where a stored value has another type, ValueError where it is a number that is not finite."""
    if type(value) not in types:  # JSON gives plain types, and True is no number
        raise TypeError(f"{name} is {type(value).__name__}, not {' or '.join(one.__name__ for one in types)}")
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
