"""Where the units of a text begin: sentences (or lines of code) and phrases, which prompt compression keeps or drops.

A splitter is a function from a text to the ascending places at which its units begin. Units follow one another without
gaps, so these places are all there is to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from typing import Any

Splitter = Callable[[str], list[int]]

# What ends a line in Python's str.splitlines, \r\n as one
_BREAKS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"
LINE_BREAK = rf"(?:\r\n|[{_BREAKS}])"
# A full stop that closes no single letter ("J.", "e.g.") and no title, or another sign; the signs, quotes and brackets
# that close with it; and the white space behind
_STOP = r"(?<!\b\w)(?<!\b(?:Mr|Ms|Dr|St))(?<!\bMrs)(?<!\bProf)\."
_SENTENCE_END = rf"(?:{_STOP}|[!?…])[.!?…]*[\"'”’)\]]*[^\S{_BREAKS}]+"
_BOUNDARY = re.compile(f"{LINE_BREAK}|{_SENTENCE_END}")

SPACY_MODEL = "en_core_web_sm"


def sentence_starts(text: str) -> list[int]:
    """Where sentences begin; a line break ends one too, so that in code every line is a unit.

    Ours: a rule and no model. A sentence ends with a full stop, question or exclamation mark and the white space behind
    it, but not after a single letter ("e.g. this", "J. Smith") or a title ("Dr. Smith").
    """
    return sorted({0, *(match.end() for match in _BOUNDARY.finditer(text))} - ({len(text)} if text else set()))


def phrase_starts(text: str, nlp: Callable[[str], Any]) -> list[int]:
    """Where noun phrases begin, and every word and sign that belongs to none (as in Selective Context).

    nlp: a spaCy pipeline with a parser, or what behaves like one: its document yields words that know their place
        (`idx`) and has `noun_chunks`, each a sequence of words.
    """
    document = nlp(text)
    inside = {word.idx for chunk in document.noun_chunks for word in list(chunk)[1:]}
    return sorted({0, *(word.idx for word in document)} - inside)


def check_spacy() -> None:
    """Raise ValueError, saying what to install, if spaCy or its English model is missing. Imports neither."""
    model = f"python -m spacy download {SPACY_MODEL}"
    if find_spec("spacy") is None:
        raise ValueError(
            f"unit='phrase' finds noun phrases with spaCy, which is not installed: pip install 'lazyllm-bench[phrase]' "
            f"(or pip install spacy), then {model}"
        )
    if find_spec(SPACY_MODEL) is None:
        raise ValueError(f"unit='phrase' needs spaCy's English model {SPACY_MODEL}, which is not installed: {model}")


@cache
def load_splitter(unit: str) -> Splitter:
    """The splitter of unit "sentence" or "phrase", loaded once. Raises ValueError as `check_spacy` does."""
    if unit == "sentence":
        return sentence_starts
    check_spacy()
    import spacy  # type: ignore[import-not-found]  # an optional extra, slow to import

    nlp = spacy.load(SPACY_MODEL, exclude=["ner", "lemmatizer"])
    return lambda text: phrase_starts(text, nlp)


def starts_in(text: str, ranges: Iterable[tuple[int, int]], split: Splitter) -> list[int]:
    """Where the units of these ascending ranges of `text` begin, each range split by itself."""
    return [start + place for start, end in ranges for place in split(text[start:end])]
