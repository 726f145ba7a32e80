"""The schedules that a search may try, and their ideal speedups, by which some are refused before a model runs."""

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

_POWERS = 2**12  # steps of a candidate's strength


@dataclass(frozen=True)
class Candidate:
    """A drawn schedule. cuts: (layer, per cent kept), in order of layers; invalid if a layer is repeated."""

    cuts: tuple[tuple[int, int], ...]

    @property
    def clashes(self) -> int:
        """Number of cuts after a layer that already has a cut."""
        return len(self.cuts) - len(dict(self.cuts))

    @property
    def schedule(self) -> dict[int, float]:
        """{layer: keep ratio}."""
        return {layer: percent / 100 for layer, percent in self.cuts}

    @property
    def name(self) -> str:
        """A file name: 2_30-5_50 keeps 30 % after layer 2 and 50 % of these after layer 5."""
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
    """Schedules of 1 to `max_cuts` pruning layers, from 1 to `num_layers` - 1, with a keep ratio for each.

    lowest, highest, step: of the keep ratios, in per cent.
    """

    num_layers: int
    max_cuts: int
    lowest: int = 5
    highest: int = 95
    step: int = 1

    def draw(self, trial: Trial) -> Candidate:
        """A candidate drawn by the trial's sampler. With a target, `fitted` then adjusts its strength."""
        cuts = []
        for number in range(1, trial.suggest_int("cuts", 1, self.max_cuts) + 1):
            layer = trial.suggest_int(f"layer_{number}", 1, self.num_layers - 1)
            cuts.append((layer, trial.suggest_int(f"keep_{number}", self.lowest, self.highest, step=self.step)))
        return Candidate(tuple(sorted(cuts)))

    def fitted(self, candidate: Candidate, ideal: Ideal, target: float) -> Candidate:
        """The candidate with all keep ratios raised to the least power that reaches the target, then rounded to a step.

        So no model runs for a schedule that prunes more than necessary. If the candidate's layers cannot reach the
        target, the result prunes most at these layers.
        """
        weak, strong = 0, _POWERS  # in 1 / _POWERS of the greatest power, which takes `highest` to `lowest`
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
        """Whether `draw` can give the candidate."""
        return len(candidate.cuts) <= self.max_cuts and all(keep in self.ratios for _, keep in candidate.cuts)

    @property
    def ratios(self) -> range:
        """The keep ratios in per cent, ascending."""
        return range(self.lowest, self.highest + 1, self.step)

    @property
    def fastest(self) -> Candidate:
        """The candidate with the fewest FLOPs."""
        return Candidate(tuple((layer, self.lowest) for layer in range(1, self.max_cuts + 1)))


@dataclass(frozen=True)
class Ideal:
    """Ideal TTFT speedups over many prompts, aggregated like measured ones (`eval.store.aggregate`).

    lengths: {dataset: {prompt tokens: number of prompts}}. A dataset's speedup is the baseline's summed FLOPs over the
    schedule's; a task's is the mean over its datasets; the total is the mean over tasks. method: gets the schedules.
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
        """The schedule's ideal speedup; for a single prompt it is `Method.ideal_speedup`."""
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
    """Schedules to compare the tuned one with, {"paper": ..., "uniform": ...}, without those that miss the target.

    paper: pruning after 30, 60 and 90 % of the depth (Figure 4), or after the next earlier layers of
    `lazyllm.methods.lazy.DEPTHS` that reach the target. uniform: after `max_cuts` evenly spaced layers, or the fewest
    more that reach it. Each has one keep ratio: the highest that reaches the target; without a target the paper's 70 %.
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
        reaching = (choice for choice in equal if target is None or ideal.speedup(choice.schedule) >= target)
        if (candidate := next(reaching, None)) is not None:
            found[name] = candidate
    return found
