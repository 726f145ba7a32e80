"""The record of an example, and its one schema, from which lines, columns and checks follow.

A new measured number is a field of `Measurement` here, with a default for the records that lack it, and a value in
`eval.run.measure`. Every field that is a number is a column of the frames, under its own name (`MEASURED`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import pyarrow as pa

from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.rows import sha256_of
from lazyllm.errors import UserError

PROMPT_END = 600  # characters at a prompt's end that its record keeps, for people to read

_PERCENT = {"scale": 100}  # for numbers stored as 0 to 1 and shown as 0 to 100

_Kind = TypeVar("_Kind")

# {annotation of a field: (types of its JSON values, type of its column)}
_TYPES: dict[str, tuple[tuple[type, ...], pa.DataType]] = {
    "str": ((str,), pa.string()),
    "int": ((int,), pa.int64()),
    "float": ((int, float), pa.float64()),
    "list[str]": ((list,), pa.list_(pa.string())),
    "list[int]": ((list,), pa.list_(pa.int32())),
    "list[float]": ((list,), pa.list_(pa.float64())),
    "list[list[int]]": ((list,), pa.list_(pa.list_(pa.int32()))),
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a client saw of one request to a server. Times are seconds since just before the POST.

    headers_s, first_event_s: when they came. first_content_s: the first text of the answer, which may follow reasoning.
    end_s: the end of the stream. tpot_s: seconds per token after the first, (last token - first) / (tokens - 1).
    sent_at: in seconds since 1970.
    prompt_tokens, completion_tokens, cached_tokens: the server's counts. retries: before this attempt.
    noise: the line before the prompt that kept it out of a prefix cache.
    """

    headers_s: float
    first_event_s: float
    first_content_s: float | None
    end_s: float
    tpot_s: float | None
    sent_at: float
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    retries: int
    noise: str | None = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One generation, scored. What a server does not tell is None.

    text: the scored answer, before the first-line rule of some datasets. token_ids: its tokens.
    score: the dataset's metric, 0 to 1. rouge_l: rouge-score's ROUGE-L if the metric is ROUGE, else None.
    ttft_s, scoring_s, total_s, decode_step_s: seconds, as in `lazyllm.Generation`; the last two are None if other
        answers decoded in the same steps (`answers.rows`).
    scoring_tokens: prompt tokens that any model computed before the method's prefill.
    pct_prompt_tokens_computed: 0 to 100, mean over layers, at the end.
    group_starts: first layer (from 1) of each run of layers that computed the same prompt tokens.
    computed: [steps][groups] distinct prompt tokens computed so far.
    kv_bytes, aux_bytes: held at the end. peak_memory_bytes: the device's (the process's on CPU), weights included.
    prefill_flops: of the tokens that each layer computed in prefill, and of scoring (`lazyllm.engine.flops`).
    prefill_mfu: model FLOPs utilisation, 0 to 1: `prefill_flops` / `ttft_s` over the peak of a known accelerator, or on
        a CPU over the rate of a matrix product that the run measured; None for other devices.

    Compared with the paired baseline; None in the baseline's own measurement, and without a baseline:
    kl: KL(baseline || method) in nats of the first token's distribution. top1_agrees: 1 if both have the same most
        likely first token, else 0.
    leading_tokens: number of leading tokens that the two answers share. same_answer: 1 if they are equal, else 0.
    edit_similarity: 0 to 1, of the two lists of tokens (1 - Levenshtein distance / length of the longer one).
    answer_kl, answer_log_likelihood: with `fidelity=answer`, of the baseline's answer fed to the method: mean KL per
        token, and log-likelihood per token minus the baseline's. gold_kl, gold_log_likelihood: of the gold answer.

    Evidence: the prompt's tokens that hold the answer; None if unknown:
    evidence_tokens: their number. evidence_prefill, evidence_revived: [layers] 0 to 1, the shares of them that are
        computed in prefill, and later. evidence_recall: the last layer's share in prefill. In a later turn, tokens
        computed by earlier turns count as prefill if the method continues from them.

    Of a turn; tokens are prompt tokens of all turns so far, mean over layers:
    tokens_computed: run for this turn, `scoring_tokens` included. revived_tokens: of these, tokens that earlier steps
        or turns had left out of a layer. tokens_computed_so_far, total_s_so_far: sums over the turns up to this one.

    request: of a server's answer; None in process. Its ttft_s and total_s end at the first and the last event with a
        token.
    """

    text: str
    token_ids: list[int] | None = None
    score: float = field(metadata=_PERCENT)
    rouge_l: float | None = field(metadata=_PERCENT)
    ttft_s: float
    scoring_s: float | None = None
    scoring_tokens: int | None = 0
    total_s: float | None
    decode_step_s: list[float] | None = None
    pct_prompt_tokens_computed: float | None = None
    group_starts: list[int] | None = None
    computed: list[list[int]] | None = None
    kv_bytes: int | None = None
    aux_bytes: int | None = None
    peak_memory_bytes: int | None = None
    prefill_flops: int | None = None
    prefill_mfu: float | None = field(default=None, metadata=_PERCENT)
    kl: float | None = None
    top1_agrees: int | None = field(default=None, metadata=_PERCENT)
    leading_tokens: int | None = None
    edit_similarity: float | None = field(default=None, metadata=_PERCENT)
    same_answer: int | None = field(default=None, metadata=_PERCENT)
    answer_kl: float | None = None
    answer_log_likelihood: float | None = None
    gold_kl: float | None = None
    gold_log_likelihood: float | None = None
    evidence_tokens: int | None = None
    evidence_recall: float | None = field(default=None, metadata=_PERCENT)
    evidence_prefill: list[float] | None = None
    evidence_revived: list[float] | None = None
    tokens_computed: float | None = None
    revived_tokens: float | None = None
    tokens_computed_so_far: float | None = None
    total_s_so_far: float | None = None
    request: Request | None = None


@cache
def _described(kind: type) -> list[tuple[Field[Any], bool, str]]:
    """(field, whether it may be None, its annotation without None) of all fields of a class."""
    names = [(item, str(item.type)) for item in fields(kind)]
    return [(item, name.endswith(" | None"), name.removesuffix(" | None")) for item, name in names]


# {column of the frames: its factor over the record's field}
SCALES: dict[str, float] = {
    item.name: item.metadata.get("scale", 1) for item, _, kind in _described(Measurement) if kind in ("int", "float")
}
# The frames' columns of a measurement: its numbers, the mean decoding step, the number of generated tokens, and 100 for
# an answer that is not empty, else 0
MEASURED = (*SCALES, "step_s", "generated_tokens", "pct_answered")


@dataclass(frozen=True)
class Line:
    """A line of the store about one example."""

    dataset: str
    id: str

    @property
    def key(self) -> tuple[str, str]:
        return self.dataset, self.id

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The object of a line. Raises ValueError or TypeError for an invalid one."""
        return _made(cls, json.loads(line))

    def to_json(self) -> str:
        """One line of JSON, without a newline at its end."""
        return json.dumps(vars(self), default=vars, ensure_ascii=True, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class LaterTurn:
    """A later turn of an example, stored in its line. Fields as in `Record`, for the turn's message."""

    prompt_sha256: str
    prompt_tokens: int
    method: Measurement
    baseline: Measurement | None
    prompt_end: str
    answers: list[str]


@dataclass(frozen=True)
class Record(Line):
    """One example: its prompt, and the measurements of the method and of the paired baseline (None if not paired).

    baseline_ttft_s: seconds to the baseline's first token, if that was all that was timed beside the method
    (`timing.paired=ttft`): `eval.store.runs.StoredRun` takes the rest of `baseline` from the baseline's own run.

    prompt_end: the last `PROMPT_END` characters of the prompt's text. answers: the gold answers. groups: of the
    example, such as "length=8k+".
    later: the later turns, in order: a line holds all turns of an example.
    turn: the number of this turn, from 1; a stored record is the first.
    attention_kernel: of the baseline's prefill, by profiler at warm-up; of the method's without a paired baseline.
    """

    prompt_sha256: str
    prompt_tokens: int
    prompt_tokens_before_truncation: int
    method: Measurement
    baseline: Measurement | None
    prompt_end: str = ""
    answers: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    later: list[LaterTurn] | None = None
    turn: int = 1
    baseline_ttft_s: float | None = None
    attention_kernel: str | None = None

    @property
    def by_turn(self) -> list[Record]:
        """A record for each turn, this one first. A later one's prompt is its message, which is never truncated."""
        return [
            replace(self, later=None),
            *(
                replace(self, later=None, turn=number, prompt_tokens_before_truncation=turn.prompt_tokens, **vars(turn))
                for number, turn in enumerate(self.later or (), start=2)
            ),
        ]


@dataclass(frozen=True)
class Failure(Line):
    """An example that could not be measured. reason: one line for people. traceback: of the error."""

    reason: str
    traceback: str


def job_event(line: str) -> dict[str, Any]:
    """A line of jobs.jsonl: "event", which is begin or end, its "time", and more. Raises as `Line.from_json`."""
    values = json.loads(line)
    if values["event"] not in ("begin", "end"):
        raise ValueError(f"event is {values['event']!r}, not begin or end")
    datetime.fromisoformat(values["time"])
    return values


def compact_counts(computed: np.ndarray) -> tuple[list[int], list[list[int]]]:
    """(group_starts, computed) of [steps, layers] counts: neighbouring layers with equal counts form a group."""
    differs = (computed[:, 1:] != computed[:, :-1]).any(axis=0)
    first = np.concatenate([[0], 1 + np.flatnonzero(differs)])
    return (first + 1).tolist(), computed[:, first].tolist()


def _made(kind: type[_Kind], values: Any) -> _Kind:
    """The object of a class from JSON values, if they have the types of its fields and are finite.

    Items of lists are not validated, but for turns. Raises TypeError or ValueError.
    """
    if type(values) is not dict:
        raise TypeError(f"{kind.__name__} is {type(values).__name__}, not dict")
    values = dict(values)
    for item, optional, annotation in _described(kind):
        if (name := item.name) not in values or (values[name] is None and optional):
            continue
        value = values[name]
        if annotation in _NESTED:
            inner, is_list = _NESTED[annotation]
            values[name] = [_made(inner, item) for item in value] if is_list else _made(inner, value)
        elif type(value) not in (types := _TYPES[annotation][0]):  # JSON gives plain types; True is not a number
            expected = " or ".join(kind.__name__ for kind in types)
            raise TypeError(f"{name} is {type(value).__name__}, not {expected}{' or None' if optional else ''}")
        elif type(value) is float and not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
    line = kind(**values)
    if isinstance(line, Line) and line.dataset not in DATASETS:
        raise ValueError(f"there is no dataset {line.dataset!r}")
    return line


# The classes of nested fields, and whether a field holds a list of them
_NESTED: dict[str, tuple[type, bool]] = {
    "Measurement": (Measurement, False),
    "Request": (Request, False),
    "list[LaterTurn]": (LaterTurn, True),
}


def _schema(kind: type) -> pa.Schema:
    """The columns of a class, nested like its fields."""
    columns = []
    for item, optional, name in _described(kind):
        if name in _NESTED:
            inner, is_list = _NESTED[name]  # Arrow makes every part of a null struct null
            parts = [part.with_nullable((optional and not is_list) or part.nullable) for part in _schema(inner)]
            column: pa.DataType = pa.list_(pa.struct(parts)) if is_list else pa.struct(parts)
        else:
            column = _TYPES[name][1]
        columns.append(pa.field(item.name, column, nullable=optional))
    return pa.schema(columns)


SCHEMA = _schema(Record)  # measurements are nested in `method` and `baseline`


def to_table(records: Iterable[Record]) -> pa.Table:
    """Records in the columns of `SCHEMA`. Raises ValueError for values that a column cannot hold."""
    try:
        return pa.Table.from_pylist([_nested(record) for record in records], schema=SCHEMA)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error


def _nested(value: Any) -> Any:
    """A value with dicts for its objects, without copies of lists of numbers."""
    if is_dataclass(value):
        return {name: _nested(inner) for name, inner in vars(value).items()}
    if isinstance(value, list) and value and is_dataclass(value[0]):
        return list(map(_nested, value))
    return value


def to_records(table: pa.Table) -> list[Record]:
    """The records of a table with the columns of `SCHEMA`, all but those with defaults. Raises as `from_json`."""
    return [_made(Record, values) for values in table.to_pylist()]


@dataclass(frozen=True)
class Trace:
    """One example under one method.

    tokens: [n] the text of each prompt token; joined they are the prompt, with the names of special tokens.
    generated: the text of each generated token; "" for a token that ends within a letter.
    importance: [layers][n] Eq. 1 in a prefill without pruning.
    selected: per step {layer (1-based; 0 before the first layer): ascending positions that enter the next layer},
        prompt and generated tokens; empty in later steps if a method selects in prefill only.
    group_starts, computed: as in `Measurement`.
    """

    dataset: str
    id: str
    tokens: list[str]
    generated: list[str]
    importance: list[list[float]]
    selected: list[dict[int, list[int]]]
    group_starts: list[int]
    computed: list[list[int]]

    def to_json(self) -> str:
        return json.dumps(vars(self), separators=(",", ":")) + "\n"

    @staticmethod
    def file_name(dataset: str, example: str) -> str:
        """The trace's file name. If the example's id cannot be part of one, it is cut, and its hash is added."""
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", example)[:80]
        end = "" if safe == example else f"-{sha256_of(example)[:8]}"
        return f"{dataset}-{safe}{end}.json"


def read_trace(file: Path) -> Trace:
    """The trace in a file. Raises UserError if it is not a trace."""
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        values["selected"] = [{int(layer): kept for layer, kept in step.items()} for step in values["selected"]]
        return Trace(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{file}: not a trace ({type(error).__name__}: {error})") from error
