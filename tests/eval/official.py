"""An oracle for `eval.benchmarks.metrics`: the official scorer's rules, implemented differently.

Written from LongBench's scoring rules: F1 strikes shared words off a list, and classification uses an explicit
index, which shows how it skips a name. ROUGE-L and `fuzz.ratio` are compared with the packages themselves.
"""

from __future__ import annotations

import difflib
import itertools
import json
import string
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared"
"""Real LongBench rows, scored answers and Llama 2's tokenizer: beside the repository, and never in it."""

LONGBENCH = SHARED / "longbench"


def needs(path: Path) -> pytest.MarkDecorator:
    """Skip a test, with the reason, if the shared material is missing."""
    return pytest.mark.skipif(not path.exists(), reason=f"../shared/{path.relative_to(SHARED)} is absent")


@cache
def shared_rows(folder: str = "") -> dict[str, list[dict[str, Any]]]:
    """{dataset: rows} of ../shared/longbench or of a folder in it; empty if it is missing."""
    files = sorted((LONGBENCH / folder).glob("*.jsonl"))
    return {file.stem: [json.loads(line) for line in file.read_bytes().split(b"\n") if line] for file in files}


def f1(prediction: str, gold: str) -> float:
    """SQuAD's F1: words are struck off the gold list one by one as they are found in the answer."""
    predicted, wanted = _squad_words(prediction), _squad_words(gold)
    left, shared = list(wanted), 0
    for word in predicted:
        if word in left:
            left.remove(word)
            shared += 1
    # 2PR / (P + R) with P = shared/predicted and R = shared/wanted
    return 2 * shared / (len(predicted) + len(wanted)) if shared else 0.0


def _squad_words(text: str) -> list[str]:
    kept = "".join(character for character in text.lower() if character not in set(string.punctuation))
    # Articles are removed if no letter, digit or underscore touches them: between spaces, and also in "a’b".
    words, run = [], ""
    for character in [*kept, " "]:
        if character.isalnum() or character == "_":
            run += character
        else:
            words.append(" " if run in ("a", "an", "the") else run)
            words.append(character)
            run = ""
    return "".join(words).split()


def classification(prediction: str, gold: str, all_classes: list[str]) -> float:
    """The quirk with an explicit index: after a removal, the next name moves to the place already visited."""
    found = [name for name in all_classes if prediction.find(name) >= 0]
    index = 0
    while index < len(found):
        if found[index] != gold and gold.find(found[index]) >= 0:
            # The first equal name is removed, which is this one unless names repeat.
            del found[found.index(found[index])]
        index += 1  # also after a removal: one name is skipped
    return 1 / len(found) if gold in found else 0.0


def numbers(prediction: str, gold: str) -> float:
    """The share of numbers (runs of decimal digits) that equal `gold` as text."""
    runs = [
        "".join(group)
        for is_digit, group in itertools.groupby(prediction, key=lambda character: character.isdecimal())
        if is_digit
    ]
    return sum(run == gold for run in runs) / len(runs) if runs else 0.0


def retrieval(prediction: str, gold: str) -> float:
    _, _, rest = gold.partition("Paragraph ")
    return numbers(prediction, "".join(itertools.takewhile(str.isdecimal, rest)))


def code_similarity(prediction: str, gold: str) -> float:
    start = 0
    while prediction[start : start + 1] == "\n":
        start += 1
    for line in prediction[start:].split("\n"):
        if not ("`" in line or "#" in line or "//" in line):
            break
    else:
        line = ""
    if line == gold:
        return 1.0
    if not line or not gold:
        return 0.0
    matches = sum(block.size for block in difflib.SequenceMatcher(None, line, gold).get_matching_blocks())
    return round(100 * (2.0 * matches / (len(line) + len(gold)))) / 100
