"""Attention of queries to stored keys by SDPA's kernels, whatever the model's own attention is.

Notation:
    h  query heads          g  key and value heads (g divides h; h = g without grouped-query attention)
    m  query tokens         s  stored tokens (slots)          d  head width
"""

import functools
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from lazyllm.engine.masks import AttentionMask, PositionSortedMask, block_bytes
from lazyllm.engine.sdpa import attend_with_lse

# (query, key) pairs of a block's mask in `attend_in_order`. A larger block masks more pairs that need no mask
SPLIT_ON_CPU, SPLIT = 2**16, 2**20


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
        logits = capped(packed @ key.transpose(-1, -2) * scaling, softcap)  # [1, g, h/g * m, s]
        if mask is not None:
            logits = logits + mask
        out = logits.softmax(dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype) @ value
    if m == 1:
        return out.reshape(1, 1, heads, value.shape[-1])
    # [1, g, h/g * m, d] -> [1, g, m, h/g, d] -> [1, m, h, d], in one copy
    by_query = out.view(1, kv_heads, heads // kv_heads, m, value.shape[-1]).transpose(2, 3)
    return by_query.transpose(1, 2).reshape(1, m, heads, value.shape[-1])


def attend_in_blocks(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    share: int,
    logits: bool,
) -> Tensor:
    """[1, m, h, d] attention of blocks of queries, each with its mask.

    attend: (query, key, value, mask or None) -> [1, b, h, d], attention of a block of b queries.
    share: as in `additive_mask`. logits: whether `attend` holds the logits of all heads in memory.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    form = functools.partial(additive_mask, share=share, dtype=query.dtype)
    # elements in memory for a (query, key) pair
    held = heads if logits else heads // kv_heads
    out: Tensor | None = None
    for rows, keys, additive in mask.blocks(form, held * query.element_size(), query.device):
        part = attend(query[:, :, rows], key[:, :, keys], value[:, :, keys], additive)
        if part.shape[1] == query.shape[2]:
            return part
        if out is None:
            out = part.new_empty(1, query.shape[2], *part.shape[2:])
        out[:, rows] = part
    assert out is not None  # there is a block
    return out


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
        keys, another one the rest under a mask, and `join` makes one of both.
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
        first = attend_with_lse(packed, key[:, :, : keys.start], value[:, :, : keys.start], None, scaling)
        rest = attend_with_lse(packed, of_keys, of_values, additive, scaling)
        joined, _ = join([rest, first])
        out[:, rows] = joined.reshape(1, heads, -1, value.shape[-1]).transpose(1, 2)
    return out


def join(pieces: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention to the keys of all pieces, from the attention to each piece alone (`attend_with_lse`).

    pieces: of each, attention [1, h, m, d] and the log-sum-exp [1, h, m] of each query's logits, in float32 (float64
        for float64 inputs). No key is in two pieces. A query may attend to nothing in a piece if its log-sum-exp there
        is far below the others', and its attention finite: a mask of -inf gives NaN, one of -1e30 does not.

    Returns the same of all pieces together; the attention is in the dtype of the log-sum-exp.
    """
    (attended, total), *others = pieces
    joined = attended.to(total.dtype)
    for attended, sums in others:
        joined = torch.lerp(joined, attended.to(sums.dtype), (sums - total).sigmoid()[..., None])
        total = torch.logaddexp(total, sums)
    return joined, total


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
