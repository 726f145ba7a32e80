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

from lazyllm.engine.devices import home_of
from lazyllm.errors import UserError


class Probe:
    """What the installed attention function is asked for, and what it found.

    own_attention_is_eager: whether the model's own attention has no causality of its own.
    own_masks: whether the model's own attention takes masks in prefill (additive for eager, else of bool); those of
        `part_mask` are for `attend_to_chosen` in any case.
    own_window: whether the model's own attention has sliding windows of its own, over tokens without gaps.
    decodes: whether this is a decoding step, whose mask, if there is one, is that of `part_mask`.
    home: the device that importance is brought to, whichever one its layer is on.
    """

    def __init__(
        self, own_attention_is_eager: bool, home: torch.device, own_masks: bool = True, own_window: bool = False
    ) -> None:
        self.own_attention_is_eager = own_attention_is_eager
        self.own_masks = own_masks
        self.own_window = own_window
        self.decodes = False
        self._home = home
        self._watched: range = range(0)
        self._found: list[Tensor] = []

    def watch(self, layers: range) -> None:
        """Ask for the importance in these layers (indices from 0), and forget what was found before."""
        self._watched, self._found = layers, []

    def wants(self, layer: int) -> bool:
        return layer in self._watched

    def look(
        self, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, softcap: float | None = None
    ) -> None:
        """Take down `last_token_importance` of a watched layer."""
        self._found.append(last_token_importance(query, key, mask, scaling, softcap).to(self._home))

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
    is_eager = own_name is None or own_name == "eager"
    is_flash = own_name is not None and own_name.startswith("flash")
    probe = Probe(is_eager, home_of(model), own_masks=is_eager or is_sdpa, own_window=is_flash)
    name = f"lazyllm_{id(probe)}"  # of its own, so that two models may generate at the same time

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        _check_terms(module, kwargs)
        scaling, softcap = kwargs["scaling"], kwargs.get("softcap")
        layer: Any = module.layer_idx
        if probe.wants(layer):
            probe.look(query, key, attention_mask, scaling, softcap)
        is_part = attention_mask is not None and (probe.decodes or not probe.own_masks)
        if is_part or (is_sdpa and probe.decodes):
            return attend_to_chosen(query, key, value, attention_mask, scaling, softcap), None
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


# What may be given to an attention function without changing what it computes, beside what is honoured here:
# `scaling`, `softcap`, and `sliding_window`, which the masks have seen to
_HARMLESS = frozenset(
    {"scaling", "softcap", "sliding_window", "dropout", "position_ids", "cache_position", "use_cache"}
    | {"output_attentions", "output_hidden_states", "return_dict"}
)


def _check_terms(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise UserError where attention has a term that neither Eq. 1 nor `attend_to_chosen` would see."""
    if kwargs.keys() <= _HARMLESS and getattr(module, "is_causal", True):
        return
    others = [name for name, value in kwargs.items() if name not in _HARMLESS and value is not None]
    if kwargs.get("is_causal", True) and getattr(module, "is_causal", True):
        others = [name for name in others if name != "is_causal"]
    else:
        others.append("is_causal=False")
    if others:
        raise UserError(
            f"{type(module).__name__} attends with {', '.join(others)} (sinks, a bias or the like), which the "
            "importance of Eq. 1 would not see"
        )


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


def last_token_importance(
    query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, softcap: float | None = None
) -> Tensor:
    """Eq. 1: attention probability of the newest token on every stored token, mean over heads.

    query [1, h, m, d] and key [1, g, s, d] after RoPE; the newest token is the last query.
    mask: of which the last row counts, additive (`part_mask`) or bool [1, 1, m, s]; None for all.
    softcap: what the attention logits are capped at, c * tanh(logits / c), as in Gemma 2.
    Returns [s], 0 where not attended to, in float32 (float64 for a float64 model). The cost is h*s*d.
    """
    heads, kv_heads, d = query.shape[1], key.shape[1], query.shape[-1]
    # [1, h, m, d] -> [g, h/g, d]: the query heads that share a key head become the rows of one product
    last = query[:, :, -1].reshape(kv_heads, heads // kv_heads, d)
    # float16 would overflow here where attention itself does not, and bfloat16 would blur what is compared
    exact = torch.promote_types(query.dtype, torch.float32)
    logits = _capped((last.to(exact) * scaling) @ key[0].to(exact).transpose(-1, -2), softcap)  # [g, h/g, s]
    if mask is not None and mask.dtype == torch.bool:
        logits.masked_fill_(~mask[0, :, -1], float("-inf"))
    elif mask is not None:
        logits += mask[0, :, -1]
    return logits.softmax(dim=-1).mean(dim=(0, 1))


def attend_to_chosen(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None = None
) -> Tensor:
    """Attention of m queries to those of the stored tokens that `mask` (from `part_mask`) leaves each of them.

    Without a mask each attends to everything stored. softcap: as in `last_token_importance`; no kernel of PyTorch's
    knows it, so that with it all products are there at once.
    query [1, h, m, d]; key, value [1, g, s, d]. Returns [1, m, h, d].
    """
    _, heads, m, d = query.shape
    kv_heads = key.shape[1]
    # [1, h, m, d] -> [1, g, h/g * m, d]: K and V are read once for all the heads that share them, never repeated
    packed = query.reshape(1, kv_heads, heads // kv_heads * m, d)
    if softcap is None:
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    else:
        # rounded where eager attention rounds: the products in the model's dtype, their softmax in float32 at least
        logits = _capped(packed @ key.transpose(-1, -2) * scaling, softcap)  # [1, g, h/g * m, s]
        if mask is not None:
            logits = logits + mask
        out = logits.softmax(dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype) @ value
    return out.reshape(1, heads, m, value.shape[-1]).transpose(1, 2).contiguous()


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
