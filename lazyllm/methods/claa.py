"""CLAA: FastKV's cut by several layers' scores together (McDanel et al. 2026, arXiv 2602.16054)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lazyllm.engine.depth import Depth
from lazyllm.engine.inputs import Boundary, Group
from lazyllm.methods.fastkv import HalfwayCut
from lazyllm.methods.support.hyperparameters import Count
from lazyllm.methods.support.ranking import best_and_window, window_scores

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CLAA(HalfwayCut):
    """Cut the prompt once, by a token's highest z-score over the key heads of several layers.

    layer, keep, window, pool: as in `HalfwayCut`; scores are pooled by their maximum. `keep` is
        also the share that each key head stores (SnapKV), in the layers up to `layer` except the
        first `layers`.
    layers: how many layers, the last ones up to `layer`, score together; those among them that see
        the whole prompt, if any does. As many first layers store all tokens.
    retain: None, as in the method, stores the share `keep`; 1 turns SnapKV off.

    Scores are FastKV's for each key head, z-normalised over the tokens outside the window. Tokens
    keep their positions.

    Source: the paper and a description of the code (BradMcDanel/kv-exps, commit 90e13b1, which has
    no licence). Written from scratch. Ours: ties go to the lower position; no prompt is too short.
    """

    label = "CLAA"
    order = 8
    colour = "#7A0019"
    marker = "d"
    target_parameter = "keep"

    layers: Count = 4
    retain: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.retain is not None and self.retain != 1:
            raise ValueError(
                f"retain={self.retain!r}: give null (each key head stores the share `keep`) or 1 "
                "(all)"
            )

    def scoring_layers(self, depth: Depth) -> list[int]:
        cut = self.cut_after(depth)
        return depth.among(range(max(1, cut - self.layers + 1), cut + 1))

    def groups(self, depth: Depth, n: int) -> list[Group]:
        cut, late, scoring = self.cut_after(depth), self.kept_of(n), self.scoring_layers(depth)
        groups = []
        for layer in range(1, cut + 1):
            layers = range(layer - 1, layer)
            stores = self.retain is None and layer > self.layers
            is_watched = late < n and (layer in scoring or layer == cut or stores)
            groups.append(Group(layers, n, self.score_spec(layers, depth) if is_watched else None))
        return [*groups, Group(range(cut, depth.count), late)] if cut < depth.count else groups

    def stored_per_layer(self, depth: Depth, n: int) -> list[int]:
        # the first layers store all that entered them
        first = depth.count if self.retain == 1 else self.layers
        tokens = enumerate(self.tokens_per_layer(depth, n), start=1)
        return [m if layer <= first else self.kept_of(n) for layer, m in tokens]

    def score(self, at: Boundary, recorded: list[Tensor]) -> Tensor:
        return window_scores(recorded[0], self.window, at.kv_heads, self.pool, "max")

    def store(self, at: Boundary, scores: Tensor) -> Tensor | None:
        stores_all = self.retain == 1 or at.layer <= self.layers
        return None if stores_all else best_and_window(scores, self.kept_of(at.n), at.m)

    def select(self, at: Boundary, scores: Tensor) -> Tensor | None:
        import torch

        rows = at.notes.setdefault("rows", [])  # [g, o] scores of each layer that scores
        if at.layer in self.scoring_layers(at.depth):
            rows.append(z_normalised(scores))
        if at.layer != self.cut_after(at.depth):
            return None
        return best_and_window(torch.cat(rows).amax(dim=0), self.kept_of(at.n), at.m)


def z_normalised(scores: Tensor) -> Tensor:
    """Compute (score - mean) / deviation over the last dimension; 0 where all are equal."""
    import torch

    deviation, mean = torch.std_mean(scores, dim=-1, correction=0, keepdim=True)
    equal = scores.amax(dim=-1, keepdim=True) == scores.amin(dim=-1, keepdim=True)
    return torch.where(equal, 0.0, (scores - mean) / deviation)
