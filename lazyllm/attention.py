"""Attention as the method needs it: the last token's row as importance, and attention to a chosen set of tokens.

Notation:
    h  query heads          g  key and value heads (g divides h; h = g without grouped-query attention)
    m  query tokens         s  stored tokens (slots)
    d  head width
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lazyllm.placement import home_of


class Probe:
    """What the installed attention function is asked for, and what it found.

    own_attention_is_eager: whether the model's own attention has no causality of its own.
    decodes: whether this is a decoding step, whose mask, if there is one, is that of `part_mask`.
    home: the device that importance is brought to, whichever one its layer is on.
    """

    def __init__(self, own_attention_is_eager: bool, home: torch.device) -> None:
        self.own_attention_is_eager = own_attention_is_eager
        self.decodes = False
        self._home = home
        self._watched: range = range(0)
        self._found: list[Tensor] = []

    def watch(self, layers: range) -> None:
        """Ask for the importance in these layers (indices from 0), and forget what was found before."""
        self._watched, self._found = layers, []

    def wants(self, layer: int) -> bool:
        return layer in self._watched

    def look(self, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> None:
        """Take down `last_token_importance` of a watched layer."""
        self._found.append(last_token_importance(query, key, mask, scaling).to(self._home))

    def take(self) -> Tensor:
        """[s] the newest token's attention probability on each stored token, mean over heads and watched layers.

        Raises RuntimeError if a watched layer did not run its attention through the installed function.
        """
        found, wanted = self._found, len(self._watched)
        self.watch(range(0))
        if not found or len(found) != wanted:
            raise RuntimeError(f"{len(found)} of {wanted} watched layers called the installed attention function")
        return found[0] if wanted == 1 else torch.stack(found).mean(dim=0)


@contextmanager
def installed_attention(model: PreTrainedModel) -> Iterator[Probe]:
    """Put an observing attention function into `model`, and take it out again on exit, whatever happens.

    The model's own attention (SDPA, FlashAttention, eager) does the work, but for decoding steps that attend to part of
    the stored tokens: these are `attend_to_chosen`'s. Of SDPA it takes all decoding steps: it calls the same kernels,
    and does not make them read K and V once for every query head that shares them.
    """
    own_name = model.config._attn_implementation
    is_sdpa = own_name == "sdpa"
    is_flash = own_name is not None and own_name.startswith("flash")
    probe = Probe(own_attention_is_eager=own_name == "eager", home=home_of(model))
    name = f"lazyllm_{id(probe)}"  # of its own, so that two models may generate at the same time

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        scaling = kwargs["scaling"]
        part = attention_mask if probe.decodes else None
        layer: Any = module.layer_idx
        if probe.wants(layer):
            probe.look(query, key, part, scaling)
        if part is not None or (is_sdpa and probe.decodes):
            return attend_to_chosen(query, key, value, part, scaling), None
        own = _own_attention(own_name, module)
        if not is_flash:
            return own(module, query, key, value, attention_mask, **kwargs)
        # transformers' FlashAttention asks the config for its own name, and takes gaps in the positions for the seams
        # of several sequences packed into one
        kwargs.pop("position_ids", None)
        model.config._attn_implementation = own_name
        try:
            return own(module, query, key, value, attention_mask, **kwargs)
        finally:
            model.config._attn_implementation = name

    ALL_ATTENTION_FUNCTIONS[name] = attention
    model.config._attn_implementation = name
    try:
        yield probe
    finally:
        model.config._attn_implementation = own_name
        del ALL_ATTENTION_FUNCTIONS[name]


def _own_attention(name: str | None, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function that `module` uses under the implementation `name`."""
    if name is None or name == "eager":  # which every modelling file of transformers defines for itself
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def part_mask(chosen: Tensor, share: int, dtype: torch.dtype) -> Tensor:
    """The additive mask of `attend_to_chosen`, made once for all layers of a group.

    chosen [m, s] bool: which stored tokens each query attends to. share: query heads to a key head, h/g.
    Returns [1, 1, h/g * m, s] in `dtype`, or [1, 1, 1, s] for a single query.
    """
    m, s = chosen.shape
    # CUDA's kernels want rows that begin at multiples of 16 elements, else each layer makes such a copy of the mask
    rows = chosen.new_empty((1 if m == 1 else share, m, -(-s // 16) * 16), dtype=dtype)
    mask = rows[..., :s].fill_(float("-inf")).masked_fill_(chosen, 0)
    return mask.flatten(0, 1)[None, None]


def last_token_importance(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Eq. 1: attention probability of the newest token on every stored token, mean over heads.

    query [1, h, m, d] and key [1, g, s, d] after RoPE; the newest token is the last query. mask: from `part_mask`, None
    for all. Returns [s], 0 where not attended to, in float32 (float64 for a float64 model). The cost is h*s*d.
    """
    heads, kv_heads, d = query.shape[1], key.shape[1], query.shape[-1]
    # [1, h, m, d] -> [g, h/g, d]: the query heads that share a key head become the rows of one product
    last = query[:, :, -1].reshape(kv_heads, heads // kv_heads, d)
    # float16 would overflow here where attention itself does not, and bfloat16 would blur what is compared
    exact = torch.promote_types(query.dtype, torch.float32)
    logits = (last.to(exact) * scaling) @ key[0].to(exact).transpose(-1, -2)  # [g, h/g, s]
    if mask is not None:
        logits += mask[0, :, -1]
    return logits.softmax(dim=-1).mean(dim=(0, 1))


def attend_to_chosen(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of m queries to those of the stored tokens that `mask` (from `part_mask`) leaves each of them.

    Without a mask each attends to everything stored.
    query [1, h, m, d]; key, value [1, g, s, d]. Returns [1, m, h, d].
    """
    _, heads, m, d = query.shape
    kv_heads = key.shape[1]
    # [1, h, m, d] -> [1, g, h/g * m, d]: K and V are read once for all the heads that share them, never repeated
    packed = query.reshape(1, kv_heads, heads // kv_heads * m, d)
    out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(1, heads, m, d).transpose(1, 2).contiguous()
