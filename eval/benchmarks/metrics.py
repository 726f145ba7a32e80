"""LongBench's metrics at parity with its own scorer (`metrics.py` and `eval.py`, commit 2e00731), quirks included.

Every metric takes one answer and one gold answer and gives 0 to 1; `score_example` takes the best over the golds.
Google's `rouge-score` is reported beside the official ROUGE-L and never in its place: the package `rouge` 1.0.1, which
LongBench uses, is summary-level and counts unique words, so that the two differ by several points.
"""

from __future__ import annotations

import difflib
import re
import string
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

    from eval.benchmarks.datasets import Dataset

Metric = Callable[[str, str, Sequence[str]], float]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NUMBER = re.compile(r"\d+")
_GOLD_PARAGRAPH = re.compile(r"Paragraph (\d+)")
_CODE_COMMENT_MARKS = ("`", "#", "//")

# `rouge` walks back through its LCS table by recursion, one frame a word, so that a long stretch without a full stop
# ends in a RecursionError, which the official scorer counts as 0. Where that happens depends on how deep the stack
# already is; these two put it at the same word for every caller: Python's own limit, and the frames under
# `Rouge.get_scores` in the official script (module, scorer, metric).
_OFFICIAL_RECURSION_LIMIT = 1000
_OFFICIAL_FRAMES = 3


def normalize_answer(text: str) -> str:
    """SQuAD's normalisation: lower case, without ASCII punctuation and English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, gold: str, all_classes: Sequence[str] = ()) -> float:
    """Token F1 after SQuAD's normalisation; 0 where no token is shared, two empty answers included."""
    predicted, wanted = normalize_answer(prediction).split(), normalize_answer(gold).split()
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(wanted)
    return (2 * precision * recall) / (precision + recall)


def rouge(prediction: str, gold: str, all_classes: Sequence[str] = ()) -> float:
    """ROUGE-L F of the package `rouge` 1.0.1; 0 where it fails: on an empty text, on too long a sentence."""
    try:
        return _at_official_depth(lambda: _rouge_l(prediction, gold))
    except (ValueError, RecursionError):
        # The two ways in which the package fails on strings. The official scorer catches everything; we do not.
        return 0.0


def classification(prediction: str, gold: str, all_classes: Sequence[str]) -> float:
    """One over the number of class names found in the answer, if the gold one is among them; else 0.

    Names that are a proper part of the gold one are taken out of the list *while it is iterated*, so that the name
    after one taken out is not looked at. The quirk is the official scorer's, and scores depend on it.

    Raises ValueError: without class names.
    """
    if not all_classes:
        raise ValueError("classification needs the class names (all_classes), and there are none")
    found = [name for name in all_classes if name in prediction]
    for name in found:
        if name in gold and name != gold:
            found.remove(name)  # while iterating: the quirk
    return 1.0 / len(found) if gold in found else 0.0


def retrieval(prediction: str, gold: str, all_classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that are the gold paragraph's; the gold answer reads `Paragraph <number>`.

    Raises ValueError: the gold answer names no paragraph.
    """
    match = _GOLD_PARAGRAPH.search(gold)
    if match is None:
        raise ValueError(f"a gold answer of the retrieval metric must read 'Paragraph <number>', got {gold!r}")
    return count(prediction, match.group(1))


def count(prediction: str, gold: str, all_classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that read exactly as the gold one; 0 without any number."""
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

    dataset: says which metric, and whether only the first line counts.
    prediction: the model's answer, post-processed as `pred.py` does.
    answers: the gold answers, at least one.
    all_classes: the class names, for the classification metric only.
    Raises ValueError: gold answers that the metric cannot score (see `gold_problem`).
    """
    problem = gold_problem(dataset, answers, all_classes)
    if problem is not None:
        raise ValueError(f"{dataset.name}: {problem}")
    metric, text = METRICS[dataset.metric], scored_text(dataset, prediction)
    return max(0.0, *(metric(text, gold, all_classes or ()) for gold in answers))


def gold_problem(dataset: Dataset, answers: Sequence[str], all_classes: Sequence[str] | None) -> str | None:
    """Why a row's gold side cannot be scored by its dataset's metric, or None if it can.

    The official scorer gives 0 or breaks on such rows; a row that can only score 0 is a broken row, not a hard one.
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

    Raises ValueError: no scores.
    """
    if not scores:
        raise ValueError("a dataset's score needs at least one example")
    # Not sum(): from Python 3.12 on it compensates rounding errors, and the official scorer adds one by one.
    total = 0.0
    for score in scores:
        total += score
    return round(100 * total / len(scores), 2)


def fuzz_ratio(left: str, right: str) -> int:
    """`fuzzywuzzy.fuzz.ratio` (0 to 100) as it is without python-Levenshtein, whatever is installed.

    fuzzywuzzy decides at import, for the whole process, which matcher it uses, and python-Levenshtein's gives other
    numbers; so the few lines around difflib are done here. Equal strings give 100, also two empty ones.
    """
    if left == right:
        return 100
    if not left or not right:
        return 0
    return round(100 * difflib.SequenceMatcher(None, left, right).ratio())


def _rouge_l(prediction: str, gold: str) -> float:
    """The call that the official scorer makes, without the two metrics whose result it drops."""
    scorer = _official_rouge()
    return scorer.get_scores([prediction], [gold], avg=True)["rouge-l"]["f"]  # type: ignore[index]


@lru_cache(maxsize=1)
def _official_rouge():
    from rouge import Rouge

    return Rouge(metrics=["rouge-l"])


@lru_cache(maxsize=1)
def _google_scorer() -> RougeScorer:
    # Imported on first use: it brings nltk along, half a second that scoring other datasets need not wait for.
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=False)


def _at_official_depth(call: Callable[[], float]) -> float:
    """Runs `call` with as much stack left as the official scorer has, however deep the caller's own stack is.

    A new thread starts with an empty stack; the recursion limit, which tests and notebooks raise, is set for that time.
    Whatever `call` raises is raised here.
    """
    outcome: list[float] = []
    error: list[BaseException] = []

    def run() -> None:
        limit = sys.getrecursionlimit()
        # `call` itself and the function it calls are frames too, `get_scores` being the first that both have.
        depth = _stack_depth() + 2
        try:
            sys.setrecursionlimit(_OFFICIAL_RECURSION_LIMIT + depth - _OFFICIAL_FRAMES)
            outcome.append(call())
        except BaseException as raised:
            error.append(raised)
        finally:
            sys.setrecursionlimit(limit)

    thread = threading.Thread(target=run, name="rouge")
    thread.start()
    thread.join()
    if error:
        raise error[0]
    return outcome[0]


def _stack_depth() -> int:
    """The number of Python frames of this thread, the caller's included and this function's not."""
    frame, depth = sys._getframe(1), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return depth
