"""The baseline is transformers' own greedy `generate`."""

from typing import Any

import pytest
import torch

import lazyllm
from lazyllm.methods import Baseline
from tests.reference import attention_of, random_variant


@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma2", "mistral, window"])
@pytest.mark.parametrize(("ends", "least"), [(0, 0), (4, 0), (4, 3)])
def test_answers_and_logits_are_transformers(variant: str, ends: int, least: int) -> None:
    model: Any = random_variant(variant, 3, attention_of(variant)).double()
    prompt = torch.randint(3, 97, (41,), generator=torch.Generator().manual_seed(5))
    whole = lazyllm.generate(model, prompt, Baseline(), 8, ())
    end_ids = whole.token_ids[ends - 1 : ends] if ends else []  # ends it there, if not before
    found = lazyllm.generate(model, prompt, Baseline(), 8, end_ids, least)
    with torch.inference_mode():
        logits = model(prompt[None], logits_to_keep=1).logits[0, -1]
        tokens = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            do_sample=False,
            max_new_tokens=8,
            min_new_tokens=least or None,
            eos_token_id=end_ids or None,
            pad_token_id=0,
        )
    assert found.token_ids == tokens[0, len(prompt) :].tolist()
    torch.testing.assert_close(found.first_logits, logits, rtol=0, atol=1e-5)
    assert (found.computed == len(prompt)).all()
