"""RULER's scorers (`scripts/eval/synthetic/constants.py`, `scripts/eval/evaluate.py`), for one answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def score(task: str, answer: str, outputs: Sequence[str]) -> float:
    """The official score of one answer, 0 to 1.

    task: one of the 13 tasks. answer: the generated text after the answer prefix. outputs: the row's gold answers.
    """
    return string_match_part(answer, outputs) if task.startswith("qa_") else string_match_all(answer, outputs)


def string_match_all(answer: str, outputs: Sequence[str]) -> float:
    """The share of gold answers that the answer contains, ignoring case."""
    answer = _cleaned(answer)
    return sum(gold.lower() in answer for gold in outputs) / len(outputs)


def string_match_part(answer: str, outputs: Sequence[str]) -> float:
    """1 if the answer contains any gold answer, ignoring case, else 0."""
    answer = _cleaned(answer)
    return float(any(gold.lower() in answer for gold in outputs))


def _cleaned(answer: str) -> str:
    """The answer in lower case, stripped; every control character (tab and newline too) becomes a newline."""
    return _CONTROL.sub("\n", answer.strip()).strip().lower()
