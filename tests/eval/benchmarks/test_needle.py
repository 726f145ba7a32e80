"""Needles: their places, lengths of prompts, haystacks, and refused settings."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.needle import NeedleSettings
from eval.benchmarks.prompts import build_prompt
from eval.benchmarks.suite import Example, LoadedDataset
from eval.run.prepare import prepare
from lazyllm.errors import UserError
from lazyllm.models.tokenizers import load_tokenizer_of
from lazyllm.spec import ModelSpec
from tests.eval import official
from tests.eval.benchmarks.loading import load
from tests.runs import checked

TINY = ModelSpec("tiny")
LLAMA2 = ModelSpec("llama2", load_format="dummy", tokenizer=str(official.LLAMA2))
NEEDS_LLAMA2 = official.needs(official.LLAMA2)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
SENTENCES = [f" {sentence}." for sentence in NOISE.rstrip(".").split(". ")]


def made(model: ModelSpec = TINY, chat: str = "none", **options: Any) -> LoadedDataset:
    settings = NeedleSettings(**options)
    return load("needle", model=model, chat=CHAT_FORMATS[chat], options=settings)


def needle_of(example: Example) -> str:
    pattern = rf"One of the special magic numbers for \w+-\w+ is: {example.answers[0]}\."
    (needle,) = re.findall(pattern, example.context)
    return needle


@cache
def tokenizer_of(model: ModelSpec) -> Any:
    return load_tokenizer_of(model)


def size(model: ModelSpec, text: str) -> int:
    return len(tokenizer_of(model)(text, add_special_tokens=False)["input_ids"])


def check_length(example: Example, length: int, model: ModelSpec, chat: str = "none") -> None:
    """Counted from the whole prompt: it fits, and one more sentence would not."""
    prompt = build_prompt(example, DATASETS["needle"], tokenizer_of(model), chat=CHAT_FORMATS[chat])
    longest = max(size(model, sentence) for sentence in SENTENCES)
    assert length - longest - 2 < len(prompt.token_ids) + 32 <= length


@pytest.mark.parametrize(
    "model", [TINY, pytest.param(LLAMA2, marks=NEEDS_LLAMA2)], ids=["tiny", "llama2"]
)
@pytest.mark.parametrize("chat", ["none", "llama2"])
def test_rows_have_every_length_at_every_depth(model: ModelSpec, chat: str) -> None:
    lengths, depths = [300, 701], [0, 33, 100]
    loaded = made(model, chat, lengths=lengths, depths=depths, repeats=2)
    assert loaded.max_new_tokens == 32
    assert [example.groups for example in loaded.examples] == [
        (f"length={length}", f"depth={depth}")
        for _ in range(2)
        for length in lengths
        for depth in depths
    ]
    assert len({example.id for example in loaded.examples}) == 12
    assert len({example.answers for example in loaded.examples}) == 12
    longest = max(size(model, sentence) for sentence in SENTENCES)
    for example in loaded.examples:
        length, depth = (int(group.partition("=")[2]) for group in example.groups)
        check_length(example, length, model, chat)
        needle = needle_of(example)
        assert example.context.count(example.answers[0]) == example.context.count(needle) == 1
        before, after = (size(model, part) for part in example.context.split(needle))
        # the first sentence end at or after the depth; white space may count on either side
        wanted = depth * (before + after) / 100
        assert wanted - 1 <= before < wanted + longest + 1
        assert example.answers[0] not in example.instruction + example.input + example.answer_prefix
        row = example.official
        assert (row["length"], row["depth"], row["outputs"]) == (length, depth, [*example.answers])
        assert row["input"] == example.instruction + example.context + example.input


@NEEDS_LLAMA2
def test_haystack_is_noise_or_the_users_text(tmp_path: Path) -> None:
    noise = made(LLAMA2, lengths=[400], depths=[50]).examples[0]
    assert (f"{NOISE} " * 30).startswith(noise.context.replace(f"{needle_of(noise)} ", ""))
    words = " ".join(f"w{number}" for number in range(100))
    text = f"First words!  Then\nmore? {words}. Last."
    (tmp_path / "one.txt").write_text(text)
    found = made(LLAMA2, lengths=[2000], depths=[50], haystack=str(tmp_path)).examples[0]
    rest = found.context.replace(f"{needle_of(found)} ", "")
    assert ((" ".join(text.split()) + " ") * 30).startswith(rest)
    # without sentences, needles stand between parts of at most 40 words
    (tmp_path / "one.txt").write_text("word " * 3000)
    options: Any = {"lengths": [1000], "depths": [0, 50], "haystack": str(tmp_path / "one.txt")}
    for example in made(LLAMA2, **options).examples:
        prompt = build_prompt(example, DATASETS["needle"], official.llama2())
        assert 1000 - 42 < len(prompt.token_ids) + 32 <= 1000


def test_other_needles_have_other_keys_and_the_same_room() -> None:
    """The needle stands where it was, and the prompt is as long as without the others."""
    loaded, orders = made(lengths=[900], depths=[0, 50, 100], others=4), set[int]()
    for example in loaded.examples:
        found = re.findall(r"numbers for (\w+-\w+) is: (\d{7})\.", example.context)
        assert len({key for key, _ in found}) == len(found) == 5
        assert [value for key, value in found if key in example.input] == [*example.answers]
        assert needle_of(example).endswith(f"is: {example.answers[0]}.")
        check_length(example, 900, TINY)
        orders.add([value for _, value in found].index(example.answers[0]))
    first, *_, last = loaded.examples
    assert first.context.startswith(needle_of(first))
    assert last.context.endswith(needle_of(last))
    assert len(orders) > 1


def test_data_hash_depends_on_every_setting_but_not_on_the_number_of_rows() -> None:
    def data(chat: str = "none", **options: Any) -> str:
        return made(chat=chat, **{"lengths": [500], "depths": [0, 50], **options}).data_sha256

    assert data() == data(repeats=2)
    changes: list[Any] = [{"seed": 1}, {"lengths": [499]}, {"depths": [0, 51]}, {"others": 1}]
    assert len({data(), data("llama2"), *(data(**change) for change in changes)}) == 6


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        ("[20]", r"lengths: 20 is too short: needle, question and answer alone take \d+ tokens"),
        ("[512,5000]", r".* exceed the model's 4096 positions: lower needle\.lengths"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lengths: str, reason: str) -> None:
    config = checked("model=tiny", "dataset=needle", f"needle.lengths={lengths}")
    with pytest.raises(UserError, match=rf"needle[.:]\s?{reason}"):
        prepare(config)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lengths": []}, "a list of different numbers"),
        ({"lengths": [512, 512]}, "a list of different numbers"),
        ({"haystack": "nowhere.txt"}, "a text file or a folder, but it does not exist"),
    ],
)
def test_settings_without_rows_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        NeedleSettings(**options)


def test_empty_texts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(" \n")
    with pytest.raises(UserError, match=r"no text to hide needles in; give needle\.haystack=FILE"):
        made(LLAMA2, haystack=str(tmp_path))
