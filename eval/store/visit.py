"""A visit: one example, answered by all arms of a run one after the other. One line of the store, and its one schema.

A new measured number is a field of a part of `Answer`, with a default for the visits that lack it, and a value in
`eval.run.answers`. Every field that is a number is a column of the frames, under its own name (`MEASURED`).
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.rows import sha256_of
from lazyllm.errors import UserError, reason_of

PROMPT_END = 600  # characters at a prompt's end that a visit keeps, for people to read

# How lines are parsed: exact types (1 is not text, true is not a number), finite numbers, no unknown fields
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_PERCENT = {"scale": 100}  # for numbers stored as 0 to 1 and shown as 0 to 100


@dataclass(frozen=True, kw_only=True)
class Times:
    """When an answer came, in seconds.

    ttft_s, scoring_s, total_s, decode_step_s: as in `lazyllm.Generation`; the last two are None if other answers
        decoded in the same steps (`batch_size`).
    total_s_so_far: the sum over the turns up to this one.
    """

    __pydantic_config__ = _STRICT

    ttft_s: float | None
    scoring_s: float | None = None
    total_s: float | None
    decode_step_s: list[float] | None = None
    total_s_so_far: float | None = None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the model computed and stored for an answer.

    scoring_tokens: prompt tokens that any model computed before the method's prefill.
    pct_prompt_tokens_computed: 0 to 100, mean over layers, at the end.
    group_starts: first layer (from 1) of each run of layers that computed the same prompt tokens.
    computed: [steps][groups] distinct prompt tokens computed so far.
    kv_bytes, aux_bytes: of stored tokens, and of tokens that may be revived, at the end (`lazyllm.Generation`).
    peak_memory_bytes: the device's (the process's on CPU), weights included, without those of other arms' models.
    prefill_flops: of the tokens that each layer computed in prefill, and of scoring (`lazyllm.engine.flops`).
    prefill_mfu: model FLOPs utilisation, 0 to 1: `prefill_flops` / `ttft_s` over the peak of a known accelerator, or on
        a CPU over the rate of a matrix product that the run measured; None for other devices.

    attention_ceiling: the ideal speedup of the prompt's prefill without attention, which no method that skips only
        attention exceeds; None in later turns.

    Of a turn; tokens are prompt tokens of all turns so far, mean over layers:
    tokens_computed: run for this turn, `scoring_tokens` included.
    revived_tokens: of these, tokens that earlier steps or turns had left out of a layer.
    tokens_computed_so_far: the sum over the turns up to this one.
    """

    __pydantic_config__ = _STRICT

    scoring_tokens: int
    pct_prompt_tokens_computed: float
    group_starts: list[int]
    computed: list[list[int]]
    kv_bytes: int
    aux_bytes: int
    peak_memory_bytes: int | None = None
    prefill_flops: int | None = None
    prefill_mfu: float | None = field(default=None, metadata=_PERCENT)
    attention_ceiling: float | None = None
    tokens_computed: float | None = None
    revived_tokens: float | None = None
    tokens_computed_so_far: float | None = None


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """An answer beside the baseline's of the same visit.

    same_answer: 1 if the two are equal, else 0.
    kl: KL(baseline || arm) in nats of the first token's distribution.
    top1_agrees: 1 if both have the same most likely first token, else 0.
    leading_tokens: number of leading tokens that the two answers share.
    edit_similarity: 0 to 1, of the two lists of tokens (1 - Levenshtein distance / length of the longer one).
    answer_kl, answer_log_likelihood: with `fidelity=answer`, of the baseline's answer fed to the arm: mean KL per
        token, and log-likelihood per token minus the baseline's.
    gold_kl, gold_log_likelihood: the same of the gold answer.
    """

    __pydantic_config__ = _STRICT

    kl: float
    top1_agrees: int = field(metadata=_PERCENT)
    leading_tokens: int
    edit_similarity: float = field(metadata=_PERCENT)
    same_answer: int = field(metadata=_PERCENT)
    answer_kl: float | None = None
    answer_log_likelihood: float | None = None
    gold_kl: float | None = None
    gold_log_likelihood: float | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An arm's answer in one turn, scored, with what is known of it.

    text: the scored answer, before the first-line rule of some datasets; None in records that leave out the texts
        (`scripts.dev.records`). token_ids: its tokens, which are all 0 there.
    score: the dataset's metric, 0 to 1; None without one.
    rouge_l: rouge-score's ROUGE-L if the metric is ROUGE, else None.
    fidelity: None of the baseline's own answer, and without a baseline.
    """

    __pydantic_config__ = _STRICT

    text: str | None
    token_ids: list[int]
    score: float | None = field(metadata=_PERCENT)
    rouge_l: float | None = field(default=None, metadata=_PERCENT)
    times: Times
    cost: Cost
    fidelity: Fidelity | None = None


def _scales(kind: type) -> dict[str, float]:
    """{field of a dataclass that is a number: its factor in the frames}."""
    numbers = (item for item in fields(kind) if str(item.type).removesuffix(" | None") in ("int", "float"))
    return {item.name: item.metadata.get("scale", 1) for item in numbers}


# {part of an answer, "" for itself: {its number, a column of the frames of the same name: the column's factor}}
_PARTS = {"": Answer, "times": Times, "cost": Cost, "fidelity": Fidelity}
_NUMBERS = {part: _scales(kind) for part, kind in _PARTS.items()}
SCALES: dict[str, float] = {name: scale for scales in _NUMBERS.values() for name, scale in scales.items()}
# The frames' columns of an answer: its numbers, the mean decoding step, the number of generated tokens, and 100 for an
# answer that is not empty, else 0
MEASURED = (*SCALES, "step_s", "generated_tokens", "pct_answered")


def numbers_of(answer: Answer) -> list[float | None]:
    """An answer's numbers in the order of `SCALES`, as stored; None for those of a part that it lacks."""
    numbers: list[float | None] = []
    for part, names in _NUMBERS.items():
        holder = getattr(answer, part) if part else answer
        numbers += [None if holder is None else getattr(holder, name) for name in names]
    return numbers


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a turn asks: the whole prompt first, then the messages of later turns.

    sha256: of the text's token ids.
    tokens: of the prompt or message, as the model gets it. tokens_before_truncation: later turns are never truncated.
    end: the last `PROMPT_END` characters.
    answers: the gold answers.
    """

    __pydantic_config__ = _STRICT

    sha256: str
    tokens: int
    tokens_before_truncation: int
    end: str = ""
    answers: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An arm that failed on an example. reason: one line to show. traceback: of the error."""

    __pydantic_config__ = _STRICT

    reason: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One example and what the arms answered, within seconds of each other.

    groups: of the example, such as "length=8k+".
    turns: what is asked, in order.
    order: the labels of the arms in the order in which they were measured.
    answers: {label of an arm: its answer to each turn}. failures: {label of an arm that could not answer: why}.
    attention_kernel: of the baseline's prefill (of the first arm's without one), by its operators at warm-up.

    An example has several visits if an arm failed: a later one holds the baseline again, for the clock, and the arms
    that had no answer. An arm's answer counts in its first visit only; ratios are made within one visit only.
    """

    __pydantic_config__ = _STRICT

    dataset: str
    id: str
    groups: list[str] = field(default_factory=list)
    turns: list[Turn]
    order: list[str]
    answers: dict[str, list[Answer]]
    failures: dict[str, Failure] = field(default_factory=dict)
    attention_kernel: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        """The example."""
        return self.dataset, self.id

    @classmethod
    def from_json(cls, line: str | bytes) -> Visit:
        """The visit of a line. Raises ValueError that names the field for an invalid one."""
        try:
            visit = _adapter(Visit).validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'line'}: {first['msg']}") from error
        if visit.dataset not in DATASETS:
            raise ValueError(f"there is no dataset {visit.dataset!r}")
        for label, answers in visit.answers.items():
            if len(answers) != len(visit.turns):
                raise ValueError(f"answers.{label}: has {len(answers)} turns, not {len(visit.turns)}")
        return visit

    def to_json(self) -> str:
        """One line of JSON, without a newline at its end."""
        return json.dumps(vars(self), default=vars, ensure_ascii=True, separators=(",", ":"))


_adapter: Any = cache(TypeAdapter)


def compact_counts(computed: np.ndarray) -> tuple[list[int], list[list[int]]]:
    """(group_starts, computed) of [steps, layers] counts: neighbouring layers with equal counts form a group."""
    differs = (computed[:, 1:] != computed[:, :-1]).any(axis=0)
    first = np.concatenate([[0], 1 + np.flatnonzero(differs)])
    return (first + 1).tolist(), computed[:, first].tolist()


@dataclass(frozen=True)
class Trace:
    """One example under one arm.

    tokens: [n] the text of each prompt token; joined they are the prompt, with the names of special tokens.
    generated: the text of each generated token; "" for a token that ends within a letter. All are "" in records that
        leave out the texts.
    importance: [layers][n] Eq. 1 in a prefill without pruning.
    selected: per step {layer (1-based; 0 before the first layer): ascending positions that enter the next layer},
        prompt and generated tokens; empty in later steps if a method selects in prefill only.
    group_starts, computed: as in `Cost`.
    """

    __pydantic_config__ = _STRICT

    dataset: str
    id: str
    arm: str
    tokens: list[str]
    generated: list[str]
    importance: list[list[float]]
    selected: list[dict[int, list[int]]]
    group_starts: list[int]
    computed: list[list[int]]

    def to_json(self) -> str:
        return json.dumps(vars(self), separators=(",", ":")) + "\n"

    @staticmethod
    def file_name(dataset: str, example: str, arm: str) -> str:
        """The trace's file name. Their hash is added if id or arm cannot be part of one, or the arm has the "-" between
        them."""
        wanted = f"{example}-{arm}"
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", wanted)[:80]
        end = "" if safe == wanted and "-" not in arm else f"-{sha256_of([example, arm])[:8]}"
        return f"{dataset}-{safe}{end}.json"


def read_trace(file: Path) -> Trace:
    """The trace in a file, which may be gzipped. Raises UserError if it is not a trace."""
    try:
        data = file.read_bytes()
        return _adapter(Trace).validate_json(gzip.decompress(data) if file.suffix == ".gz" else data)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file}: not a trace ({reason_of(error)})") from error
