"""Metrics equal the official scorers: on real answers, the packages, and by hand."""

import runpy
import subprocess
import sys
from difflib import SequenceMatcher
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.metrics import (
    METRICS,
    code_similarity,
    dataset_score,
    rouge,
    score_example,
    scored_text,
    second_score,
)
from tests.conftest import ROOT
from tests.eval import official
from tests.eval.benchmarks.loading import LONGBENCH

SCORED = official.LONGBENCH / "scored"

FIXED = settings(max_examples=60, deadline=None, derandomize=True)
NAMES = ["a", "an", "the", "The", "cat", "sat", "on", "mat", "7", "12", "two", "Paragraph"]
SIGNS = [".", "..", "_", "-", "`", "#", "//", "```python", "\n", " ", "\r", "\t", "\u2028"]
WORDS = st.sampled_from([*NAMES, *SIGNS, "x = 1", "naïve", "日本", "’", "٣"])
WORD_LISTS = st.lists(WORDS, max_size=40)
TEXTS = WORD_LISTS.map(" ".join) | WORD_LISTS.map("".join) | st.text()


@official.needs(SCORED)
@pytest.mark.parametrize("name", LONGBENCH)
def test_real_answers_have_the_official_scores(name: str) -> None:
    rows, dataset = official.shared_rows("scored")[name], DATASETS[name]
    ours = [score_example(dataset, r["pred"], r["answers"], r["all_classes"]) for r in rows]
    assert ours == [r["official_score"] for r in rows]


# {metric: (answer, gold answer or several, score, perhaps class names)}, by the definitions
BY_HAND: dict[str, list[tuple[Any, ...]]] = {
    "f1": [
        ("The cat sat.", "a cat", 2 / 3),  # {cat, sat} and {cat}: P 1/2, R 1
        ("cat cat dog", "cat", 1 / 2),  # a repeated word counts once: P 1/3, R 1
        ("cat cat", "cat cat cat", 4 / 5),
        ("cat sat", ("dog", "cat", "cat sat mat"), 4 / 5),  # the best gold answer counts
        ("U.S.A", "usa", 1.0),
        ("well-known", "well known", 0.0),  # punctuation is removed without leaving a space
        ("", "", 0.0),
        ("the", "a", 0.0),  # nothing left of either
        ("\n\n\n", "cat", 0.0),
        ("CAT\u2028sat", "cat sat", 1.0),
        ("Straße", "strasse", 0.0),  # lower case, not case folding
        ("‘cat’", "cat", 0.0),  # only ASCII punctuation goes
        ("a’cat", "’cat", 1.0),  # articles are removed at every word boundary
        ("theatre", "atre", 0.0),
        ("  The  Quick, (brown)\nfox: a  an end! ", "quick brown fox end", 1.0),
    ],
    "rouge": [
        ("...", "cat", 0.0),  # no sentence is left: the package raises, which counts 0
        ("cat sat", "cat sat", 1.0),
        ("cat sat mat", "mat sat cat", 1 / 3),  # one word of three in common order
    ],
    "retrieval": [
        ("Paragraph 12", "Paragraph 12", 1.0),
        ("12, 3 and 12", "Paragraph 12", 2 / 3),
        ("Paragraph 123", "Paragraph 12", 0.0),
        ("twelve", "Paragraph 12", 0.0),  # numbers in words do not count
        ("", "Paragraph 12", 0.0),
        ("012", "Paragraph 12", 0.0),  # as written
        ("1.2", "Paragraph 1", 1 / 2),
        ("B12x", "Paragraph 12", 1.0),
        ("١٢ 12", "Paragraph 12", 1 / 2),  # digits of other scripts are other numbers
        ("²", "Paragraph 2", 0.0),  # no decimal digit
        ("4", "Paragraph 4, not Paragraph 5", 1.0),  # the first paragraph named is the gold one
        ("5", "Paragraph 4, not Paragraph 5", 0.0),
    ],
    "count": [
        ("46", "46", 1.0),
        ("46 of 100", "46", 1 / 2),
        ("forty-six", "46", 0.0),
        ("\n\n", "46", 0.0),
        ("-46", "46", 1.0),
    ],
    "code_similarity": [
        ("x = 1", "x = 1", 1.0),
        ("```python\nx = 1\n```", "x = 1", 1.0),  # a markdown fence is passed over
        ("# set x\n// or y\nx = 1", "x = 1", 1.0),
        ("x = 1  # one\ny = 2", "y = 2", 1.0),  # even a line that only ends in a comment
        ("\n\n\nx = 1\ny = 2", "x = 1", 1.0),
        # a line of white space is a line: " " in "x = 1" is 2 * 1 / 6
        ("\n \nx = 1", "x = 1", 0.33),
        ("```", "x = 1", 0.0),
        ("", "x = 1", 0.0),
        ("", "", 1.0),  # equal comes before empty
        ("\r\nx = 1", "x = 1", 0.0),  # a carriage return is no newline: the first line is "\r"
        ("abcd", "abxd", 0.75),
        ("http://a.b", "http://a.b", 0.0),  # an address holds //
        ("aab", "ab", 0.8),
        # halves go to the even neighbour: 2 * 5 / 16 = 0.625 and 2 * 1 / 16 = 0.125
        ("abcdefgh", "abcdeXYZ", 0.62),
        ("aXXXXXXX", "aYYYYYYY", 0.12),
        # from 200 characters on, difflib ignores those that make up over 1 % of the second text
        ("b" + "a" * 300, "c" + "a" * 300, 0.0),
        ("b" + "a" * 100, "c" + "a" * 100, 0.99),
    ],
    "classification": [
        ("Type: City", "City", 1.0, ["City", "State"]),
        ("City or State", "City", 1 / 2, ["City", "State"]),
        ("State", "City", 0.0, ["City", "State"]),
        ("city", "City", 0.0, ["City", "State"]),
        ("", "City", 0.0, ["City", "State"]),
        # Names inside the gold one: the longer answer contains both, and the inner one is removed.
        ("Other location", "Other location", 1.0, ["Other location", "location"]),
        # Two inner names in a row: the second is skipped and stays.
        ("A big city", "A big city", 1 / 2, ["big", "city", "A big city"]),
        # Three in a row: the first and the third are removed.
        ("a b c d", "a b c d", 1 / 2, ["a", "b", "c", "a b c d"]),
        # The gold one between them is skipped.
        ("a b c", "a b c", 1.0, ["a", "a b c", "b"]),
        # A name that contains the gold one stays.
        ("Other location", "location", 1 / 2, ["location", "Other location"]),
        # For a repeated name, the first occurrence is removed.
        ("a b", "a b", 1 / 2, ["a", "a", "a b"]),
    ],
    "string_match_all": [
        (" 7374122.", "7374122", 1),
        ("73741 22", "7374122", 0),
        ("", "7374122", 0),
        ("the number 173741229", "7374122", 1),  # part of another number
        ("1111111, 2222222", ("1111111", "2222222", "3333333", "4444444"), 0.5),
        ("1111111 1111111", ("1111111", "1111111", "2222222"), 2 / 3),  # a gold twice counts twice
        ("abcde VWXYZ", ("ABCDE", "vwxyz"), 1),
        ("ABC\x00DE", "ABCDE", 0),  # there is a newline between the halves
        ("AB\tCD", "AB\nCD", 1),  # a tab is a control character too
        ("AB\x7fCD", "AB\nCD", 0),  # DEL is not a control character here
        (" \x01 apple", " apple", 0),  # stripped again after the control characters became newlines
        ("İstanbul", "i\u0307stanbul", 1),  # lower case of one letter may be two
        ("STRASSE", "straße", 0),
    ],
    "string_match_part": [
        ("In 1066, I think", ("1067", "1066", "in 1066,"), 1),
        ("In 1065", ("1067", "1066"), 0),
        ("yes and no", "no", 1),
        ("nothing", "no", 1),  # contained, whatever it means
        ("\n\n", "no", 0),
        ("anything", "", 1),  # every answer contains the empty gold
    ],
    "substring": [("It is a-1.", "a-1", 1), ("It is A-1.", "a-1", 0), ("abxyz", "abxyz", 1)],
    "node_f1": [
        ("Final Answer: [a, b]", ("b", "a"), 1),
        ("I think.\nFinal Answer: [a, b, c]\n\n", "a", 0.5),  # precision 1/3, recall 1
        ("Final Answer:[a, a, a]", "a", 1),  # sets; the card's pattern needs no space
        ("Final Answer: [a]\nThat is all.", "a", 0),  # only the last line counts
        ("Final Answer: [a", "a", 0),
        ("final answer: [a]", "a", 0),
        ("[a]", "a", 0),
        ("", "a", 0),
        ("Final Answer: [ ]", "a", 0),
        ("Final Answer: [a, b]", ("a", "a", "c"), 0.5),
        ("So: Final Answer: [a], [b]", "b", 0),  # greedy: the nodes are "a]" and "[b"
    ],
}


CASES = [(metric, case) for metric, cases in BY_HAND.items() for case in cases]


@pytest.mark.parametrize(("metric", "case"), CASES)
def test_metric_by_hand(metric: str, case: tuple[Any, ...]) -> None:
    answer, gold, expected, *classes = case
    golds = (gold,) if isinstance(gold, str) else gold
    # the package `rouge` adds 1e-8 to P + R
    found = METRICS[metric](answer, golds, *(classes or [()]))
    assert found == pytest.approx(expected, abs=1e-7)
    if metric.startswith("string_match") and official.RULER.exists():
        constants = official.RULER / "official" / "eval_constants.py"
        score = runpy.run_path(str(constants))[metric]
        letters = ("\n" if letter < " " else letter for letter in answer.strip())
        assert score(["".join(letters).strip()], [golds]) == round(100 * expected, 2)


@FIXED
@given(TEXTS, TEXTS)
def test_rouge_equals_the_package(prediction: str, gold: str) -> None:
    from rouge import Rouge

    try:
        scores: Any = Rouge(metrics=["rouge-l"]).get_scores([prediction], [gold], avg=True)
        expected = scores["rouge-l"]["f"]
    except ValueError:  # one text has no sentence
        expected = 0.0
    assert rouge(prediction, gold) == expected


OFFICIAL_CALLS = """
# The frames of the official script: module, loop over rows, metric, and the package's call.
from rouge import Rouge

def metric(prediction, gold):
    try:
        return Rouge().get_scores([prediction], [gold], avg=True)["rouge-l"]["f"]
    except:
        return 0.0

def scorer():
    for words in range(900, 1001):
        if metric("cat", "cat" + " dog" * words) == 0.0:
            return words

if __name__ == "__main__":
    print(scorer())
"""


def test_rouge_scores_0_from_the_length_at_which_the_official_script_fails(tmp_path) -> None:
    """The package recurses once per step; a stretch too long for Python's stack scores 0."""
    script = tmp_path / "official_calls.py"
    script.write_text(OFFICIAL_CALLS)
    process = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    failing = int(process.stdout)
    expected = pytest.approx(2 / 3, abs=1e-7)  # one of one unique word, one of two
    assert rouge("cat", "cat" + " dog" * (failing - 1)) == expected
    assert rouge("cat", "cat" + " dog" * failing) == 0.0
    # with a full stop in the middle there is no such stretch
    assert rouge("cat", "cat" + " dog" * 500 + "." + " dog" * 500) == expected
    # the recursion ends at the beginning of either text, however long the other is
    assert rouge("dog " * 2000 + "cat", "cat") == expected
    assert rouge("cat " * failing, "cat " * failing) == pytest.approx(1.0, abs=1e-7)
    assert rouge("cat " * (failing + 1), "cat " * (failing + 1)) == 0.0


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("cat sat mat", ["dog", "cat mat"], 4 / 5),  # P 2/3, R 1
        ("cat cat cat", ["cat"], 1 / 2),  # repeated words count each time: P 1/3, R 1
        ("Cat, sat", ["cat sat"], 1.0),  # rouge-score lowers and drops punctuation
        ("running", ["run"], 0.0),  # no stemming
        ("", ["cat"], 0.0),
    ],
)
def test_second_score_by_hand(prediction: str, answers: list[str], expected: float) -> None:
    found = second_score(DATASETS["qmsum"], prediction, answers)
    assert found == pytest.approx(expected, abs=1e-12)


@FIXED
@given(TEXTS, TEXTS)
def test_code_similarity_is_that_of_difflib(prediction: str, gold: str) -> None:
    assume(not any(mark in prediction for mark in ("`", "#", "//", "\n")))
    ratio = round(100 * SequenceMatcher(None, prediction, gold).ratio()) / 100
    assert code_similarity(prediction, gold) == (1.0 if prediction == gold else ratio)


WITH_LEVENSHTEIN = """
import sys, types, warnings
warnings.simplefilter("error")

class StringMatcher:  # of python-Levenshtein
    def __init__(self, *texts): pass
    def ratio(self): return 0.01

sys.modules["fuzzywuzzy.StringMatcher"] = stand_in = types.ModuleType("fuzzywuzzy.StringMatcher")
stand_in.StringMatcher = StringMatcher
from fuzzywuzzy import fuzz
from eval.benchmarks.metrics import code_similarity
print(fuzz.ratio("abcd", "abxd"), code_similarity("abcd", "abxd"), fuzz.ratio("abcd", "abxd"))
"""


def test_code_similarity_does_not_depend_on_python_levenshtein() -> None:
    command = [sys.executable, "-c", WITH_LEVENSHTEIN]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (process.stdout, process.stderr) == ("1 0.75 1\n", "")


def test_few_shot_scores_the_first_line_only() -> None:
    first = {name for name in LONGBENCH if DATASETS[name].first_line}
    assert first == {"trec", "triviaqa", "samsum"}
    lines = {"\n\nCity\nState": "City", "\n\n": "", " \nCity": " ", "\r\nCity\rx": "\r"}
    for answer, line in lines.items():
        assert scored_text(DATASETS["trec"], answer) == line
    assert scored_text(DATASETS["qasper"], "\n\nCity\nState") == "\n\nCity\nState"
    assert score_example(DATASETS["triviaqa"], "\ncat\ndog", ["cat"]) == 1.0
    found = score_example(DATASETS["qasper"], "\ncat\ndog", ["cat"])
    assert found == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("name", "answers", "classes", "reason"),
    [
        ("qasper", [], None, "answers is empty"),
        ("trec", ["City"], None, "all_classes"),
        ("trec", ["City"], [], "all_classes"),
        ("passage_retrieval_en", ["Paragraph 1", "12"], None, "'12'"),
    ],
)
def test_unscorable_gold_answers_are_refused(
    name: str, answers: list[str], classes: list[str] | None, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        score_example(DATASETS[name], "12", answers, classes)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1.0], 100.0),
        ([0.0, 1.0, 1.0], 66.67),
        ([1 / 3, 0.5], 41.67),
        # added one by one, as officially: 1e16 + 1 stays 1e16; `sum` of Python 3.12 adds the ones
        ([1e16, 1.0, 1.0, -1e16], 0.0),
    ],
)
def test_dataset_score_by_hand(scores: list[float], expected: float) -> None:
    assert dataset_score(scores) == expected
