"""The attention function that runs in a model's layers: it stores K and V, records scores, attends.

Notation:
    h  query heads          g  key and value heads (g divides h)          d  head width
    m  query tokens         s  stored tokens (slots)
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lazyllm.engine.cache import GroupCache
from lazyllm.engine.devices import replaced
from lazyllm.engine.inputs import NO_SCORES, ScoreSpec, Triangle
from lazyllm.engine.kernels import (
    Way,
    additive_mask,
    attend_in_blocks,
    attend_in_chunks,
    attend_in_order,
    attend_to_chosen,
    chunked_mask,
    num_chunks,
    way_to_attend,
)
from lazyllm.engine.masks import AttentionMask, Chosen, PositionSortedMask
from lazyllm.engine.scores import attention_scores
from lazyllm.engine.sdpa import gives_lse, shares_heads
from lazyllm.engine.sparse import attend_in_triangle, attend_under_mask
from lazyllm.errors import UserError

# (layer, from 1, number of prompt tokens) -> the keys that the layer's queries attend to; None: all
Sees = Callable[[int, int], Triangle | None]


class AttentionContext:
    """What one generation's tokens attend to in a run through a group's layers, and their scores.

    cache: stores the K and V of the tokens, for which it has slots.
    positions: [m] of the tokens. length: tokens of the whole text.
    scores: to record; they are moved to the device of `positions`.
    chosen: the stored tokens to attend to; None for all. A layer's window holds too.
    ranks: [m] for each token, the number of chosen tokens up to itself. With ranks, keys are sorted
        by position.
    stop_at: the layer (from 0) whose attention raises `KeysReached` instead of running.
    mask: which stored tokens the running layer attends to.
    sees: in a prefill, which keys a layer's queries attend to (`Sparse.sees`).
    """

    mask: AttentionMask
    sees: Sees | None = None

    def __init__(
        self,
        cache: GroupCache,
        positions: Tensor,
        length: int,
        scores: ScoreSpec = NO_SCORES,
        chosen: Chosen | None = None,
        ranks: Sequence[int] | None = None,
        stop_at: int | None = None,
    ) -> None:
        self.cache, self.stop_at = cache, stop_at
        self._length = length
        self._wanted, self._recorded = scores, list[Tensor]()
        self._positions, self._chosen, self._ranks = positions, chosen, ranks
        # by window; each keeps the mask of its last block
        self._masks: dict[int | None, AttentionMask] = {}

    @property
    def decodes(self) -> bool:
        """Whether the tokens that run attend to tokens stored by earlier runs."""
        return self.cache.added < self.cache.length

    def enter_layer(self, window: int | None) -> None:
        """Prepare for a layer of the group, with its sliding window."""
        window = None if window is None or self._length <= window else window
        if window not in self._masks:
            about = self.cache, self._positions, self._chosen, window
            ranks = self._ranks
            sorts = ranks is not None
            self._masks[window] = (
                PositionSortedMask(*about, ranks) if sorts else AttentionMask(*about)
            )
        self.mask = self._masks[window]

    def record(
        self, layer: int, query: Tensor, key: Tensor, scaling: float, softcap: float | None
    ) -> None:
        """Record `attention_scores` of a layer, if they are wanted."""
        if layer in self._wanted.layers:
            visible = self.mask.visible_last
            scores = attention_scores(query, key, visible, scaling, softcap, self._wanted)
            self._recorded.append(scores.to(self._positions.device))

    def take_each(self) -> list[Tensor]:
        """Take each layer's scores. Raises RuntimeError if a layer called another function."""
        recorded, wanted = self._recorded, len(self._wanted.layers)
        self._wanted, self._recorded = NO_SCORES, []
        if not recorded or len(recorded) != wanted:
            raise RuntimeError(
                f"{len(recorded)} of {wanted} watched layers called the installed attention"
            )
        return recorded


class KeysReached(Exception):  # noqa: N818 - not an error
    """Ends a run at `stop_at`. args: the query [1, h, m, d] and key [1, g, s, d], after RoPE."""


class RecordingAttention:
    """An attention function for transformers: it makes masks, runs attention, records scores.

    running: for each generation in the run, in order, its context and the number of its tokens.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.running: Sequence[tuple[AttentionContext, int]] = ()
        self.model = model
        name = self.native = model.config._attn_implementation
        self.is_sdpa = name == "sdpa"
        self.is_eager = name is None or name == "eager"
        self.is_flash = name is not None and name.startswith("flash")

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend from query [1, h, m, d] after storing K and V [1, g, m, d]: [1, m, h, d]."""
        if not self.running[0][0].decodes:  # steps pass the arguments of the prefill
            _check_terms(module, kwargs)
        if len(self.running) == 1:
            return self._attend(self.running[0][0], module, query, key, value, kwargs), None
        sizes = [size for _, size in self.running]
        parts = (part.split(sizes, dim=2) for part in (query, key, value))
        out = [
            self._attend(context, module, q, k, v, kwargs)
            for (context, _), q, k, v in zip(self.running, *parts, strict=True)
        ]
        return torch.cat(out, dim=1), None

    def _attend(
        self,
        context: AttentionContext,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kwargs: dict[str, Any],
    ) -> Tensor:
        layer = cast(int, module.layer_idx)
        key, value = context.cache.update(key, value, layer)
        if layer == context.stop_at:
            raise KeysReached(query, key)
        call = _Call(self, context, module, kwargs, kwargs["scaling"], kwargs.get("softcap"))
        context.record(layer, query, key, call.scaling, call.softcap)
        attend = call.decode if context.decodes else call.prefill
        return attend(query, key, value)


@dataclass(eq=False)
class _Call:
    """A layer's attention of one generation. Its methods return [1, m, h, d]."""

    attention: RecordingAttention
    context: AttentionContext
    module: nn.Module
    kwargs: dict[str, Any]
    scaling: float
    softcap: float | None

    def prefill(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend among a prompt's tokens, by the model's attention, causal without a mask.

        Eager attention needs masks in all layers, the others in layers with a window.
        FlashAttention applies a window itself, but in slots: only if there are gaps, it needs
        masks, and as it takes none, `attend_to_chosen` runs in its place.
        """
        attention, mask = self.attention, self.context.mask
        if self.context.sees is not None:
            pattern = self.context.sees(cast(int, self.module.layer_idx) + 1, query.shape[2])
            if pattern is not None:
                has_lse = gives_lse(attention.model, query, value)
                if has_lse and mask.window is None and self.softcap is None:
                    return attend_in_triangle(query, key, value, pattern, self.scaling)
                terms = mask, self.scaling, self.softcap
                return attend_under_mask(query, key, value, pattern, *terms)
        has_window = mask.window is not None and not (
            attention.is_flash and self.context.cache.is_contiguous
        )
        if mask.sees_all or not (attention.is_eager or has_window):
            return self.natively(query, key, value, None)
        if attention.is_eager or attention.is_sdpa:
            attend, share = self.natively, 1
        else:
            attend, share = self.packed, query.shape[1] // key.shape[1]
        holds_logits = attention.is_eager or self.softcap is not None
        return self._under_masks(attend, share, holds_logits, query, key, value)

    def decode(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from a step's tokens to the stored ones, in the way that `way_to_attend` takes.

        With SDPA, `attend_to_chosen` also runs steps without a mask, by the same kernels: they read
        K and V once, not once for each head that shares them.
        """
        mask, share = self.context.mask, query.shape[1] // key.shape[1]
        way = self._way(query, key, value)
        if way in ("copy", "sort"):
            slots = mask.slots_on(key.device)
            layer = cast(int, self.module.layer_idx)
            key, value = self.context.cache.take(layer, slots, key.shape[3])
        if isinstance(mask, PositionSortedMask):
            has_lse = gives_lse(self.attention.model, query, value)
            splits = self.softcap is None and mask.window is None and has_lse
            return attend_in_order(query, key, value, mask, self.scaling, self.softcap, splits)
        if way == "chunks":
            chunks = num_chunks(key.shape[1], query.shape[2] * share, key.shape[2])
            form = functools.partial(chunked_mask, share=share, dtype=query.dtype, chunks=chunks)
            attend = functools.partial(attend_in_chunks, scaling=self.scaling)
            return attend_in_blocks(attend, form, query, key, value, mask)
        if way == "mask":
            holds_logits = self.softcap is not None
            return self._under_masks(self._step, share, holds_logits, query, key, value)
        return self._step(query, key, value, None)

    def _step(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None and not self.attention.is_sdpa:
            return self.natively(query, key, value, None)
        return self.packed(query, key, value, mask)

    def _way(self, query: Tensor, key: Tensor, value: Tensor) -> Way:
        """Choose how these queries attend: by `way_to_attend` where there is a choice."""
        mask = self.context.mask
        if mask.sees_all:
            return "all"
        if isinstance(mask, PositionSortedMask):
            return "sort"
        if mask.window is not None:
            return "mask"
        (_, heads, m, _), (_, kv_heads, keys, _) = query.shape, key.shape
        way = way_to_attend(m, heads, kv_heads, keys, key.element_size(), key.device)
        if way == "chunks":
            runs = self.softcap is None and gives_lse(self.attention.model, query, value)
            return way if runs else "mask"
        return "mask" if way == "sort" else way  # only a `PositionSortedMask` knows the order

    def _under_masks(
        self,
        attend: Callable[..., Tensor],
        share: int,
        holds_logits: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        form = functools.partial(additive_mask, share=share, dtype=query.dtype)
        return attend_in_blocks(attend, form, query, key, value, self.context.mask, holds_logits)

    def packed(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return attend_to_chosen(query, key, value, mask, self.scaling, self.softcap)

    def natively(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Run the model's attention. mask: of `additive_mask`; None: causal, or a query to all."""
        attention, module, kwargs = self.attention, self.module, self.kwargs
        if attention.is_eager:  # every modelling file of transformers defines one
            attend = sys.modules[type(module).__module__].eager_attention_forward
        else:
            attend = ALL_ATTENTION_FUNCTIONS[attention.native]
        if attention.is_sdpa and mask is None and not shares_heads(attention.model, query):
            share = query.shape[1] // key.shape[1]
            key, value = (part.repeat_interleave(share, dim=1) for part in (key, value))
        if not attention.is_flash:
            return attend(module, query, key, value, mask, **kwargs)[0]
        # transformers' FlashAttention reads the implementation's name from the config, and would
        # take gaps in position_ids for borders between packed sequences
        kwargs = {name: value for name, value in kwargs.items() if name != "position_ids"}
        with replaced(attention.model.config, "_attn_implementation", attention.native):
            return attend(module, query, key, value, mask, **kwargs)[0]


@contextmanager
def installed_attention(model: PreTrainedModel) -> Iterator[RecordingAttention]:
    """Install a `RecordingAttention` in `model`; it is removed on exit."""
    attention = RecordingAttention(model)
    name = f"lazyllm_{id(attention)}"  # two models may generate at the same time
    ALL_ATTENTION_FUNCTIONS[name] = attention
    try:
        with replaced(model.config, "_attn_implementation", name):
            yield attention
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


# Arguments of an attention function that do not change its result, or that are honoured here:
# `scaling`, `softcap`, `sliding_window` (in the masks). `_check_terms` checks `is_causal`
_HARMLESS = frozenset(
    {"scaling", "softcap", "sliding_window", "dropout", "position_ids", "cache_position"}
    | {"use_cache", "is_causal", "output_attentions", "output_hidden_states", "return_dict"}
)


def _check_terms(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse attention with a term that neither Eq. 1 nor `attend_to_chosen` would see."""
    terms = [name for name, value in kwargs.items() if name not in _HARMLESS and value is not None]
    if not (kwargs.get("is_causal", True) and getattr(module, "is_causal", True)):
        terms.append("is_causal=False")
    if terms:
        raise UserError(
            f"{type(module).__name__} attends with {', '.join(terms)} (sinks, a bias or the like): "
            "not supported, as the importance of Eq. 1 does not include it"
        )
