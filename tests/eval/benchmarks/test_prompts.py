"""Prompts as LongBench builds them: whole real prompts against a pipeline written on the sentencepiece library alone,
and the order of the steps, the wraps and the errors by hand."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.datasets import DATASETS, load_rows
from eval.benchmarks.prompts import build_prompt, end_token_ids
from eval.benchmarks.suite import Dataset, Example
from lazyllm.errors import UserError
from tests.eval import official
from tests.eval.official import LLAMA2, llama2, sentencepiece
from tests.helpers import slow, tiny

EXEMPT = {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
LONGBENCH_NAMES = [name for name, dataset in DATASETS.items() if dataset.suite == "longbench"]
QASPER = DATASETS["qasper"]
ROW = Example("qasper", "one", "|Who?", "A cat\r\nsat.", ("cat",), instruction="Q: ")
QUESTION = replace(ROW, instruction="", context="", input="Who?")


class Characters:
    """A tokenizer with one token per character (its code point) after BOS (1), with offsets."""

    is_fast = True
    eos_token_id = 2
    bos_token, eos_token = "\x01", "\x02"
    chat_template: str | None = None
    around = ("\x01<user>", "<model>")

    def __call__(
        self,
        text: str,
        *,
        truncation: bool,
        add_special_tokens: bool,
        verbose: bool,
        return_offsets_mapping: bool = False,
    ) -> dict[str, Any]:
        assert not truncation
        ids = [1] * add_special_tokens + [ord(character) for character in text]
        offsets = [(0, 0)] * add_special_tokens + [(place, place + 1) for place in range(len(text))]
        return {"input_ids": ids, "offset_mapping": offsets} if return_offsets_mapping else {"input_ids": ids}

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(number) for number in ids if number > 2)

    def get_chat_template(self) -> str:
        return str(self.chat_template)

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool, **_: Any
    ) -> str:
        assert (tokenize, add_generation_prompt, [message["role"] for message in messages]) == (False, True, ["user"])
        return messages[0]["content"].strip().join(self.around)


def prompt_of(row: Example = ROW, tokenizer: Any = None, dataset: Dataset = QASPER, **kwargs: Any):
    return build_prompt(row, dataset, tokenizer or Characters(), **kwargs)


def official_llama2_prompt(name: str, row: dict[str, Any], template: str, limit: int) -> tuple[list[int], int]:
    """(token ids, tokens before truncation), with nothing but sentencepiece and LongBench's description."""
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
@pytest.mark.parametrize("name", [*LONGBENCH_NAMES[::3], *slow(*LONGBENCH_NAMES[1::3], *LONGBENCH_NAMES[2::3])])
def test_llama2_prompts_equal_the_sentencepiece_pipelines(name):
    dataset = DATASETS[name]
    loaded = load_rows(dataset, official.LONGBENCH)
    templates = json.loads((official.LONGBENCH / "config" / "dataset2prompt.json").read_bytes())
    for example, row in zip(loaded.examples, official.shared_rows()[name], strict=True):
        prompt = build_prompt(example, dataset, llama2(), 3500, CHAT_FORMATS["llama2"])
        expected, before = official_llama2_prompt(name, row, templates[name], 3500)
        assert list(prompt.token_ids) == expected
        assert prompt.tokens_before_truncation == before
        assert prompt.truncated == (before > 3500)


@pytest.mark.parametrize(
    ("chat", "around"), [("none", ("", "")), ("llama2", ("[INST]", "[/INST]")), ("auto", ("\x01<user>", "<model>"))]
)
def test_answer_prefix_follows_the_chat_template(chat, around):
    tokenizer = Characters()
    tokenizer.chat_template = "given"
    row = Example("qasper", "one", " Who?", "0123456789", ("1",), instruction="In: ", answer_prefix=" Answer: it is")
    prompt = prompt_of(row, tokenizer, chat=CHAT_FORMATS[chat])
    assert prompt.text == f"{around[0]}In: 0123456789 Who?{around[1]} Answer: it is"
    characters = list(prompt.token_ids[chat != "auto" :])  # the template has written BOS out
    assert characters == [ord(letter) for letter in prompt.text]
    assert [prompt.text[start:end] for start, end in prompt.context] == ["0123456789"]
    assert prompt.spans is not None
    assert len(prompt.spans) == len(prompt.token_ids)


def test_the_template_is_what_the_chat_format_wrote():
    def written(prompt):
        return [prompt.text[slice(*place)] for place in prompt.template]

    with_template = Characters()
    with_template.chat_template = "yes"
    row = replace(ROW, answer_prefix="It is")
    assert written(prompt_of(row)) == []
    assert written(prompt_of(row, chat=CHAT_FORMATS["llama2"])) == ["[INST]", "[/INST]"]
    assert written(prompt_of(row, with_template, chat=CHAT_FORMATS["auto"])) == ["\x01<user>", "<model>"]
    assert written(prompt_of(row, dataset=DATASETS["lcc"], chat=CHAT_FORMATS["llama2"])) == []


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (20, "Q: A cat\r\nsat.|Who?"),  # as many tokens as allowed: nothing is cut
        (19, "Q: A cat" + "sat.|Who?"),  # nine of each end, BOS among the first: "\\r\\n" is removed
        (7, "Q:" + "ho?"),  # int(7 / 2) of each end, BOS among the first three
        (2, "" + "?"),
        (None, "Q: A cat\r\nsat.|Who?"),
    ],
)
def test_long_prompt_loses_its_middle_and_is_wrapped_unless_its_dataset_is_exempt(limit, text):
    for dataset, expected in (("qasper", f"[INST]{text}[/INST]"), ("lcc", text)):
        prompt = prompt_of(dataset=DATASETS[dataset], max_prompt_tokens=limit, chat=CHAT_FORMATS["llama2"])
        assert prompt.text == expected
        assert prompt.token_ids == (1, *map(ord, expected))
        assert prompt.tokens_before_truncation == 1 + len("Q: A cat\r\nsat.|Who?") == 20
        assert prompt.truncated == (limit not in (20, None))
        ids = ",".join(str(number) for number in [1, *map(ord, expected)])
        assert prompt.sha256 == hashlib.sha256(ids.encode()).hexdigest()
    assert {name for name in LONGBENCH_NAMES if not DATASETS[name].chat_wrap} == EXEMPT


@official.needs(official.LONGBENCH)
def test_xgen_format_is_the_published_one():
    header = (official.LONGBENCH / "config" / "xgen_header.txt").read_bytes().decode()
    assert prompt_of(QUESTION, chat=CHAT_FORMATS["xgen"]).text == header + " ### Human: Who?\n###"


def test_newline_ends_samsums_answers_only():
    newline_ends = {name for name in LONGBENCH_NAMES if DATASETS[name].newline_ends}
    assert newline_ends == {"samsum"}
    tokenizer: Any = Characters()
    assert end_token_ids(tokenizer, [7, 8], DATASETS["samsum"]) == (7, 8, ord("\n"))
    assert end_token_ids(tokenizer, [7, 8], DATASETS["qasper"]) == (7, 8)
    assert end_token_ids(tokenizer, 7, DATASETS["qasper"]) == (7,)
    assert end_token_ids(tokenizer, None, DATASETS["qasper"]) == (2,)
    assert end_token_ids(tokenizer, (), DATASETS["samsum"]) == (2, ord("\n"))
    assert end_token_ids(tokenizer, [ord("\n")], DATASETS["samsum"]) == (ord("\n"),)


@official.needs(LLAMA2)
def test_llama2_newline_is_its_byte_token():
    # sentencepiece puts a space token in front of the newline; the official pipeline takes the last one.
    assert sentencepiece().encode("\n")[-1] == sentencepiece().piece_to_id("<0x0A>") == 13
    assert end_token_ids(llama2(), 2, DATASETS["samsum"]) == (2, 13)


def test_build_prompt_refuses_bad_settings():
    with pytest.raises(UserError, match="max_prompt_tokens must be at least 2"):
        prompt_of(max_prompt_tokens=1)
    with pytest.raises(UserError, match=r"chat=auto: .* no chat template: give model.chat=none, llama2 or xgen"):
        prompt_of(chat=CHAT_FORMATS["auto"])


def test_texts_without_tokens_are_refused():
    class Silent(Characters):
        is_fast = False

        def __call__(self, text: str, **_: Any) -> dict[str, Any]:
            return {"input_ids": []}

    tokenizer: Any = Silent()
    with pytest.raises(UserError, match="qasper, row 'one': the prompt has no tokens"):
        prompt_of(tokenizer=tokenizer)
    assert end_token_ids(tokenizer, 7, DATASETS["qasper"]) == (7,)
    with pytest.raises(UserError, match="samsum: a newline ends its answers"):
        end_token_ids(tokenizer, 7, DATASETS["samsum"])


SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>")
# with texts of special tokens, letters of several tokens, and white space that tokenizers may drop
BITS = [*SPECIAL, "  \n ", "é", "👩\u200d👧", "\ufffd", "\u2028"]
REAL_TEXT = st.lists(st.text(max_size=20) | st.sampled_from(BITS)).map("".join)
INSTRUCTIONS = st.sampled_from(["", "Read: "])
CHATS = st.sampled_from(["none", "llama2", "xgen"])


@given(REAL_TEXT, REAL_TEXT, INSTRUCTIONS, CHATS)
@hypothesis.example("\x00", "", "", "none")
def test_spans_of_a_real_tokenizer_are_its_tokens_texts(context: str, asked: str, instruction: str, chat: str) -> None:
    row, form = replace(ROW, instruction=instruction, context=context, input=asked), CHAT_FORMATS[chat]
    prompt = prompt_of(row, tiny()[1], chat=form)
    assert prompt.text == f"{form.before}{instruction}{context}{asked}{form.after}"
    assert "".join(prompt.text[start:stop] for start, stop in prompt.context) == context
    assert prompt.spans is not None
    assert prompt.spans.shape == (len(prompt.token_ids), 2)
    covered, last = [False] * len(prompt.text), 0
    assert prompt.token_ids[0] == tiny()[1].convert_tokens_to_ids("<|begin|>")
    assert prompt.spans[0].tolist() == [0, 0]
    for token, (start, stop) in zip(prompt.token_ids[1:], prompt.spans[1:].tolist(), strict=True):
        assert 0 <= start <= stop <= len(prompt.text)
        assert last <= start or (start, stop) == (0, 0)
        last = start
        covered[start:stop] = [True] * (stop - start)
        decoded = tiny()[1].decode([token])
        span = prompt.text[start:stop]
        if "\ufffd" not in decoded:  # else a part of a character, and the span is all of it
            assert decoded.strip() == span.strip()
    assert all(done or letter.isspace() for letter, done in zip(prompt.text, covered, strict=True))


@given(st.text(max_size=30))
def test_special_tokens_text_becomes_that_token(text: str) -> None:
    """As in the official pipeline: rows are text, and the tokenizer decides which parts are special tokens."""
    assume(not any(special[:2] in text for special in SPECIAL))
    prompt = prompt_of(replace(QUESTION, input=f"{text}<|end|>{text}"), tiny()[1])
    end = tiny()[1].convert_tokens_to_ids("<|end|>")
    place = prompt.token_ids.index(end)
    assert prompt.token_ids.count(end) == 1
    assert prompt.spans is not None
    assert prompt.spans[place].tolist() == [len(text), len(text) + len("<|end|>")]
