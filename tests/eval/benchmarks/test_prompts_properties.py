"""The prompt builder on arbitrary rows and templates, against Python's own formatting and a letter-by-letter oracle."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import assume, example, given
from hypothesis import strategies as st

from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.prompts import BuiltPrompt, build_prompt
from eval.benchmarks.suite import Example
from lazyllm.models.load import load_tokenizer_of
from lazyllm.spec import ModelSpec
from tests.eval.benchmarks.test_prompts import Characters

# `Characters` treats ids below 3 as special tokens
TEXT_LETTERS = st.characters(codec="utf-8", min_codepoint=3)
TEXT = st.text(TEXT_LETTERS)
SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>")
# with texts of special tokens, letters of several tokens, and white space that tokenizers may drop
BITS = [*SPECIAL, "  \n ", "é", "👩\u200d👧", "\ufffd", "\u2028"]
REAL_TEXT = st.lists(st.text(max_size=20) | st.sampled_from(BITS)).map("".join)
REAL_TEMPLATES = st.sampled_from(["{context}", "Read: {context}\nAsk: {input} ", "{input}{context}"])
LIMITS = st.none() | st.integers(2, 60)
CHATS = st.sampled_from(["none", "llama2", "xgen"])


def row_of(context: str, question: str = "") -> Example:
    return Example("qasper", "one", question, context, ("cat",), (), 3, "en")


def fields_of(row: Example) -> dict[str, Any]:
    return {
        "input": row.input,
        "context": row.context,
        "answers": list(row.answers),
        "length": row.length,
        "dataset": row.dataset,
        "language": row.language,
        "all_classes": None,
        "_id": row.id,
    }


def marked(prompt: BuiltPrompt) -> list[bool]:
    """For each letter of the prompt, whether it belongs to the context."""
    marks = [False] * len(prompt.text)
    end = 0
    for start, stop in prompt.context:
        assert end <= start < stop <= len(prompt.text)  # ascending, disjoint, not empty
        marks[start:stop] = [True] * (stop - start)
        end = stop
    return marks


@cache
def tiny() -> Any:
    return load_tokenizer_of(ModelSpec("tiny"))


@given(
    st.lists(st.sampled_from(["{context}", "{input}", None]), max_size=6),
    st.lists(TEXT, min_size=1, max_size=3),
    st.text(TEXT_LETTERS, min_size=1),  # the loader takes no empty context
    TEXT,
    LIMITS,
    CHATS,
)
def test_prompts_equal_the_letter_by_letter_oracle(
    places: list[str | None], literals: list[str], context: str, question: str, limit: int | None, chat: str
) -> None:
    """With one token per letter: whether each letter is cut, wrapped or marked as context can be checked."""
    pieces = [place or literals[number % len(literals)] for number, place in enumerate(places)]
    template = "".join(
        piece if place else piece.replace("{", "{{").replace("}", "}}")
        for piece, place in zip(pieces, places, strict=True)
    )
    letters: list[tuple[str, bool]] = []
    for piece, place in zip(pieces, places, strict=True):
        text = {"{context}": context, "{input}": question}[place] if place else piece
        letters += [(letter, place == "{context}") for letter in text]
    tokens = 1 + len(letters)  # one for BOS
    truncated = limit is not None and tokens > limit
    if limit is not None and truncated:
        letters = letters[: limit // 2 - 1] + letters[len(letters) - limit // 2 :]
    form = CHAT_FORMATS[chat]
    letters = [(letter, False) for letter in form.before] + letters + [(letter, False) for letter in form.after]

    prompt = build_prompt(row_of(context, question), template, Characters(), limit, CHAT_FORMATS[chat])  # type: ignore[arg-type]
    assert prompt.text == "".join(letter for letter, _ in letters)
    assert prompt.token_ids == (1, *(ord(letter) for letter, _ in letters))
    assert (prompt.tokens_before_truncation, prompt.truncated) == (tokens, truncated)
    assert marked(prompt) == [mark for _, mark in letters]


@given(REAL_TEXT, REAL_TEXT, REAL_TEMPLATES, CHATS)
@example("\x00", "", "{context}", "none")
def test_spans_of_a_real_tokenizer_are_its_tokens_texts(context: str, question: str, template: str, chat: str) -> None:
    row = row_of(context, question)
    prompt = build_prompt(row, template, tiny(), None, CHAT_FORMATS[chat])
    form = CHAT_FORMATS[chat]
    assert prompt.text == f"{form.before}{template.format(**fields_of(row))}{form.after}"
    assert "".join(prompt.text[start:stop] for start, stop in prompt.context) == context
    assert prompt.spans is not None
    assert prompt.spans.shape == (len(prompt.token_ids), 2)
    covered, last = [False] * len(prompt.text), 0
    assert prompt.token_ids[0] == tiny().convert_tokens_to_ids("<|begin|>")
    assert prompt.spans[0].tolist() == [0, 0]
    for token, (start, stop) in zip(prompt.token_ids[1:], prompt.spans[1:].tolist(), strict=True):
        assert 0 <= start <= stop <= len(prompt.text)
        assert last <= start or (start, stop) == (0, 0)
        last = start
        covered[start:stop] = [True] * (stop - start)
        decoded = tiny().decode([token])
        span = prompt.text[start:stop]
        if "\ufffd" not in decoded:  # else a part of a character, and the span is all of it
            assert decoded.strip() == span.strip()
    assert all(done or letter.isspace() for letter, done in zip(prompt.text, covered, strict=True))


@given(st.text(max_size=30))
def test_special_tokens_text_becomes_that_token(text: str) -> None:
    """As in the official pipeline: rows are text, and the tokenizer decides which parts are special tokens."""
    assume(not any(special[:2] in text for special in SPECIAL))
    prompt = build_prompt(row_of(f"{text}<|end|>{text}"), "{context}", tiny())
    end = tiny().convert_tokens_to_ids("<|end|>")
    place = prompt.token_ids.index(end)
    assert prompt.token_ids.count(end) == 1
    assert prompt.spans is not None
    assert prompt.spans[place].tolist() == [len(text), len(text) + len("<|end|>")]
