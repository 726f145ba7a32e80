"""The rules by which tokens are chosen. Nothing here waits for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def rank(scores: Tensor) -> Tensor:
    """Sort indices of scores [..., n], highest first; ties to the lower index."""
    return scores.argsort(descending=True, stable=True)


def best_of_prompt(scores: Tensor, keep: int) -> Tensor:
    """Choose the `keep` tokens of highest score, ascending.

    scores: [n] of the tokens that entered the pruning layer, by position. The last one is the
        step's newest token: it is always kept, and counts in `keep`.
    """
    forced = scores.clone()
    forced[-1:] = float("inf")  # `forced[-1]` would be copied from the host, for which CUDA waits
    return rank(forced)[:keep].sort().values


def window_scores(sums: Tensor, window: int, kv_heads: int, pool: int, pooling: str) -> Tensor:
    """Score [g, o] the o tokens before the window: pooled per query head, summed per key head.

    sums: [h, m] attention probabilities of m tokens, summed over the window's queries.
    window: number of last tokens, which are not scored; less than m. pool: odd width of pooling.
    pooling: "max", or "average", which counts the zeros around the tokens.
    """
    import torch.nn.functional as F

    heads, m = sums.shape
    older = sums[:, : m - window]
    pool_1d = F.max_pool1d if pooling == "max" else F.avg_pool1d
    pooled = pool_1d(older[None], pool, stride=1, padding=pool // 2)[0]
    return sum_over_first(pooled.view(kv_heads, heads // kv_heads, -1).transpose(0, 1))


def sum_over_first(scores: Tensor) -> Tensor:
    """Sum over the first dimension, rounded alike for every token: equal scores stay equal."""
    return scores.movedim(0, -1).contiguous().sum(dim=-1)


def best_and_window(scores: Tensor, keep: int, m: int) -> Tensor:
    """Choose `keep` of m tokens, [..., keep] ascending: the window, and the best of the others.

    scores: [..., o] of the tokens before the window. keep: at least m - o. Ties go to the lower
        index.
    """
    import torch

    older = scores.shape[-1]
    best = rank(scores)[..., : keep - (m - older)].sort().values
    window = torch.arange(older, m, device=scores.device)
    return torch.cat([best, window.expand(*best.shape[:-1], -1)], dim=-1)
