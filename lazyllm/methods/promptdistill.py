"""PromptDistill: an early layer's query selects the tokens (Jin et al. 2025, arXiv 2503.23274)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from lazyllm.engine.depth import Depth
from lazyllm.engine.inputs import Boundary, ScoreSpec
from lazyllm.methods.support.bases import Prune, at_depth
from lazyllm.methods.support.hyperparameters import Count, Odd, Ratio, count_of, sorted_layers
from lazyllm.methods.support.ranking import best_of_prompt, sum_over_first

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PromptDistill(Prune):
    """After an early layer, keep the tokens that the last query attends to most; also in stages.

    layers: 1-based layers after which tokens are dropped; None for one, at 14/32 of the depth (the
        authors' index 13), that sees the whole prompt (`Depth.at_share`).
    keep: for each of `layers`, the tokens that go on with the last one, as a number (int) or a
        share of the prompt, rounded up (float). A single value serves all layers.
    pool: odd width of the average pooling of scores.
    forget: dropped tokens also leave the KV caches of the layers up to the cut (the authors' cache
        truncation).

    Scores: attention logits of the last token's query, summed over all heads, without softmax; the
    last token's counts as 0 where its neighbours are pooled. A token outside the layer's sliding
    window comes last. Tokens keep their positions.

    Source: the paper, and a description of the code (declare-lab/PromptDistill, commit 472bfef,
    which has no licence). As there, the last token always stays and does not count in `keep`.
    Written from scratch. Ours: `keep` as a share; ties go to the lower position.
    """

    label = "PromptDistill"
    order = 13
    colour = "#7878F0"
    marker = "p"
    target_parameter = "keep"
    shown_parameters = ("layers",)

    layers: Sequence[Count] | None = None
    keep: Count | Ratio | Sequence[Count | Ratio] = 1024
    pool: Odd = 5
    forget: bool = True  # type: ignore[misc]  # a base's class attribute

    def __post_init__(self) -> None:
        super().__post_init__()
        given, layers = self.layers, sorted_layers(self.layers)
        if isinstance(self.keep, Sequence):
            if len(self.keep) != len(layers or [None]) or [*(given or ())] != [*(layers or ())]:
                raise ValueError(
                    f"layers={given}, keep={self.keep}: give ascending layers, and a keep for each "
                    "of them"
                )
            object.__setattr__(self, "keep", tuple(self.keep))
        object.__setattr__(self, "layers", layers)

    def kept(self, depth: Depth, n: int) -> dict[int, int]:
        places = self.layers or [None]
        layers = [at_depth(layer, depth, Fraction(14, 32), "layers") for layer in places]
        keeps = self.keep if isinstance(self.keep, Sequence) else [self.keep] * len(layers)
        counts = [count_of(keep, n) for keep in keeps]
        return {layer: min(n, min(counts[: stage + 1]) + 1) for stage, layer in enumerate(layers)}

    def score_spec(self, layers: range, depth: Depth) -> ScoreSpec:
        return ScoreSpec(layers[-1:], raw=True, per_head=True)

    def score(self, at: Boundary, recorded: list[Tensor]) -> Tensor:
        import torch.nn.functional as F

        summed = sum_over_first(recorded[0])  # [m]
        summed[-1:] = 0.0  # of the last token itself, which stays anyway
        return F.avg_pool1d(summed[None], self.pool, stride=1, padding=self.pool // 2)[0]

    def select(self, at: Boundary, scores: Tensor) -> Tensor:
        return best_of_prompt(scores, self.kept(at.depth, at.n)[at.layer])
