"""Prompts as LongBench builds them, and the part of them that methods may shorten.

Whole real prompts against a pipeline written on the sentencepiece library alone; the order of the
steps, the wraps, the cut and the errors by hand.
"""

import hashlib
import json
import re
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.embedded import TEMPLATES
from eval.benchmarks.prompts import build_prompt, end_token_ids
from eval.benchmarks.suite import Example
from lazyllm.errors import UserError
from lazyllm.methods import PromptCompression
from lazyllm.methods.prompt_compression import droppable
from tests.eval import official
from tests.eval.benchmarks.loading import LONGBENCH, Characters, context_of, load, prompt_of
from tests.eval.official import LLAMA2, llama2, sentencepiece
from tests.helpers import slow, tiny

EXEMPT = {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
QASPER, LCC, SAMSUM = (DATASETS[name] for name in ("qasper", "lcc", "samsum"))
ROW = Example("qasper", "one", "|Who?", "A cat\r\nsat.", ("cat",), instruction="Q: ")
DIGITS = replace(ROW, context="0123456789")  # 3 + 10 + 5 characters
QUESTION = replace(ROW, instruction="", context="", input="Who?")


def with_template() -> Characters:
    tokenizer = Characters()
    tokenizer.chat_template = "given"
    return tokenizer


def official_llama2_prompt(
    name: str, row: dict[str, Any], template: str, limit: int
) -> tuple[list[int], int]:
    """(token ids, tokens before truncation) by sentencepiece and LongBench's description alone."""
    text = template.format(**row)
    ids = [1, *sentencepiece().encode(text)]
    before = len(ids)
    if before > limit:
        half = int(limit / 2)
        left, right = ids[:half], ids[-half:]
        text = sentencepiece().decode(left[1:]) + sentencepiece().decode(right)
    if name not in EXEMPT:
        text = "[INST]" + text + "[/INST]"
    return [1, *sentencepiece().encode(text)], before


@official.needs(LLAMA2)
@official.needs(official.LONGBENCH)
@pytest.mark.parametrize("name", [*LONGBENCH[::3], *slow(*LONGBENCH[1::3], *LONGBENCH[2::3])])
def test_llama2_prompts_equal_the_sentencepiece_pipelines(name: str) -> None:
    file = official.LONGBENCH / "config" / "dataset2prompt.json"
    template = json.loads(file.read_bytes())[name]
    examples = load(name, official.LONGBENCH).examples
    for example, row in zip(examples, official.shared_rows()[name], strict=True):
        prompt = build_prompt(example, DATASETS[name], llama2(), 3500, CHAT_FORMATS["llama2"])
        expected, before = official_llama2_prompt(name, row, template, 3500)
        assert list(prompt.token_ids) == expected
        assert (prompt.uncut_tokens, prompt.truncated) == (before, before > 3500)


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (20, "Q: A cat\r\nsat.|Who?"),  # as many tokens as allowed: nothing is cut
        (19, "Q: A cat" + "sat.|Who?"),  # nine of each end, BOS among the first
        (7, "Q:" + "ho?"),  # int(7 / 2) of each end
        (2, "" + "?"),
        (None, "Q: A cat\r\nsat.|Who?"),
    ],
)
def test_long_prompt_loses_its_middle_and_is_wrapped_unless_its_dataset_is_exempt(
    limit: int | None, text: str
) -> None:
    for dataset, expected in ((QASPER, f"[INST]{text}[/INST]"), (LCC, text)):
        chat = CHAT_FORMATS["llama2"]
        prompt = prompt_of(ROW, dataset=dataset, max_prompt_tokens=limit, chat=chat)
        assert prompt.text == expected
        assert prompt.token_ids == (1, *map(ord, expected))
        assert prompt.uncut_tokens == 1 + len("Q: A cat\r\nsat.|Who?") == 20
        assert prompt.truncated == (limit not in (20, None))
        ids = ",".join(map(str, [1, *map(ord, expected)]))
        assert prompt.sha256 == hashlib.sha256(ids.encode()).hexdigest()
    assert {name for name in LONGBENCH if not DATASETS[name].chat_wrap} == EXEMPT


@pytest.mark.parametrize(
    ("chat", "around"),
    [
        ("none", ("", "")),
        ("llama2", ("[INST]", "[/INST]")),
        ("auto", ("\x01<user>", "<model>")),  # the template has written BOS out
    ],
)
def test_answer_prefix_follows_the_chat_template(chat: str, around: tuple[str, str]) -> None:
    row = replace(DIGITS, answer_prefix=" It is")
    prompt = prompt_of(row, with_template(), chat=CHAT_FORMATS[chat])
    assert prompt.text == f"{around[0]}Q: 0123456789|Who?{around[1]} It is"
    assert [*prompt.token_ids[chat != "auto" :]] == [*map(ord, prompt.text)]
    assert context_of(prompt) == ["0123456789"]
    assert [prompt.text[slice(*place)] for place in prompt.template] == [*filter(None, around)]
    assert prompt.spans is not None
    assert len(prompt.spans) == len(prompt.token_ids)
    exempt = prompt_of(row, with_template(), dataset=LCC, chat=CHAT_FORMATS[chat])
    assert (exempt.text, exempt.template) == ("Q: 0123456789|Who? It is", ())


@official.needs(official.LONGBENCH)
def test_xgen_format_is_the_published_one() -> None:
    header = (official.LONGBENCH / "config" / "xgen_header.txt").read_bytes().decode()
    prompt = prompt_of(QUESTION, chat=CHAT_FORMATS["xgen"])
    assert prompt.text == header + " ### Human: Who?\n###"


def test_newline_ends_samsums_answers_only() -> None:
    assert {name for name in LONGBENCH if DATASETS[name].newline_ends} == {"samsum"}
    tokenizer: Any = Characters()
    newline = ord("\n")
    for ends, dataset, expected in (
        ([7, 8], SAMSUM, (7, 8, newline)),
        ([7, 8], QASPER, (7, 8)),
        (7, QASPER, (7,)),
        (None, QASPER, (2,)),
        ((), SAMSUM, (2, newline)),
        ([newline], SAMSUM, (newline,)),
    ):
        assert end_token_ids(tokenizer, ends, dataset) == expected


@official.needs(LLAMA2)
def test_llama2_newline_is_its_byte_token() -> None:
    # sentencepiece puts a space token before the newline; the official pipeline takes the last one
    newline = sentencepiece().piece_to_id("<0x0A>")
    assert sentencepiece().encode("\n")[-1] == newline == 13
    assert end_token_ids(llama2(), 2, SAMSUM) == (2, 13)


def test_bad_settings_and_texts_without_tokens_are_refused() -> None:
    class Silent(Characters):
        is_fast = False

        def __call__(self, text: str, **_: Any) -> dict[str, Any]:
            return {"input_ids": []}

    with pytest.raises(UserError, match="max_prompt_tokens must be at least 2"):
        prompt_of(ROW, max_prompt_tokens=1)
    reason = r"chat=auto: .* no chat template: give model.chat=none, llama2 or xgen"
    with pytest.raises(UserError, match=reason):
        prompt_of(ROW, chat=CHAT_FORMATS["auto"])
    tokenizer: Any = Silent()
    with pytest.raises(UserError, match="qasper, row 'one': the prompt has no tokens"):
        prompt_of(ROW, tokenizer)
    assert end_token_ids(tokenizer, 7, QASPER) == (7,)
    with pytest.raises(UserError, match="samsum: a newline ends its answers"):
        end_token_ids(tokenizer, 7, SAMSUM)


SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>")
# with texts of special tokens, letters of several tokens, and white space that may be dropped
BITS = [*SPECIAL, "  \n ", "é", "👩\u200d👧", "\ufffd", "\u2028"]
REAL_TEXT = st.lists(st.text(max_size=20) | st.sampled_from(BITS)).map("".join)


@given(
    REAL_TEXT,
    REAL_TEXT,
    st.sampled_from(["", "Read: "]),
    st.sampled_from(["none", "llama2", "xgen"]),
)
@hypothesis.example("\x00", "", "", "none")
def test_spans_of_a_real_tokenizer_are_its_tokens_texts(
    context: str, question: str, instruction: str, chat: str
) -> None:
    row = replace(ROW, instruction=instruction, context=context, input=question)
    tokenizer, form = tiny()[1], CHAT_FORMATS[chat]
    prompt = prompt_of(row, tokenizer, chat=form)
    assert prompt.text == f"{form.before}{instruction}{context}{question}{form.after}"
    assert "".join(context_of(prompt)) == context
    assert prompt.spans is not None
    assert prompt.spans.shape == (len(prompt.token_ids), 2)
    assert prompt.token_ids[0] == tokenizer.convert_tokens_to_ids("<|begin|>")
    assert prompt.spans[0].tolist() == [0, 0]
    covered, last = set[int](), 0
    for token, (start, stop) in zip(prompt.token_ids[1:], prompt.spans[1:].tolist(), strict=True):
        assert 0 <= start <= stop <= len(prompt.text)
        assert last <= start or (start, stop) == (0, 0)
        last = start
        covered |= {*range(start, stop)}
        decoded = tokenizer.decode([token])
        if "\ufffd" not in decoded:  # else a part of a character, and the span is all of it
            assert decoded.strip() == prompt.text[start:stop].strip()
    left = {place for place in range(len(prompt.text)) if not prompt.text[place].isspace()}
    assert left <= covered


@given(st.text(max_size=30))
def test_special_tokens_text_becomes_that_token(text: str) -> None:
    """As in the official pipeline: the tokenizer decides which parts are special tokens."""
    assume(not any(special[:2] in text for special in SPECIAL))
    prompt = prompt_of(replace(QUESTION, input=f"{text}<|end|>{text}"), tiny()[1])
    end = tiny()[1].convert_tokens_to_ids("<|end|>")
    assert prompt.token_ids.count(end) == 1
    assert prompt.spans is not None
    span = prompt.spans[prompt.token_ids.index(end)].tolist()
    assert span == [len(text), len(text) + len("<|end|>")]


# The part that may be shortened


@pytest.mark.parametrize(
    ("changes", "limit", "context"),
    [
        ({}, None, ["0123456789"]),
        ({}, 19, ["0123456789"]),
        ({}, 18, ["01234" + "6789"]),  # nine tokens of each end, BOS among the first: one range
        ({}, 12, ["01" + "9"]),
        ({}, 10, ["0"]),  # "Q: 0" and "|Who?"
        ({}, 8, []),  # "Q: " and "Who?"
        ({}, 6, []),  # "Q:" and "ho?": the cut reaches into both
        # in one half alone: "Q: 0123|a" and "g question"; "a ve" and "123|Q"
        ({"context": "0123", "input": "|a very long question"}, 20, ["0123"]),
        ({"context": "0123", "input": "|Q", "instruction": "a very long one "}, 10, ["123"]),
    ],
)
def test_context_after_the_cut(
    changes: dict[str, str], limit: int | None, context: list[str]
) -> None:
    row = replace(DIGITS, **changes)
    for chat in ("none", "llama2", "xgen"):
        prompt = prompt_of(row, max_prompt_tokens=limit, chat=CHAT_FORMATS[chat])
        assert context_of(prompt) == context


@pytest.mark.parametrize(
    ("limit", "context", "text"),
    [
        (None, ["q: aa\n", "\nq: cc\n"], "Q: q: aa\nA: bb\nq: cc\nA: dd|Who?"),
        # cut between "A: " and "bb": the pattern has seen the whole context before
        (26, ["q: aa\n", "cc\n"], "Q: q: aa\nA: cc\nA: dd|Who?"),
        (38, ["q: aa\n", "\nq: cc\n"], "Q: q: aa\nA: bb\nq: cc\nA: dd|Who?"),
    ],
)
def test_protected_text_splits_the_context_also_at_the_cut(
    limit: int | None, context: list[str], text: str
) -> None:
    row = replace(ROW, context="q: aa\nA: bb\nq: cc\nA: dd")
    dataset = replace(QASPER, protected="^A:.*")
    prompt = prompt_of(row, dataset=dataset, max_prompt_tokens=limit)
    assert (context_of(prompt), prompt.text) == (context, text)
    assert prompt.token_ids == prompt_of(row, max_prompt_tokens=limit).token_ids


def test_context_is_found_in_the_tokenizers_chat_template() -> None:
    tokenizer, chat = with_template(), CHAT_FORMATS["auto"]
    spaced = replace(DIGITS, instruction="", context=" 123 ", input="")  # the template strips
    assert context_of(prompt_of(spaced, tokenizer, chat=chat)) == ["123"]
    tokenizer.around = ("Q: 0123456789|Who? ", "")  # if it occurs twice, its place is unknown
    prompt = prompt_of(DIGITS, tokenizer, chat=chat)
    assert prompt.context == ()
    with pytest.raises(ValueError, match="chat template changes the prompt's text"):
        PromptCompression(0.5).check_prompt(prompt.as_input())


@official.needs(LLAMA2)
def test_character_at_the_cut_belongs_to_no_context() -> None:
    smile = "\U0001f602"  # four byte tokens
    row = replace(ROW, instruction="Say: ", context=f"ha {smile}" * 30, input="\nWho?")
    broken = 0
    for limit in range(60, 76):
        prompt = prompt_of(row, llama2(), max_prompt_tokens=limit)
        found = context_of(prompt)
        inner = prompt.text.removeprefix("Say: ").removesuffix("\nWho?")
        assert "".join(found) == inner.replace("\ufffd", "")
        assert (len(found) == 2) == ("\ufffd" in prompt.text)
        broken += "\ufffd" in prompt.text
        assert prompt.spans is not None
        places = droppable(prompt.as_input())
        gone = {prompt.text[slice(*prompt.spans[place])] for place in places}
        assert smile in gone
        assert "\ufffd" not in gone
    assert 0 < broken < 16


def places_of_answers(name: str, context: str) -> set[int]:
    """Places in a few-shot context that belong to an answer or a label, line by line."""
    places = set[int]()
    start, in_answer = 0, False
    for line in context.split("\n"):
        label = line.split(" ")[0]
        if name == "trec":
            in_answer = label == "Type:"
            places |= {*range(start, start + len("Question:"))}
        elif name == "triviaqa":
            in_answer = line == "Question:" or (in_answer and line != "Passage:")
        else:
            in_answer = label == "Summary:" or (in_answer and label != "Dialogue:")
        if label in ("Dialogue:", "Passage:"):
            places |= {*range(start, start + len(label))}
        if in_answer:
            places |= {*range(start, start + len(line) + 1)}
        start += len(line) + 1
    return places


@official.needs(official.LONGBENCH)
@pytest.mark.parametrize(
    ("name", "label"), [("trec", "Question:"), ("triviaqa", "Passage:"), ("samsum", "Dialogue:")]
)
def test_context_of_a_real_few_shot_row_holds_no_answer(name: str, label: str) -> None:
    """One answer per label line; contexts are whole, so no line is cut."""
    for row in load(name, official.LONGBENCH).examples:
        prompt = prompt_of(replace(row, instruction="", input=""), dataset=DATASETS[name])
        context = {place for span in prompt.context for place in range(*span)}
        answers = places_of_answers(name, row.context)
        assert answers
        assert not {place for place in context & answers if prompt.text[place] != "\n"}
        # each example's text is between its label and its answer
        texts = [text for text in context_of(prompt) if text.strip()]
        assert len(texts) == sum(line.startswith(label) for line in row.context.split("\n"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_words_of_an_embedded_rows_context_may_go(name: str) -> None:
    for example in load(name).examples[:6]:
        prompt = build_prompt(example, DATASETS[name], tiny()[1])
        assert prompt.spans is not None
        gone = droppable(prompt.as_input()).tolist()
        spans = enumerate(prompt.spans.tolist())
        left = "".join(prompt.text[slice(*span)] for place, span in spans if place not in gone)
        question = example.official["input"]
        head, tail = TEMPLATES[name].format(context="\0", input=question).split("\0")
        assert left.startswith(head)
        assert left.endswith(tail)
        assert left.count("\n") == prompt.text.count("\n")
        assert len(gone) > len(prompt.token_ids) / 2
        if name == "shots":
            lines = (f"Example {line.split(' ')[-1]}" for line in example.context.split("\n"))
            assert left == head + "\n".join(lines) + tail
        if name == "complete":  # the first word of an indented line holds part of its indentation
            first_words = re.compile(r"^  \w*", re.MULTILINE)
            assert first_words.findall(left) == first_words.findall(prompt.text)
            assert max(len(line.split()) for line in left.split("\n")[1:-1]) == 1
