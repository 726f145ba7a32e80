"""The schedules that a search may try, and the arithmetic that refuses some of them before a model runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Any

from eval.benchmarks.datasets import DATASETS, TASKS
from lazyllm.engine.flops import prefill_flops
from lazyllm.methods import Method
from lazyllm.methods.lazy import DEPTHS

if TYPE_CHECKING:
    from optuna import Trial

_POWERS = 2**12  # how finely a candidate's strength is set


@dataclass(frozen=True)
class Candidate:
    """A drawn schedule. cuts: (layer, per cent kept) in order of layers; it is invalid if a layer stands twice."""

    cuts: tuple[tuple[int, int], ...]

    @property
    def clashes(self) -> int:
        """Number of cuts after a layer that has one already."""
        return len(self.cuts) - len(dict(self.cuts))

    @property
    def schedule(self) -> dict[int, float]:
        """{layer: keep ratio}, as a method takes it."""
        return {layer: percent / 100 for layer, percent in self.cuts}

    @property
    def name(self) -> str:
        """For files: 2_30-5_50 keeps 30 % after layer 2 and 50 % of those after layer 5."""
        return "-".join(f"{layer}_{percent}" for layer, percent in self.cuts)

    @property
    def parameters(self) -> dict[str, int]:
        """The values that Optuna draws for this candidate."""
        drawn = {"cuts": len(self.cuts)}
        for number, (layer, percent) in enumerate(self.cuts, start=1):
            drawn |= {f"layer_{number}": layer, f"keep_{number}": percent}
        return drawn


@dataclass(frozen=True)
class Space:
    """One to `max_cuts` pruning layers before the last one of `num_layers`, a keep ratio for each.

    lowest, highest, step: the keep ratios, in per cent.
    """

    num_layers: int
    max_cuts: int
    lowest: int = 5
    highest: int = 95
    step: int = 1

    def draw(self, trial: Trial) -> Candidate:
        """A candidate by the trial's sampler, its cuts in order of layers.

        With a target it is drawn as a shape, which `fitted` makes as strong as the target asks.
        """
        cuts = []
        for number in range(1, trial.suggest_int("cuts", 1, self.max_cuts) + 1):
            layer = trial.suggest_int(f"layer_{number}", 1, self.num_layers - 1)
            cuts.append((layer, trial.suggest_int(f"keep_{number}", self.lowest, self.highest, step=self.step)))
        return Candidate(tuple(sorted(cuts)))

    def fitted(self, candidate: Candidate, ideal: Ideal, target: float) -> Candidate:
        """The candidate, pruned as little as reaches the target: every keep ratio to one power, then to a whole step.

        No model runs for a schedule that prunes more than the target asks: it is no better. If the candidate's layers
        cannot reach the target, the result prunes most at these layers.
        """
        weak, strong = 0, _POWERS  # 1 / _POWERS of the greatest power, which takes even the mildest cut to the end
        while strong - weak > 1:
            middle = (weak + strong) // 2
            reaches = ideal.speedup(self._raised(candidate, middle).schedule) >= target
            weak, strong = (weak, middle) if reaches else (middle, strong)
        return self._raised(candidate, strong)

    def _raised(self, candidate: Candidate, power: int) -> Candidate:
        greatest = math.log(self.lowest / 100) / math.log(self.highest / 100)
        raised = [(layer, 100 * (keep / 100) ** (power / _POWERS * greatest)) for layer, keep in candidate.cuts]
        return Candidate(
            tuple((layer, min(self.ratios, key=lambda ratio: abs(ratio - keep))) for layer, keep in raised)
        )

    def holds(self, candidate: Candidate) -> bool:
        """Whether the candidate can be drawn."""
        return len(candidate.cuts) <= self.max_cuts and all(keep in self.ratios for _, keep in candidate.cuts)

    @property
    def ratios(self) -> range:
        """The keep ratios in per cent, ascending."""
        return range(self.lowest, self.highest + 1, self.step)

    @property
    def fastest(self) -> Candidate:
        """The candidate of the fewest FLOPs."""
        return Candidate(tuple((layer, self.lowest) for layer in range(1, self.max_cuts + 1)))


@dataclass(frozen=True)
class Ideal:
    """Ideal TTFT speedups over many prompts, put together as measured ones are (`eval.store.aggregate`).

    lengths: {dataset: {prompt tokens: number of prompts}}. A dataset's speedup is the baseline's summed FLOPs over the
    schedule's; a task's the mean over its datasets; the whole the mean over tasks. method: takes the schedules.
    """

    model_config: Any
    lengths: Mapping[str, Mapping[int, int]]
    method: Method

    @classmethod
    def of(cls, model_config: Any, prompts: Sequence[tuple[str, int]], method: Method) -> Ideal:
        """Ideal speedups on these prompts, each (dataset, tokens)."""
        lengths: dict[str, Counter[int]] = {}
        for dataset, tokens in prompts:
            lengths.setdefault(dataset, Counter())[tokens] += 1
        return cls(model_config, lengths, method)

    def speedup(self, schedule: Mapping[int, float]) -> float:
        """The schedule's ideal speedup; one prompt's is `Method.ideal_speedup`."""
        method = with_schedule(self.method, schedule)
        layers = self.model_config.num_hidden_layers
        flops = {
            n: [
                prefill_flops(self.model_config, tokens)
                for tokens in ([n] * layers, method.tokens_per_layer(layers, n))
            ]
            for n in {n for counts in self.lengths.values() for n in counts}
        }
        of_dataset = {
            name: sum(flops[n][0] * times for n, times in counts.items())
            / sum(flops[n][1] * times for n, times in counts.items())
            for name, counts in self.lengths.items()
        }
        by_task = [[of_dataset[name] for name in of_dataset if DATASETS[name].task == task] for task in TASKS]
        return mean(mean(of_task) for of_task in by_task if of_task)


def with_schedule(method: Method, schedule: Mapping[int, float]) -> Method:
    """The method with another schedule. method: its dial is "schedule"."""
    return replace(method, schedule=dict(schedule))  # type: ignore[type-var]  # every method is a dataclass


def references(space: Space, ideal: Ideal, target: float | None) -> dict[str, Candidate]:
    """The schedules to compare the tuned one with: those of {"paper": ..., "uniform": ...} that reach the target.

    paper: after 30, 60 and 90 % of the depth (Figure 4), or the next earlier layers of
    `lazyllm.methods.lazy.DEPTHS` that reach the target. uniform: after evenly spaced layers, as many as a schedule
    may have, or the fewest more that reach it. Both keep one ratio: the highest that reaches the target; without a
    target 70 %, the paper's.
    """
    depth = space.num_layers
    even = [[depth * number // (cuts + 1) for number in range(1, cuts + 1)] for cuts in range(space.max_cuts, depth)]
    places = {"paper": [[depth * share // 100 for share in shares] for shares in DEPTHS], "uniform": even}
    found = {}
    for name, choices in places.items():
        equal = (
            Candidate(tuple((layer, percent) for layer in sorted({*layers} - {0})))
            for layers in choices
            for percent in (reversed(space.ratios) if target is not None else [70])
        )
        candidate = next((one for one in equal if target is None or ideal.speedup(one.schedule) >= target), None)
        if candidate is not None:
            found[name] = candidate
    return found
