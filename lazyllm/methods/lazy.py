"""LazyLLM: dynamic token pruning in prefill and decoding (arXiv 2407.14057)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
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

# A target speedup is solved for one keep ratio at three pruning layers, given in per cent of the depth: those of Figure
# 4 if a ratio of at least `LOWEST_RATIO` reaches the target, else the next earlier ones.
DEPTHS = ((30, 60, 90), (20, 50, 80), (20, 40, 60), (10, 30, 50), (10, 20, 30))
LOWEST_RATIO = 0.3


def reference_layers(depth: Depth) -> Iterator[list[int]]:
    """The pruning layers at each of `DEPTHS`, ascending; fewer than three where two shares are the same layer."""
    for shares in DEPTHS:
        yield sorted({depth.at_share(Fraction(share, 100)) for share in shares} - {0})


@dataclass(frozen=True)
class Lazy(Method):
    """Prune progressively by the newest token's attention (Eq. 1), anew in every step; revive from the Aux Cache.

    schedule: pruning layers and keep ratios (section 3.2); "paper" for Figure 4's at the model's depth, or a mapping.
    prune_generated: prune generated tokens too. The paper does not say; by default they are kept.
    revive: select anew in every decoding step (section 3.3). False is an ablation: decoding keeps the prefill's
        selection, and nothing is revived.

    Ours: keep ratios instead of percentiles, ties to the lower position, the newest token always kept.
    """

    label = "LazyLLM"
    order = 4
    colour = "#0072B2"
    marker = "o"
    target_parameter = "schedule"
    keep_all: ClassVar[Mapping[str, Any]] = {"schedule": "none"}

    schedule: Schedule | Mapping[int, float] | str = "paper"
    prune_generated: bool = False
    revive: bool = True

    def __post_init__(self) -> None:
        if self.prune_generated and not self.revive:
            raise ValueError("prune_generated needs a selection in every decoding step: leave out revive=False")
        Schedule.parse(self.schedule, Depth(sys.maxsize))  # refuses what is wrong at any depth, before a model loads
        if isinstance(self.schedule, Mapping):  # made hashable, and equal to the same schedule in another form
            object.__setattr__(self, "schedule", Schedule.hashable(self.schedule))

    @classmethod
    def resolve(cls, settings: Mapping[str, Any], depth: Depth) -> dict[str, Any]:
        schedule = settings.get("schedule", "paper")
        is_name = isinstance(schedule, str) and ":" not in schedule
        if is_name:
            return dict(settings)
        return {**settings, "schedule": dict(Schedule.parse(schedule, depth).keep)}

    def kept(self, depth: Depth, n: int) -> dict[int, int]:
        """{pruning layer: number of n prompt tokens that go on after it}."""
        schedule, kept = Schedule.parse(self.schedule, depth), {}
        for layer, ratio in schedule.keep.items():
            if ratio < 1:  # with 1, the layers before and after it see the same tokens: no boundary
                n = kept[layer] = keep_count(ratio, n)
        return kept

    def groups(self, depth: Depth, n: int) -> list[Group]:
        groups = groups_between(self, self.kept(depth, n), depth, n, lambda layers, _: ScoreSpec(layers[-1:]))
        return [
            replace(group, score_in_decode=self.revive, revives=self.revive and group is not groups[0])
            for group in groups
        ]

    def aux_rows(self, depth: Depth, max_positions: int) -> int:
        return max_positions if self.revive and len(self.groups(depth, max_positions)) > 1 else 0

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        from lazyllm.methods.support.lazy_session import LazySession

        return LazySession(decoder, self, len(prompt), max_new_tokens)

    @classmethod
    def solve(cls, settings: Mapping[str, Any], config: Any, n: int, target: float) -> dict[int, float] | None:
        # the other settings do not change a prefill
        for layers in reference_layers(Depth.of(config)):

            def speedup(ratio: float, layers: list[int] = layers) -> float:
                return cls(Schedule(dict.fromkeys(layers, ratio))).ideal_speedup(config, n)

            ratio = nearest_ratio(speedup, target)
            if ratio is not None and ratio >= LOWEST_RATIO:
                return dict.fromkeys(layers, ratio)
        return None
