"""Sentences: as prompt compression cuts a context, and as Selective Context's release does."""

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

# Line breaks of Python's str.splitlines, with \r\n as one
_BREAKS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"
LINE_BREAK = rf"(?:\r\n|[{_BREAKS}])"
# A full stop, but not after a single letter ("J.", "e.g.") or a title; or one of "!?…". Then signs,
# quotes and closing brackets, if any; then white space
_STOP = r"(?<!\b\w)(?<!\b(?:Mr|Ms|Dr|St))(?<!\bMrs)(?<!\bProf)\."
_SENTENCE_END = rf"(?:{_STOP}|[!?…])[.!?…]*[\"'”’)\]]*[^\S{_BREAKS}]+"
_BOUNDARY = re.compile(f"{LINE_BREAK}|{_SENTENCE_END}")
_RELEASED_BOUNDARY = re.compile(r"(?<=[.?])(?<!\w\.\w.)(?<![A-Z][a-z]\.)\s+")


def sentence_starts(text: str) -> list[int]:
    """Find the beginnings of sentences, ascending. A line break ends a sentence too.

    Ours: a rule instead of a model. A sentence ends with a full stop, question or exclamation mark
    and the white space after it, but not after a single letter ("e.g. this") or a title ("Dr. S").
    """
    starts = {0, *(match.end() for match in _BOUNDARY.finditer(text))}
    return sorted(starts - ({len(text)} if text else set()))


def released_sentences(text: str, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield ranges of the sentences in these ranges of the text, as the released code cuts it.

    A sentence ends after a full stop or question mark, but not after "e.g." or "Dr.".
    """
    for start, stop in ranges:
        ends = (match.end() for match in _RELEASED_BOUNDARY.finditer(text[start:stop]))
        bounds = [start, *(start + end for end in ends), stop]
        for first, last in pairwise(bounds):
            sentence = text[first:last]
            if sentence.strip():
                yield last - len(sentence.lstrip()), first + len(sentence.rstrip())
