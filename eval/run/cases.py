"""Examples with their prompts, without weights. Functions take an `eval.run.run.Run`, whose properties call them."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eval.benchmarks.prompts import BuiltPrompt, build_prompt, end_token_ids
from eval.benchmarks.suite import Dataset, Example, LoadedDataset
from eval.run.arms import Arm
from lazyllm.errors import UserError
from lazyllm.models.load import load_end_ids

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Case:
    """One example with its prompt.

    end_ids: tokens that end an answer. arms: those that a visit is to measure, in this order.
    """

    dataset: Dataset
    example: Example
    prompt: BuiltPrompt
    max_new_tokens: int
    end_ids: tuple[int, ...]
    arms: tuple[Arm, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.dataset.name, self.example.id

    @property
    def prompts(self) -> tuple[Any, ...]:
        """The prompt, and the messages of later turns."""
        return self.prompt, *self.prompt.turns

    @property
    def answering(self) -> dict[str, Any]:
        """The options of `lazyllm.generate`."""
        least = 1 if self.dataset.newline_ends else 0
        return {"max_new_tokens": self.max_new_tokens, "eos_token_ids": self.end_ids, "min_new_tokens": least}


def make_cases(run: Any) -> list[Case]:
    """The cases of a run, in order. Raises UserError for a prompt that the model or an arm's method cannot take."""
    model, longest, limit = run.config.model, run.positions, run.max_prompt_tokens
    if None in (model.max_prompt_tokens, model.chat):
        has = "" if longest is None else f"has {longest} positions, so "
        texts = ("it has no chat template: prompts are plain text", "prompts have its own chat template")
        chat = texts[run.chat.uses_template(run.tokenizer)]
        log.info("%s: %sprompts beyond %d tokens lose their middle; %s", model.name, has, limit, chat)
    return [case for data in run.loaded for case in _cases(run, data)]


def _cases(run: Any, data: LoadedDataset) -> Iterator[Case]:
    dataset, limit, longest = data.dataset, run.max_prompt_tokens, run.positions
    methods = [] if run.is_served else [arm.method(dataset.name) for arm in run.arms]
    end_ids = end_token_ids(run.tokenizer, () if run.is_served else load_end_ids(run.spec), dataset)
    max_new_tokens = run.answer_limit(dataset, data.max_new_tokens)
    for example in data.examples:
        prompt = build_prompt(example, dataset, run.tokenizer, limit if dataset.truncate else None, run.chat)
        where, new_tokens = f"{dataset.name}, row {example.id}", max_new_tokens * (1 + len(prompt.turns))
        for method in methods:
            try:
                method.check_prompt(prompt.as_input())
            except ValueError as error:
                raise UserError(f"{where}: {error}") from error
        tokens = sum(len(message.token_ids) for message in (prompt, *prompt.turns))
        needed = tokens + new_tokens - (not run.is_served)  # the last new token has no position here; servers count it
        if longest is not None and needed > longest:
            fits = longest - needed + min(prompt.tokens_before_truncation, limit)
            instead = f"set model.max_prompt_tokens={fits}, or less" if dataset.truncate else run.suite.shorter
            if fits < 1:
                instead = "give a lower max_new_tokens or model.thinking_tokens"
            of_turns = f" of {1 + len(prompt.turns)} turns" if prompt.turns else ""
            raise UserError(
                f"{where}: {tokens} prompt tokens{of_turns} and up to {new_tokens} new ones exceed the model's "
                f"{longest} positions: {instead}"
            )
        yield Case(dataset, example, prompt, max_new_tokens, end_ids)
