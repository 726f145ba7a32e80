"""Attention as methods need it: scores of the stored tokens, and attention to a subset of them.

Notation:
    h  query heads          g  key and value heads (g divides h; h = g without grouped-query attention)
    m  query tokens         s  stored tokens (slots)
    w  last queries         d  head width
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lazyllm.engine.cache import GroupCache
from lazyllm.engine.devices import replaced, tf32_products, to_device
from lazyllm.engine.inputs import NO_SCORES, ScoreSpec
from lazyllm.engine.masks import AttentionMask, Chosen, PositionSortedMask, block_bytes
from lazyllm.engine.sdpa import attend_with_lse, gives_lse, shares_heads
from lazyllm.errors import UserError

# Scores that a sum over queries holds at once: on a CPU they fit its caches; elsewhere they take 128 MB in float32
SUMMED_ON_CPU, SUMMED = 2**22, 2**25
# (query, key) pairs of a block's mask in `attend_in_order`. A larger block masks more pairs that need no mask
SPLIT_ON_CPU, SPLIT = 2**16, 2**20

# (slice of queries, slice of keys) -> [b, k] bool: which of the last k keys each query attends to, beside all keys
# before these. None: all queries attend to all keys (`AttentionMask.visible_last`)
Visible = Callable[[slice, slice], Tensor | None]


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
    """

    mask: AttentionMask

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
    """An attention function for transformers. It makes the masks, calls the model's own attention, and records scores.

    The model's own attention (SDPA, FlashAttention, eager) does the work, with three exceptions:
    - Queries that need a mask run in blocks (`in_blocks`). In prefill, eager attention needs masks in all layers, the
      others in layers with a window (FlashAttention only if its window, counted in slots, would span gaps). In decoding
      all queries need one, except a single one that attends to all tokens or to a copy of some (`AttentionMask.slots`).
    - `attend_to_chosen` runs these blocks in decoding, and in prefill for FlashAttention, which takes no masks. It runs
      all decoding in place of SDPA, by the same kernels: they read K and V once, not once per head that shares them.
    - `attend_in_order` runs decoding steps that revive many tokens (`PositionSortedMask`).

    running: for each generation in the run, in order, its context and the number of its tokens. Each generation stores
        its own K and V, and attends to these only.
    """

    _context: AttentionContext  # of the generation whose attention runs

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
            self._context = self.running[0][0]
            return self.of_one(module, query, key, value, kwargs), None
        out, sizes = [], [size for _, size in self.running]
        queries, keys, values = (part.split(sizes, dim=2) for part in (query, key, value))
        for (context, _), q, k, v in zip(self.running, queries, keys, values, strict=True):
            self._context = context
            out.append(self.of_one(module, q, k, v, kwargs))
        return torch.cat(out, dim=1), None

    def of_one(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """`__call__` for the tokens of one generation, that of `self._context`."""
        context, layer = self._context, cast(int, module.layer_idx)
        key, value = context.cache.update(key, value, layer)
        if layer == context.stop_at:
            raise KeysReached(query, key)
        context.record(layer, query, key, kwargs["scaling"], kwargs.get("softcap"))
        mask, in_prefill = context.mask, not context.decodes
        if mask.slots is not None:
            slots = mask.slots = mask.slots.to(key.device)  # moved once for all layers on that device
            key, value = context.cache.take(layer, slots, key.shape[3])
        if isinstance(mask, PositionSortedMask):
            softcap = kwargs.get("softcap")
            splits = softcap is None and mask.window is None and gives_lse(self._model, query, value)
            return attend_in_order(query, key, value, mask, kwargs["scaling"], softcap, splits)
        # without a mask, prefill is causal; FlashAttention also applies the window, but in slots: there may be no gaps
        needs_none = (self._is_flash and context.cache.is_contiguous) or (not self._is_eager and mask.window is None)
        if (in_prefill and needs_none) or mask.needs_no_mask:
            return self.attend(module, query, key, value, None, kwargs)
        return self.in_blocks(module, query, key, value, kwargs)

    def in_blocks(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """[1, m, h, d] attention of blocks of queries, each with its mask."""
        blocks, decodes = self._context.mask, self._context.decodes
        heads, share = query.shape[1], query.shape[1] // key.shape[1]
        form = functools.partial(additive_mask, share=share if self._masks_are_ours else 1, dtype=query.dtype)
        # elements in memory for a (query, key) pair: a logit of each head if attention holds them, else `share` of mask
        held = heads if kwargs.get("softcap") is not None or (self._is_eager and not decodes) else share
        out: Tensor | None = None
        for rows, keys, mask in blocks.blocks(form, held * query.dtype.itemsize, query.device):
            part = self.attend(module, query[:, :, rows], key[:, :, keys], value[:, :, keys], mask, kwargs)
            if part.shape[1] == query.shape[2]:
                return part
            if out is None:
                out = part.new_empty(1, query.shape[2], *part.shape[2:])
            out[:, rows] = part
        assert out is not None  # there is a block
        return out

    @property
    def _masks_are_ours(self) -> bool:
        """Whether `attend_to_chosen` runs masked blocks; else the model's own attention does."""
        return self._context.decodes or not (self._is_eager or self._is_sdpa)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor:
        """[1, m, h, d] attention of a block. mask: from `in_blocks`; None: causal in prefill, all keys in decoding."""
        if (self._context.decodes and self._is_sdpa) or (mask is not None and self._masks_are_ours):
            return attend_to_chosen(query, key, value, mask, kwargs["scaling"], kwargs.get("softcap"))
        if self._is_eager:  # every modelling file of transformers defines its own
            own = sys.modules[type(module).__module__].eager_attention_forward
        else:
            own = ALL_ATTENTION_FUNCTIONS[self._own]
        if not self._is_flash:
            if self._is_sdpa and mask is None and not shares_heads(self._model, query):
                share = query.shape[1] // key.shape[1]
                key, value = (part.repeat_interleave(share, dim=1) for part in (key, value))
            return own(module, query, key, value, mask, **kwargs)[0]
        # transformers' FlashAttention reads the implementation's name from the config, and would take gaps in
        # position_ids for borders between packed sequences
        of_flash = {key: value for key, value in kwargs.items() if key != "position_ids"}
        with replaced(self._model.config, "_attn_implementation", self._own):
            return own(module, query, key, value, mask, **of_flash)[0]


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


def additive_mask(visible: Tensor, share: int, dtype: torch.dtype) -> Tensor:
    """A mask that attention adds to its logits: 0, or -inf where a query does not attend to a token.

    visible [m, s] bool: which stored tokens each query attends to; [g, m, s] if key heads store different tokens.
    share: copies of each query's row, h/g for `attend_to_chosen`, else 1.
    Returns [1, 1, share * m, s] in `dtype`, or [1, g, share * m, s]; a single query has one row for all its heads.
    """
    m, s = visible.shape[-2:]
    # CUDA's kernels need rows that start at multiples of 16 elements, else each layer copies the mask
    shape = (*visible.shape[:-2], 1 if m == 1 else share, m, -(-s // 16) * 16)
    rows = visible.new_full(shape, float("-inf"), dtype=dtype)
    mask = rows[..., :s].masked_fill_(visible.unsqueeze(-3), 0).flatten(-3, -2)
    return mask[None] if visible.ndim == 3 else mask[None, None]


def attention_scores(
    query: Tensor,
    key: Tensor,
    visible: Visible,
    scaling: float,
    softcap: float | None = None,
    spec: ScoreSpec = NO_SCORES,
) -> Tensor:
    """The scores of one layer that `spec` describes; by default Eq. 1, the newest token's attention, mean over heads.

    query [1, h, m, d] and key [1, g, s, d] after RoPE; the newest token is the last query.
    visible: which keys the last queries attend to.
    softcap: the bound c of attention logits, c * tanh(logits / c), as in Gemma 2.

    Returns [h, w, s], w = min(spec.queries, m), without the dimensions that `ScoreSpec` reduces, in float32 (float64
    for a float64 model); a probability is 0 if a token is not attended to. The cost is h*w*s*d.
    """
    if spec.summed is not None:
        return _summed_scores(query, key, visible, scaling, softcap, spec)
    m = query.shape[2]
    logits = _logits(query, key, visible, slice(m - min(spec.queries, m), m), key.shape[2], scaling, softcap)
    scores = logits if spec.raw else logits.softmax(dim=-1)
    scores = scores if spec.per_head else scores.mean(dim=0)
    return scores.squeeze(-2) if spec.queries == 1 else scores


def _logits(
    query: Tensor, key: Tensor, visible: Visible, rows: slice, keys: int, scaling: float, softcap: float | None
) -> Tensor:
    """[h, w, keys] of the queries in `rows` and the first `keys` keys; -inf if a key is not attended to."""
    heads, kv_heads, d = query.shape[1], key.shape[1], query.shape[-1]
    w = rows.stop - rows.start
    # [1, h, w, d] -> [g, h/g * w, d]: the query heads that share a key head become the rows of one product
    last = query[:, :, rows].reshape(kv_heads, heads // kv_heads * w, d)
    # float16 could overflow here, though not in attention itself; bfloat16 would blur the comparison
    exact = torch.promote_types(query.dtype, torch.float32)
    last, of_keys = last.to(exact), key[0, :, :keys].to(exact).transpose(-1, -2)
    # scaled after the product: TF32 holds 16-bit inputs exactly, but not their multiples
    with tf32_products(query.is_cuda and query.element_size() == 2):
        products = torch.baddbmm(last[..., :1], last, of_keys, beta=0, alpha=scaling)  # beta=0: adds nothing
    logits = _capped(products, softcap).view(heads, w, keys)
    attended = to_device(visible(rows, slice(0, keys)), key.device)
    if attended is None:
        return logits
    if attended.shape[-1] == keys:
        return torch.where(attended, logits, _minus_infinity(exact, key.device))
    logits[..., keys - attended.shape[-1] :].masked_fill_(~attended, float("-inf"))
    return logits


@functools.cache
def _minus_infinity(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), float("-inf"), dtype=dtype, device=device)


def _summed_scores(
    query: Tensor, key: Tensor, visible: Visible, scaling: float, softcap: float | None, spec: ScoreSpec
) -> Tensor:
    """`attention_scores` with `spec.summed`: [h, s], or [s]. Blocks of queries run over the keys up to their end."""
    heads, m, s = query.shape[1], query.shape[2], key.shape[2]
    w = min(spec.queries, m)
    exact = torch.promote_types(query.dtype, torch.float32)
    assert spec.summed is not None
    weights = torch.linspace(*spec.summed, w, dtype=exact, device=key.device)
    key = key.to(exact)  # once for all blocks
    sums = weights.new_zeros((heads, s))
    block = max(1, (SUMMED_ON_CPU if key.device.type == "cpu" else SUMMED) // (heads * s))
    if block < w:  # several blocks read it: stored in the order in which their products do
        key = key.transpose(-1, -2).contiguous().transpose(-1, -2)
    for first in range(m - w, m, block):
        rows = slice(first, min(first + block, m))
        keys = s - (m - rows.stop)  # no query of the block attends to later keys
        scores = _logits(query, key, visible, rows, keys, scaling, softcap).softmax(dim=-1)
        sums[:, :keys] += weights[first - (m - w) : rows.stop - (m - w)] @ scores
    return sums if spec.per_head else sums.mean(dim=0)


def attend_to_chosen(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """Attention of m queries to the stored tokens that `mask` (`additive_mask`) allows each of them.

    Without a mask, each query attends to all stored tokens. softcap: as in `attention_scores`; no kernel of PyTorch
    supports it, so all products are then in memory at once.
    query [1, h, m, d]; key, value [1, g, s, d]. Returns [1, m, h, d].
    """
    _, heads, m, d = query.shape
    kv_heads = key.shape[1]
    # [1, h, m, d] -> [1, g, h/g * m, d]: K and V are read once for all the heads that share them, never repeated
    packed = query.reshape(1, kv_heads, heads // kv_heads * m, d)
    if softcap is None:
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    else:
        # rounded as eager attention rounds: products in the model's dtype, softmax in at least float32
        logits = _capped(packed @ key.transpose(-1, -2) * scaling, softcap)  # [1, g, h/g * m, s]
        if mask is not None:
            logits = logits + mask
        out = logits.softmax(dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype) @ value
    if m == 1:
        return out.reshape(1, 1, heads, value.shape[-1])
    # [1, g, h/g * m, d] -> [1, g, m, h/g, d] -> [1, m, h, d], in one copy
    by_query = out.view(1, kv_heads, heads // kv_heads, m, value.shape[-1]).transpose(2, 3)
    return by_query.transpose(1, 2).reshape(1, m, heads, value.shape[-1])


def attend_in_order(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PositionSortedMask,
    scaling: float,
    softcap: float | None,
    splits: bool,
) -> Tensor:
    """Attention of m queries to the first keys, as many as `mask` says for each of them.

    query [1, h, m, d]; key, value [1, g, s, d] sorted by position. Returns [1, m, h, d].
    splits: in a block, all queries attend to the keys before the first query's own. A kernel without a mask runs these
        keys, another one the rest under a mask. Their log-sum-exps of the logits give the weights that join both.
    """
    heads, m, share = query.shape[1], query.shape[2], query.shape[1] // key.shape[1]
    pairs = SPLIT_ON_CPU if query.device.type == "cpu" else SPLIT
    if not splits:
        pairs = block_bytes(query.device) // ((share if softcap is None else heads) * query.element_size())
    form = functools.partial(additive_mask, share=share, dtype=query.dtype)
    out = query.new_empty(1, m, heads, value.shape[-1])
    for rows, keys, additive in mask.blocks_in_order(form, pairs, splits, key.device):
        own, of_keys, of_values = query[:, :, rows], key[:, :, keys], value[:, :, keys]
        if not splits or not keys.start:
            out[:, rows] = attend_to_chosen(own, of_keys, of_values, additive, scaling, softcap)
            continue
        packed = own.reshape(1, key.shape[1], -1, query.shape[3])
        first, lse_first = attend_with_lse(packed, key[:, :, : keys.start], value[:, :, : keys.start], None, scaling)
        rest, lse_rest = attend_with_lse(packed, of_keys, of_values, additive, scaling)
        joined = torch.lerp(
            rest.to(lse_rest.dtype), first.to(lse_rest.dtype), (lse_first - lse_rest).sigmoid()[..., None]
        )
        out[:, rows] = joined.reshape(1, heads, -1, value.shape[-1]).transpose(1, 2)
    return out


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
