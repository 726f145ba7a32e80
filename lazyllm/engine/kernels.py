"""Attention of queries to stored keys by SDPA's kernels, whatever the model's attention is.

Notation:
    h  query heads          g  key and value heads (g divides h)          d  head width
    m  query tokens         s  stored tokens (slots)
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lazyllm.engine.masks import BLOCK, AttentionMask, PositionSortedMask, block_bytes
from lazyllm.engine.sdpa import attend_with_lse

# (query, key) pairs of a block's mask in `attend_in_order`. More mask more pairs that need no mask
SPLIT_ON_CPU, SPLIT = 2**16, 2**20
# K and V are sorted: on a CPU for more queries than this, times the heads that share a key head;
# elsewhere if a layer's masks would take more bytes than this, those of one block of queries
SORTED_ON_CPU, SORTED = 96, BLOCK
# Chunks of keys: at most this many, of at least this many keys, and no more than fill a GPU of 132
# multiprocessors twice, where each block of threads runs 64 rows of a head over one chunk
CHUNKS, CHUNK_KEYS, THREAD_BLOCKS, THREAD_BLOCK_ROWS = 16, 2048, 264, 64
# Devices on which a single query attends to a copy of its tokens, and several ones to chunks. On a
# CPU, masks are as fast: a kernel's threads share the keys of a head there
COPIES = frozenset({"cuda"})

Way = Literal["all", "copy", "mask", "chunks", "sort"]


def way_to_attend(
    m: int, heads: int, kv_heads: int, keys: int, itemsize: int, device: torch.device
) -> Way:
    """Choose how a step's m queries attend to some of the stored tokens, without a window.

    keys: number of stored tokens. itemsize: bytes of an element of K and V.

    copy: K and V of a single query's tokens are copied, and need no mask.
    mask: all stored tokens, under a mask (`attend_to_chosen`); CUDA's kernel gives all keys of a
        head to one block of threads.
    chunks: the same, with the keys in chunks that run side by side (`attend_in_chunks`).
    sort: K and V are copied by position, so that few keys need a mask (`attend_in_order`).

    The limits are where times of a layer of 32 heads on an H200 cross (results/gpu). Chunks are not
    yet timed on a GPU.
    """
    if m == 1:
        return "copy" if device.type in COPIES else "mask"
    rows = m * (heads // kv_heads)
    if rows > SORTED_ON_CPU if device.type == "cpu" else rows * keys * itemsize > SORTED:
        return "sort"
    return "chunks" if device.type in COPIES and num_chunks(kv_heads, rows, keys) > 1 else "mask"


def num_chunks(kv_heads: int, rows: int, keys: int) -> int:
    """Count chunks of keys for `attend_in_chunks`: 4 to 16, or 1 if fewer would do."""
    running = kv_heads * -(-rows // THREAD_BLOCK_ROWS)  # blocks of threads, without chunks
    chunks = min(CHUNKS, keys // CHUNK_KEYS, THREAD_BLOCKS // running)
    return chunks if chunks >= 4 else 1


def additive_mask(
    visible: Tensor, share: int, dtype: torch.dtype, hidden: float = float("-inf")
) -> Tensor:
    """Make a mask that attention adds to its logits: 0, or `hidden` for tokens out of sight.

    visible [m, s] bool: the stored tokens that each query attends to; [g, m, s] if key heads
    differ.
    share: copies of each query's row, h/g for `attend_to_chosen`, else 1.
    Returns [1, 1 or g, share * m, s] in `dtype`; a single query has one row for all its heads.
    """
    m, s = visible.shape[-2:]
    # CUDA's kernels need rows that start at multiples of 16 elements, else each layer copies them
    shape = (*visible.shape[:-2], 1 if m == 1 else share, m, -(-s // 16) * 16)
    rows = visible.new_full(shape, hidden, dtype=dtype)
    mask = rows[..., :s].masked_fill_(visible.unsqueeze(-3), 0).flatten(-3, -2)
    return mask[None] if visible.ndim == 3 else mask[None, None]


def chunked_mask(visible: Tensor, share: int, dtype: torch.dtype, chunks: int) -> Tensor:
    """Make an `additive_mask` for `attend_in_chunks`: [c, 1 or g, share * m, k], k keys in a chunk.

    A chunk may hide all its keys from a query. So hidden keys get a large negative number: with
    -inf, the softmax over such a chunk would be NaN.
    """
    s = visible.shape[-1]
    parts = _in_chunks(visible, chunks, dim=-1).movedim(-2, 0)  # [c, m, k] or [c, g, m, k]
    if s % chunks:  # a chunk's last keys are also the next one's first
        parts = parts.clone()
        parts[:-1, ..., s // chunks :] = False
    if parts.ndim == 3:
        parts = parts[:, None]
    hidden = max(-1e30, torch.finfo(dtype).min)
    mask = additive_mask(parts.flatten(0, 1), share, dtype, hidden)
    return mask.view(*parts.shape[:2], *mask.shape[-2:])


def _in_chunks(values: Tensor, chunks: int, dim: int) -> Tensor:
    """View `dim`, the keys, as windows [c, ..., k]: the c chunks at `dim`, their k keys last.

    All have s // c keys and the remainder of s / c; they begin s // c keys apart.
    """
    s = values.shape[dim]
    step = s // chunks
    return values.unfold(dim, s - (chunks - 1) * step, step)


def attend_to_chosen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Attend from m queries to the stored tokens that `mask` (`additive_mask`) allows; None: all.

    softcap: as in `attention_scores`; no kernel of PyTorch has it, so all products are in memory.
    query [1, h, m, d]; key, value [1, g, s, d]. Returns [1, m, h, d].
    """
    _, heads, m, d = query.shape
    kv_heads = key.shape[1]
    share, width = heads // kv_heads, value.shape[-1]
    # [1, h, m, d] -> [1, g, h/g * m, d]: K and V are read once for all the heads that share them
    packed = query.reshape(1, kv_heads, share * m, d)
    if softcap is None:
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    else:
        # rounded as in eager attention: products in the model's dtype, softmax at least in float32
        logits = capped(packed @ key.transpose(-1, -2) * scaling, softcap)  # [1, g, h/g * m, s]
        if mask is not None:
            logits = logits + mask
        exact = torch.promote_types(query.dtype, torch.float32)
        out = logits.softmax(dim=-1, dtype=exact).to(query.dtype) @ value
    if m == 1:
        return out.reshape(1, 1, heads, width)
    # [1, g, h/g * m, d] -> [1, g, m, h/g, d] -> [1, m, h, d], in one copy
    by_query = out.view(1, kv_heads, share, m, width).transpose(2, 3)
    return by_query.transpose(1, 2).reshape(1, m, heads, width)


def attend_in_blocks(
    attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor],
    form: Callable[[Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    holds_logits: bool = False,
) -> Tensor:
    """Attend in blocks of queries, each with its mask: [1, m, h, d].

    attend: (query, key, value, mask) -> [1, b, h, d] of a block; the mask is None if all see all.
    form: turns `AttentionMask.visible` into the mask that `attend` takes.
    holds_logits: whether `attend` holds the logits of all heads in memory.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    cell = heads if holds_logits else heads // kv_heads  # elements for a (query, key) pair
    out: Tensor | None = None
    for rows, keys, additive in mask.blocks(form, cell * query.element_size(), query.device):
        part = attend(query[:, :, rows], key[:, :, keys], value[:, :, keys], additive)
        if part.shape[1] == query.shape[2]:
            return part
        if out is None:
            out = part.new_empty(1, query.shape[2], *part.shape[2:])
        out[:, rows] = part
    assert out is not None  # there is a block
    return out


def attend_in_chunks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """Run `attend_to_chosen` for few queries and many keys: chunks of keys run as a batch.

    mask: [c, 1 or g, h/g * m, k] from `chunked_mask`. Returns [1, m, h, d].
    """
    _, heads, m, d = query.shape
    chunks, kv_heads, width = mask.shape[0], key.shape[1], value.shape[-1]
    packed = query.reshape(1, kv_heads, -1, d).expand(chunks, -1, -1, -1)
    # [1, g, s, d] -> [g, c, d, k] -> [c, g, k, d], views of K and V
    keys, values = (_in_chunks(part[0], chunks, dim=1).permute(1, 0, 3, 2) for part in (key, value))
    attended, sums = attend_with_lse(packed, keys, values, mask, scaling)
    # [g, h/g * m, d], in the dtype of `sums`
    joined = (attended * sums.softmax(dim=0)[..., None]).sum(dim=0)
    out = query.new_empty(1, m, kv_heads, heads // kv_heads, width)
    # casts and transposes in one copy
    out[0] = joined.view(kv_heads, -1, m, width).permute(2, 0, 1, 3)
    return out.view(1, m, heads, width)


def attend_in_order(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PositionSortedMask,
    scaling: float,
    softcap: float | None,
    splits: bool,
) -> Tensor:
    """Attend from m queries to the first keys, as many as `mask` says for each: [1, m, h, d].

    key, value: sorted by position.
    splits: a block's queries attend to the keys before the first one's without a mask, and to the
        rest under a mask; `join` makes one of both.
    """
    heads, m, share = query.shape[1], query.shape[2], query.shape[1] // key.shape[1]
    pairs = SPLIT_ON_CPU if query.device.type == "cpu" else SPLIT
    if not splits:
        cell = (share if softcap is None else heads) * query.element_size()
        pairs = block_bytes(query.device) // cell
    form = functools.partial(additive_mask, share=share, dtype=query.dtype)
    out = query.new_empty(1, m, heads, value.shape[-1])
    for rows, keys, additive in mask.blocks_in_order(form, pairs, splits, key.device):
        block, near = query[:, :, rows], (key[:, :, keys], value[:, :, keys])
        if not splits or not keys.start:
            out[:, rows] = attend_to_chosen(block, *near, additive, scaling, softcap)
            continue
        packed = block.reshape(1, key.shape[1], -1, query.shape[3])
        far = key[:, :, : keys.start], value[:, :, : keys.start]
        first = attend_with_lse(packed, *far, None, scaling)
        rest = attend_with_lse(packed, *near, additive, scaling)
        joined, _ = join([rest, first])
        out[:, rows] = joined.reshape(1, heads, -1, value.shape[-1]).transpose(1, 2)
    return out


def join(pieces: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Compute attention to the keys of all pieces from that to each piece (`attend_with_lse`).

    pieces: attention [1, h, m, d] and log-sum-exp [1, h, m] of each. No key is in two. A query may
        attend to nothing in a piece if its log-sum-exp there is far below the others', and its
        attention finite: a mask of -inf gives NaN, one of -1e30 does not.

    Returns the same of all pieces, in the dtype of the log-sum-exp.
    """
    (attended, total), *others = pieces
    joined = attended.to(total.dtype)
    for attended, sums in others:
        weight = (sums - total).sigmoid()[..., None]
        joined = torch.lerp(joined, attended.to(sums.dtype), weight)
        total = torch.logaddexp(total, sums)
    return joined, total


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
