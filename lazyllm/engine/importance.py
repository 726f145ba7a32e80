"""The importance that Eq. 1 gives every prompt token in every layer: what Figure 2 of the paper draws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lazyllm.engine.decoder import Decoder, open_decoder
from lazyllm.engine.session import Batch, Group, Session


@torch.inference_mode()
def importance_of_layers(model: PreTrainedModel, token_ids: Tensor | Sequence[int]) -> Tensor:
    """[layers, n] attention probability of the last prompt token on each, mean over heads, on the host.

    token_ids: one prompt [n]. Nothing is pruned. At least float32; a row sums to 1.
    """
    prompt = torch.as_tensor(token_ids)
    with open_decoder(model) as decoder:
        session = _WatchingSession(decoder, prompt.shape[0])
        session.prefill(prompt.to(decoder.device))
        return torch.stack(session.found).cpu()


class _WatchingSession(Session):
    """The baseline's session with every layer a group of its own, so that each one's importance can be taken."""

    def __init__(self, decoder: Decoder, prompt_tokens: int) -> None:
        layers = [range(layer, layer + 1) for layer in range(len(decoder.layers))]
        super().__init__(decoder, [Group(one, prompt_tokens, watched=one) for one in layers], prompt_tokens, 1)
        self.found: list[Tensor] = []

    def cross_in_prefill(self, index: int, batch: Batch) -> Batch:
        self.found.append(self.decoder.probe.take())
        return batch
