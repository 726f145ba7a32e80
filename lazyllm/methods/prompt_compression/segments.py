"""Units that prompt compression keeps or drops: sentences (or lines of code) and phrases.

A splitter gives the ascending positions at which a text's units begin. Units have no gaps between them.
"""

import re
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

Splitter = Callable[[str], list[int]]

# Line breaks of Python's str.splitlines, with \r\n as one
_BREAKS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"
LINE_BREAK = rf"(?:\r\n|[{_BREAKS}])"
# A full stop, but not after a single letter ("J.", "e.g.") or a title; or one of "!?…". Then signs, quotes and closing
# brackets, if any; then white space
_STOP = r"(?<!\b\w)(?<!\b(?:Mr|Ms|Dr|St))(?<!\bMrs)(?<!\bProf)\."
_SENTENCE_END = rf"(?:{_STOP}|[!?…])[.!?…]*[\"'”’)\]]*[^\S{_BREAKS}]+"
_BOUNDARY = re.compile(f"{LINE_BREAK}|{_SENTENCE_END}")

SPACY_MODEL = "en_core_web_sm"


def sentence_starts(text: str) -> list[int]:
    """The beginnings of sentences; a line break ends a sentence too, so in code every line is a unit.

    Ours: a rule instead of a model. A sentence ends with a full stop, question or exclamation mark and the white space
    after it, but not after a single letter ("e.g. this", "J. Smith") or a title ("Dr. Smith").
    """
    return sorted({0, *(match.end() for match in _BOUNDARY.finditer(text))} - ({len(text)} if text else set()))


def phrase_starts(text: str, nlp: Callable[[str], Any]) -> list[int]:
    """The beginnings of noun phrases, and of every word and sign outside them (as in Selective Context).

    nlp: a spaCy pipeline with a parser, or a function whose result yields words with their place (`idx`) and has
        `noun_chunks`, each a sequence of words.
    """
    document = nlp(text)
    inside = {word.idx for chunk in document.noun_chunks for word in list(chunk)[1:]}
    return sorted({0, *(word.idx for word in document)} - inside)


def check_spacy() -> None:
    """Raise ValueError with the commands to install if spaCy or its English model is missing. Imports neither."""
    missing = [name for name in ("spacy", SPACY_MODEL) if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"unit='phrase' needs {' and '.join(missing)}, which is not installed: pip install 'lazyllm-bench[phrase]'"
            f", then python -m spacy download {SPACY_MODEL}"
        )


@cache
def load_splitter(unit: str) -> Splitter:
    """The splitter of unit "sentence" or "phrase", loaded once. Raises ValueError as `check_spacy` does."""
    if unit == "sentence":
        return sentence_starts
    check_spacy()
    import spacy  # type: ignore[import-not-found]  # an optional extra, slow to import

    nlp = spacy.load(SPACY_MODEL, exclude=["ner", "lemmatizer"])
    return lambda text: phrase_starts(text, nlp)
