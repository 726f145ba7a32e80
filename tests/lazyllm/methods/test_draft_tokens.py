"""SpecPrefill's draft must read the prompt in the model's own tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import lazyllm
from lazyllm.methods import SpecPrefill
from lazyllm.models.tokenizers import load_tokenizer
from tests.reference import random_variant

TINY = Path(lazyllm.__file__).parent / "models" / "tiny"


def letters() -> PreTrainedTokenizerBase:
    """One token per byte, without special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=own)


def draft_in(folder: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> SpecPrefill:
    random_variant("llama", 7, num_hidden_layers=2, vocab_size=vocab_size).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return SpecPrefill(str(folder))


def test_draft_with_other_tokens_is_refused(tmp_path: Path) -> None:
    own, text = load_tokenizer(TINY), "the old lantern"
    model = random_variant("llama", 0, vocab_size=len(own))
    read = own(text, return_offsets_mapping=True)
    spans = tuple(map(tuple, read["offset_mapping"]))
    prompt = lazyllm.Prompt(torch.tensor(read["input_ids"]), text, spans)
    with pytest.raises(ValueError, match=r"has 256 tokens in its vocabulary.* give a draft with the model's tokenizer"):
        draft_in(tmp_path / "fewer", letters(), 256).check(model.config)
    as_many = draft_in(tmp_path / "others", letters(), len(own))
    as_many.check(model.config)
    with pytest.raises(ValueError, match="tokenises the prompt differently than the model: give a draft with"):
        as_many.check_prompt(prompt)
    same = draft_in(tmp_path / "same", own, len(own))
    same.check(model.config)
    same.check_prompt(prompt)
