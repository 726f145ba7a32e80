"""Examples with their prompts, without weights."""

import logging
from collections.abc import Iterator, Sequence

from eval.benchmarks.prompts import build_prompt, end_token_ids
from eval.benchmarks.suite import Dataset, LoadedDataset
from eval.run.arms import Arm
from eval.run.asked import Asked, read_rows
from eval.run.case import Case
from eval.run.config import prompt_limit
from lazyllm.errors import UserError

log = logging.getLogger(__name__)


def limit_of_prompts(asked: Asked, positions: int) -> int:
    """Tokens of a prompt; longer ones lose their middle. positions: the model's. Raises UserError."""
    length, given = asked.suite.length(asked.data), asked.config.model.max_prompt_tokens
    if length is not None and length > positions:  # before the rows are made
        raise UserError(
            f"{asked.datasets[0].name}: {length} tokens of prompt and answer exceed the model's {positions} positions: "
            f"{asked.suite.shorter}"
        )
    limit = given or prompt_limit(positions)
    if limit > positions:
        raise UserError(f"model.max_prompt_tokens={limit}: the model has {positions} positions: give fewer")
    return limit


def limit_of_answers(asked: Asked, dataset: Dataset, most: int) -> int:
    """The most tokens of an answer, thoughts included. most: those of the dataset's own answers."""
    thinking = asked.subject.chat.thinking_tokens if dataset.chat_wrap else 0
    return min(most, asked.config.max_new_tokens or most) + thinking


def make_cases(asked: Asked, arms: Sequence[Arm], rows: Sequence[LoadedDataset], limit: int) -> list[Case]:
    """The cases of a run, in order. limit: tokens of a prompt.

    Raises UserError for a prompt that the model, or an arm's method, cannot take.
    """
    model, subject = asked.config.model, asked.subject
    if None in (model.max_prompt_tokens, model.chat):
        texts = ("it has no chat template: prompts are plain text", "prompts have its own chat template")
        chat = texts[subject.chat.uses_template(subject.tokenizer)]
        has = f"has {subject.positions} positions, so prompts beyond {limit} tokens lose their middle"
        log.info("%s: %s; %s", model.name, has, chat)
    return [case for data in rows for case in _cases(asked, arms, data, limit)]


def prompts_of(asked: Asked) -> list[Case]:
    """The cases of a run whatever its arms are. Raises UserError."""
    limit = limit_of_prompts(asked, asked.subject.positions)
    return make_cases(asked, (), read_rows(asked), limit)


def _cases(asked: Asked, arms: Sequence[Arm], data: LoadedDataset, limit: int) -> Iterator[Case]:
    dataset, subject, positions = data.dataset, asked.subject, asked.subject.positions
    methods = [arm.method(dataset.name) for arm in arms]
    end_ids = end_token_ids(subject.tokenizer, subject.end_ids, dataset)
    max_new_tokens = limit_of_answers(asked, dataset, data.max_new_tokens)
    for example in data.examples:
        prompt = build_prompt(example, dataset, subject.tokenizer, limit if dataset.truncate else None, subject.chat)
        where, tokens = f"{dataset.name}, row {example.id}", len(prompt.token_ids)
        try:
            for method in methods:
                method.check_prompt(prompt.as_input())
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        needed = tokens + max_new_tokens - 1  # the last new token is not run
        if needed > positions:
            fits = positions - needed + min(prompt.tokens_before_truncation, limit)
            instead = f"set model.max_prompt_tokens={fits}, or less"
            if not dataset.truncate:
                instead = asked.suite.shorter
            elif fits < 1:
                instead = "give a lower max_new_tokens or model.thinking_tokens"
            raise UserError(
                f"{where}: {tokens} prompt tokens and up to {max_new_tokens} new ones exceed the model's "
                f"{positions} positions: {instead}"
            )
        yield Case(dataset, example, prompt, max_new_tokens, end_ids)
