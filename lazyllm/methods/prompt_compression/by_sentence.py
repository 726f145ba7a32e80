"""Self-information of units as Selective Context's released code computes it: one call of the scorer per sentence.

There, each run of white space becomes one space, and a sentence ends after a full stop or question mark, but not after
"e.g." or "Dr.". Each sentence is segmented and scored alone, after the scorer's BOS. A unit's information is the mean
over the scorer's tokens in it. A token that reaches over the ends of several phrases is shared evenly by these; a space
alone inside a phrase counts for nothing.

Source: the authors' package (liyucheng09/Selective_Context, commit 099e651), described and written anew.
Ours: units are positions in the text instead of strings, as it is the model's own tokens that stay or go; a sentence
beyond the scorer's positions is scored in windows; a character that the scorer writes in several tokens is no error.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lazyllm.methods.prompt_compression.segments import load_splitter

_BETWEEN = re.compile(r"(?<=[.?])(?<!\w\.\w.)(?<![A-Z][a-z]\.)\s+")


@dataclass(frozen=True)
class Sentence:
    """A sentence, each run of white space as one space. place: [len(text)] each character's place in the whole text."""

    text: str
    place: np.ndarray

    def ends(self, upto: Iterable[int]) -> np.ndarray:
        """Ends of pieces of `text`, 1 or more, as ends in the whole text."""
        return self.place[np.array([*upto], dtype=int) - 1] + 1


# (sentence) -> the tokens' ends in the whole text [k], their self-information [k]; tokens ascend without gaps
Scorer = Callable[[Sentence], tuple[np.ndarray, np.ndarray]]


def sentences_in(text: str, ranges: Iterable[tuple[int, int]]) -> Iterator[Sentence]:
    """The sentences of the text in these ascending ranges, each of which begins a sentence."""
    for start, stop in ranges:
        bounds = [start, *(start + match.end() for match in _BETWEEN.finditer(text[start:stop])), stop]
        for first, last in pairwise(bounds):
            found = [*re.finditer(r"\S|(?<=\S)\s+(?=\S)", text[first:last])]
            if found:
                signs = "".join(" " if match[0].isspace() else match[0] for match in found)
                yield Sentence(signs, np.array([first + match.start() for match in found], dtype=int))


def units_by_sentence(
    text: str, ranges: Iterable[tuple[int, int]], unit: str, score: Scorer
) -> tuple[np.ndarray, np.ndarray]:
    """The beginnings of the units in the text [u], ascending, and their self-information [u].

    ranges: of the text, as in `sentences_in`. unit: "sentence", "phrase" or "token" (the scorer's).
    """
    begins, info = list[np.ndarray](), list[np.ndarray]()
    for sentence in sentences_in(text, ranges):
        token_ends, of_tokens = score(sentence)
        token_starts = np.minimum([sentence.place[0], *token_ends[:-1]], token_ends - 1)
        if unit == "token":
            begins.append(token_starts)
            info.append(of_tokens)
        elif unit == "sentence":
            begins.append(sentence.place[:1])
            info.append(of_tokens.mean(keepdims=True))
        else:
            starts = load_splitter(unit)(sentence.text)
            ends = sentence.ends([*(len(sentence.text[:start].rstrip()) for start in starts[1:]), len(sentence.text)])
            spaces = [text[start:end].isspace() for start, end in zip(token_starts, token_ends, strict=True)]
            begins.append(sentence.place[starts])
            info.append(of_phrases(ends, token_starts, token_ends, of_tokens, np.array(spaces)))
    return np.concatenate(begins), np.concatenate(info)


def of_phrases(
    ends: np.ndarray, token_starts: np.ndarray, token_ends: np.ndarray, info: np.ndarray, spaces: np.ndarray
) -> np.ndarray:
    """[u] mean self-information of a sentence's phrases, which end at `ends` [u], the last one with the sentence.

    token_starts, token_ends, info: [k] of its tokens. spaces: [k] bool, the tokens that are only white space.
    """
    first, after = (np.searchsorted(ends, at, side="right") for at in (token_starts, token_ends))
    ended = after - first  # phrases that end in the token
    counts = np.where((ended == 0) & spaces, 0, np.maximum(ended, 1))  # number of phrases that share the token
    phrase = np.concatenate([np.arange(at, at + count) for at, count in zip(first, counts, strict=True)])  # indices
    return np.bincount(phrase, weights=np.repeat(info / np.maximum(ended, 1), counts)) / np.bincount(phrase)
