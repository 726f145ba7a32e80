"""LongBench's metrics, equal to its own scorer (`metrics.py` and `eval.py`, commit 2e00731), quirks included.

Every metric takes one answer and one gold answer and gives 0 to 1; `score_example` takes the best over the golds.
The official ROUGE-L is that of the package `rouge` 1.0.1: summary-level, over unique words. Google's `rouge-score`
differs from it by several points and is reported in addition.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

    from eval.benchmarks.suite import Dataset

Metric = Callable[[str, str, Sequence[str]], float]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NUMBER = re.compile(r"\d+")
_GOLD_PARAGRAPH = re.compile(r"Paragraph (\d+)")
_CODE_COMMENT_MARKS = ("`", "#", "//")

# The package `rouge` walks back through its LCS table by recursion, one call a step. In the official script, Python's
# limit of 1000 nested calls allows N steps; a longer walk ends in an error that scores 0.
_OFFICIAL_STEPS = 990


def normalize_answer(text: str) -> str:
    """SQuAD's normalisation: lower case, without ASCII punctuation and English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, gold: str, all_classes: Sequence[str] = ()) -> float:
    """Token F1 after SQuAD's normalisation; 0 if no token is shared, also for two empty answers."""
    predicted, wanted = normalize_answer(prediction).split(), normalize_answer(gold).split()
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(wanted)
    return (2 * precision * recall) / (precision + recall)


def rouge(prediction: str, gold: str, all_classes: Sequence[str] = ()) -> float:
    """ROUGE-L F of the package `rouge` 1.0.1: summary-level, over unique words.

    0 if the package fails, as in the official scorer: for a text without a sentence, and for two sentences whose
    comparison takes more than `_OFFICIAL_STEPS` steps.
    """
    answer, wanted = _sentences(prediction), _sentences(gold)
    if not answer or not wanted:
        return 0.0
    common: set[str] = set()
    for reference in wanted:
        for sentence in answer:
            words = _common_words(reference, sentence)
            if words is None:
                return 0.0
            common |= words
    recall = len(common) / len({word for sentence in wanted for word in sentence})
    precision = len(common) / len({word for sentence in answer for word in sentence})
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
    """The words of each sentence; a sentence of white space counts as one empty word."""
    return [sentence.split() or [""] for sentence in text.split(".") if sentence]


def _common_words(left: list[str], right: list[str]) -> set[str] | None:
    """The words of the longest common subsequence that the package finds; None if its walk is too long.

    The walk starts at the end of both, takes equal words, and at a tie goes back in `right`.
    """
    if min(len(left), len(right)) > _OFFICIAL_STEPS:  # no walk is shorter than that
        return None
    lengths = [[0] * (len(right) + 1)]
    for word in left:
        above, row = lengths[-1], [0]
        for column, other in enumerate(right):
            row.append(above[column] + 1 if word == other else max(above[column + 1], row[column]))
        lengths.append(row)
    words: set[str] = set()
    i, j, steps = len(left), len(right), 0
    while i and j:
        if left[i - 1] == right[j - 1]:
            words.add(left[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
        steps += 1
    return words if steps <= _OFFICIAL_STEPS else None


def classification(prediction: str, gold: str, all_classes: Sequence[str]) -> float:
    """1 / number of class names found in the answer, if the gold one is among them; else 0.

    Names that are a proper part of the gold one are removed from the list *while it is iterated*, so the name after a
    removed one is skipped. This quirk of the official scorer changes scores.

    Raises ValueError without class names.
    """
    if not all_classes:
        raise ValueError("classification needs the class names: give all_classes")
    found = [name for name in all_classes if name in prediction]
    for name in found:
        if name in gold and name != gold:
            found.remove(name)  # while iterating: the quirk
    return 1.0 / len(found) if gold in found else 0.0


def retrieval(prediction: str, gold: str, all_classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that equal the gold paragraph's; the gold answer is `Paragraph <number>`.

    Raises ValueError if the gold answer names no paragraph.
    """
    match = _GOLD_PARAGRAPH.search(gold)
    if match is None:
        raise ValueError(f"a gold answer of the retrieval metric must read 'Paragraph <number>', got {gold!r}")
    return count(prediction, match.group(1))


def count(prediction: str, gold: str, all_classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that equal the gold one as text; 0 without a number."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(gold) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, gold: str, all_classes: Sequence[str] = ()) -> float:
    """Similarity (in hundredths) of the gold line and the answer's first line without backtick, `#` and `//`."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in _CODE_COMMENT_MARKS)), "")
    return fuzz_ratio(line, gold) / 100


METRICS: dict[str, Metric] = {
    "f1": f1,
    "rouge": rouge,
    "classification": classification,
    "retrieval": retrieval,
    "count": count,
    "code_similarity": code_similarity,
}


def scored_text(dataset: Dataset, prediction: str) -> str:
    """The part of an answer that is scored: all of it, or its first line after leading newlines (`eval.py`, scorer)."""
    return prediction.lstrip("\n").split("\n")[0] if dataset.first_line else prediction


def score_example(
    dataset: Dataset, prediction: str, answers: Sequence[str], all_classes: Sequence[str] | None = None
) -> float:
    """The official score, 0 to 1, of one answer: the best over its gold answers.

    dataset: names the metric, and whether only the first line counts.
    prediction: the model's answer, post-processed as `pred.py` does.
    answers: the gold answers, at least one.
    all_classes: the class names, for the classification metric only.
    Raises ValueError for gold answers that the metric cannot score (see `gold_problem`).
    """
    problem = gold_problem(dataset, answers, all_classes)
    if problem is not None:
        raise ValueError(f"{dataset.name}: {problem}")
    metric, text = METRICS[dataset.metric], scored_text(dataset, prediction)
    return max(0.0, *(metric(text, gold, all_classes or ()) for gold in answers))


def gold_problem(dataset: Dataset, answers: Sequence[str], all_classes: Sequence[str] | None) -> str | None:
    """Why the dataset's metric cannot score a row's gold answers; None if it can.

    The official scorer fails or gives 0 on such rows.
    """
    if not answers:
        return "answers is empty: there is nothing to score against"
    if dataset.metric == "classification" and not all_classes:
        return "all_classes must list the class names, which this dataset's metric needs"
    if dataset.metric == "retrieval":
        wrong = [gold for gold in answers if not _GOLD_PARAGRAPH.search(gold)]
        if wrong:
            return f"answers must read 'Paragraph <number>', got {wrong[0]!r}"
    return None


def rouge_score_f(prediction: str, answers: Sequence[str]) -> float:
    """ROUGE-L F (0 to 1, no stemming) of Google's `rouge-score`, the best over the gold answers.

    prediction: the text to score; pass it through `scored_text` first to compare with the official ROUGE-L.
    """
    scorer = _google_scorer()
    return max(0.0, *(scorer.score(gold, prediction)["rougeL"].fmeasure for gold in answers))


def dataset_score(scores: Sequence[float]) -> float:
    """A dataset's score: the mean of its examples' scores (0 to 1) times 100, rounded to 2 digits.

    Raises ValueError without scores.
    """
    if not scores:
        raise ValueError("a dataset's score needs at least one example")
    # not sum(), which compensates rounding errors from Python 3.12 on; the official scorer does not
    total = 0.0
    for score in scores:
        total += score
    return round(100 * total / len(scores), 2)


def fuzz_ratio(left: str, right: str) -> int:
    """`fuzzywuzzy.fuzz.ratio` (0 to 100) without python-Levenshtein, even if that is installed.

    fuzzywuzzy would use python-Levenshtein's matcher, which gives other numbers, so difflib is called here. Equal
    strings give 100, also two empty ones.
    """
    if left == right:
        return 100
    if not left or not right:
        return 0
    return round(100 * difflib.SequenceMatcher(None, left, right).ratio())


@lru_cache(maxsize=1)
def _google_scorer() -> RougeScorer:
    # not at the top: it imports nltk, which takes half a second
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=False)
