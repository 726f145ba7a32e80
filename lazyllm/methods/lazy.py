"""LazyLLM: dynamic token pruning in prefill and decoding (arXiv 2407.14057)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from lazyllm.engine.depth import Depth
from lazyllm.engine.flops import nearest_ratio
from lazyllm.engine.inputs import Group, Prompt, ScoreSpec
from lazyllm.engine.method import Method
from lazyllm.methods.support.bases import groups_between
from lazyllm.methods.support.hyperparameters import keep_count
from lazyllm.methods.support.schedule import Schedule

if TYPE_CHECKING:
    from lazyllm.engine.decoder import Decoder
    from lazyllm.engine.session import Session

# A target speedup is solved for one keep ratio at three pruning layers, given in per cent of the
# depth: those of Figure 4 if a ratio of at least `LOWEST_RATIO` reaches it, else earlier ones
DEPTHS = ((30, 60, 90), (20, 50, 80), (20, 40, 60), (10, 30, 50), (10, 20, 30))
LOWEST_RATIO = 0.3


def reference_layers(depth: Depth) -> Iterator[list[int]]:
    """Yield the pruning layers at each of `DEPTHS`; fewer than three where shares coincide."""
    for shares in DEPTHS:
        yield sorted({depth.at_share(Fraction(share, 100)) for share in shares} - {0})


@dataclass(frozen=True)
class Lazy(Method):
    """Prune by the newest token's attention (Eq. 1), anew in every step; revive from the Aux Cache.

    schedule: pruning layers and keep ratios (section 3.2): a mapping, or "paper" for Figure 4's.
    prune_generated: prune generated tokens too. The paper does not say; by default they are kept.
    revive: select anew in every decoding step (section 3.3). False is an ablation: decoding keeps
        the prefill's selection, and nothing is revived.

    Ours: keep ratios instead of percentiles, ties to the lower position, the newest token always
    kept.
    """

    label = "LazyLLM"
    order = 4
    colour = "#0072B2"
    marker = "o"
    target_parameter = "schedule"
    keep_all: ClassVar[Mapping[str, Any]] = {"schedule": "none"}

    schedule: Schedule | Mapping[Any, float] | str = "paper"
    prune_generated: bool = False
    revive: bool = True

    def __post_init__(self) -> None:
        # refuses what is wrong at any depth, before a model loads
        Schedule.parse(self.schedule, Depth(sys.maxsize))
        if isinstance(self.schedule, Mapping):  # hashable, and equal to the same in another form
            object.__setattr__(self, "schedule", Schedule(self.schedule))
        super().__post_init__()
        if self.prune_generated and not self.revive:
            raise ValueError(
                "prune_generated needs a selection in every decoding step: leave out revive=False"
            )

    @classmethod
    def resolve(cls, settings: Mapping[str, Any], depth: Depth) -> dict[str, Any]:
        schedule = settings.get("schedule", "paper")
        if schedule in ("paper", "none"):
            return dict(settings)
        return {**settings, "schedule": dict(Schedule.parse(schedule, depth).keep)}

    def kept(self, depth: Depth, n: int) -> dict[int, int]:
        """Count {pruning layer: number of n prompt tokens that go on after it}."""
        kept = {}
        for layer, ratio in Schedule.parse(self.schedule, depth).keep.items():
            if ratio < 1:  # with 1, the layers before and after it see the same tokens
                n = kept[layer] = keep_count(ratio, n)
        return kept

    def groups(self, depth: Depth, n: int) -> list[Group]:
        groups = groups_between(self, self.kept(depth, n), depth, n, _score_spec)
        return [
            replace(
                group,
                score_in_decode=self.revive,
                revives=self.revive and group is not groups[0],
            )
            for group in groups
        ]

    def aux_rows(self, depth: Depth, max_positions: int) -> int:
        prunes = len(self.groups(depth, max_positions)) > 1
        return max_positions if self.revive and prunes else 0

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        from lazyllm.methods.support.lazy_session import LazySession

        return LazySession(decoder, self, len(prompt), max_new_tokens)

    @classmethod
    def solve(
        cls, settings: Mapping[str, Any], config: Any, n: int, target: float
    ) -> dict[int, float] | None:
        def speedup(layers: list[int], ratio: float) -> float:
            # the other settings do not change a prefill
            return cls(Schedule(dict.fromkeys(layers, ratio))).ideal_speedup(config, n)

        for layers in reference_layers(Depth.of(config)):
            ratio = nearest_ratio(partial(speedup, layers), target)
            if ratio is not None and ratio >= LOWEST_RATIO:
                return dict.fromkeys(layers, ratio)
        return None


def _score_spec(layers: range, depth: Depth) -> ScoreSpec:
    return ScoreSpec(layers[-1:])
