"""Static token pruning (a baseline of the LazyLLM paper): the prompt is pruned once, in prefill, for good."""

from dataclasses import dataclass

from lazyllm.engine.inputs import ScoreSpec
from lazyllm.methods.support.bases import Prune
from lazyllm.methods.support.hyperparameters import check_int, check_ratio, checked, keep_count


@dataclass(frozen=True)
class StaticPruning(Prune):
    """Prune once, after layer `layer`, by the importance (Eq. 1) averaged over layers 1 to `layer`.

    layer: 1-based. keep: share of the prompt tokens that go on, `ceil(keep * n)` of n, the newest among them.

    Pruned tokens also leave the KV caches of the early layers: decoding sees the kept tokens only.
    """

    label = "static pruning"
    order = 2
    colour = "#D55E00"
    marker = "s"
    target_parameter = "keep"
    shown_parameters = ("layer",)

    layer: int = checked(check_int, 2)
    keep: float = checked(check_ratio, 0.3)

    def kept(self, num_layers: int, n: int) -> dict[int, int]:
        return {self.layer: keep_count(self.keep, n)}

    def score_spec(self, layers: range) -> ScoreSpec:
        return ScoreSpec(layers)
