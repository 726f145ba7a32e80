"""The first layers of a model, run once over a prompt without storing K and V, to score tokens.

Notation:
    n  tokens      w  hidden width
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lazyllm.engine.attention import KeysReached
from lazyllm.engine.declaration import NOTHING, Look
from lazyllm.engine.decoder import Decoder, open_decoder


def run_layers(decoder: Decoder, token_ids: Tensor, layers: int | None = None, look: Look = NOTHING) -> Tensor:
    """[1, n, w] hidden states after the first `layers` layers; None runs all layers.

    decoder: the open model. token_ids: [n], on the model's device, at positions from 0 on; they attend to one another
    only. look: attention scores to record; `decoder.probe.take()` or `take_each()` returns them.
    The run counts in `decoder.tokens_run`, and so in `Generation.scoring_tokens`.
    """
    n = token_ids.shape[0]
    positions = torch.arange(n, device=decoder.device)
    hidden = decoder.embed(token_ids, positions)
    unstored: Any = _Unstored(range(len(decoder.layers))[:layers], positions)
    return decoder.run(unstored, hidden, positions, decoder.rope(hidden, positions), None, look, n)


def run_to_keys(decoder: Decoder, token_ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Run layers 1 to `layer`, the last one up to its attention: its query [1, h, n, d] and key [1, g, n, d].

    Both are after RoPE. token_ids: as in `run_layers`. The last layer counts in `decoder.tokens_run` as a whole one.
    """
    decoder.probe.stop_at = layer - 1
    try:
        run_layers(decoder, token_ids, layer)
    except KeysReached as reached:
        return reached.query, reached.key
    finally:
        decoder.probe.stop_at = None
    raise RuntimeError(f"layer {layer} did not call the installed attention function")


class _Unstored:
    """A cache that stores nothing: the tokens of a run attend to one another."""

    is_ascending = is_whole = True

    def __init__(self, layers: range, positions: Tensor) -> None:
        self.layers = layers
        self.positions = positions
        self.added = self.length = positions.shape[0]  # as in a prefill: every token is new

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value


@torch.inference_mode()
def importance_of_layers(model: PreTrainedModel, token_ids: Tensor | Sequence[int]) -> Tensor:
    """[layers, n] Eq. 1 in every layer: attention of the last token to each token, mean over heads (Figure 2).

    token_ids: one prompt [n]. Nothing is pruned. The result is on the host, in at least float32; a row sums to 1.
    """
    with open_decoder(model) as decoder:
        prompt = torch.as_tensor(token_ids).to(decoder.device)
        run_layers(decoder, prompt, look=Look(range(len(decoder.layers))))
        return torch.stack(decoder.probe.take_each()).cpu()
