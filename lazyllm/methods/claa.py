"""CLAA: FastKV's cut by the scores of several layers together (McDanel et al. 2026, arXiv 2602.16054)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from lazyllm.engine.declaration import Group, Look
from lazyllm.methods.bases import Cut, Layerwise, at_depth
from lazyllm.methods.schedule import check_pool, check_ratio, check_whole, share_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CLAA(Layerwise):
    """Cut the prompt once, by the highest of the z-scores that the last `layers` layers' key heads give a token.

    layer: 1-based layer after which the cut is; None for half of the depth (the authors' 16 of 32).
    keep: share of the n prompt tokens that go on, rounded down, the window among them and never less than it. Also what
        each key head stores in the layers behind the first `layers` and up to `layer` (SnapKV).
    layers: how many layers, `layer` the last, are asked together. The first `layers` layers of the model store all.
    window, pool: as FastKV's, with maximum pooling. retain: 1 turns SnapKV off; None is the method.

    Scores are FastKV's for each key head, z-normalised over the tokens outside the window. Positions are the prompt's.

    Source: the paper and a description of the code (BradMcDanel/kv-exps, commit 90e13b1, which has no licence).
    Ours: all of the code; ties go to the lower position; no prompt is too short.
    """

    label: ClassVar[str] = "CLAA"
    order: ClassVar[int] = 8
    colour: ClassVar[str | None] = "#7A0019"
    marker: ClassVar[str | None] = "d"
    dial: ClassVar[str | None] = "keep"

    layer: int | None = None
    keep: float = 0.2
    layers: int = 4
    window: int = 8
    pool: int = 7
    retain: float | None = None

    def __post_init__(self) -> None:
        if self.layer is not None:
            check_whole("layer", self.layer, 1)
        check_ratio("keep", self.keep)
        check_whole("layers", self.layers, 1)
        check_whole("window", self.window, 1)
        check_pool(self.pool)
        if self.retain is not None and self.retain != 1:
            raise ValueError(f"retain is null (each key head stores the share `keep`) or 1 (all), got {self.retain!r}")

    def kept(self, n: int) -> int:
        """How many of n tokens go on after the cut, and how many a key head stores."""
        return min(n, max(share_of(self.keep, n), self.window))

    def groups(self, num_layers: int, n: int) -> list[Group]:
        cut, late = at_depth(self.layer, num_layers, Fraction(1, 2)), self.kept(n)
        groups = []
        for layer in range(1, cut + 1):
            wanted = late < n and (layer > cut - self.layers or (self.retain is None and layer > self.layers))
            look = Look((layer - 1,), self.window, per_head=True, summed=(1, 1)) if wanted else Look()
            groups.append(Group(range(layer - 1, layer), n, look))
        return [*groups, Group(range(cut, num_layers), late)] if cut < num_layers else groups

    def cutter(self, num_layers: int, kv_heads: int, n: int) -> Cut:
        import torch

        from lazyllm.methods.sessions import best_and_window, window_scores

        at, late = at_depth(self.layer, num_layers, Fraction(1, 2)), self.kept(n)
        rows: list[Tensor] = []  # of the layers that are asked together, [g, o] each

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
