"""An example of a run, ready to be answered, and what a visit holds of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eval.benchmarks.chat_format import ChatFormat, post_process
from eval.benchmarks.metrics import score_example, second_score
from eval.benchmarks.prompts import BuiltPrompt
from eval.benchmarks.suite import Dataset, Example
from eval.run.arms import Arm
from eval.store.record import PROMPT_END, Answer, Failure, Visit

if TYPE_CHECKING:
    from lazyllm.engine.generation import Greedy


@dataclass(frozen=True)
class Case:
    """One example with its prompt.

    end_ids: tokens that end an answer. arms: those that a visit is to measure, in order.
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
    def options(self) -> dict[str, Any]:
        """The options of `lazyllm.generate`."""
        least = 1 if self.dataset.newline_ends else 0
        return {"max_new_tokens": self.max_new_tokens, "eos_token_ids": self.end_ids, "min_new_tokens": least}

    def sampler(self) -> Greedy:
        """Chooses the tokens of one answer, greedily."""
        from lazyllm.engine.generation import Greedy  # not at the top: planning needs no torch

        return Greedy(self.end_ids, self.options["min_new_tokens"])


def score_of(case: Case, decoded: str, chat: ChatFormat) -> dict[str, Any]:
    """The fields of `Answer` that its text determines."""
    text, gold = post_process(decoded, chat, case.dataset.chat_wrap), list(case.example.answers)
    is_scored, classes = case.dataset.metric != "", list(case.example.all_classes)
    return {
        "text": text,
        "score": score_example(case.dataset, text, gold, classes) if is_scored else None,
        "rouge_l": second_score(case.dataset, text, gold),
    }


def visit_of(
    case: Case,
    arms: dict[str, Answer | Failure],
    kernel: str | None = None,
    attention_ceiling: float | None = None,
) -> Visit:
    """The visit of a case. Other arguments are fields of `Visit`."""
    return Visit(
        dataset=case.dataset.name,
        id=case.example.id,
        groups=list(case.example.groups),
        gold=list(case.example.answers),
        prompt_sha256=case.prompt.sha256,
        prompt_tokens=len(case.prompt.token_ids),
        uncut_tokens=case.prompt.tokens_before_truncation,
        prompt_end=case.prompt.text[-PROMPT_END:],
        order=[arm.label for arm in case.arms],
        kernel=kernel,
        attention_ceiling=attention_ceiling,
        arms=arms,
    )
