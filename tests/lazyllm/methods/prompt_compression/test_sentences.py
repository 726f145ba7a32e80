"""Beginnings of sentences and lines, determined by hand."""

import pytest

from lazyllm.methods.prompt_compression.sentences import sentence_starts


def pieces(text: str, starts: list[int]) -> list[str]:
    assert starts == sorted(set(starts))
    assert starts[0] == 0
    return [text[start:stop] for start, stop in zip(starts, [*starts[1:], len(text)], strict=True)]


@pytest.mark.parametrize(
    "sentences",
    [
        [""],
        ["One"],
        ["One. ", "Two? ", "Three!"],
        ["all in small letters. ", "the second one."],
        ['"Really?!" ', "(He did.)  ", "So… ", "well... ", "yes."],
        [
            "Dr. Smith and J. F. Kennedy met, e.g. in the U.S. Senate. ",
            "Mrs. Hay, Mr. Po and Prof. Ed did not.",
        ],
        ["3.5 of 4.0 is no end. ", "Nor is file.py."],
        ["Is this plan B? ", "Yes."],
        ["first line\n", "second line\r\n", "\n", "third\r", "fourth\u2028", "fifth"],
        ["def f(x):\n", "    return x.y\n", "\n", "print(f(1))\n"],
        ["One. \n", "Two.\n"],
    ],
)
def test_sentences(sentences: list[str]) -> None:
    text = "".join(sentences)
    found = pieces(text, sentence_starts(text))
    if (
        text == "One. \nTwo.\n"
    ):  # the line break after the white space is a separate unit, which is always kept
        sentences = ["One. ", "\n", "Two.\n"]
    assert found == sentences
