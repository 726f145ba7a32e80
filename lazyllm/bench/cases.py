"""The benchmark's samples, and the ratios that the case table and the targets read from them. Needs no torch."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """One timed generation. step_s: seconds of each decoding step; revived_flops: of what each of them revived.

    Of transformers' own the mean step alone is known. product_flops_per_s: of a plain matrix product just before its
    prefill.
    """

    ttft_s: float
    step_s: list[float]
    total_s: float
    revived_flops: list[int]
    product_flops_per_s: float

    def utilisation(self, prefill_flops: int) -> float:
        """FLOP/s of the prefill over those of the plain matrix product."""
        return prefill_flops / self.ttft_s / self.product_flops_per_s


@dataclass(frozen=True)
class Pair:
    """Two runs on the same prompt: token by token in turns, or with transformers itself one after the other.

    equal: the baseline on as many of the prompt's tokens as `other` stores after its prefill, in turns with the two.
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
        """The median step over the baseline's with as many tokens stored; None if that was not measured."""
        if self.equal is None or not self.equal.step_s:
            return None
        return statistics.median(self.other.step_s) / statistics.median(self.equal.step_s)

    def idle_step_ratio(self) -> float | None:
        """The median, over the steps that revive nothing, of seconds over those of the baseline's same step.

        None if there is no such step, and for transformers, whose single steps are not known.
        """
        return _median_ratio(self._steps(revives=False))

    def reviving_step_ratio(self) -> float | None:
        """The same over the steps that revive something."""
        return _median_ratio(self._steps(revives=True))

    def revival_cost(self, prefill_flops: int) -> float | None:
        """Extra seconds of the reviving steps, over the time of the revived tokens' FLOPs at prefill's rate.

        Without revival, a reviving step would take the baseline's median step times `idle_step_ratio`. prefill_flops:
        of the method's own prefill, whose measured seconds give the rate. None without steps of each kind.
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
            return []  # transformers' own
        steps = zip(other.step_s, baseline.step_s, other.revived_flops, strict=True)
        return [(seconds, of_baseline) for seconds, of_baseline, flops in steps if (flops > 0) == revives]


@dataclass(frozen=True)
class Untimed:
    """Results of a run of its own. Bytes; peaks are those beyond what was held before, None if unknown.

    prefill_s: seconds of its prefill, with the counting in it.
    selection_share: of the time to the first token, spent on scores, ranking and gathering, and on what runs before the
        prefill to select; the device is waited for before and after each of these, so that the share is a bound from
        above.
    prefill_waits, step_waits: calls that wait for the device, the choice of the token left out; of steps the most.
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
        """Of the whole generation; of the prefill if an older file says no more."""
        return self.generation_peak_bytes or self.prefill_peak_bytes


@dataclass(frozen=True)
class Case:
    """A method, or transformers itself, against the baseline on prompts of one length.

    boundaries: pruning layers of a schedule, 0 of others and of transformers. untimed: None of transformers.
    ideal_ttft_speedup: by the tokens that entered each layer, scoring included. prefill_flops: without scoring.
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
        """The ratio of each pair that has one."""
        return [value for pair in self.pairs if (value := ratio(pair)) is not None]

    def revival_costs(self) -> list[float]:
        return self.of_pairs(lambda pair: pair.revival_cost(self.prefill_flops))

    def share_of_ideal(self) -> float:
        """The median TTFT speedup over the ideal one."""
        return statistics.median(map(Pair.ttft_speedup, self.pairs)) / self.ideal_ttft_speedup

    def memory_ratio(self) -> float:
        """Bytes of KV cache and Aux Cache after a method's prefill, over those of the baseline's KV cache."""
        assert self.untimed is not None
        return (self.untimed.kv_bytes + self.untimed.aux_bytes) / self.baseline_untimed.kv_bytes


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """The benchmark's JSON files below a folder, by name. Raises ValueError if there is none."""
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("*.json"))]
    reports = [report for report in reports if isinstance(report, dict) and "cases" in report]
    if not reports:
        raise ValueError(f"{folder}: no file of `python -m lazyllm.bench --json` lies there")
    return reports


def cases_of(report: dict[str, Any]) -> list[Case]:
    """The cases of one JSON file."""
    return [_case(dict(values)) for values in report["cases"]]


def _case(values: dict[str, Any]) -> Case:
    values["pairs"] = [Pair(**{which: run and Run(**run) for which, run in pair.items()}) for pair in values["pairs"]]
    for name in ("untimed", "baseline_untimed"):
        values[name] = None if values[name] is None else Untimed(**values[name])
    return Case(**values)


def _median_ratio(steps: Sequence[tuple[float, float]]) -> float | None:
    return statistics.median(seconds / of_baseline for seconds, of_baseline in steps) if steps else None
