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


def select(importance: Tensor, keep: int) -> Tensor:
    """Decoding: indices of the `keep` most important of the candidates [n], most important first."""
    return rank(importance)[:keep]
