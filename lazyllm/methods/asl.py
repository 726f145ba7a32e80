"""ASL: cut the prompt once, after a layer chosen for it (Taniguchi 2026, arXiv 2601.07667)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from lazyllm.engine.depth import Depth
from lazyllm.engine.inputs import Boundary, ScoreSpec
from lazyllm.methods.support.bases import Prune, at_depth
from lazyllm.methods.support.hyperparameters import Count, Odd, Positive, Ratio, count_of
from lazyllm.methods.support.ranking import best_and_window, rank, sum_over_first, window_scores

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ASL(Prune):
    """Cut the prompt after the first layer at which the ranks of its best tokens have settled.

    first: 1-based layer from which tokens are ranked; None for 11/32 of the depth (the authors'
        index 10 of 32 layers), at a layer that sees the whole prompt (`Depth.at_share`).
    threshold: cut if the variance of ranks is below this share of the first variance, or is 0.
    keep: tokens kept beside the window, as a number (int) or share of the prompt, rounded up
        (float).
    window: number of last tokens; their attention ranks the others, and they always stay.
    layers: number of ranked layers that a variance is taken over; None for a quarter of the depth
        (the authors' 8 of 32), at least 2. Where some layers see the whole prompt, only these
        count, and are ranked.
    pool: odd width of the average pooling of scores.
    retain: tokens that each key head of each layer stores (SnapKV), the window among them, as a
        number or share; None for the value of `keep`. 1 turns SnapKV off.

    Variance: of a token's ranks in the last `layers` layers; mean over the tokens that are among
    the `keep` best in at least one of these layers. Scores are FastKV's, summed over heads. Tokens
    keep their positions. Nothing is cut if the prompt has at most `keep` + `window` tokens.

    The number of tokens in each layer depends on the prompt, so no `keep` is solved for a speedup.
    `groups` and `ideal_speedup` assume the earliest likely cut: one ranked layer after that of the
    first variance, or at that layer if the threshold is above 1. `Generation.computed` gives the
    actual one. At each ranked layer from that of the first variance to the cut, the method waits
    once for the device.

    Source: the paper and a description of the code (TANIGUCHIREI/ASL, commit 9e1ec0c, which has no
    licence). Written from scratch. Ours: a variance of 0 cuts; ties go to the lower position.
    """

    label = "ASL"
    order = 10
    colour = "#4B0082"
    marker = ">"
    shown_parameters = ("keep",)
    keep_all: ClassVar[Mapping[str, Any]] = {"keep": 1.0, "retain": 1}
    adaptive = True
    forget = False

    first: Count | None = None
    threshold: Positive = 0.3
    keep: Count | Ratio = 2048
    window: Count = 32
    layers: Count | None = None
    pool: Odd = 7
    retain: Count | Ratio | None = None

    def scoring_layers(self, depth: Depth) -> list[int]:
        # the ranked ones: without the last one, after which nothing is left to cut
        first = at_depth(self.first, depth, Fraction(11, 32), "first")
        return depth.among(range(first, depth.count))

    def _cuts(self, depth: Depth) -> list[int]:
        """Name the layers after which the cut can be: `layers` of them have been ranked there."""
        return self.scoring_layers(depth)[self._averaged(depth) - 1 :]

    def _averaged(self, depth: Depth) -> int:
        """Count the ranked layers that a variance is taken over."""
        return self.layers or max(2, len(depth.full) // 4)

    def _after_cut(self, n: int) -> int:
        return min(n, count_of(self.keep, n) + self.window)

    def _stored(self, n: int) -> int:
        """Count the most of n tokens that each key head stores."""
        if self.retain == 1:
            return n
        return max(count_of(self.keep if self.retain is None else self.retain, n), self.window)

    def kept(self, depth: Depth, n: int) -> dict[int, int]:
        cuts, after_cut, kept = self._cuts(depth), self._after_cut(n), {}
        ranked = self.scoring_layers(depth) if cuts and after_cut < n else []
        # up to 1, the first variance is not below its share
        likely = cuts if self.threshold > 1 else cuts[1:]
        cut = next(iter(likely), depth.count) if ranked else depth.count
        for layer in range(1, depth.count + 1):
            if self._stored(n) < n or layer in ranked:
                kept[layer] = after_cut if cut <= layer < depth.count else n
        return kept

    def score_spec(self, layers: range, depth: Depth) -> ScoreSpec:
        return ScoreSpec(layers[-1:], self.window, per_head=True, summed=(1, 1))

    def stored_per_layer(self, depth: Depth, n: int) -> list[int]:
        return [min(m, self._stored(n)) for m in self.tokens_per_layer(depth, n)]

    def score(self, at: Boundary, recorded: list[Tensor]) -> Tensor:
        return window_scores(recorded[0], self.window, at.kv_heads, self.pool, "average")

    def store(self, at: Boundary, scores: Tensor) -> Tensor | None:
        stored = self._stored(at.n)
        return best_and_window(scores, stored, at.m) if stored < at.m else None

    def select(self, at: Boundary, scores: Tensor) -> Tensor | None:
        kept = self._after_cut(at.n)
        is_over = kept == at.n or at.m < at.n  # nothing to cut, or cut already
        if is_over or at.layer not in self.scoring_layers(at.depth):
            return None
        by_token = sum_over_first(scores)
        ranks = at.notes.setdefault("ranks", [])  # of each ranked layer, [o]
        ranks.append(rank(by_token).argsort())  # each token's rank
        if at.layer not in self._cuts(at.depth):
            return None
        variance = rank_variance(ranks[-self._averaged(at.depth) :], kept - self.window)
        start = at.notes.setdefault("start", variance)
        settled = bool((variance == 0) | (variance < self.threshold * start))
        return best_and_window(by_token, kept, at.m) if settled else None


def rank_variance(ranks: list[Tensor], count: int) -> Tensor:
    """Average the variance of a token's ranks over those among the `count` best of any ranking.

    ranks: [o] each, from 0.
    """
    import torch

    stacked = torch.stack(ranks).double()
    among = (stacked < count).any(dim=0)
    variances = stacked.var(dim=0, correction=0)
    return torch.where(among, variances, 0.0).sum() / among.sum()
