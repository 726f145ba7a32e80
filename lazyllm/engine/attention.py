"""The attention function that runs in a model's layers: it stores K and V, records scores, and attends.

Notation:
    h  query heads          g  key and value heads (g divides h; h = g without grouped-query attention)
    m  query tokens         s  stored tokens (slots)          d  head width
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from lazyllm.engine.sparse import attend_sparsely
from lazyllm.errors import UserError

# (layer, from 1, number of prompt tokens) -> the keys that the layer's queries attend to; None for all
Sees = Callable[[int, int], Triangle | None]


class AttentionContext:
    """What one generation's tokens attend to in a run through a group's layers, and the scores recorded there.

    cache: stores the K and V of the tokens, for which it has slots.
    positions: [m] of the tokens.
    length: tokens of the whole text; all positions are below it.
    scores: the scores to record; they are moved to the device of `positions`.
    chosen: the stored tokens that the run attends to, up to their own positions; None for all. A layer with a sliding
        window attends to those in the window.
    ranks: [m] for each token, the number of chosen tokens up to itself, itself included. With ranks, keys are sorted by
        position (`PositionSortedMask`); None leaves keys as they are stored.
    stop_at: the layer (from 0) whose attention raises `KeysReached` instead of running; None for none.
    mask: which stored tokens the running layer attends to.
    sees: in a prefill, which keys a layer's queries attend to (`lazyllm.methods.Sparse.sees`); None for all.
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
        self._masks: dict[int | None, AttentionMask] = {}  # by window; each keeps the mask of its last block

    @property
    def decodes(self) -> bool:
        """Whether the tokens that run attend to tokens stored by earlier runs."""
        return self.cache.added < self.cache.length

    def enter_layer(self, window: int | None) -> None:
        """Prepare for a layer of the group, with its sliding window."""
        window = None if window is None or self._length <= window else window
        if window not in self._masks:
            about = self.cache, self._positions, self._chosen, window
            self._masks[window] = (
                AttentionMask(*about) if self._ranks is None else PositionSortedMask(*about, self._ranks)
            )
        self.mask = self._masks[window]

    def record(self, layer: int, query: Tensor, key: Tensor, scaling: float, softcap: float | None) -> None:
        """Record `attention_scores` of a layer, if they are wanted."""
        if layer in self._wanted.layers:
            scores = attention_scores(query, key, self.mask.visible_last, scaling, softcap, self._wanted)
            self._recorded.append(scores.to(self._positions.device))

    def take_each(self) -> list[Tensor]:
        """Take the scores of each layer. Raises RuntimeError if a layer did not call the installed function."""
        recorded, wanted = self._recorded, len(self._wanted.layers)
        self._wanted, self._recorded = NO_SCORES, []
        if not recorded or len(recorded) != wanted:
            raise RuntimeError(f"{len(recorded)} of {wanted} watched layers called the installed attention function")
        return recorded


class KeysReached(Exception):  # noqa: N818 - not an error
    """Ends a run at `AttentionContext.stop_at`. args: the query [1, h, m, d] and key [1, g, s, d], after RoPE."""


class RecordingAttention:
    """An attention function for transformers. It makes the masks, runs attention, and records scores.

    A prefill runs the model's own attention (SDPA, FlashAttention, eager); decoding runs it where it is as fast.

    running: for each generation in the run, in order, its context and the number of its tokens. Each generation stores
        its own K and V, and attends to these only.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.running: Sequence[tuple[AttentionContext, int]] = ()
        self._model = model
        own = self._own = model.config._attn_implementation
        self._is_sdpa = own == "sdpa"
        self._is_eager = own is None or own == "eager"
        self._is_flash = own is not None and own.startswith("flash")

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attention of query [1, h, m, d], after storing key and value [1, g, m, d]: [1, m, h, d], and no weights."""
        if not self.running[0][0].decodes:  # steps pass the same arguments as the prefill, which was checked
            _check_terms(module, kwargs)
        if len(self.running) == 1:
            return self.of_one(self.running[0][0], module, query, key, value, kwargs), None
        out, sizes = [], [size for _, size in self.running]
        queries, keys, values = (part.split(sizes, dim=2) for part in (query, key, value))
        for (context, _), q, k, v in zip(self.running, queries, keys, values, strict=True):
            out.append(self.of_one(context, module, q, k, v, kwargs))
        return torch.cat(out, dim=1), None

    def of_one(
        self,
        context: AttentionContext,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """`__call__` for the tokens of one generation."""
        layer = cast(int, module.layer_idx)
        key, value = context.cache.update(key, value, layer)
        if layer == context.stop_at:
            raise KeysReached(query, key)
        context.record(layer, query, key, kwargs["scaling"], kwargs.get("softcap"))
        attend = self.decode if context.decodes else self.prefill
        return attend(context, module, query, key, value, kwargs)

    def prefill(
        self,
        context: AttentionContext,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """[1, m, h, d] attention of a prompt's tokens to one another, by the model's own function.

        Without a mask it is causal. Eager attention needs masks in all layers, the others in layers with a window;
        FlashAttention applies the window itself, but in slots: only if there are gaps, it needs masks. It takes none,
        so `attend_to_chosen` runs in its place.
        `attend_sparsely` runs a layer in which the method skips keys.
        """
        mask, softcap = context.mask, kwargs.get("softcap")
        pattern = context.sees(cast(int, module.layer_idx) + 1, query.shape[2]) if context.sees else None
        if pattern is not None:
            has_lse = gives_lse(self._model, query, value)
            return attend_sparsely(query, key, value, pattern, mask, kwargs["scaling"], softcap, has_lse)
        own = functools.partial(self.own, module, kwargs=kwargs)
        is_causal = not self._is_eager and (mask.window is None or (self._is_flash and context.cache.is_contiguous))
        if is_causal or mask.sees_all:
            return own(query, key, value, None)
        share, attend = 1, own
        if not (self._is_eager or self._is_sdpa):
            share = query.shape[1] // key.shape[1]
            attend = functools.partial(attend_to_chosen, scaling=kwargs["scaling"], softcap=softcap)
        form = functools.partial(additive_mask, share=share, dtype=query.dtype)
        return attend_in_blocks(attend, form, query, key, value, mask, self._is_eager or softcap is not None)

    def decode(
        self,
        context: AttentionContext,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """[1, m, h, d] attention of a step's tokens to the stored ones, in the way that `way_to_attend` takes.

        With SDPA, `attend_to_chosen` runs steps without a mask too, by the same kernels: they read K and V once, not
        once for each head that shares them.
        """
        mask, scaling, softcap = context.mask, kwargs["scaling"], kwargs.get("softcap")
        share, way = query.shape[1] // key.shape[1], self._way(context.mask, query, key, value, softcap)
        if way in ("copy", "sort"):
            key, value = context.cache.take(cast(int, module.layer_idx), mask.slots_on(key.device), key.shape[3])
        if isinstance(mask, PositionSortedMask):
            splits = softcap is None and mask.window is None and gives_lse(self._model, query, value)
            return attend_in_order(query, key, value, mask, scaling, softcap, splits)
        if way == "chunks":
            chunks = num_chunks(key.shape[1], query.shape[2] * share, key.shape[2])
            form = functools.partial(chunked_mask, share=share, dtype=query.dtype, chunks=chunks)
            in_chunks = functools.partial(attend_in_chunks, scaling=scaling)
            return attend_in_blocks(in_chunks, form, query, key, value, mask)

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            if mask is None and not self._is_sdpa:
                return self.own(module, query, key, value, None, kwargs)
            return attend_to_chosen(query, key, value, mask, scaling, softcap)

        if way == "mask":
            form = functools.partial(additive_mask, share=share, dtype=query.dtype)
            return attend_in_blocks(attend, form, query, key, value, mask, softcap is not None)
        return attend(query, key, value, None)

    def _way(self, mask: AttentionMask, query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> Way:
        """How these queries attend: by `way_to_attend` where there is a choice."""
        if mask.sees_all:
            return "all"
        if isinstance(mask, PositionSortedMask):
            return "sort"
        if mask.window is not None:
            return "mask"
        (_, heads, m, _), (_, kv_heads, keys, _) = query.shape, key.shape
        way = way_to_attend(m, heads, kv_heads, keys, key.element_size(), key.device)
        has_kernel = way != "chunks" or (softcap is None and gives_lse(self._model, query, value))
        return way if has_kernel and way != "sort" else "mask"  # only a `PositionSortedMask` knows the order

    def own(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor:
        """[1, m, h, d] the model's own attention. mask: as in `additive_mask`; None: causal, or one query to all."""
        if self._is_eager:  # every modelling file of transformers defines its own
            attend = sys.modules[type(module).__module__].eager_attention_forward
        else:
            attend = ALL_ATTENTION_FUNCTIONS[self._own]
        if self._is_sdpa and mask is None and not shares_heads(self._model, query):
            share = query.shape[1] // key.shape[1]
            key, value = (part.repeat_interleave(share, dim=1) for part in (key, value))
        if not self._is_flash:
            return attend(module, query, key, value, mask, **kwargs)[0]
        # transformers' FlashAttention reads the implementation's name from the config, and would take gaps in
        # position_ids for borders between packed sequences
        of_flash = {key: value for key, value in kwargs.items() if key != "position_ids"}
        with replaced(self._model.config, "_attn_implementation", self._own):
            return attend(module, query, key, value, mask, **of_flash)[0]


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


# Arguments of an attention function that do not change its result, or that are honoured here: `scaling`, `softcap`, and
# `sliding_window`, which is in the masks. `_check_terms` checks `is_causal`
_HARMLESS = frozenset(
    {"scaling", "softcap", "sliding_window", "dropout", "position_ids", "cache_position", "use_cache", "is_causal"}
    | {"output_attentions", "output_hidden_states", "return_dict"}
)


def _check_terms(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise UserError if attention has a term that neither Eq. 1 nor `attend_to_chosen` would see."""
    others = [name for name, value in kwargs.items() if name not in _HARMLESS and value is not None]
    if not (kwargs.get("is_causal", True) and getattr(module, "is_causal", True)):
        others.append("is_causal=False")
    if others:
        raise UserError(
            f"{type(module).__name__} attends with {', '.join(others)} (sinks, a bias or the like): not supported, as "
            "the importance of Eq. 1 does not include it"
        )
