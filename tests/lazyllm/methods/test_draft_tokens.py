"""SpecPrefill's draft must read the prompt in the model's own tokens."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

import lazyllm
from lazyllm.methods import SpecPrefill
from lazyllm.models.tokenizers import load_tokenizer
from tests.helpers import byte_tokenizer
from tests.reference import random_variant

TINY = Path(lazyllm.__file__).parent / "models" / "tiny"


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
        draft_in(tmp_path / "fewer", byte_tokenizer(), 256).check(model.config)
    as_many = draft_in(tmp_path / "others", byte_tokenizer(), len(own))
    as_many.check(model.config)
    with pytest.raises(ValueError, match="tokenises the prompt differently than the model: give a draft with"):
        as_many.check_prompt(prompt)
    same = draft_in(tmp_path / "same", own, len(own))
    same.check(model.config)
    same.check_prompt(prompt)
