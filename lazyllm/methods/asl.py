"""ASL: cut the prompt once, after a layer chosen for this prompt (Taniguchi et al. 2026, arXiv 2601.07667)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from lazyllm.engine.inputs import Boundary, ScoreSpec
from lazyllm.methods.support.bases import Prune, at_depth
from lazyllm.methods.support.hyperparameters import (
    check_count_or_ratio,
    check_int,
    check_odd,
    check_positive,
    checked,
    count_of,
)
from lazyllm.methods.support.ranking import best_and_window, rank, sum_over_first, window_scores

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ASL(Prune):
    """Cut the prompt after the first layer at which the ranks of its best tokens have settled.

    first: 1-based layer from which tokens are ranked; None for 11/32 of the depth (the authors' index 10 of 32 layers).
    threshold: cut if the variance of ranks is below this share of the first variance, or is 0.
    keep: tokens kept beside the window, as a number (int) or share of the prompt, rounded up (float).
    window: number of last tokens; their attention ranks the others, and they always stay.
    layers: number of layers that a variance is taken over; None for a quarter of the depth (the authors' 8 of 32), at
        least 2.
    pool: odd width of the average pooling of scores.
    retain: tokens that each key head of each layer stores (SnapKV), the window among them, as a number or share; None
        for the value of `keep`. 1 turns SnapKV off.

    Variance: of a token's ranks in the last `layers` layers; mean over the tokens that are among the `keep` best in at
    least one of these layers. Scores are FastKV's, summed over heads. Tokens keep their positions. Nothing is cut if
    the prompt has at most `keep` + `window` tokens.

    The number of tokens in each layer depends on the prompt, so no `keep` is solved for a speedup. `groups` and
    `ideal_speedup` assume the earliest likely cut: one layer after that of the first variance, or at that layer if the
    threshold is above 1. `Generation.computed` and `ideal_speedup(..., computed=...)` give the actual one. At each
    layer from the first variance to the cut, the method waits once for the device.

    Source: the paper and a description of the code (TANIGUCHIREI/ASL, commit 9e1ec0c, which has no licence).
    Written from scratch. Ours: a variance of 0 cuts; ties go to the lower position.
    """

    label = "ASL"
    order = 10
    colour = "#4B0082"
    marker = ">"
    shown_parameters = ("keep",)
    keep_all: ClassVar[Mapping[str, Any]] = {"keep": 1.0, "retain": 1}
    adaptive = True
    forget = False

    first: int | None = checked(check_int, None)
    threshold: float = checked(check_positive, 0.3, below=math.inf)
    keep: float = checked(check_count_or_ratio, 2048)
    window: int = checked(check_int, 32)
    layers: int | None = checked(check_int, None)
    pool: int = checked(check_odd, 7)
    retain: float | None = checked(check_count_or_ratio, None)

    def _ranked(self, num_layers: int) -> tuple[int, int]:
        """The first layer that is ranked, and the first layer after which the cut can be."""
        first = at_depth(self.first, num_layers, Fraction(11, 32), "first")
        return first, first + (self.layers or max(2, num_layers // 4)) - 1

    def _after_cut(self, n: int) -> int:
        return min(n, count_of(self.keep, n) + self.window)

    def _stored(self, n: int) -> int:
        """The greatest number of n tokens that each key head stores."""
        if self.retain == 1:
            return n
        return max(count_of(self.keep if self.retain is None else self.retain, n), self.window)

    def kept(self, num_layers: int, n: int) -> dict[int, int]:
        (first, earliest), after_cut, kept = self._ranked(num_layers), self._after_cut(n), {}
        ranks = after_cut < n and earliest < num_layers
        cut = earliest if self.threshold > 1 else earliest + 1  # up to 1, the first variance is not below its share
        for layer in range(1, num_layers + 1):
            if self._stored(n) < n or (ranks and first <= layer < num_layers):
                kept[layer] = after_cut if ranks and layer >= cut else n
        return kept

    def score_spec(self, layers: range) -> ScoreSpec:
        return ScoreSpec(layers[-1:], self.window, per_head=True, summed=(1, 1))

    def stored_per_layer(self, num_layers: int, n: int) -> list[int]:
        return [min(m, self._stored(n)) for m in self.tokens_per_layer(num_layers, n)]

    def score(self, at: Boundary, recorded: list[Tensor]) -> Tensor:
        return window_scores(recorded[0], self.window, at.kv_heads, self.pool, "average")

    def store(self, at: Boundary, scores: Tensor) -> Tensor | None:
        stored = self._stored(at.n)
        return best_and_window(scores, stored, at.m) if stored < at.m else None

    def select(self, at: Boundary, scores: Tensor) -> Tensor | None:
        (first, earliest), kept = self._ranked(at.num_layers), self._after_cut(at.n)
        if kept == at.n or at.m < at.n or not first <= at.layer < at.num_layers:  # nothing to cut, or cut already
            return None
        by_token = sum_over_first(scores)
        ranks = at.notes.setdefault("ranks", [])  # of each ranked layer, [o]
        ranks.append(rank(by_token).argsort())  # each token's rank
        if at.layer < earliest:
            return None
        variance = rank_variance(ranks[first - 1 - earliest :], kept - self.window)  # of the last `layers` layers
        start = at.notes.setdefault("start", variance)
        settled = bool((variance == 0) | (variance < self.threshold * start))
        return best_and_window(by_token, kept, at.m) if settled else None


def rank_variance(ranks: list[Tensor], count: int) -> Tensor:
    """Variance of a token's ranks, mean over those among the `count` best of any ranking. ranks: [o] each, from 0."""
    import torch

    stacked = torch.stack(ranks).double()
    among = (stacked < count).any(dim=0)
    variances = stacked.var(dim=0, correction=0)
    return torch.where(among, variances, 0.0).sum() / among.sum()
