"""The speed and memory targets, and whether the measurements of one machine meet them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lazyllm.bench.cases import BenchCase, Pair, cases_of

LONG = 2000  # prefills of fewer tokens are not compared with the ideal


@dataclass(frozen=True)
class SpeedTarget:
    """A target of speed or memory.

    what: the quantity. wanted: the bound, ">= x", "<= x", or "0" for "<= 0".
    read: (case, all cases of its file) -> readings.
    """

    what: str
    wanted: str
    read: Callable[[BenchCase, Sequence[BenchCase]], Iterable[float]]

    @property
    def is_least(self) -> bool:
        """Whether the bound is a lower one."""
        return self.wanted.startswith(">=")

    def holds(self, value: float) -> bool:
        bound = float(self.wanted.split()[-1])
        return value >= bound if self.is_least else value <= bound


def table(reports: Sequence[dict[str, Any]]) -> str:
    """Markdown: for each target the worst reading, the range of all, and whether all meet it."""
    lines = ["| what | target | worst | all readings | |", "|---|---|---:|---|---|"]
    files = [(report["settings"]["shape"], cases_of(report)) for report in reports]
    for target in TARGETS:
        readings = [
            (value, f"{shape}, {case.name}, {case.tokens} + {case.new_tokens} tokens")
            for shape, cases in files
            for case in cases
            for value in target.read(case, cases)
        ]
        lines.append(_row(target, readings))
    return "\n".join(lines)


def _row(target: SpeedTarget, readings: Sequence[tuple[float, str]]) -> str:
    """One row of the table. readings: (value, name of its case)."""
    if not readings:
        return f"| {target.what} | {target.wanted} | - | not measured | |"
    missed = sum(not target.holds(value) for value, _ in readings)
    order = sorted(readings, key=lambda reading: reading[0])
    (low, _), (high, _) = order[0], order[-1]
    worst, case = order[0] if target.is_least else order[-1]
    verdict = f"missed by {missed} of {len(readings)}" if missed else "met"
    return (
        f"| {target.what} | {target.wanted} | {worst:.3g} ({case}) | "
        f"{low:.3g} to {high:.3g} of {len(readings)} | {verdict} |"
    )


def _medians(case: BenchCase, *ratios: Callable[[Pair], float | None]) -> list[float]:
    """The median over the pairs of each ratio, without those that no pair has."""
    return [statistics.median(values) for ratio in ratios if (values := case.of_pairs(ratio))]


def _share_of_ideal(case: BenchCase) -> list[float]:
    return [case.share_of_ideal()] if case.boundaries and case.tokens >= LONG else []


def _whole(case: BenchCase) -> list[float]:
    # with --repeats 0 only prefills were measured
    has_answers = len(case.pairs[0].baseline.step_s) == case.new_tokens - 1
    return _medians(case, Pair.total_ratio) if case.untimed and has_answers else []


def _peak_growth(case: BenchCase, cases: Sequence[BenchCase]) -> Iterable[float]:
    """From the method's shortest prompt to this one: growth of the peak beyond the weights / growth of the prompt.

    Linear growth gives 1, less if a part of the peak does not grow; quadratic growth gives the growth of the prompt.
    On a CPU the peak is that of the process, with memory that the C library holds back.
    """
    alike = [other for other in cases if other.name == case.name and other.tokens >= LONG and other.untimed]
    shortest = min(alike, key=lambda other: other.tokens, default=case)
    before, after = (each.untimed and each.untimed.peak_bytes for each in (shortest, case))
    growth = case.tokens / shortest.tokens
    return [after / before / growth] if before and after and growth > 1 else []


TARGETS = (
    SpeedTarget(
        "TTFT speedup / ideal speedup, 2,000 tokens and more", ">= 0.97", lambda case, _: _share_of_ideal(case)
    ),
    SpeedTarget(
        "baseline's prefill / `model(...)`",
        "<= 1.00",
        lambda case, _: [] if case.untimed else _medians(case, Pair.ttft_speedup),
    ),
    SpeedTarget(
        "baseline's step / `model.generate`'s",
        "<= 1.00",
        lambda case, _: [] if case.untimed else [1 / ratio for ratio in _medians(case, Pair.step_ratio)],
    ),
    SpeedTarget(
        "keep ratio 1 / baseline: TTFT, step, whole",
        "<= 1.02",
        lambda case, _: (
            _medians(case, Pair.ttft_ratio, Pair.idle_step_ratio, Pair.total_ratio)
            if case.untimed and not case.boundaries
            else []
        ),
    ),
    SpeedTarget(
        "step in which nothing is revived / baseline's",
        "<= 1.05",
        lambda case, _: _medians(case, Pair.idle_step_ratio) if case.boundaries else [],
    ),
    SpeedTarget(
        "cost of revival / its FLOPs' time",
        "<= 1.2",
        lambda case, _: [statistics.median(costs)] if case.boundaries and (costs := case.revival_costs()) else [],
    ),
    SpeedTarget("whole generation / baseline's", "<= 1.02", lambda case, _: _whole(case)),
    SpeedTarget(
        "selection, share of TTFT",
        "<= 0.01",
        lambda case, _: [case.untimed.selection_share] if case.untimed and case.boundaries else [],
    ),
    SpeedTarget("waits in prefill", "0", lambda case, _: [case.untimed.prefill_waits] if case.untimed else []),
    SpeedTarget(
        "waits in a step beyond one per boundary",
        "0",
        lambda case, _: [max(0, case.untimed.step_waits - case.boundaries)] if case.untimed else [],
    ),
    SpeedTarget(
        "KV + Aux / baseline's KV, Figure 4's schedule",
        "<= 0.75",
        lambda case, _: [case.memory_ratio()] if case.untimed and case.name.startswith("paper") else [],
    ),
    SpeedTarget("growth of the peak beyond weights / the prompt's", "<= 1.05", _peak_growth),
)
