"""What the samples of a pair of runs say, in numbers: the case table and the targets both read these."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from lazyllm.bench.clock import Case, Pair, Run


def ttft_speedup(pair: Pair) -> float:
    return pair.baseline.ttft_s / pair.other.ttft_s


def total_ratio(pair: Pair) -> float:
    return pair.other.total_s / pair.baseline.total_s


def step_ratio(pair: Pair) -> float | None:
    """The mean step over the baseline's mean step; None if one token alone was generated."""
    if not pair.other.step_s:
        return None
    return statistics.fmean(pair.other.step_s) / statistics.fmean(pair.baseline.step_s)


def idle_step_ratio(pair: Pair) -> float | None:
    """The median, over the steps in which nothing is revived, of its seconds over those of the baseline's same step.

    None if there is no such step, and for transformers, whose single steps are not known.
    """
    return _median_ratio(_steps(pair, revives=False))


def reviving_step_ratio(pair: Pair) -> float | None:
    """The same over the steps in which something is revived."""
    return _median_ratio(_steps(pair, revives=True))


def revival_cost(pair: Pair, prefill_flops: int) -> float | None:
    """Seconds of the reviving steps beyond such that do not, over the revived tokens' FLOPs at prefill's rate.

    Without what it revives, a step would take as much more than the baseline's median one as those that revive nothing.
    prefill_flops: of the method's own prefill, whose measured seconds give the rate. None without steps of each kind.
    """
    idle, reviving = idle_step_ratio(pair), _steps(pair, revives=True)
    if idle is None or not reviving:
        return None
    beyond = sum(seconds for seconds, _ in reviving) - len(reviving) * idle * statistics.median(pair.baseline.step_s)
    return beyond / (sum(pair.other.revived_flops) / prefill_flops * pair.other.ttft_s)


def utilisation(run: Run, prefill_flops: int) -> float:
    """FLOP/s of the prefill over those of a plain matrix product measured just before."""
    return prefill_flops / run.ttft_s / run.product_flops_per_s


def share_of_ideal(case: Case) -> float:
    """The median TTFT speedup over the ideal one."""
    return statistics.median(map(ttft_speedup, case.pairs)) / case.ideal_ttft_speedup


def memory_ratio(case: Case) -> float:
    """Bytes of KV cache and Aux Cache after a method's prefill, over those of the baseline's KV cache."""
    assert case.untimed is not None
    return (case.untimed.kv_bytes + case.untimed.aux_bytes) / case.baseline_untimed.kv_bytes


def of_pairs(case: Case, ratio: Callable[[Pair], float | None]) -> list[float]:
    """The ratio of each pair that has one."""
    return [value for pair in case.pairs if (value := ratio(pair)) is not None]


def _steps(pair: Pair, revives: bool) -> list[tuple[float, float]]:
    """(seconds, seconds of the baseline's same step) of the steps of one kind."""
    baseline, other = pair.baseline, pair.other
    if len(other.step_s) != len(baseline.step_s):
        return []  # transformers' own
    steps = zip(other.step_s, baseline.step_s, other.revived_flops, strict=True)
    return [(seconds, of_baseline) for seconds, of_baseline, flops in steps if (flops > 0) == revives]


def _median_ratio(steps: Sequence[tuple[float, float]]) -> float | None:
    return statistics.median(seconds / of_baseline for seconds, of_baseline in steps) if steps else None
