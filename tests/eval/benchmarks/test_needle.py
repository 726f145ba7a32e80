"""Needles: their places, lengths of prompts, refused settings, and the heat map."""

import re
from typing import Any

import pytest
from eval.run.run import prepare

from eval.analysis.table import figures
from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.needle import SUITE, NeedleConfig
from eval.benchmarks.prompts import build_prompt
from eval.benchmarks.suite import DataSettings
from eval.store.results import Results
from lazyllm.errors import UserError
from lazyllm.models.tokenizers import load_tokenizer_of
from lazyllm.spec import ModelSpec
from tests.eval import official
from tests.eval.made import stored
from tests.eval.store.visits import visit
from tests.runs import run_of

DATASET = DATASETS["needle"]
LLAMA2 = ModelSpec("llama2", load_format="dummy", tokenizer=str(official.LLAMA2))
NEEDS_LLAMA2 = official.needs(official.LLAMA2)
MODELS = [ModelSpec("tiny"), pytest.param(LLAMA2, marks=NEEDS_LLAMA2)]
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def settings_of(model: ModelSpec = MODELS[0], chat: str = "none", limit: int | None = None, **options: Any):
    return DataSettings(options=NeedleConfig(**options), model=model, chat=CHAT_FORMATS[chat], limit=limit)


def needle_of(example) -> str:
    (needle,) = re.findall(rf"One of the special magic numbers for \w+-\w+ is: {example.answers[0]}\.", example.context)
    return needle


@pytest.mark.parametrize("model", MODELS, ids=["tiny", "llama2"])
@pytest.mark.parametrize("chat", ["none", "llama2"])
def test_rows_have_every_length_at_every_depth(model, chat):
    """Counted from the whole prompt: it fits, and one more sentence would not."""
    lengths, depths = [300, 701], [0, 33, 100]
    loaded = SUITE.load(DATASET, settings_of(model, chat, lengths=lengths, depths=depths, repeats=2))
    assert [example.groups for example in loaded.examples] == [
        (f"length={length}", f"depth={depth}") for _ in range(2) for length in lengths for depth in depths
    ]
    assert len({example.id for example in loaded.examples}) == 12
    assert len({example.answers for example in loaded.examples}) == 12
    tokenizer = load_tokenizer_of(model)
    assert tokenizer is not None
    sentences = [f" {sentence}." for sentence in NOISE.rstrip(".").split(". ")]
    longest = max(len(tokenizer(sentence, add_special_tokens=False)["input_ids"]) for sentence in sentences)
    for example in loaded.examples:
        length, depth = (int(group.partition("=")[2]) for group in example.groups)
        prompt = build_prompt(example, DATASET, tokenizer, chat=CHAT_FORMATS[chat])
        assert length - longest - 2 < len(prompt.token_ids) + loaded.max_new_tokens <= length
        needle = needle_of(example)
        assert example.answers[0] in needle
        assert example.context.count(example.answers[0]) == example.context.count(needle) == 1
        before, after = (
            len(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in example.context.split(needle)
        )
        # the first end of a sentence at or behind the depth; a token of white space may be counted on either side
        assert depth * (before + after) / 100 - 1 <= before < depth * (before + after) / 100 + longest + 1
        assert example.answers[0] not in example.instruction + example.input + example.answer_prefix
        row = example.official
        assert (row["length"], row["depth"], row["outputs"]) == (length, depth, [*example.answers])
        assert row["input"] == example.instruction + example.context + example.input


@NEEDS_LLAMA2
def test_haystack_is_noise_or_the_users_text(tmp_path):
    noise = SUITE.load(DATASET, settings_of(LLAMA2, lengths=[400], depths=[50])).examples[0]
    rest = noise.context.replace(f"{needle_of(noise)} ", "")
    assert (f"{NOISE} " * 30).startswith(rest)
    assert re.fullmatch(r"One of the special magic numbers for \w+-\w+ is: \d{7}\.", needle_of(noise))
    text = "First words!  Then\nmore? " + " ".join(f"w{number}" for number in range(100)) + ". Last."
    (tmp_path / "one.txt").write_text(text)
    found = SUITE.load(DATASET, settings_of(LLAMA2, lengths=[2000], depths=[50], haystack=str(tmp_path))).examples[0]
    rest = found.context.replace(f"{needle_of(found)} ", "")
    assert ((" ".join(text.split()) + " ") * 30).startswith(rest)


def test_other_needles_have_other_keys_and_the_same_room():
    """Counted from the text: the asked needle stands where it was, and the prompt is as long as without the others."""
    loaded = SUITE.load(DATASET, settings_of(lengths=[900], depths=[0, 50, 100], others=4))
    tokenizer: Any = load_tokenizer_of(MODELS[0])
    sizes = {len(tokenizer(f" {sentence}.")["input_ids"]) for sentence in NOISE.rstrip(".").split(". ")}
    orders = set()
    for example in loaded.examples:
        found = re.findall(r"numbers for (\w+-\w+) is: (\d{7})\.", example.context)
        assert len({key for key, _ in found}) == len(found) == 5
        assert [value for key, value in found if key in example.input] == [*example.answers]
        assert needle_of(example).endswith(f"is: {example.answers[0]}.")
        tokens = len(build_prompt(example, DATASET, tokenizer).token_ids) + loaded.max_new_tokens
        assert 900 - max(sizes) - 2 < tokens <= 900
        orders.add([value for _, value in found].index(example.answers[0]))
    first, *_, last = loaded.examples
    assert first.context.startswith(needle_of(first))
    assert last.context.endswith(needle_of(last))
    assert len(orders) > 1


@NEEDS_LLAMA2
def test_haystack_without_sentences_is_filled(tmp_path):
    file = tmp_path / "one.txt"
    file.write_text("word " * 3000)
    loaded = SUITE.load(DATASET, settings_of(LLAMA2, lengths=[1000], depths=[0, 50], haystack=str(file)))
    for example in loaded.examples:
        tokens = len(build_prompt(example, DATASET, official.llama2()).token_ids) + loaded.max_new_tokens
        assert 1000 - 42 < tokens <= 1000


def test_data_hash_depends_on_every_setting_but_not_on_the_number_of_rows():
    def data(**options: Any) -> str:
        return SUITE.load(DATASET, settings_of(**{"lengths": [500], "depths": [0, 50], **options})).data_sha256

    assert data() == data(limit=1) == data(repeats=2)
    assert (
        len({data(), data(seed=1), data(lengths=[499]), data(depths=[0, 51]), data(others=1), data(chat="llama2")}) == 6
    )


def test_lengths_that_do_not_fit_and_empty_texts_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"needle\.lengths: 20 is too short: needle, question and answer alone take \d+ tokens"
    ):
        _ = prepare(run_of("dataset=needle", "needle.lengths=[20]")).cases
    with pytest.raises(UserError, match=r"exceed the model's 4096 positions: lower needle\.lengths"):
        _ = prepare(run_of("dataset=needle", "needle.lengths=[512,5000]")).cases
    (tmp_path / "one.txt").write_text(" \n")
    with pytest.raises(UserError, match=r"no text to hide needles in; give needle\.haystack=FILE"):
        SUITE.load(DATASET, settings_of(LLAMA2, haystack=str(tmp_path)))


def test_map_shows_each_methods_misses():
    visits = [
        visit(depth, "needle", score=score, groups=["length=256", f"depth={depth}"])
        for depth, score in ((0, 1.0), (50, 0.0), (100, 1.0))
    ]
    figure = figures()["needle"]
    frame: Any = figure.data(Results([stored(visits)]))
    assert list(dict.fromkeys(frame["method"])) == ["baseline", "lazy"]
    rows = frame[frame["method"] == "lazy"].to_dict("records")
    assert {(row["length"], row["depth"]): row["score"] for row in rows} == {
        (256, 0): 100,
        (256, 50): 0,
        (256, 100): 100,
    }
    panels = [axes for axes in figure.plot(frame).axes if axes.get_visible()]
    assert len(panels) == 3  # two methods and the scale
    assert [text.get_text() for text in panels[0].get_yticklabels()] == ["0", "50", "100"]
    assert panels[0].get_ylim() == (3, 0)  # depth 0 on top
