"""Static token pruning (a baseline of the LazyLLM paper): the prompt is pruned once, for good."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lazyllm.engine.depth import Depth
from lazyllm.engine.inputs import ScoreSpec
from lazyllm.methods.support.bases import Prune
from lazyllm.methods.support.hyperparameters import Count, Ratio, keep_count


@dataclass(frozen=True)
class StaticPruning(Prune):
    """Prune once, after layer `layer`, by the importance (Eq. 1) averaged over layers 1 to `layer`.

    layer: 1-based; None for 2, or the first layer that sees the whole prompt if layer 2 has a
        sliding window. Layers with a window do not count in the average, unless all have one.
    keep: share of the prompt tokens that go on, `ceil(keep * n)` of n, the newest among them.

    Pruned tokens also leave the KV caches of the early layers: decoding sees the kept tokens only.
    """

    label = "static pruning"
    order = 2
    colour = "#D55E00"
    marker = "s"
    target_parameter = "keep"
    shown_parameters = ("layer",)

    layer: Count | None = None
    keep: Ratio = 0.3

    @classmethod
    def resolve(cls, settings: Mapping[str, Any], depth: Depth) -> dict[str, Any]:
        layer = settings.get("layer")
        return {**settings, "layer": depth.nearest(2) if layer is None else layer}

    def cut_after(self, depth: Depth) -> int:
        """Find the layer after which tokens are pruned."""
        return depth.nearest(2) if self.layer is None else self.layer

    def kept(self, depth: Depth, n: int) -> dict[int, int]:
        return {self.cut_after(depth): keep_count(self.keep, n)}

    def scoring_layers(self, depth: Depth) -> list[int]:
        return depth.among(range(1, self.cut_after(depth) + 1))

    def score_spec(self, layers: range, depth: Depth) -> ScoreSpec:
        return ScoreSpec([layer - 1 for layer in self.scoring_layers(depth)])
