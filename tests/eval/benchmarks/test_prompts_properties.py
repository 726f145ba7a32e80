"""The prompt builder on arbitrary rows, with a real tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import assume, example, given
from hypothesis import strategies as st

from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.prompts import build_prompt
from eval.benchmarks.suite import Example
from lazyllm.models.load import load_tokenizer_of
from lazyllm.spec import ModelSpec

SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>")
# with texts of special tokens, letters of several tokens, and white space that tokenizers may drop
BITS = [*SPECIAL, "  \n ", "é", "👩\u200d👧", "\ufffd", "\u2028"]
REAL_TEXT = st.lists(st.text(max_size=20) | st.sampled_from(BITS)).map("".join)
REAL_TEMPLATES = st.sampled_from(["{context}", "Read: {context}\nAsk: {input} ", "{input}{context}"])
CHATS = st.sampled_from(["none", "llama2", "xgen"])


def row_of(context: str, question: str = "") -> Example:
    return Example("qasper", "one", question, context, ("cat",), (), 3, "en")


@cache
def tiny() -> Any:
    return load_tokenizer_of(ModelSpec("tiny"))


@given(REAL_TEXT, REAL_TEXT, REAL_TEMPLATES, CHATS)
@example("\x00", "", "{context}", "none")
def test_spans_of_a_real_tokenizer_are_its_tokens_texts(context: str, question: str, template: str, chat: str) -> None:
    row = row_of(context, question)
    prompt = build_prompt(row, template, tiny(), None, CHAT_FORMATS[chat])
    form = CHAT_FORMATS[chat]
    assert prompt.text == f"{form.before}{template.format(context=context, input=question)}{form.after}"
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
