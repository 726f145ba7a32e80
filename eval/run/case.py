"""An example of a run, ready to be answered, and what a visit holds of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eval.benchmarks.chat_format import ChatFormat, post_process
from eval.benchmarks.metrics import score_example, second_score
from eval.benchmarks.prompts import BuiltPrompt
from eval.benchmarks.suite import Dataset, Example
from eval.run.arms import Arm
from eval.store.visit import PROMPT_END, Answer, Failure, Turn, Visit

if TYPE_CHECKING:
    from lazyllm.engine.generation import Greedy


@dataclass(frozen=True)
class Case:
    """One example with its prompt.

    end_ids: tokens that end an answer. cut: tokens before a hidden question (`eval.run.hidden`); None without one.
    arms: those that a visit is to measure, in order.
    """

    dataset: Dataset
    example: Example
    prompt: BuiltPrompt
    max_new_tokens: int
    end_ids: tuple[int, ...]
    cut: int | None = None
    arms: tuple[Arm, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.dataset.name, self.example.id

    @property
    def prompts(self) -> tuple[Any, ...]:
        """The prompt, and the messages of later turns."""
        return self.prompt, *self.prompt.turns

    @property
    def options(self) -> dict[str, Any]:
        """The options of `lazyllm.generate`."""
        least = 1 if self.dataset.newline_ends else 0
        return {"max_new_tokens": self.max_new_tokens, "eos_token_ids": self.end_ids, "min_new_tokens": least}

    def sampler(self) -> Greedy:
        """Chooses the tokens of one answer, greedily."""
        from lazyllm.engine.generation import Greedy  # not at the top: planning needs no torch

        return Greedy(self.end_ids, self.options["min_new_tokens"])


def scored(case: Case, decoded: str, chat: ChatFormat, turn: int = 0) -> dict[str, Any]:
    """The fields of `Answer` that its text determines."""
    text = post_process(decoded, chat, case.dataset.chat_wrap)
    answers, is_scored = list((case.example, *case.example.turns)[turn].answers), case.dataset.metric != ""
    return {
        "text": text,
        "score": score_example(case.dataset, text, answers, list(case.example.all_classes)) if is_scored else None,
        "rouge_l": second_score(case.dataset, text, answers),
    }


def visit_of(
    case: Case, arms: Sequence[Arm], outcomes: Mapping[str, list[Answer] | Failure], kernel: str | None = None
) -> Visit:
    """The visit of a case. arms: the run's, in order. outcomes: by arm. kernel: of attention."""
    turns = [
        Turn(
            sha256=message.sha256,
            tokens=len(message.token_ids),
            tokens_before_truncation=getattr(message, "tokens_before_truncation", len(message.token_ids)),
            end=message.text[-PROMPT_END:],
            answers=list(question.answers),
        )
        for message, question in zip(case.prompts, (case.example, *case.example.turns), strict=True)
    ]
    return Visit(
        dataset=case.dataset.name,
        id=case.example.id,
        groups=list(case.example.groups),
        turns=turns,
        order=[arm.label for arm in case.arms],
        answers={arm.label: own for arm in arms if isinstance(own := outcomes.get(arm.label), list)},
        failures={label: own for label, own in outcomes.items() if isinstance(own, Failure)},
        attention_kernel=kernel,
    )
