"""TriangleMix: sinks, a window, the last queries in later layers (He 2025, arXiv 2507.21526)."""

from __future__ import annotations

from dataclasses import dataclass

from lazyllm.engine.depth import Depth
from lazyllm.engine.inputs import Triangle
from lazyllm.methods.support.bases import Sparse
from lazyllm.methods.support.hyperparameters import Count, CountOrZero, Ratio, count_of


@dataclass(frozen=True)
class TriangleMix(Sparse):
    """Skip attention, not tokens: in later layers, tokens attend only to near and to first ones.

    dense: the first layers, whose attention stays dense, as a number (int, 0 for none) or share of
        the depth, rounded up (float).
    sinks: first tokens of the prompt, which all tokens see.
    window: tokens that a token sees, itself included.
    last: last tokens of the prompt, which see everything.

    A layer's sliding window also holds. Prompts of at most `window` + `sinks` + `last` tokens are
    dense.

    Source: the authors' code (microsoft/MInference, commit 2d4549d, `modules/tri_mix.py`, MIT),
    described and written anew. Half of the depth is dense in its example for Llama 3.1 8B; where
    nothing is set, none is (`dense=0`).
    Ours: pieces of the ordinary kernel, joined by their log-sum-exps, in place of a kernel.
    """

    label = "TriangleMix"
    order = 14
    colour = "#287878"
    marker = "H"
    target_parameter = "dense"
    shown_parameters = ("window",)

    dense: CountOrZero | Ratio = 0.5
    sinks: CountOrZero = 8
    window: Count = 512
    last: Count = 128

    def sees(self, layer: int, n: int, depth: Depth) -> Triangle | None:
        pattern = Triangle(self.sinks, self.window, self.last)
        is_dense = layer <= count_of(self.dense, depth.count) or pattern.is_dense(n)
        return None if is_dense else pattern
