"""Eq. 1 in every layer, against transformers' own eager attention."""

from __future__ import annotations

import numpy as np
import torch

from lazyllm.engine.partial import importance_of_layers
from tests.reference import random_model

PROMPT = np.random.default_rng(1).integers(0, 97, 23).tolist()


def test_importance_of_all_layers_is_the_last_row_of_attention() -> None:
    found = importance_of_layers(random_model("llama", 4, num_layers=5), PROMPT)
    eager = random_model("llama", 4, num_layers=5, attn_implementation="eager")
    with torch.inference_mode():
        attentions = eager(torch.tensor([PROMPT]), output_attentions=True).attentions
    expected = torch.stack([layer[0, :, -1].mean(dim=0) for layer in attentions])
    assert found.shape == (5, 23)
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=1e-6)  # eager softmax is in float32


def test_a_single_token_has_all_the_attention() -> None:
    assert importance_of_layers(random_model("qwen3", 4), PROMPT[:1]).eq(1).all()
