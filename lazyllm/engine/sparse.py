"""Attention of a prefill's queries to some of the keys before them, which a method chooses (`bases.Sparse`).

Notation:
    h  query heads          g  key and value heads          n  prompt tokens          d  head width
    b  queries of a block   k  keys up to a block's last query          c  blocks
"""

import torch
from torch import Tensor

from lazyllm.engine.devices import to_device
from lazyllm.engine.inputs import Triangle
from lazyllm.engine.kernels import additive_mask, attend_to_chosen, join
from lazyllm.engine.masks import AttentionMask, block_bytes
from lazyllm.engine.sdpa import attend_with_lse


def attend_sparsely(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Triangle,
    mask: AttentionMask,
    scaling: float,
    softcap: float | None,
    has_lse: bool,
) -> Tensor:
    """`attend_in_triangle` where that is possible, else `attend_under_mask`.

    has_lse: whether `attend_with_lse` takes these tensors.
    """
    if has_lse and mask.window is None and softcap is None:
        return attend_in_triangle(query, key, value, pattern, scaling)
    return attend_under_mask(query, key, value, pattern, mask, scaling, softcap)


def attend_under_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Triangle,
    mask: AttentionMask,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Dense attention under the pattern's mask, in blocks of queries: exact on any device, and not faster.

    query [1, h, n, d]; key, value [1, g, n, d]. mask: of the layer, causal and with its window.
    Returns [1, n, h, d].
    """
    _, heads, n, _ = query.shape
    share, out = heads // key.shape[1], query.new_empty(1, n, heads, value.shape[-1])
    held = heads * query.element_size()  # the logits of a query and a key, which a softcap needs
    most = max(1, block_bytes(query.device) // (held * n))
    for first in range(0, n, most):
        rows, keys = slice(first, min(first + most, n)), slice(0, min(first + most, n))
        visible = _visible(pattern, rows, keys, n, query.device)
        own = to_device(mask.visible(rows, keys), query.device)
        visible = visible if own is None else visible & own  # [b, k]
        additive = additive_mask(visible, share, query.dtype)
        own_keys, own_values = key[:, :, keys], value[:, :, keys]
        out[:, rows] = attend_to_chosen(query[:, :, rows], own_keys, own_values, additive, scaling, softcap)
    return out


def _visible(pattern: Triangle, rows: slice, keys: slice, n: int, device: torch.device) -> Tensor:
    """[b, k] bool: which of n tokens the pattern lets each query see, if they are not after it."""
    query = torch.arange(rows.start, rows.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)
    return (key < pattern.sinks) | (query - key < pattern.window) | (query >= n - pattern.last)


def attend_in_triangle(query: Tensor, key: Tensor, value: Tensor, pattern: Triangle, scaling: float) -> Tensor:
    """Attention in pieces that need no mask, joined by their log-sum-exps: as fast as the pairs that it attends to.

    query [1, h, n, d]; key, value [1, g, n, d], on a device of `gives_lse`. The pattern is not dense for n tokens.
    Returns [1, n, h, d].
    """
    heads, n = query.shape[1:3]
    sinks, window, before = pattern.sinks, pattern.window, n - pattern.last
    out = query.new_empty(1, n, heads, value.shape[-1]).transpose(1, 2)

    # the window of each query, in blocks as long as the window, and a shorter one at the end
    whole = before // window * window
    near = [_near(query[0], key[0], value[0], range(0, whole, window), window, window, scaling)]
    if whole < before:
        near.append(_near(query[0], key[0], value[0], range(whole, before, window), before - whole, window, scaling))
    attended, sums = (torch.cat(parts, dim=1)[None] for parts in zip(*near, strict=True))
    out[:, :, :window] = attended[:, :, :window]

    # the sinks, which the first queries after the window see one by one
    for rows in (slice(window, window + sinks), slice(window + sinks, before)) if sinks else ():
        first = key[:, :, :sinks], value[:, :, :sinks]
        of_sinks = attend_with_lse(query[:, :, rows], *first, None, scaling, is_causal=rows.start == window)
        attended[:, :, rows], _ = join([(attended[:, :, rows], sums[:, :, rows]), of_sinks])
    out[:, :, window:before] = attended[:, :, window:]

    last = query[:, :, before:]
    earlier = attend_with_lse(last, key[:, :, :before], value[:, :, :before], None, scaling)
    own = attend_with_lse(last, key[:, :, before:], value[:, :, before:], None, scaling, is_causal=True)
    out[:, :, before:], _ = join([earlier, own])
    return out.transpose(1, 2)


def _near(
    query: Tensor, key: Tensor, value: Tensor, starts: range, b: int, window: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention of blocks of b <= window queries, each query to the last `window` tokens up to itself.

    query [h, n, d]; key, value [g, n, d]. starts: of the blocks, whose distance is its step.
    Returns [h, c * b, d], and the log-sum-exps [h, c * b], in at least float32.

    A block's own keys are causal. Of the `window` keys before it, all queries see the last `window` - b. Each query
    sees one less of the others than the query before it: causal again, if queries and keys are reversed.
    """

    def blocks(part: Tensor, starts: range, width: int) -> Tensor:  # [c, h or g, width, d], views
        return part[:, starts[0] : starts[-1] + width].unfold(1, width, starts.step).permute(1, 0, 3, 2)

    def attend(rows: Tensor, starts: range, width: int, is_causal: bool) -> tuple[Tensor, Tensor]:
        return attend_with_lse(rows, blocks(key, starts, width), blocks(value, starts, width), None, scaling, is_causal)

    def attend_reversed(rows: Tensor, starts: range, width: int) -> tuple[Tensor, Tensor]:
        keys, values = blocks(key, starts, width).flip(2), blocks(value, starts, width).flip(2)
        attended, sums = attend_with_lse(rows.flip(2), keys, values, None, scaling, is_causal=True)
        return attended.flip(2), sums.flip(2)

    rows = blocks(query, starts, b)
    attended, sums = attend(rows, starts, b, is_causal=True)
    attended = attended.to(sums.dtype)
    later = starts[1:] if starts[0] == 0 else starts
    skipped = len(starts) - len(later)
    rows = rows[skipped:]

    def add(where: slice, piece: tuple[Tensor, Tensor]) -> None:
        joined = join([(attended[skipped:, :, where], sums[skipped:, :, where]), piece])
        attended[skipped:, :, where], sums[skipped:, :, where] = joined

    if later and b < window:
        shifted = range(later.start - window + b, later.stop - window + b, later.step)
        add(slice(None), attend(rows, shifted, window - b, is_causal=False))
    if later and b > 1:
        shifted = range(later.start - window + 1, later.stop - window + 1, later.step)
        add(slice(b - 1), attend_reversed(rows[:, :, : b - 1], shifted, b - 1))
    return attended.transpose(0, 1).flatten(1, 2), sums.transpose(0, 1).flatten(1, 2)
