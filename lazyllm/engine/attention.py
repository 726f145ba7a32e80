"""Attention as methods need it: scores of the stored tokens, and attention to a chosen set of them.

Notation:
    h  query heads          g  key and value heads (g divides h; h = g without grouped-query attention)
    m  query tokens         s  stored tokens (slots)
    w  last queries         d  head width
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

from lazyllm.engine.declaration import NOTHING, Look
from lazyllm.engine.devices import home_of
from lazyllm.errors import UserError

# Scores that a sum over queries holds at once. On a CPU few enough to stay in its caches; elsewhere 128 MB in float32
BLOCK_ON_CPU, BLOCK = 2**22, 2**25


class Probe:
    """Tells the installed attention function what to look at, and holds what it found.

    own_attention_is_eager: whether the model's own attention has no causality of its own.
    own_masks: whether the model's own attention takes masks in prefill (additive for eager, else of bool); those of
        `part_mask` are for `attend_to_chosen` in any case.
    own_window: whether the model's own attention has sliding windows of its own, over tokens without gaps.
    decodes: whether this is a decoding step; its mask, if there is one, is that of `part_mask`.
    window: the sliding window of the layer that runs, if only the model's own attention knows of it.
    stop_at: the layer (from 0) whose attention raises `KeysReached` instead of running; None for none.
    home: the device that scores are brought to, whichever one their layer is on.
    """

    def __init__(
        self, own_attention_is_eager: bool, home: torch.device, own_masks: bool = True, own_window: bool = False
    ) -> None:
        self.own_attention_is_eager = own_attention_is_eager
        self.own_masks = own_masks
        self.own_window = own_window
        self.decodes = False
        self.window: int | None = None
        self.stop_at: int | None = None
        self._home = home
        self._look = NOTHING
        self._found: list[Tensor] = []

    def watch(self, look: Look) -> None:
        """Ask for the scores of these layers, and forget what was found before."""
        self._look, self._found = look, []

    def wants(self, layer: int) -> bool:
        return layer in self._look.layers

    def look(
        self, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, softcap: float | None = None
    ) -> None:
        """Take down `attention_scores` of a layer that is asked for."""
        scores = attention_scores(query, key, mask, scaling, softcap, self._look, self.window)
        self._found.append(scores.to(self._home))

    def take(self) -> Tensor:
        """The scores, as `Look` says, as their mean over the layers. Raises RuntimeError as `take_each`."""
        found = self.take_each()
        return found[0] if len(found) == 1 else torch.stack(found).mean(dim=0)

    def take_each(self) -> list[Tensor]:
        """The scores of each layer, in order; a second call finds nothing.

        Raises RuntimeError if a layer did not run its attention through the installed function.
        """
        found, wanted = self._found, len(self._look.layers)
        self.watch(NOTHING)
        if not found or len(found) != wanted:
            raise RuntimeError(f"{len(found)} of {wanted} watched layers called the installed attention function")
        return found


class KeysReached(Exception):  # noqa: N818 - no error
    """Ends a run at `Probe.stop_at`: the layer's query [1, h, m, d] and key [1, g, s, d], after RoPE."""

    def __init__(self, query: Tensor, key: Tensor) -> None:
        super().__init__()
        self.query = query
        self.key = key


@contextmanager
def installed_attention(model: PreTrainedModel) -> Iterator[Probe]:
    """Put an observing attention function into `model`, and take it out again on exit, whatever happens.

    The model's own attention (SDPA, FlashAttention, eager) does the work. Decoding steps that attend to part of the
    stored tokens go to `attend_to_chosen`. In place of SDPA it takes all decoding steps: it calls the same kernels, but
    they read K and V once, not once for every query head that shares them.
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
        if layer == probe.stop_at:
            raise KeysReached(query, key)
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


# Arguments of an attention function that do not change what it computes, and those that are honoured here: `scaling`,
# `softcap`, and `sliding_window`, which the masks have seen to
_HARMLESS = frozenset(
    {"scaling", "softcap", "sliding_window", "dropout", "position_ids", "cache_position", "use_cache"}
    | {"output_attentions", "output_hidden_states", "return_dict"}
)


def _check_terms(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise UserError if attention has a term that neither Eq. 1 nor `attend_to_chosen` would see."""
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
    if name is None or name == "eager":  # every modelling file of transformers defines its own
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def part_mask(chosen: Tensor, share: int, dtype: torch.dtype) -> Tensor:
    """The additive mask of `attend_to_chosen`, made once for all layers of a group.

    chosen [m, s] bool: which stored tokens each query attends to; [g, 1, s] for one query if key heads store different
    tokens. share: query heads per key head, h/g.
    Returns [1, 1, h/g * m, s] in `dtype`, or [1, 1, 1, s] for a single query, or [1, g, 1, s].
    """
    m, s = chosen.shape[-2:]
    by_head = chosen.ndim == 3
    # CUDA's kernels want rows that begin at multiples of 16 elements, else each layer makes such a copy of the mask
    first = chosen.shape[0] if by_head else 1 if m == 1 else share
    rows = chosen.new_empty((first, m, -(-s // 16) * 16), dtype=dtype)
    mask = rows[..., :s].fill_(float("-inf")).masked_fill_(chosen, 0)
    return mask[None] if by_head else mask.flatten(0, 1)[None, None]


def attention_scores(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    look: Look = NOTHING,
    window: int | None = None,
) -> Tensor:
    """What `look` asks to see of one layer; by default Eq. 1, the newest token's attention, mean over heads.

    query [1, h, m, d] and key [1, g, s, d] after RoPE; the newest token is the last query.
    mask: its last rows count, additive (`part_mask`) or bool [1, 1, m, s]. Without one, each query attends to
        everything stored up to itself, within the last `window` of it if that is given.
    softcap: what the attention logits are capped at, c * tanh(logits / c), as in Gemma 2.
    Returns [h, w, s], w = min(look.queries, m), with fewer dimensions as `Look` says, in float32 (float64 for a float64
    model); a probability is 0 if a token is not attended to. The cost is h*w*s*d.
    """
    if look.summed is not None:
        return _summed_scores(query, key, mask, scaling, softcap, look, window)
    heads, kv_heads, d, s = query.shape[1], key.shape[1], query.shape[-1], key.shape[2]
    w = min(look.queries, query.shape[2])
    # [1, h, w, d] -> [g, h/g * w, d]: the query heads that share a key head become the rows of one product
    last = query[:, :, -w:].reshape(kv_heads, heads // kv_heads * w, d)
    # float16 would overflow here where attention itself does not, and bfloat16 would blur what is compared
    exact = torch.promote_types(query.dtype, torch.float32)
    logits = _capped((last.to(exact) * scaling) @ key[0].to(exact).transpose(-1, -2), softcap).view(heads, w, s)
    if mask is None and window is not None:
        slots = torch.arange(s, device=key.device)
        of_query = slots[s - w :, None]
        mask = ((slots <= of_query) & (slots > of_query - window))[None, None]
    elif mask is None and w > 1:  # only the newest tokens lie behind a query
        behind = torch.ones(w, w, dtype=torch.bool, device=key.device).triu(1)
        logits[..., s - w :].masked_fill_(behind, float("-inf"))
    elif mask is not None and mask.dtype != torch.bool and look.raw:
        mask = mask == 0  # eager attention's masks hold the lowest number in place of -inf
    if mask is not None and mask.dtype == torch.bool:
        logits.masked_fill_(~mask[0, :, -w:], float("-inf"))
    elif mask is not None:
        logits += mask[0, :, -w:]
    scores = logits if look.raw else logits.softmax(dim=-1)
    scores = scores if look.per_head else scores.mean(dim=0)
    return scores.squeeze(-2) if look.queries == 1 else scores


def _summed_scores(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    look: Look,
    window: int | None,
) -> Tensor:
    """`attention_scores` for a `look.summed`: [h, s], or [s]. A block of queries at a time, each up to its own keys."""
    heads, m, s = query.shape[1], query.shape[2], key.shape[2]
    w = min(look.queries, m)
    exact = torch.promote_types(query.dtype, torch.float32)
    assert look.summed is not None
    weights = torch.linspace(*look.summed, w, dtype=exact, device=key.device)
    key = key.to(exact)  # once, not for each block
    sums = weights.new_zeros((heads, s))
    block = max(1, (BLOCK_ON_CPU if key.device.type == "cpu" else BLOCK) // (heads * s))
    if block < w:  # in the order in which the products read it
        key = key.transpose(-1, -2).contiguous().transpose(-1, -2)
    for first in range(0, w, block):
        last = min(first + block, w)
        later = w - last  # queries behind the block, and keys that none of its queries attends to
        part = Look(queries=last - first, per_head=True)
        of_mask = None if mask is None else mask[..., : mask.shape[-2] - later, : s - later]
        scores = attention_scores(
            query[:, :, : m - later], key[:, :, : s - later], of_mask, scaling, softcap, part, window
        )
        sums[:, : s - later] += weights[first:last] @ scores.view(heads, last - first, s - later)
    return sums if look.per_head else sums.mean(dim=0)


def attend_to_chosen(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None = None
) -> Tensor:
    """Attention of m queries to the stored tokens that `mask` (from `part_mask`) leaves to each of them.

    Without a mask each query attends to everything stored. softcap: as in `attention_scores`; no kernel of PyTorch
    knows it, so with it all products are in memory at once.
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
