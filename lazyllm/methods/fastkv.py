"""FastKV: one cut half-way, and SnapKV in every layer's cache (Jo 2025, arXiv 2502.01068)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lazyllm.engine.depth import Depth
from lazyllm.engine.inputs import Boundary, ScoreSpec
from lazyllm.methods.support.bases import Prune, at_depth
from lazyllm.methods.support.hyperparameters import Count, Odd, Ratio, share_of
from lazyllm.methods.support.ranking import best_and_window, sum_over_first, window_scores

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HalfwayCut(Prune):
    """The common part of FastKV and CLAA: one cut after a layer, by the last tokens' attention.

    layer: 1-based layer after which the cut is; None for half of the depth (the authors' 16 of 32,
        20 of 40), at a layer that sees the whole prompt (`Depth.at_share`).
    keep: share of the n prompt tokens that go on, rounded down; it includes the window, and is at
        least the window.
    window: number of last tokens; their attention scores the others, and they always stay.
    pool: odd width of the pooling of scores along the prompt.
    """

    forget = False

    layer: Count | None = None
    keep: Ratio = 0.2
    window: Count = field(default=8, kw_only=True)
    pool: Odd = field(default=7, kw_only=True)

    def cut_after(self, depth: Depth) -> int:
        """Find the layer after which the cut is. Raises ValueError if it is beyond the model."""
        return at_depth(self.layer, depth, Fraction(1, 2))

    def pruning_layers(self, depth: Depth) -> tuple[int, ...]:
        return (self.cut_after(depth),)

    def scoring_layers(self, depth: Depth) -> Collection[int]:
        return (self.cut_after(depth),)

    def kept_of(self, n: int) -> int:
        """Count how many of n tokens go on after the cut."""
        return min(n, max(share_of(self.keep, n), self.window))

    def score_spec(self, layers: range, depth: Depth) -> ScoreSpec:
        return ScoreSpec(layers[-1:], self.window, per_head=True, summed=(1, 1))


@dataclass(frozen=True)
class FastKV(HalfwayCut):
    """Cut once, after a layer, by the last tokens' attention; each key head stores its best.

    layer, keep, window, pool: as in `HalfwayCut`.
    retain: share of n that each key head stores in each layer up to `layer` (SnapKV), rounded as
        `keep`; in later layers retain/keep of the tokens that entered them. 1 turns SnapKV off:
        layers store all that entered them.
    pooling: of scores along the prompt, "max" or "average".

    Scores: probabilities summed over the window's queries, pooled for each query head, summed over
    heads. Tokens keep their positions. The key heads of a layer store different tokens, by this
    layer's scores; decoding sees only these. A layer with a sliding window thereby loses only what
    it will not see again.

    Source: the authors' code (dongwonjo/FastKV, commit b978769, MIT), described and written anew.
    Ours: shares only, no constant budgets; ties go to the lower position; no prompt is too short.
    """

    label = "FastKV"
    order = 6
    colour = "#56B4E9"
    marker = "P"
    target_parameter = "keep"
    shown_parameters = ("retain",)
    keep_all: ClassVar[Mapping[str, Any]] = {"keep": 1.0, "retain": 1}

    retain: Ratio = 0.1
    pooling: Literal["max", "average"] = "max"

    def stored(self, m: int, is_late: bool) -> int:
        """Count how many of a layer's m tokens each key head stores. is_late: after the cut."""
        if self.retain == 1:
            return m
        share = Fraction(str(self.retain)) / (Fraction(str(self.keep)) if is_late else 1)
        return min(m, max(int(share * m), self.window))

    def kept(self, depth: Depth, n: int) -> dict[int, int]:
        cut, late, kept = self.cut_after(depth), self.kept_of(n), {}
        for layer in range(1, depth.count + 1):
            m = late if layer > cut else n
            if self.stored(m, layer > cut) < m or (layer == cut and late < n):
                kept[layer] = late if layer >= cut else n
        return kept

    def stored_per_layer(self, depth: Depth, n: int) -> list[int]:
        tokens, cut = self.tokens_per_layer(depth, n), self.cut_after(depth)
        return [self.stored(m, layer > cut) for layer, m in enumerate(tokens, start=1)]

    def score(self, at: Boundary, recorded: list[Tensor]) -> Tensor:
        return window_scores(recorded[0], self.window, at.kv_heads, self.pool, self.pooling)

    def store(self, at: Boundary, scores: Tensor) -> Tensor | None:
        stored = self.stored(at.m, at.layer > self.cut_after(at.depth))
        return best_and_window(scores, stored, at.m) if stored < at.m else None

    def select(self, at: Boundary, scores: Tensor) -> Tensor | None:
        kept = self.kept_of(at.n)
        if at.layer != self.cut_after(at.depth) or kept == at.n:
            return None
        return best_and_window(sum_over_first(scores), kept, at.m)
