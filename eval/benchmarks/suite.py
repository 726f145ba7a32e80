"""The values that a suite of tasks is made of.

A suite is one file or folder beside this one. It ends in a `Suite`, which `eval.benchmarks.SUITES` lists: no other
code names a suite. What differs between suites is a field here, never an `if`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eval.benchmarks.chat_format import CHAT_FORMATS, ChatFormat
from lazyllm.models.spec import ModelSpec

OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class Dataset:
    """One dataset of a suite.

    name: its name in configs, files and tables; unique among all suites.
    task: the task whose score is the mean over its datasets.
    metric: the name of its score: a key of `eval.benchmarks.metrics.METRICS` if the suite scores by `score_example`.
    suite: the name of its suite.
    prompt_of: the dataset of LongBench whose prompt and answer length it has; "" for its own.
    chat_wrap: whether the prompt is wrapped in the model's chat template.
    truncate: whether a prompt longer than `model.max_prompt_tokens` loses its middle.
    decode_halves: whether the two ends of such a prompt are decoded one by one, as LongBench does, or together.
    first_line: whether only the first line of the answer is scored (leading newlines stripped first).
    newline_ends: whether a newline token ends the answer, which then has at least one token.
    protected: a pattern (re.MULTILINE) of text in a few-shot context that no method may shorten: the examples' answers,
        and the labels that lay the examples out; "" if the context holds no examples.
    """

    name: str
    task: str
    metric: str
    suite: str
    prompt_of: str = ""
    chat_wrap: bool = True
    truncate: bool = True
    decode_halves: bool = True
    first_line: bool = False
    newline_ends: bool = False
    protected: str = ""


@dataclass(frozen=True)
class Turn:
    """A later question on an example's context.

    text: the whole text of the message, as it stands behind the answer before it; a chat template wraps it.
    answers: the gold answers, at least one.
    answer_prefix, evidence: as in `Example`.
    """

    text: str
    answers: tuple[str, ...]
    answer_prefix: str = ""
    evidence: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Example:
    """One row. Field names are LongBench's, except `id` (its `_id`).

    id: the row's own, or a hash of the row if it has none; unique in its dataset.
    answers: the gold answers, at least one.
    all_classes: the class names; empty if the dataset is no classification.
    length: the row's length as the suite counts it, in words, characters or tokens.
    instruction: the text in front of the context, if it differs from row to row.
    answer_prefix: the text behind the chat template that the answer continues; a part of the prompt.
    evidence: the [start, end) ranges of `context`, in characters, that hold the answer; empty if nobody knows.
    groups: the groups of rows that it is in and that scores are shown for, each as "length=8k+".
    turns: the later questions, in order; the first is `input`.
    """

    dataset: str
    id: str
    input: str
    context: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...]
    length: int
    language: str
    instruction: str = ""
    answer_prefix: str = ""
    evidence: tuple[tuple[int, int], ...] = ()
    groups: tuple[str, ...] = ()
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """A row that was left out: where it stands (file:line) and why."""

    where: str
    reason: str


@dataclass(frozen=True)
class LoadedDataset:
    """A dataset's rows, and the facts that its prompts and answers need.

    template: the official prompt, with placeholders such as `{context}` and `{input}`.
    max_new_tokens: the most tokens an answer may have.
    data_sha256: of the bytes of the rows, one JSON object a line; if only the first are made, of what all follow from.
    config_sha256: of template and max_new_tokens.
    source: the origin of the rows, for people.
    skipped: rows left out, with `on_error="skip"` only.
    total: the number of the dataset's rows if `examples` holds only the first; None if it holds all.
    """

    dataset: Dataset
    examples: tuple[Example, ...]
    template: str
    max_new_tokens: int
    data_sha256: str
    config_sha256: str
    source: str
    skipped: tuple[Skipped, ...]
    total: int | None = None


@dataclass(frozen=True)
class DataSettings:
    """The settings of a run that say what its rows are.

    dir: the folder with the suite's files (`data.dir`); None if the suite is to fetch or make them.
    on_error: "raise" at the first row that cannot be used, or "skip" such rows and list them in `LoadedDataset`.
    limit: the number of rows that are used: a suite that makes rows makes no more; None for all.
    options: the suite's own settings, which the config holds under the suite's name; None if it has none.
    model: names the tokenizer, for a suite whose rows depend on it.
    chat: how prompts are wrapped.
    turns: the number of questions asked of a row, for a suite that makes rows; None for all that a row has.
    """

    dir: Path | None = None
    on_error: OnError = "raise"
    limit: int | None = None
    options: Any = None
    model: ModelSpec | None = None
    chat: ChatFormat = CHAT_FORMATS["none"]
    turns: int | None = None


def _nothing(dataset: Dataset, settings: DataSettings) -> None:
    """Nothing to refuse, nothing missing."""


@dataclass(frozen=True)
class Suite:
    """A suite of datasets: what is asked, where it comes from and how it is scored.

    name: its name in records and tables.
    version: raised by every change of rows, prompts or scores.
    datasets: in the order of tables.
    load: reads one of its datasets. Raises UserError.
    score: the official scorer: (dataset, answer, gold answers, class names) -> 0 to 1.
    whole: the name in configs for all its datasets.
    tasks: tasks that configs may name for its datasets of that task.
    limit: the number of examples of each dataset in a run of `whole` that sets no `limit`; None for all.
    in_paper: whether LazyLLM's paper reports this suite.
    reference_tokens: the prompt length for which a target speedup is solved; None for the paper's lengths.
    check: refuses settings that the dataset cannot be loaded with, before torch is imported. Raises UserError.
    missing: why a dataset's rows cannot be had, or None: such a dataset is left out of `whole`, and refused if named.
    rows: the rows in the suite's official format, `settings.limit` at most; None for LongBench's format.
    length: the tokens of prompt and answer that the settings ask for; None if the rows alone decide.
    shorter: what to do if a prompt is longer than the model can hold.
    """

    name: str
    version: int
    datasets: tuple[Dataset, ...]
    load: Callable[[Dataset, DataSettings], LoadedDataset]
    score: Callable[[Dataset, str, Sequence[str], Sequence[str] | None], float]
    whole: str
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    in_paper: bool = False
    reference_tokens: int | None = None
    check: Callable[[Dataset, DataSettings], None] = _nothing
    missing: Callable[[Dataset, DataSettings], str | None] = _nothing
    rows: Callable[[Dataset, DataSettings], Iterable[Mapping[str, Any]]] | None = None
    length: Callable[[DataSettings], int | None] = lambda settings: None
    shorter: str = "set a lower model.max_prompt_tokens"

    @property
    def may_lack(self) -> bool:
        """Whether a dataset's rows can be missing."""
        return self.missing is not _nothing

    @property
    def all_tasks(self) -> tuple[str, ...]:
        """The tasks of its datasets, in the order of tables."""
        return tuple(dict.fromkeys(dataset.task for dataset in self.datasets))
