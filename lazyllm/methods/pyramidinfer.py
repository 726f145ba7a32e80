"""PyramidInfer: fewer of the older tokens after every layer (Yang 2024, arXiv 2405.12532)."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, floor, pi
from typing import TYPE_CHECKING

from lazyllm.engine.depth import Depth
from lazyllm.engine.inputs import Boundary, Group, ScoreSpec
from lazyllm.methods.support.bases import Prune, groups_between
from lazyllm.methods.support.hyperparameters import CountOrZero, Positive, Ratio, share_of
from lazyllm.methods.support.ranking import rank

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PyramidInfer(Prune):
    """Keep a share of the older tokens after every layer but the last, by recent ones' attention.

    recent: share of the prompt, its last tokens, rounded down, at least 1: they score the others
        and always stay.
    decay: after layer l of L, the share (1 - decay)(cos(pi (l - 1) / L) + 1) / 2 + decay of the
        older tokens that entered it stays, rounded down. Shares multiply. Layers with a sliding
        window drop nothing, unless all layers have one: the next layer that sees the whole prompt
        drops what they would have dropped.
    weight: of the newest recent query; the oldest has weight 1, the others are spaced evenly.
    first: number of first tokens that always stay.

    Scores: the weighted sum of probabilities over the recent queries, mean over heads. Tokens keep
    their positions. Each layer stores all tokens that entered it.

    Source: the paper and a description of the code (mutonix/pyramidinfer, commit 61ac641, which has
    no licence). Written from scratch. Ours: the cosine schedule only; scores in blocks of queries
    instead of whole attention matrices. Scoring is extra work here, which `scoring_flops` counts.
    """

    label = "PyramidInfer"
    order = 9
    colour = "#DDCC00"
    marker = "<"
    target_parameter = "decay"
    forget = False

    recent: Ratio = 0.2
    decay: Ratio = 0.9
    weight: Positive = 1.2
    first: CountOrZero = 4

    scoring_flops = Prune.scores_flops

    def _recent(self, n: int) -> int:
        return max(1, share_of(self.recent, n))

    def kept(self, depth: Depth, n: int) -> dict[int, int]:
        recent, pruning = self._recent(n), self.pruning_layers(depth)
        older, kept = n - recent, {}
        before, forced = older, min(self.first, older)
        for layer in range(1, depth.count):
            wave = (cos(pi * (layer - 1) / depth.count) + 1) / 2
            share = (1 - self.decay) * wave + self.decay
            # 1e-9: rounding must not cost a token
            older = max(floor(share * older + 1e-9), forced)
            if layer in pruning and older < before:
                before, kept[layer] = older, older + recent
        return kept

    def groups(self, depth: Depth, n: int) -> list[Group]:
        def score_spec(layers: range, _: Depth) -> ScoreSpec:
            return ScoreSpec(layers[-1:], self._recent(n), summed=(1, self.weight))

        return groups_between(self, self.kept(depth, n), depth, n, score_spec)

    def pruning_layers(self, depth: Depth) -> list[int]:
        return [layer for layer in depth.full if layer < depth.count]

    def select(self, at: Boundary, scores: Tensor) -> Tensor:
        scores[: self.first] = scores[at.m - self._recent(at.n) :] = float("inf")
        return rank(scores)[: self.kept(at.depth, at.n)[at.layer]].sort().values
