"""What a run measures: the contract between the loop and a model in this process, or servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from eval.benchmarks.chat_format import ChatFormat
from eval.benchmarks.suite import Dataset
from eval.run.arms import Arm
from eval.run.settings import RunConfig
from eval.store.visit import Trace, Visit
from lazyllm.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from eval.run.case import Case

Load = Callable[[], "PreTrainedModel"]

WARMUP_TOKENS = 4  # for a prefill, a decoding step that revives, and a step after it


def in_turn(arms: Sequence[Arm], number: int) -> tuple[Arm, ...]:
    """The arms in the order of a run's visit with this number, from 0.

    It rotates with every second visit, and every other visit reverses it: in 2 visits each arm comes before any other
    once and after it once, and in 2 k visits of k arms each arm has each place twice.
    """
    first = number // 2 % len(arms)
    order = (*arms[first:], *arms[:first])
    return order[::-1] if number % 2 else order


class Answerer(Protocol):
    """A subject that is ready: its model is loaded, its servers answer."""

    def warm_up(self, cases: Sequence[Case], runs: int) -> None:
        """Answer some of these cases, so that the first visit is no slower than the others."""
        ...

    def visits(self, cases: Sequence[Case]) -> Iterator[Visit]:
        """The visits of the cases, as they are done: the answers of each case's arms, or their failures."""
        ...

    def traces(self, case: Case, arms: Sequence[Arm]) -> Iterator[Trace]:
        """What visits leave out, of each arm. Raises RuntimeError or FloatingPointError."""
        ...


class Subject(Protocol):
    """What answers the examples of a run. Made of settings: nothing heavy is imported or loaded before it is needed."""

    @property
    def name(self) -> str:
        """As in folders' names."""
        ...

    @property
    def spec(self) -> ModelSpec:
        """The model whose tokenizer makes the prompts."""
        ...

    @property
    def chat(self) -> ChatFormat:
        """The format of prompts and answers."""
        ...

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """The models whose files it reads, each once; none for servers."""
        ...

    @property
    def counts_last(self) -> bool:
        """Whether the last new token of an answer takes a position."""
        ...

    def check(self) -> None:
        """Refuse what files at hand, or servers, rule out, without torch. Raises UserError."""
        ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of `spec`."""
        ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, besides the tokenizer's own."""
        ...

    @property
    def positions(self) -> int | None:
        """Of prompt and answer together; None if unknown."""
        ...

    def arms(self, datasets: Sequence[Dataset], tokens: int | None, limit: int | None) -> tuple[Arm, ...]:
        """The arms that can be measured, in order; others are left out, with a log line.

        tokens: prompt and answer, if the settings fix their length. limit: tokens of a prompt. Raises UserError.
        """
        ...

    def batch_size(self, arms: Sequence[Arm], prompt_tokens: int, new_tokens: int) -> int:
        """Answers that decode together. prompt_tokens, new_tokens: the most."""
        ...

    def identity(self, arms: Sequence[Arm]) -> Mapping[str, Any]:
        """What must agree for two visits to share a folder; `arms`: {label: what must agree of it}."""
        ...

    @property
    def device(self) -> str:
        """The name of what computes."""
        ...

    def ready(
        self, arms: Sequence[Arm], baseline: str | None, batch_size: int, load: Load | None = None
    ) -> AbstractContextManager[Answerer]:
        """The subject, ready to answer until the block ends.

        arms: of the run, in order. baseline: the label of the one to compare with. batch_size: answers that decode
        together. load: gives the model, if several runs share it.
        """
        ...


# {setting that names another subject than a model in this process: the module whose `subject_of` makes it}
GUESTS = {"server.url": "eval.serving.subject"}


def subject_of(config: RunConfig, arms: Mapping[str, dict[str, Any]]) -> Subject:
    """The subject that the settings name. arms: {label: settings}. Raises UserError for settings that cannot be."""
    for key, module in GUESTS.items():
        group, name = key.split(".")
        if getattr(getattr(config, group), name) is not None:
            return import_module(module).subject_of(config, arms)
    return import_module("eval.run.local").subject_of(config, arms)
