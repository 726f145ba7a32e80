"""SpecPrefill across tokenizers against its slow oracle, with real tokenizers; kept text is tokenised again."""

from __future__ import annotations

import json
import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import lazyllm
from lazyllm.engine.decoder import open_decoder
from lazyllm.methods import SpecPrefill
from lazyllm.models.tokenizers import load_tokenizer
from tests.field_oracles import FieldOutput, Token, specprefill_across
from tests.helpers import slow
from tests.reference import casts_in_float64, random_variant

TINY = Path(lazyllm.__file__).parent / "models" / "tiny"
WORDS = ["the", "old", "lantern,", "12.5", "km", "away;", "naïve", "😀", "中文", "entry\n\n", "copper\t\t", "Question:"]
STEPS = 4
PAIRS = [("letters", "tiny"), ("tiny", "letters"), ("llama2", "gpt2"), ("gpt2", "tiny"), ("tiny", "llama2")]


def letters() -> PreTrainedTokenizerBase:
    """One token per byte, without special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=own)


def gpt2(merges_file: Path) -> PreTrainedTokenizerBase:
    """From its merges: the bytes come first in the vocabulary, then each merge."""
    lines = [line.split() for line in merges_file.read_text(encoding="utf-8").splitlines()[1:] if line]
    merges = [(left, right) for left, right in lines]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    own = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=own)


@pytest.fixture(scope="module")
def tokenizers(request: pytest.FixtureRequest):
    @cache
    def by_name(name: str) -> PreTrainedTokenizerBase:
        if name in ("tiny", "letters"):
            return load_tokenizer(TINY) if name == "tiny" else letters()
        folder = request.getfixturevalue("shared") / "tokenizers" / name
        return load_tokenizer(folder / "tokenizer.model") if name == "llama2" else gpt2(folder / "merges.txt")

    return by_name


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory, tokenizers):
    @cache
    def saved(variant: str, name: str) -> tuple[str, Any]:
        folder = tmp_path_factory.mktemp("draft")
        draft = random_variant(variant, 7, num_hidden_layers=2, vocab_size=len(tokenizers(name)))
        draft.save_pretrained(folder)
        tokenizers(name).save_pretrained(folder)
        return str(folder), draft

    return saved


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[Token]:
    found: Any = tokenizer(text, return_offsets_mapping=True)
    return [(token, *span) for token, span in zip(found["input_ids"], found["offset_mapping"], strict=True)]


def prompt_of(tokenizer: PreTrainedTokenizerBase, text: str) -> lazyllm.Prompt:
    tokens = tokens_of(tokenizer, text)
    spans = tuple((start, stop) for _, start, stop in tokens)
    return lazyllm.Prompt(
        torch.tensor([token for token, _, _ in tokens]), text, spans, encode=lambda other: tokenizer(other)["input_ids"]
    )


def hold(model: Any, method: SpecPrefill, prompt: lazyllm.Prompt, expected: FieldOutput) -> lazyllm.Generation:
    """Raise AssertionError if the method differs from its oracle. In float64 throughout."""
    assert expected.margin > 1e-12
    out = lazyllm.generate(model, prompt, method, STEPS, ())
    assert out.selected[0] == expected.selected
    assert out.token_ids == expected.token_ids
    assert out.computed[0].tolist() == expected.passes[-1]
    with torch.inference_mode(), open_decoder(model) as decoder:
        session = method.start(decoder, prompt, STEPS)
        logits = [session.prefill(prompt.token_ids), *map(session.step, out.token_ids[:-1])]
    np.testing.assert_allclose(torch.stack(logits).numpy(), expected.logits, rtol=0, atol=1e-9)
    return out


@pytest.mark.parametrize(("own", "other"), PAIRS)
@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_kept_chunks_are_read_anew(own: str, other: str, seed: int, tokenizers, drafts) -> None:
    rng = random.Random(f"{own} {other} {seed}")
    variant = rng.choice(["llama", "mistral, window", "qwen2", "qwen3"])
    text = " ".join(rng.choices(WORDS, k=rng.choice([1, 6, 12])))
    settings: dict[str, Any] = {
        "keep": rng.choice([0.1, 0.3, 0.6, 1.0]),
        "lookahead": rng.choice([1, 3]),
        "chunk": rng.choice([1, 2, 5]),
        "pool": rng.choice([1, 3, 13]),
        "sound": rng.random() < 0.5,
    }
    model = random_variant(variant, seed, vocab_size=len(tokenizers(own)))
    with casts_in_float64():
        folder, draft = drafts(variant, other)
        # as the library loads it: for some kinds of models, transformers reads the same files differently
        by = tokenizers(own), load_tokenizer(folder)
        read, read_by_draft = (partial(tokens_of, tokenizer) for tokenizer in by)
        expected = specprefill_across(model, draft, text, read, read_by_draft, **settings, steps=STEPS)
        method = SpecPrefill(folder, text=True, **settings)
        method.check(model.config)
        out = hold(model, method, prompt_of(tokenizers(own), text), expected)
    scored = len(read_by_draft(text)) + settings["lookahead"] - 1 if expected.scores else 0
    assert out.scoring_tokens == scored
    assert bool(out.scoring_s) == bool(scored)


@pytest.mark.parametrize(("own", "other"), PAIRS[:2])
@pytest.mark.parametrize("keep", [0.3, 1.0])
def test_again_reads_the_tokens_of_later_turns_too(own: str, other: str, keep: float, tokenizers, drafts) -> None:
    rng = random.Random(f"{own} {other} {keep}")
    text = " ".join(rng.choices(WORDS, k=8))
    model = random_variant("llama", 5, vocab_size=len(tokenizers(own)))
    settings: dict[str, Any] = {"keep": keep, "lookahead": 2, "chunk": 2, "pool": 3}
    with casts_in_float64():
        folder, draft = drafts("llama", other)
        read, read_by_draft = (partial(tokens_of, by) for by in (tokenizers(own), load_tokenizer(folder)))
        method = SpecPrefill(folder, text=True, **settings)
        session = lazyllm.start(model, prompt_of(tokenizers(own), text), method, turns="again")
        later: list[int] = []
        for more in (None, rng.choices(range(100), k=3), rng.choices(range(100), k=5)):
            later += more or []
            expected = specprefill_across(model, draft, text, read, read_by_draft, **settings, steps=STEPS, later=later)
            assert expected.margin > 1e-12
            out = session.answer(more, STEPS, ())
            assert out.token_ids == expected.token_ids
            assert out.selected[0] == expected.selected
            assert out.computed[0].tolist() == expected.passes[-1]
            np.testing.assert_allclose(out.first_logits.numpy(), expected.logits[0], rtol=0, atol=1e-9)
            later += out.token_ids


def test_draft_with_other_tokens_is_refused_without_text(tokenizers, drafts, tmp_path: Path) -> None:
    model, text = random_variant("llama", 0, vocab_size=len(tokenizers("tiny"))), "the old lantern"
    prompt = prompt_of(tokenizers("tiny"), text)
    folder, _ = drafts("llama", "letters")
    with pytest.raises(ValueError, match=r"has 256 tokens in its vocabulary.* or text=true to pass"):
        SpecPrefill(folder).check(model.config)
    # as many tokens, but others
    random_variant("llama", 7, num_hidden_layers=2, vocab_size=len(tokenizers("tiny"))).save_pretrained(tmp_path)
    tokenizers("letters").save_pretrained(tmp_path)
    same_size = SpecPrefill(str(tmp_path))
    same_size.check(model.config)
    with pytest.raises(ValueError, match=r"tokenises the prompt differently than the model: .* text=true"):
        same_size.check_prompt(prompt)
    tokenizers("tiny").save_pretrained(tmp_path / "own")
    json_config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "own" / "config.json").write_text(json.dumps(json_config))
    SpecPrefill(str(tmp_path / "own")).check_prompt(prompt)
    with pytest.raises(ValueError, match="text=true needs the prompt's text"):
        SpecPrefill(folder, text=True).check_prompt(lazyllm.Prompt(torch.tensor([1, 2, 3])))
    with pytest.raises(ValueError, match="text=true is for a draft"):
        SpecPrefill(text=True)
