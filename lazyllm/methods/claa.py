"""CLAA: FastKV's cut by the scores of several layers together (McDanel et al. 2026, arXiv 2602.16054)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lazyllm.engine.inputs import Group
from lazyllm.methods.fastkv import HalfwayCut
from lazyllm.methods.support.bases import Cut
from lazyllm.methods.support.schedule import check_whole

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CLAA(HalfwayCut):
    """Cut the prompt once, by a token's highest z-score over the key heads of several layers.

    layer, keep, window, pool: as in `lazyllm.methods.fastkv.HalfwayCut`; scores are pooled by their maximum. `keep` is
        also the share that each key head stores (SnapKV), in the layers up to `layer` but the first `layers` ones.
    layers: number of layers, up to `layer`, that score together. The first `layers` layers of the model store all.
    retain: 1 turns SnapKV off; None is the method.

    Scores are FastKV's for each key head, z-normalised over the tokens outside the window. Tokens keep their positions.

    Source: the paper and a description of the code (BradMcDanel/kv-exps, commit 90e13b1, which has no licence).
    Ours: all of the code; ties go to the lower position; no prompt is too short.
    """

    label: ClassVar[str] = "CLAA"
    order: ClassVar[int] = 8
    colour: ClassVar[str | None] = "#7A0019"
    marker: ClassVar[str | None] = "d"
    dial: ClassVar[str | None] = "keep"

    layers: int = 4
    retain: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("layers", self.layers, 1)
        if self.retain is not None and self.retain != 1:
            raise ValueError(f"retain={self.retain!r}: give null (each key head stores the share `keep`) or 1 (all)")

    def groups(self, num_layers: int, n: int) -> list[Group]:
        cut, late = self.cut_after(num_layers), self.kept(n)
        groups = []
        for layer in range(1, cut + 1):
            wanted = late < n and (layer > cut - self.layers or (self.retain is None and layer > self.layers))
            groups.append(Group(range(layer - 1, layer), n, self.look(layer, wanted)))
        return [*groups, Group(range(cut, num_layers), late)] if cut < num_layers else groups

    def stored_per_layer(self, num_layers: int, n: int, later: int = 0) -> list[int]:
        first = num_layers if self.retain == 1 else self.layers  # these store all that entered them
        tokens = enumerate(self.tokens_per_layer(num_layers, n), start=1)
        return [(m if layer <= first else self.kept(n)) + later for layer, m in tokens]

    def cutter(self, num_layers: int, kv_heads: int, n: int) -> Cut:
        import torch

        from lazyllm.methods.support.sessions import best_and_window, window_scores

        at, late = self.cut_after(num_layers), self.kept(n)
        rows: list[Tensor] = []  # [g, o] scores of each layer that scores for the cut

        def cut(layer: int, seen: list[Tensor], m: int) -> tuple[Tensor | slice | None, Tensor | None]:
            held, kept = None, slice(None) if layer == at else None
            if seen:
                by_head = window_scores(seen[0], self.window, kv_heads, self.pool, "max")
                if self.retain is None and layer > self.layers:
                    held = best_and_window(by_head, late, m)
                if layer > at - self.layers:
                    rows.append(z_normalised(by_head))
                if layer == at:
                    kept = best_and_window(torch.cat(rows).amax(dim=0), late, m)
            return kept, held

        return cut


def z_normalised(scores: Tensor) -> Tensor:
    """(score - mean) / standard deviation over the last dimension; 0 if all scores of a row are equal."""
    import torch

    deviation, mean = torch.std_mean(scores, dim=-1, correction=0, keepdim=True)
    equal = scores.amax(dim=-1, keepdim=True) == scores.amin(dim=-1, keepdim=True)
    return torch.where(equal, 0.0, (scores - mean) / deviation)
