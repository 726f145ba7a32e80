"""The benchmark's samples and their ratios. Needs no torch."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """One timed generation.

    step_s: seconds of each decoding step; of transformers' `generate` only the mean step is known.
    revived_flops: per step, FLOPs of the tokens that it revived.
    product_flops_per_s: rate of a plain matrix product just before the prefill.
    """

    ttft_s: float
    step_s: list[float]
    total_s: float
    revived_flops: list[int]
    product_flops_per_s: float

    def utilisation(self, prefill_flops: int) -> float:
        """FLOP/s of the prefill over FLOP/s of the plain matrix product."""
        return prefill_flops / self.ttft_s / self.product_flops_per_s


@dataclass(frozen=True)
class Pair:
    """Two runs on the same prompt: in turns token by token, or one after the other if `other` is transformers.

    equal: a third run in turns: the baseline on as many prompt tokens as `other` stores after its prefill.
    """

    baseline: Run
    other: Run
    equal: Run | None = None

    def ttft_speedup(self) -> float:
        return self.baseline.ttft_s / self.other.ttft_s

    def ttft_ratio(self) -> float:
        return self.other.ttft_s / self.baseline.ttft_s

    def total_ratio(self) -> float:
        return self.other.total_s / self.baseline.total_s

    def step_ratio(self) -> float | None:
        """The mean step over the baseline's mean step; None if only one token was generated."""
        if not self.other.step_s:
            return None
        return statistics.fmean(self.other.step_s) / statistics.fmean(self.baseline.step_s)

    def equal_step_ratio(self) -> float | None:
        """The median step over that of `equal`; None if that was not measured."""
        if self.equal is None or not self.equal.step_s:
            return None
        return statistics.median(self.other.step_s) / statistics.median(self.equal.step_s)

    def idle_step_ratio(self) -> float | None:
        """The median of (seconds / seconds of the baseline's same step) over the steps that revive nothing.

        None if there is no such step, and for transformers, whose single steps are not known.
        """
        return _median_ratio(self._steps(revives=False))

    def reviving_step_ratio(self) -> float | None:
        """`idle_step_ratio` over the steps that revive something."""
        return _median_ratio(self._steps(revives=True))

    def revival_cost(self, prefill_flops: int) -> float | None:
        """Extra seconds of the reviving steps, over the seconds of the revived tokens' FLOPs at the prefill's rate.

        Without revival, such a step is taken to last the baseline's median step times `idle_step_ratio`.
        prefill_flops: of the method's prefill. None unless there are steps of both kinds.
        """
        idle, reviving = self.idle_step_ratio(), self._steps(revives=True)
        if idle is None or not reviving:
            return None
        unrevived = len(reviving) * idle * statistics.median(self.baseline.step_s)
        extra = sum(seconds for seconds, _ in reviving) - unrevived
        return extra / (sum(self.other.revived_flops) / prefill_flops * self.other.ttft_s)

    def _steps(self, revives: bool) -> list[tuple[float, float]]:
        """(seconds, seconds of the baseline's same step) of the steps of one kind."""
        baseline, other = self.baseline, self.other
        if len(other.step_s) != len(baseline.step_s):
            return []  # `other` is transformers
        steps = zip(other.step_s, baseline.step_s, other.revived_flops, strict=True)
        return [(seconds, of_baseline) for seconds, of_baseline, flops in steps if (flops > 0) == revives]


@dataclass(frozen=True)
class Untimed:
    """Memory, waits and selection time, from a separate run, as counting them disturbs the clock.

    prefill_s: seconds of this run's prefill.
    selection_share: share of TTFT spent on selection: scores, ranking, gathering and whatever a method runs before its
        prefill. An upper bound, as the clock waits for the device before and after each part.
    prefill_waits, step_waits: calls that wait for the device, without the choice of the token; of steps the maximum.
    kv_bytes, aux_bytes: after the prefill. Peaks: bytes beyond those held before the run, None if unknown.
    """

    prefill_s: float
    selection_share: float
    prefill_waits: int
    step_waits: int
    kv_bytes: int
    aux_bytes: int
    prefill_peak_bytes: int | None
    generation_peak_bytes: int | None = None

    @property
    def peak_bytes(self) -> int | None:
        """Peak of the whole generation; of the prefill in files that hold no other."""
        return self.generation_peak_bytes or self.prefill_peak_bytes


@dataclass(frozen=True)
class BenchCase:
    """A method, or transformers itself, against the baseline on prompts of one length.

    boundaries: pruning layers of a schedule, 0 for other methods and for transformers.
    ideal_ttft_speedup: from the tokens that entered each layer, scoring included. prefill_flops: without scoring.
    untimed: None for transformers.
    """

    name: str
    tokens: int
    new_tokens: int
    boundaries: int
    ideal_ttft_speedup: float
    prefill_flops: int
    baseline_prefill_flops: int
    pairs: list[Pair]
    untimed: Untimed | None
    baseline_untimed: Untimed

    def of_pairs(self, ratio: Callable[[Pair], float | None]) -> list[float]:
        """The ratio of each pair for which it is not None."""
        return [value for pair in self.pairs if (value := ratio(pair)) is not None]

    def revival_costs(self) -> list[float]:
        return self.of_pairs(lambda pair: pair.revival_cost(self.prefill_flops))

    def share_of_ideal(self) -> float:
        """The median TTFT speedup over the ideal one."""
        return statistics.median(map(Pair.ttft_speedup, self.pairs)) / self.ideal_ttft_speedup

    def memory_ratio(self) -> float:
        """Bytes of KV cache and Aux Cache after the method's prefill, over bytes of the baseline's KV cache."""
        assert self.untimed is not None
        return (self.untimed.kv_bytes + self.untimed.aux_bytes) / self.baseline_untimed.kv_bytes


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """The benchmark's JSON files in a folder and its subfolders, by name. Raises ValueError if there is none."""
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("*.json"))]
    reports = [report for report in reports if isinstance(report, dict) and "cases" in report]
    if not reports:
        raise ValueError(f"{folder}: holds no file of `lazyllm-bench bench --json`")
    return reports


def cases_of(report: dict[str, Any]) -> list[BenchCase]:
    """The cases of one JSON file."""
    return [_case(dict(values)) for values in report["cases"]]


def _case(values: dict[str, Any]) -> BenchCase:
    values["pairs"] = [Pair(**{which: run and Run(**run) for which, run in pair.items()}) for pair in values["pairs"]]
    for name in ("untimed", "baseline_untimed"):
        values[name] = None if values[name] is None else Untimed(**values[name])
    return BenchCase(**values)


def _median_ratio(steps: Sequence[tuple[float, float]]) -> float | None:
    return statistics.median(seconds / of_baseline for seconds, of_baseline in steps) if steps else None
