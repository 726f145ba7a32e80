"""Which tokens go on after a pruning layer (LazyLLM, section 3.1; ties and counts are this project's)."""

from __future__ import annotations

import torch
from torch import Tensor


def rank(importance: Tensor) -> Tensor:
    """Indices of importance [n], most important first; of equals the lower index first. No synchronisation."""
    return torch.argsort(importance, descending=True, stable=True)


def split_prompt(importance: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Prefill: indices of the `keep` tokens that go on and of those that do not, each in ascending order.

    importance: [n] of the tokens that entered the pruning layer, in order of position. The last one is the newest
    token of the step: it always goes on and counts among the kept.
    """
    forced = importance.clone()
    forced[-1] = float("inf")
    order = rank(forced)
    return order[:keep].sort().values, order[keep:].sort().values


def select_candidates(importance: Tensor, is_candidate: Tensor, keep: int) -> Tensor:
    """Decoding: the `keep` most important positions among the candidates, in ascending order.

    importance, is_candidate: [p] by position. There must be at least `keep` candidates.
    """
    # probabilities are not negative, so -1 ranks below every candidate
    return rank(importance.masked_fill(~is_candidate, -1.0))[:keep].sort().values
