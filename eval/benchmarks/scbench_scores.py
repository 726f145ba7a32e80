"""SCBench's scorers (`compute_scores.py`, commit 9987de6), quirks included, for one answer.

The scorers of many_shot and qa_chn iterate over a gold answer that is a string as if it were a list of answers, so
each of its characters counts as an answer. In many_shot, an answer that shares a letter with the gold one is right.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

Metric = Callable[[str, Sequence[str]], float]

_MARKS = str.maketrans(dict.fromkeys("\n\"'.,?!{}", " "))
_PUNCTUATION = str.maketrans(
    "",
    "",
    string.punctuation + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』"
    "【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏.",
)


def _all_substrings(answer: str, answers: Sequence[str]) -> float:
    """The share of the gold answers that the answer contains, rounded to two digits, as officially."""
    return round(sum(gold.lower() in answer.lower() for gold in answers) / len(answers), 2)


def _any_case(answer: str, answers: Sequence[str]) -> bool:
    return any(gold.upper() in answer.strip().upper() for gold in answers)


def _any_character(answer: str, answers: Sequence[str]) -> bool:
    """Whether the answer contains any character of the gold one, as the official code takes a string for a list."""
    return _any_case(answer, answers[0])


def _character_f1(answer: str, answers: Sequence[str]) -> float:
    """The best F1 of the answer's characters against one character of the gold answer, which is taken for a list."""
    characters = _chinese(answer)
    if not set(characters) & set(_chinese(answers[0])):
        return 0.0
    precision = 1 / len(characters)
    return 2 * precision / (precision + 1)


def _chinese(text: str) -> str:
    """The text in lower case, without punctuation and white space."""
    return "".join(text.lower().translate(_PUNCTUATION).split())


def _choice(answer: str, answers: Sequence[str]) -> bool:
    """Whether the answer is the gold letter or text, or gives it after some phrases or as its first single letter."""
    answer = answer.strip()
    if answer[:1] in ("A", "B", "C", "D"):
        return answer[0] in answers
    if answer in answers:
        return True
    answer = re.sub("  +", " ", answer.translate(_MARKS))
    for lead in ("answer is:", "answer:", "answer is", "option is"):
        _, found, rest = answer.partition(lead)
        if found:
            return rest[1:].startswith(tuple(answers))
    return next((word for word in answer.split() if word in "ABCD"), None) in answers


def _number(answer: str, answers: Sequence[str]) -> bool:
    """Whether the first number is the gold one; its fraction is dropped if the gold one is an integer."""
    found, gold = re.search(r"\d+\.\d+|\d+", answer), json.loads(answers[0])
    if found is None:
        return False
    return (float(found[0]) // 1 if isinstance(gold, int) else float(found[0])) == gold


def _summary(answer: str, answers: Sequence[str]) -> float:
    return _rouge_scorer().score(answers[0], answer)["rougeLsum"].fmeasure


def _summary_or_number(answer: str, answers: Sequence[str]) -> float:
    """ROUGE-Lsum for a summary; for a needle, whose gold answer is a number, whether the first integer equals it."""
    if not answers[0].isdigit():
        return _summary(answer, answers)
    found = re.search("[0-9]+", answer)
    return float(found is not None and found[0] == answers[0])


@lru_cache(maxsize=1)
def _rouge_scorer() -> RougeScorer:
    # Imported on first use, as it imports nltk, which takes half a second.
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeLsum"], use_stemmer=False)


METRICS: dict[str, Metric] = {
    "substring": lambda answer, answers: answers[0] in answer,
    "share_of_substrings": _all_substrings,
    "substring_any_case": _any_case,
    "any_character": _any_character,
    "character_f1": _character_f1,
    "choice": _choice,
    "number": _number,
    "rouge_lsum": _summary,
    "rouge_lsum_or_number": _summary_or_number,
}
