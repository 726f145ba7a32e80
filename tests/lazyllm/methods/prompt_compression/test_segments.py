"""Beginnings of sentences, lines and phrases, determined by hand; and the error if spaCy is missing."""

from importlib.util import find_spec

import pytest

from lazyllm.methods import PromptCompression
from lazyllm.methods.prompt_compression import segments
from lazyllm.methods.prompt_compression.segments import (
    check_spacy,
    load_splitter,
    sentence_starts,
)


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
        ["Dr. Smith and J. F. Kennedy met, e.g. in the U.S. Senate. ", "Mrs. Hay, Mr. Po and Prof. Ed did not."],
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
    if text == "One. \nTwo.\n":  # the line break after the white space is a separate unit, which is always kept
        sentences = ["One. ", "\n", "Two.\n"]
    assert found == sentences


@pytest.mark.phrase
def test_phrases_by_spacys_english_model() -> None:
    if find_spec("spacy") is None or find_spec(segments.SPACY_MODEL) is None:
        pytest.skip("spaCy's English model is not installed: .ci/run downloads it")
    split = load_splitter("phrase")
    text = "The old man saw a very small dog. Its owner, Anna Smith, had left two red balls in the garden."
    assert pieces(text, split(text)) == [
        "The old man ", "saw ", "a very small dog", ". ", "Its owner", ", ", "Anna Smith", ", ", "had ", "left ",
        "two red balls ", "in ", "the garden", ".",
    ]  # fmt: skip


@pytest.mark.parametrize(("there", "message"), [((), "spacy and en_core"), (("spacy",), "needs en_core")])
def test_missing_spacy_or_its_model_is_named(there: tuple[str, ...], message: str, monkeypatch) -> None:
    monkeypatch.setattr(segments, "find_spec", lambda name: name if name in there else None)
    for ask in (check_spacy, lambda: load_splitter("phrase"), lambda: PromptCompression(0.5, "phrase").check(None)):
        with pytest.raises(ValueError, match=rf"{message}.* python -m spacy download en_core_web_sm$"):
            ask()
    monkeypatch.setattr(segments, "find_spec", lambda name: name)
    check_spacy()
