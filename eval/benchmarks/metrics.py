"""The official scorers of all suites, quirks included: an answer and its gold answers give 0 to 1.

LongBench (`metrics.py` and `eval.py`, commit 2e00731): a metric takes one gold answer, and the best
of a row's gold answers counts. ROUGE-L is that of the package `rouge` 1.0.1: summary-level, over
unique words. Google's `rouge-score` differs from it by several points and is reported in addition.
Code is compared by `fuzz.ratio` of the package `fuzzywuzzy`, always with difflib:
python-Levenshtein, which it uses where it is installed, gives other numbers.

RULER (`scripts/eval/synthetic/constants.py` and `scripts/eval/evaluate.py`, commit c3f5e3b): gold
answers contained.

GraphWalks (the dataset's card): F1 of the nodes in the last line, `Final Answer: [a, b]`. Ours:
blank lines at the end are passed over, and two faults of the card's code are not kept. It joins the
words `Final Answer: [` to the first node, which then is never right, and gives 1 to an answer
without any right node.
"""

import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import cache, reduce
from importlib.util import find_spec, module_from_spec
from operator import add
from typing import Any

from eval.benchmarks.suite import Dataset
from lazyllm.errors import UserError

# (answer, gold answers, class names) -> 0 to 1
Metric = Callable[[str, Sequence[str], Sequence[str]], float]
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_GOLD_PARAGRAPH = re.compile(r"Paragraph (\d+)")
_FINAL_ANSWER = re.compile(r"Final Answer: ?\[(.*)\]")

# The package `rouge` walks back through its LCS table by recursion, one call a step. Python's limit
# of 1000 nested calls allows the official script N steps; a longer walk ends in an error, a 0.
_OFFICIAL_STEPS = 990


def normalize_answer(text: str) -> str:
    """Normalise as SQuAD: lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, gold: str) -> float:
    """Token F1 after SQuAD's normalisation; 0 if no token is shared, also for two empty answers."""
    predicted = normalize_answer(prediction).split()
    wanted = normalize_answer(gold).split()
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(wanted)
    return (2 * precision * recall) / (precision + recall)


def rouge(prediction: str, gold: str) -> float:
    """ROUGE-L F of the package `rouge` 1.0.1: summary-level, over unique words.

    0 if the package fails, as in the official scorer: for a text without a sentence, and for two
    sentences whose comparison takes more than `_OFFICIAL_STEPS` steps.
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
    """The words of the longest common subsequence that the package finds; None if it fails.

    Its walk starts at the end of both, takes equal words, and at a tie goes back in `right`.
    """
    if min(len(left), len(right)) > _OFFICIAL_STEPS:  # no walk is shorter than that
        return None
    lengths = [[0] * (len(right) + 1)]
    for word in left:
        above, row = lengths[-1], [0]
        for column, other in enumerate(right):
            either = max(above[column + 1], row[column])
            row.append(above[column] + 1 if word == other else either)
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

    Names that are a proper part of the gold one are removed from the list *while it is iterated*,
    so the name after a removed one is skipped. This quirk of the official scorer changes scores.
    """
    found = [name for name in all_classes if name in prediction]
    for name in found:
        if name in gold and name != gold:
            found.remove(name)  # removed while iterating, as in the official code
    return 1.0 / len(found) if gold in found else 0.0


def retrieval(prediction: str, gold: str) -> float:
    """Share of the answer's numbers that equal the gold one's, which is `Paragraph <number>`."""
    return count(prediction, _GOLD_PARAGRAPH.findall(gold)[0])


def count(prediction: str, gold: str) -> float:
    """Share of the numbers in the answer that equal the gold one as text; 0 without a number."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(gold) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, gold: str) -> float:
    """Similarity (in hundredths) of the gold line and the answer's first line of code.

    That is the first line without backtick, `#` and `//`.
    """
    for line in prediction.lstrip("\n").split("\n"):
        if not any(mark in line for mark in ("`", "#", "//")):
            return _fuzz().ratio(line, gold) / 100
    return _fuzz().ratio("", gold) / 100


@cache
def _fuzz() -> Any:
    """A copy of `fuzzywuzzy.fuzz` of our own that compares by difflib, whatever is installed."""
    spec = find_spec("fuzzywuzzy.fuzz")
    assert spec is not None
    assert spec.loader is not None
    fuzz: Any = module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for python-Levenshtein
        spec.loader.exec_module(fuzz)
    fuzz.SequenceMatcher = SequenceMatcher
    return fuzz


def _contained(answer: str, answers: Sequence[str]) -> list[bool]:
    """Whether each gold answer is in the answer, ignoring case.

    The answer is stripped; every control character (tab and newline too) becomes a newline.
    """
    answer = re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
    return [gold.lower() in answer for gold in answers]


def _share_contained(answer: str, answers: Sequence[str]) -> float:
    return sum(_contained(answer, answers)) / len(answers)


def _node_f1(answer: str, answers: Sequence[str]) -> float:
    """F1 of the gold nodes and those of the last line that is not blank, `Final Answer: [a, b]`."""
    lines = [line for line in answer.split("\n") if line.strip()]
    match = _FINAL_ANSWER.search(lines[-1]) if lines else None
    if match is None:
        return 0.0
    nodes = {node.strip() for node in match[1].split(",") if node.strip()}
    return 2 * len(nodes & {*answers}) / (len(nodes) + len({*answers}))


def _best(metric: Callable[[str, str], float]) -> Metric:
    """A metric of one gold answer: the best over all counts."""
    return lambda answer, answers, classes: max(0.0, *(metric(answer, gold) for gold in answers))


def _over_all(metric: Callable[[str, Sequence[str]], float]) -> Metric:
    """A metric of all gold answers together."""
    return lambda answer, answers, classes: float(metric(answer, answers))


def _best_class(answer: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    return max(classification(answer, gold, classes) for gold in answers)


METRICS: dict[str, Metric] = {
    "f1": _best(f1),
    "rouge": _best(rouge),
    "classification": _best_class,
    "retrieval": _best(retrieval),
    "count": _best(count),
    "code_similarity": _best(code_similarity),
    "string_match_all": _over_all(_share_contained),
    "string_match_part": _over_all(lambda answer, golds: any(_contained(answer, golds))),
    "substring": _over_all(lambda answer, answers: answers[0] in answer),
    "node_f1": _over_all(_node_f1),
}


def needs_classes(dataset: Dataset) -> bool:
    """Whether an answer's score depends on the row's class names."""
    return dataset.metric == "classification"


def scored_text(dataset: Dataset, prediction: str) -> str:
    """The part of an answer that is scored (`eval.py`, scorer): all of it, or its first line."""
    return prediction.lstrip("\n").split("\n")[0] if dataset.first_line else prediction


def score_example(
    dataset: Dataset,
    prediction: str,
    answers: Sequence[str],
    all_classes: Sequence[str] | None = None,
) -> float:
    """The official score, 0 to 1, of one answer, by the dataset's metric.

    prediction: the model's answer, post-processed as `pred.py` does. answers: the gold ones.
    all_classes: the class names, for the classification metric only.
    Raises UserError as `check_gold`.
    """
    check_gold(dataset, answers, all_classes)
    return METRICS[dataset.metric](scored_text(dataset, prediction), answers, all_classes or ())


def check_gold(
    dataset: Dataset,
    answers: Sequence[str],
    all_classes: Sequence[str] | None,
) -> None:
    """Raise UserError for gold answers that the metric cannot score."""
    if not answers:
        raise UserError("answers is empty: there is nothing to score against")
    if needs_classes(dataset) and not all_classes:
        raise UserError("all_classes must list the class names, which this dataset's metric needs")
    wrong = [gold for gold in answers if not _GOLD_PARAGRAPH.search(gold)]
    if dataset.metric == "retrieval" and wrong:
        raise UserError(f"answers must read 'Paragraph <number>', got {wrong[0]!r}")


def second_score(dataset: Dataset, prediction: str, answers: Sequence[str]) -> float | None:
    """ROUGE-L F (0 to 1) by Google's `rouge-score`, without stemming; None for other metrics."""
    if dataset.metric != "rouge":
        return None
    text = scored_text(dataset, prediction)
    scores = (_rouge_scorer().score(gold, text)["rougeL"] for gold in answers)
    return max(0.0, *(score.fmeasure for score in scores))


@cache
def _rouge_scorer() -> Any:
    # not at the top: it imports nltk, which takes half a second
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=False)


def dataset_score(scores: Sequence[float]) -> float:
    """A dataset's score: 100 times the mean of its examples' (0 to 1), in 2 digits."""
    assert scores
    # not sum(), which compensates rounding errors from Python 3.12 on; the official scorer does not
    return round(100 * reduce(add, scores) / len(scores), 2)
