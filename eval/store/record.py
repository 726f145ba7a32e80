"""A visit: an example, answered by all arms of a run one after the other. A line of the store, and
its schema.

What can be derived from these numbers is not stored: `eval.store.frame` derives it, also for old
runs. A new measured number is a field of `Answer`, with a default for the visits that lack it, and
a value in `eval.run.answer`. Every field of `Answer` that is a number is a column of the frame,
under its own name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
)

from eval.benchmarks.datasets import DATASETS

PROMPT_END = 600  # characters at a prompt's end that a visit keeps, for people to read


class Record(BaseModel):
    """A part of a line: exact types (1 is not text, true is not a number), finite numbers, no
    unknown fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _percent(default: Any = ...) -> Any:
    """A number that is stored as 0 to 1, and shown as 0 to 100."""
    return Field(default, json_schema_extra={"scale": 100})


class Answer(Record):
    """An arm's answer: its text and score, its times in seconds, its cost, and its distance to the
    baseline's answer.

    text: the scored answer, before the first-line rule of some datasets; None in records that leave
        out the texts (`scripts.dev.records`). token_ids: its tokens, which are all 0 there.
    score: the dataset's metric, 0 to 1; None without one. rouge_l: rouge-score's ROUGE-L if the
        metric is ROUGE.

    ttft_s, scoring_s, decode_step_s: as in `lazyllm.Generation`; the steps are None if other
        answers decoded in them (`batch_size`).

    scoring_tokens: prompt tokens that any model computed before the method's prefill.
    computed: [steps][groups] distinct prompt tokens that each layer of a group has computed so far.
    group_layers: the number of layers of each group, the first layers first.
    revived_tokens: tokens that earlier steps had left out of a layer and a later step computed,
        mean over layers.
    kv_bytes, aux_bytes: of stored tokens, and of tokens that may be revived, at the end
        (`lazyllm.Generation`).
    peak_memory_bytes: the device's (the process's on CPU), weights included, without those of other
        arms' models.
    prefill_flops: of the tokens that each layer computed in prefill, and of scoring
        (`lazyllm.engine.flops`).
    prefill_mfu: model FLOPs utilisation, 0 to 1: `prefill_flops` / `ttft_s` over the peak of a
        known accelerator, or on a CPU over the rate of a matrix product that the run measured; None
        for other devices.

    The rest compares with the baseline's answer of the same visit, and is None for the baseline and
    without one:
    kl: KL(baseline || arm) in nats of the first token's distribution.
    top1_agrees: 1 if both have the same most likely first token, else 0.
    leading_tokens: number of leading tokens that the two answers share.
    edit_similarity: 0 to 1, of the two lists of tokens (1 - Levenshtein distance / length of the
        longer one).
    same_answer: 1 if the two are equal, else 0.
    answer_kl, answer_log_likelihood: with `fidelity=answer`, of the baseline's answer fed to the
        arm: mean KL per token, and log-likelihood per token minus the baseline's.
    gold_kl, gold_log_likelihood: the same of the gold answer.
    """

    text: str | None
    token_ids: list[int]
    score: float | None = _percent()
    rouge_l: float | None = _percent(None)
    ttft_s: float = Field(gt=0)
    scoring_s: float = Field(ge=0)
    decode_step_s: list[float] | None
    scoring_tokens: int
    group_layers: list[int]
    computed: list[list[int]]
    revived_tokens: float
    kv_bytes: int
    aux_bytes: int
    peak_memory_bytes: int | None
    prefill_flops: int
    prefill_mfu: float | None = _percent()
    kl: float | None = None
    top1_agrees: int | None = _percent(None)
    leading_tokens: int | None = None
    edit_similarity: float | None = _percent(None)
    same_answer: int | None = _percent(None)
    answer_kl: float | None = None
    answer_log_likelihood: float | None = None
    gold_kl: float | None = None
    gold_log_likelihood: float | None = None

    @field_validator("score", "rouge_l")
    @classmethod
    def _is_share(cls, value: float | None) -> float | None:
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"expected 0 to 1, got {value:g}")
        return value

    @property
    def computed_per_layer(self) -> list[float]:
        """Per step, the prompt tokens that a layer has computed so far, mean over layers."""
        layers = sum(self.group_layers)
        return [float(np.dot(self.group_layers, step)) / layers for step in self.computed]


def _scales() -> dict[str, float]:
    """{field of `Answer` that is a number: its factor in the frame}."""
    numbers = {"int", "float", "int | None", "float | None"}
    scales = dict[str, float]()
    for name, field in Answer.model_fields.items():
        if str(Answer.__annotations__[name]) in numbers:
            extra = field.json_schema_extra
            scale = extra["scale"] if isinstance(extra, Mapping) else 1
            scales[name] = float(scale)  # type: ignore[arg-type]  # the declared scale is a number
    return scales


SCALES = _scales()


class Failure(Record):
    """An arm that failed on an example. error: one line to show. traceback: of the error."""

    error: str
    traceback: str


def _kind(value: Any) -> str:
    failed = "error" in value if isinstance(value, dict) else isinstance(value, Failure)
    return "failure" if failed else "answer"


Outcome = Annotated[
    Annotated[Answer, Tag("answer")] | Annotated[Failure, Tag("failure")], Discriminator(_kind)
]


class Visit(Record):
    """An example and what the arms answered, within seconds of each other.

    groups: of the example, such as "length=8k+". gold: the gold answers.
    prompt_sha256: of the prompt's token ids. prompt_tokens: their number; uncut_tokens: before its
        middle was cut out.
    prompt_end: the prompt's last `PROMPT_END` characters.
    order: the labels of the arms in the order in which they were measured.
    kernel: the attention kernel of the baseline's prefill (of the first arm's without one), by its
        operators at warm-up.
    attention_ceiling: the ideal speedup of the prompt's prefill without attention, which no method
        that skips only attention exceeds.
    arms: {label of an arm: its answer, or why it could not answer}.

    An example has several visits if an arm failed: a later one holds the baseline again, for the
    clock, and the arms that had no answer. An arm's answer counts in its first visit only; ratios
    are made within one visit only.
    """

    dataset: str
    id: str
    groups: list[str] = []
    gold: list[str] = []
    prompt_sha256: str
    prompt_tokens: int
    uncut_tokens: int
    prompt_end: str = ""
    order: list[str]
    kernel: str | None = None
    attention_ceiling: float | None = None
    arms: dict[str, Outcome]

    @property
    def key(self) -> tuple[str, str]:
        """The example."""
        return self.dataset, self.id

    @property
    def answers(self) -> dict[str, Answer]:
        """{label: answer} of the arms that have answered."""
        return {label: answer for label, answer in self.arms.items() if isinstance(answer, Answer)}

    @property
    def failures(self) -> dict[str, Failure]:
        """{label: why} of the arms that have not."""
        return {
            label: failure for label, failure in self.arms.items() if isinstance(failure, Failure)
        }

    @classmethod
    def from_json(cls, line: str | bytes) -> Visit:
        """The visit of a line. Raises ValueError that names the field for an invalid one."""
        try:
            visit = cls.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = [str(part) for part in first["loc"] if part not in ("answer", "failure")]
            raise ValueError(f"{'.'.join(where) or 'line'}: {first['msg']}") from error
        if visit.dataset not in DATASETS:
            raise ValueError(f"there is no dataset {visit.dataset!r}")
        return visit

    def to_json(self) -> str:
        """One line of JSON, without a newline at its end."""
        return json.dumps(self.model_dump(), ensure_ascii=True, separators=(",", ":"))


def compact_counts(computed: np.ndarray) -> tuple[list[int], list[list[int]]]:
    """(group_layers, computed) of [steps, layers] counts: neighbouring layers with equal counts
    form a group.
    """
    differs = (computed[:, 1:] != computed[:, :-1]).any(axis=0)
    first = np.concatenate([[0], 1 + np.flatnonzero(differs)])
    layers = np.diff(np.append(first, computed.shape[1]))
    return layers.tolist(), computed[:, first].tolist()
