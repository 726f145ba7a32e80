"""The model's own layers, run one group at a time: the place where hidden states can be shortened between layers.

Notation:
    m  tokens in this run      s  stored tokens of a group      w  hidden width      v  vocabulary
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lazyllm.attention import Probe, installed_attention, part_mask
from lazyllm.cache import GroupCache
from lazyllm.flops import LayerShape
from lazyllm.placement import device_of, devices_of, home_of, is_spread, moved
from lazyllm.products import products_of

Rope = tuple[Tensor, Tensor]  # cos and sin, [1, m, d] each


class UnsupportedModelError(ValueError):
    """The model does something that the loop over its layers would not reproduce."""


class Decoder:
    """The parts of a transformers causal language model, and how a group of its layers is run.

    Use `open_decoder`, which installs the observing attention and removes it again.

    device: where everything is that no layer owns; `devices`: all that compute. Layers may be elsewhere: then what they
    need is brought there, and what leaves a group of them is brought back.
    """

    def __init__(self, model: PreTrainedModel, probe: Probe) -> None:
        self.model = model
        self.probe = probe
        self._inner: Any = model.model
        self.layers: Any = self._inner.layers
        self.config = model.config
        self.device = home_of(model)
        self.devices = devices_of(model)
        self._layer_devices = [device_of(layer) if is_spread(model) else self.device for layer in self.layers]
        self.dtype = model.dtype
        self.width: int = model.config.hidden_size
        shape = LayerShape.of(model.config)
        self._share = shape.heads // shape.kv_heads
        self._largest_matrix = shape.width * max(shape.mlp_width, shape.heads * shape.head_dim)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[m] token ids -> [1, m, w] hidden states before layer 1."""
        return self._inner.embed_tokens(token_ids[None])

    def rope(self, hidden: Tensor, positions: Tensor) -> Rope:
        """cos and sin of the tokens at `positions` [m]."""
        return moved(self._inner.rotary_emb(hidden, position_ids=positions[None]), self.device)

    def run(
        self,
        group: GroupCache,
        hidden: Tensor,
        positions: Tensor,
        rope: Rope,
        chosen: Tensor | None,
        watched: range,
    ) -> Tensor:
        """Run the group's layers over hidden [1, m, w]; K and V go into `group`, which must have been extended.

        chosen: [m, s] bool, which stored tokens each query attends to; None for causal attention over the m tokens
            (prefill), or over everything stored (a single query, decoding).
        watched: the layers whose mean importance (Eq. 1) is left in `probe`.
        """
        self.probe.watch(watched)
        self.probe.decodes = group.added < group.length
        mask = self._prefill_mask(hidden) if chosen is None else part_mask(chosen, self._share, self.dtype)
        position_ids, device = positions[None], self.device
        with products_of(hidden, self._largest_matrix) if self.probe.decodes else nullcontext():
            for layer in group.layers:
                if self._layer_devices[layer] != device:  # moved here, once: accelerate would for every layer anew
                    device = self._layer_devices[layer]
                    hidden, mask, position_ids, rope = moved((hidden, mask, position_ids, rope), device)
                hidden = self.layers[layer](
                    hidden,
                    attention_mask=mask,
                    position_ids=position_ids,
                    past_key_values=group,
                    use_cache=True,
                    position_embeddings=rope,
                )
        return moved(hidden, self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """[v] logits of the last of the tokens in hidden [1, m, w], and of no other."""
        return moved(self.model.lm_head(self._inner.norm(hidden[:, -1:]))[0, -1], self.device)

    def _prefill_mask(self, hidden: Tensor) -> Tensor | None:
        """Only eager attention has no causality of its own: it needs an additive mask [1, 1, m, m]."""
        m = hidden.shape[1]
        if m == 1 or not self.probe.own_attention_is_eager:
            return None
        lowest = torch.finfo(self.dtype).min
        return torch.full((1, 1, m, m), lowest, dtype=self.dtype, device=self.device).triu(1)


@contextmanager
def open_decoder(model: PreTrainedModel) -> Iterator[Decoder]:
    """A `Decoder` over `model`; on exit the model is as it was.

    Raises UnsupportedModelError where the model's structure is not the one that the loop reproduces.
    """
    check_structure(model)
    with installed_attention(model) as probe:
        yield Decoder(model, probe)


def check_structure(model: PreTrainedModel) -> None:
    """Refuse, by name of the cause, what can be seen without running the model. Raises UnsupportedModelError."""
    name = type(model).__name__
    inner: Any = getattr(model, "model", None)
    missing = [part for part in ("embed_tokens", "layers", "norm", "rotary_emb") if not hasattr(inner, part)]
    if missing or not hasattr(model, "lm_head"):
        raise UnsupportedModelError(
            f"{name} is not built like a Llama (no {', '.join(missing) or 'lm_head'}); "
            "supported: decoders with embed_tokens, layers, norm, rotary_emb and lm_head (Llama, Mistral, Qwen2, Qwen3)"
        )
    accepted = inspect.signature(inner.layers[0].forward).parameters
    for keyword in ("position_embeddings", "position_ids", "past_key_values", "attention_mask"):
        if keyword not in accepted:  # else **kwargs would swallow it without a word
            raise UnsupportedModelError(f"the layers of {name} take no `{keyword}`, unlike those of transformers 5")
    for knob in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(model.config, knob, None) is not None:
            raise UnsupportedModelError(f"{name} caps logits ({knob}), which the importance of Eq. 1 would not see")
    if model.training:
        raise UnsupportedModelError(f"{name} is in training mode (dropout): call model.eval() first")


def sliding_window(config: Any) -> int | None:
    """The shortest attention window of any layer, in tokens; None where every layer sees everything."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        return None
    return window


@torch.inference_mode()
def check_same_as_model(model: PreTrainedModel, length: int = 8) -> None:
    """Run a few tokens through the loop over the layers and through `model(...)`: the logits must be the same.

    This finds what no list of names does: scaled embeddings or logits, layers that mix tokens outside attention,
    a RoPE of its own per layer. Raises UnsupportedModelError where they differ. Rounded weights need no other
    tolerance: both ways run the same weights on the same rows, and differ by the order of attention's sums only.
    """
    home = home_of(model)
    token_ids = torch.arange(length, device=home) % model.config.vocab_size
    positions = torch.arange(length, device=home)
    expected = model(token_ids[None], logits_to_keep=1).logits[0, -1].to(home)
    with open_decoder(model) as decoder:
        hidden = decoder.embed(token_ids)
        group = GroupCache(range(len(decoder.layers)), length, length, decoder.device)
        group.extend(positions)
        hidden = decoder.run(group, hidden, positions, decoder.rope(hidden, positions), None, range(1))
        found = decoder.logits(hidden)
        decoder.probe.take()
    worst = (found - expected).abs().max().item()
    if not worst <= 1e-2 * expected.abs().max().item():
        raise UnsupportedModelError(
            f"{type(model).__name__}: running its layers one by one gives other logits than the model does "
            f"(they differ by up to {worst:.3g}), so it does something between or around its layers that the loop "
            "would leave out; this architecture is not supported"
        )
