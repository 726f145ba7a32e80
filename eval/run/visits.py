"""What every visit holds, whatever answered: scores, and what was asked."""

from collections.abc import Mapping, Sequence
from typing import Any

from eval.benchmarks.chat_format import ChatFormat, post_process
from eval.benchmarks.metrics import score_example, second_score
from eval.run.arms import Arm
from eval.run.case import Case
from eval.store.visit import PROMPT_END, Answer, Failure, Turn, Visit


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
