"""Selective Context's released procedure, written from its description: strings, loops, one
forward pass a token.
"""

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import lazyllm
from lazyllm.engine.decoder import open_decoder
from lazyllm.methods import PromptCompression
from lazyllm.methods import prompt_compression as module
from lazyllm.methods.prompt_compression import sentences
from lazyllm.methods.support import other_models
from tests.eval.official import SHARED
from tests.helpers import byte_tokenizer
from tests.lazyllm.methods.prompt_compression.test_scoring import slow
from tests.reference import random_model

MERGES = SHARED / "tokenizers" / "gpt2" / "merges.txt"
TEXT = (
    "The old  man saw\ta very small dog. Its owner, Dr. Anna Smith, had left; e.g. two red balls!  "
    "Were they\n  there? def f(x):\n    return x.y  # 3.5 of it\n\nNo... Don't ask."
)
SENTENCES = [
    "The old man saw a very small dog.",
    "Its owner, Dr. Anna Smith, had left; e.g. two red balls! Were they there?",
    "def f(x): return x.y # 3.5 of it No...",
    "Don't ask.",
]


def released_sentences(text: str) -> list[str]:
    """Sign by sign."""
    # every run of white space is a space
    text, sentences, start = (" ".join(text.split()), list[str](), 0)
    for place, sign in enumerate(text):
        before = text[:place]
        if sign != " " or before[-1:] not in (".", "?"):
            continue
        word = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
        abbreviation = (
            len(before) > 3 and before[-2] in word and before[-3] == "." and before[-4] in word
        )
        title = (
            len(before) > 2 and before[-1] == "." and before[-2].islower() and before[-3].isupper()
        )
        if not abbreviation and not title:
            sentences.append(text[start:place])
            start = place + 1
    return [sentence for sentence in [*sentences, text[start:]] if sentence]


def released(text: str, model: Any, tokenizer: Any) -> list[tuple[str, float]]:
    """All sentences of a text in order, with their information: the mean over their tokens."""
    found = []
    for sentence in released_sentences(text):
        ids = tokenizer(sentence).input_ids
        with torch.inference_mode():
            logits = model(torch.tensor([[tokenizer.bos_token_id, *ids]])).logits[0].double()
        info = [
            float(-torch.log(torch.softmax(logits[at], dim=-1)[token_id]))
            for at, token_id in enumerate(ids)
        ]
        found.append((sentence, float(np.mean(info))))
    return found


@pytest.fixture(scope="module", params=["bytes", "GPT-2's merges"])
def scorer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Any, Any]:
    """A stand-in of GPT-2 in a folder: its tokenizer, and random weights. Without merges, each
    byte is a token.
    """
    merges = list[tuple[str, str]]()
    if request.param != "bytes":
        if not MERGES.is_file():
            pytest.skip("no merges of GPT-2 beside this repository")
        pairs = [line.split() for line in MERGES.read_text(encoding="utf-8").splitlines()[1:]]
        merges = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]
    folder, tokenizer = tmp_path_factory.mktemp("gpt2"), byte_tokenizer(merges, "<|endoftext|>")
    bos = tokenizer.bos_token_id
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    sizes = dict(
        n_layer=2,
        n_embd=32,
        n_head=2,
        n_positions=256,
        vocab_size=len(tokenizer),
        initializer_range=0.3,
    )
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=bos, eos_token_id=bos)).save_pretrained(folder)
    return (
        str(folder),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval(),
        tokenizer,
    )


def prompt_of(tokenizer: Any, text: str, *context: str) -> lazyllm.Prompt:
    """The text between two lines that stay, in the scorer's tokens, so that "bytes" has
    characters for tokens.
    """
    whole = f"Read this.\n\n{text}\n\nNow answer:"
    found = tokenizer(whole, return_offsets_mapping=True)
    ranges = tuple(
        (whole.index(part), whole.index(part) + len(part)) for part in context or (text,)
    )
    return lazyllm.Prompt(
        torch.tensor(found["input_ids"]), whole, tuple(map(tuple, found["offset_mapping"])), ranges
    )


def made_texts(count: int) -> list[str]:
    draw = random.Random(5)
    parts = [
        *TEXT.split(" "),
        "the",
        "a dog.",
        "U.S.",
        "Mr. Po",
        "ok?",
        "\n",
        " ",
        "\u00e9t\u00e9",
        "x.y.",
        "don't",
    ]
    return [" ".join(draw.choices(parts, k=draw.randint(1, 25))) for _ in range(count)]


def test_sentences_are_the_released_ones() -> None:
    assert released_sentences(TEXT) == SENTENCES
    for text in [TEXT, "", "  ", " One. ", *made_texts(300)]:
        whole = f"Q: {text}A. B"
        ranges = [*sentences.released_sentences(whole, [(3, 3 + len(text))])]
        assert [
            " ".join(whole[start:stop].split()) for start, stop in ranges
        ] == released_sentences(text)
        assert [whole[start:stop] for start, stop in ranges] == [
            whole[start:stop].strip() for start, stop in ranges
        ]


def test_sentences_and_their_information_are_the_released_ones(
    scorer: tuple[str, Any, Any],
) -> None:
    name, model, tokenizer = scorer
    method = PromptCompression(0.5, scorer=name, scoring="sentences")
    target = random_model("llama", 1, num_layers=2, vocab_size=len(tokenizer))
    # of others the release has no places
    texts = [text for text in (TEXT, *made_texts(20)) if text.isascii()]
    assert len(texts) > 5
    for text in texts:
        prompt = prompt_of(tokenizer, text)
        with torch.inference_mode(), open_decoder(target) as decoder:
            starts, info = method._score_sentences(decoder, prompt)
        expected = released(text, model, tokenizer)
        begun = [
            prompt.text[start:stop].split()
            for start, stop in pairwise([*starts, prompt.context[0][1]])
        ]
        assert begun == [sentence.split() for sentence, _ in expected]
        np.testing.assert_allclose(info, [value for _, value in expected], rtol=1e-9)


@pytest.mark.parametrize("share", [0.35, 0.5, 0.8])
def test_what_stays_is_what_the_release_leaves(share: float, scorer: tuple[str, Any, Any]) -> None:
    """At the share of tokens to which its percentile of the sentences comes."""
    name, model, tokenizer = scorer
    text = TEXT.replace("\n", " ")  # in one line, as indented words always stay here
    prompt, left = prompt_of(tokenizer, text), ""
    units = released(text, model, tokenizer)
    threshold = np.percentile([info for _, info in units], 100 * share)
    for unit, info in units:
        left += unit if info >= threshold else ""
    target = random_model("llama", 1, num_layers=2, vocab_size=len(tokenizer))
    may_go = module.droppable(prompt)
    ends = np.array(prompt.spans)[may_go, 1] - prompt.context[0][0]  # in the text
    # without white space, which the release changes
    letters = np.cumsum([not sign.isspace() for sign in text])
    bounds = np.cumsum([len("".join(unit.split())) for unit, _ in units])
    unit_of = np.searchsorted(bounds, letters[ends - 1])
    kept_tokens = sum(units[unit][1] >= threshold for unit in unit_of)
    method = PromptCompression((kept_tokens - 0.5) / len(may_go), scorer=name, scoring="sentences")
    out = lazyllm.generate(target, prompt, method, 1, ())
    stays = sorted({*out.selected[0][0]} & {*may_go.tolist()})
    assert "".join(prompt.text[slice(*prompt.spans[at])].strip() for at in stays) == "".join(
        left.split()
    )
    assert len(stays) == kept_tokens


def test_one_call_a_sentence(scorer: tuple[str, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, tokenizer = scorer
    ran: list[int] = []
    load = other_models.load_weights

    def note(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        ran.append(inputs["input_ids"].shape[1])

    def counted(*arguments: Any) -> Any:
        model = load(*arguments)
        model.register_forward_pre_hook(note, with_kwargs=True)
        return model

    other_models.HELPERS.unload()
    monkeypatch.setattr(other_models, "load_weights", counted)
    target = random_model("llama", 1, num_layers=2, vocab_size=len(tokenizer))
    method = PromptCompression(0.5, scorer=name, scoring="sentences")
    out = lazyllm.generate(target, prompt_of(tokenizer, TEXT), method, 1, ())
    # BOS, and all but the last token
    assert ran == [len(tokenizer(sentence).input_ids) for sentence in SENTENCES]
    assert out.scoring_tokens == sum(ran)
    ran.clear()
    lazyllm.generate(target, prompt_of(tokenizer, TEXT), PromptCompression(0.5, scorer=name), 1, ())
    assert len(ran) == (1 if len(tokenizer(TEXT).input_ids) < 256 else 2)
    other_models.HELPERS.unload()


def test_the_model_itself_may_score_sentence_by_sentence(scorer: tuple[str, Any, Any]) -> None:
    _, _, tokenizer = scorer
    model = random_model(
        "llama", 1, num_layers=2, vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id
    )
    text = "The old man saw it. Its owner had left?  Nobody asked."
    prompt = prompt_of(tokenizer, text)
    with torch.inference_mode(), open_decoder(model) as decoder:
        starts, info = PromptCompression(0.5, scoring="sentences")._score_sentences(decoder, prompt)
    assert [prompt.text[start:][:3] for start in starts] == ["The", "Its", "Nob"]
    spans = prompt.spans
    for start, value in zip(starts, info, strict=True):
        stop = start + len(released_sentences(prompt.text[start:])[0])
        inside = [
            place for place, (first, last) in enumerate(spans) if last > start and first < stop
        ]
        ids = prompt.token_ids[inside].tolist()
        expected = slow(model, ids, 512, tokenizer.bos_token_id)
        assert value == pytest.approx(np.mean(expected))
