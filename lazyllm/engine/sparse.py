"""Attention of a prefill's queries to some of the keys before them, which a method chooses.

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


def attend_under_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Triangle,
    mask: AttentionMask,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Attend densely under the pattern's mask, in blocks of queries: on any device, not faster.

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
        allowed = to_device(mask.visible(rows, keys), query.device)
        visible = visible if allowed is None else visible & allowed  # [b, k]
        additive = additive_mask(visible, share, query.dtype)
        seen = key[:, :, keys], value[:, :, keys]
        out[:, rows] = attend_to_chosen(query[:, :, rows], *seen, additive, scaling, softcap)
    return out


def _visible(pattern: Triangle, rows: slice, keys: slice, n: int, device: torch.device) -> Tensor:
    """Mark [b, k] which of n tokens the pattern lets each query see, if they are not after it."""
    query = torch.arange(rows.start, rows.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)
    return (key < pattern.sinks) | (query - key < pattern.window) | (query >= n - pattern.last)


def attend_in_triangle(
    query: Tensor, key: Tensor, value: Tensor, pattern: Triangle, scaling: float
) -> Tensor:
    """Attend in pieces that need no mask, joined by their log-sum-exps: as fast as their pairs.

    query [1, h, n, d]; key, value [1, g, n, d], on a device of `gives_lse`. The pattern is not
    dense for n tokens. Returns [1, n, h, d].
    """
    heads, n = query.shape[1:3]
    sinks, window, before = pattern.sinks, pattern.window, n - pattern.last
    out = query.new_empty(1, n, heads, value.shape[-1]).transpose(1, 2)

    # the window of each query, in blocks as long as the window, and a shorter one at the end
    whole = before // window * window
    tensors = query[0], key[0], value[0]
    near = [_near(*tensors, range(0, whole, window), window, window, scaling)]
    if whole < before:
        near.append(_near(*tensors, range(whole, before, window), before - whole, window, scaling))
    attended, sums = (torch.cat(parts, dim=1)[None] for parts in zip(*near, strict=True))
    out[:, :, :window] = attended[:, :, :window]

    # the sinks, which the first queries after the window see one by one
    for rows in (slice(window, window + sinks), slice(window + sinks, before)) if sinks else ():
        first, is_first = (key[:, :, :sinks], value[:, :, :sinks]), rows.start == window
        far = attend_with_lse(query[:, :, rows], *first, None, scaling, is_causal=is_first)
        attended[:, :, rows], _ = join([(attended[:, :, rows], sums[:, :, rows]), far])
    out[:, :, window:before] = attended[:, :, window:]

    last = query[:, :, before:]
    earlier = attend_with_lse(last, key[:, :, :before], value[:, :, :before], None, scaling)
    newest = key[:, :, before:], value[:, :, before:]
    out[:, :, before:], _ = join(
        [earlier, attend_with_lse(last, *newest, None, scaling, is_causal=True)]
    )
    return out.transpose(1, 2)


def _near(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: range,
    b: int,
    window: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Attend in blocks of b <= window queries, each to the last `window` tokens up to itself.

    query [h, n, d]; key, value [g, n, d]. starts: of the blocks, whose distance is its step.
    Returns [h, c * b, d], and the log-sum-exps [h, c * b], in at least float32.

    A block's keys are causal. Of the `window` keys before it, all queries see the last `window` -
    b. Each query sees one less of the others than the query before it: causal again, if queries and
    keys are reversed.
    """

    def blocks(part: Tensor, starts: range, width: int) -> Tensor:  # [c, h or g, width, d], views
        part = part[:, starts[0] : starts[-1] + width]
        return part.unfold(1, width, starts.step).permute(1, 0, 3, 2)

    def attend(
        rows: Tensor, starts: range, width: int, is_causal: bool, reverses: bool = False
    ) -> tuple[Tensor, Tensor]:
        tensors = [rows, blocks(key, starts, width), blocks(value, starts, width)]
        if reverses:
            tensors = [part.flip(2) for part in tensors]
        attended, sums = attend_with_lse(*tensors, None, scaling, is_causal)
        return (attended.flip(2), sums.flip(2)) if reverses else (attended, sums)

    rows = blocks(query, starts, b)
    attended, sums = attend(rows, starts, b, is_causal=True)
    attended = attended.to(sums.dtype)
    later = starts[1:] if starts[0] == 0 else starts
    skipped = len(starts) - len(later)
    rows = rows[skipped:]

    def add(where: slice, piece: tuple[Tensor, Tensor]) -> None:
        joined = join([(attended[skipped:, :, where], sums[skipped:, :, where]), piece])
        attended[skipped:, :, where], sums[skipped:, :, where] = joined

    def shifted(by: int) -> range:
        return range(later.start - window + by, later.stop - window + by, later.step)

    if later and b < window:
        add(slice(None), attend(rows, shifted(b), window - b, is_causal=False))
    if later and b > 1:
        rows = rows[:, :, : b - 1]
        add(slice(b - 1), attend(rows, shifted(1), b - 1, is_causal=True, reverses=True))
    return attended.transpose(0, 1).flatten(1, 2), sums.transpose(0, 1).flatten(1, 2)
