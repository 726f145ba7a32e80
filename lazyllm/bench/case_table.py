"""What the samples say: one table for each prompt length, a row for each quantity, a column for each method."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from lazyllm.bench.clock import Case, Pair, Run, quartiles


def table(cases: Sequence[Case]) -> str:
    """The cases of one prompt length: medians over pairs, with quartiles where a ratio is a pair's own."""
    rows = [
        ["", *(case.name for case in cases)],
        *([heading, *(cell(case) for case in cases)] for heading, cell in ROWS.items()),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    )


def ttft_speedup(pair: Pair) -> float:
    return pair.baseline.ttft_s / pair.other.ttft_s


def total_ratio(pair: Pair) -> float:
    return pair.other.total_s / pair.baseline.total_s


def step_ratio(pair: Pair) -> float | None:
    """The mean step over the baseline's mean step; None where one token alone was generated."""
    if not pair.other.step_s:
        return None
    return statistics.fmean(pair.other.step_s) / statistics.fmean(pair.baseline.step_s)


def idle_step_ratio(pair: Pair) -> float | None:
    """The median, over the steps in which nothing is revived, of its seconds over those of the baseline's same step.

    None where there is no such step, and of transformers, whose single steps are not known.
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


def _steps(pair: Pair, revives: bool) -> list[tuple[float, float]]:
    """(seconds, of the baseline's same step) of the steps of one kind."""
    baseline, other = pair.baseline, pair.other
    if len(other.step_s) != len(baseline.step_s):
        return []  # transformers' own
    steps = zip(other.step_s, baseline.step_s, other.revived_flops, strict=True)
    return [(seconds, of_baseline) for seconds, of_baseline, flops in steps if (flops > 0) == revives]


def _median_ratio(steps: Sequence[tuple[float, float]]) -> float | None:
    return statistics.median(seconds / of_baseline for seconds, of_baseline in steps) if steps else None


def _spread(of_pair: Callable[[Pair], float | None]) -> Callable[[Case], str]:
    def cell(case: Case) -> str:
        values = [value for pair in case.pairs if (value := of_pair(pair)) is not None]
        if not values:
            return "-"
        low, middle, high = quartiles(values)
        return f"{middle:.3f} [{low:.3f}, {high:.3f}]"

    return cell


def _median(of_case: Callable[[Case], Sequence[float]], unit: str = "") -> Callable[[Case], str]:
    def cell(case: Case) -> str:
        values = of_case(case)
        return f"{statistics.median(values):.4g}{unit}" if values else "-"

    return cell


def _cost(case: Case) -> str:
    return _spread(lambda pair: revival_cost(pair, case.prefill_flops))(case)


def _memory(case: Case) -> str:
    if case.untimed is None:
        return "-"
    held = case.untimed.kv_bytes + case.untimed.aux_bytes
    return (
        f"{held / case.baseline_untimed.kv_bytes:.3f} "
        f"({_mb(case.untimed.kv_bytes)} + {_mb(case.untimed.aux_bytes)} of {_mb(case.baseline_untimed.kv_bytes)})"
    )


def _peak(case: Case) -> str:
    ours, theirs = case.untimed and case.untimed.prefill_peak_bytes, case.baseline_untimed.prefill_peak_bytes
    return f"{_mb(ours)} of {_mb(theirs)}" if ours is not None and theirs is not None else "-"


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


ROWS: dict[str, Callable[[Case], str]] = {
    "baseline's TTFT": _median(lambda case: [pair.baseline.ttft_s for pair in case.pairs], " s"),
    "TTFT": _median(lambda case: [pair.other.ttft_s for pair in case.pairs], " s"),
    "TTFT speedup": _spread(ttft_speedup),
    "  ideal": lambda case: f"{case.ideal_ttft_speedup:.3f}",
    "  share of the ideal": lambda case: (
        f"{statistics.median(map(ttft_speedup, case.pairs)) / case.ideal_ttft_speedup:.3f}"
    ),
    "FLOPs utilisation, baseline": _median(
        lambda case: [utilisation(pair.baseline, case.baseline_prefill_flops) for pair in case.pairs]
    ),
    "FLOPs utilisation": _median(lambda case: [utilisation(pair.other, case.prefill_flops) for pair in case.pairs]),
    "selection, share of TTFT": lambda case: (
        "-"
        if case.untimed is None
        else f"{case.untimed.selection_share:.4f} ({case.untimed.selection_share * case.untimed.prefill_s:.2g} s)"
    ),
    "baseline's step": _median(lambda case: [step for pair in case.pairs for step in pair.baseline.step_s], " s"),
    "step": _median(lambda case: [step for pair in case.pairs for step in pair.other.step_s], " s"),
    "step / baseline's": _spread(step_ratio),
    "  nothing revived / baseline's": _spread(idle_step_ratio),
    "  reviving / baseline's": _spread(reviving_step_ratio),
    "cost of revival / its FLOPs' time": _cost,
    "baseline's whole generation": _median(lambda case: [pair.baseline.total_s for pair in case.pairs], " s"),
    "whole generation": _median(lambda case: [pair.other.total_s for pair in case.pairs], " s"),
    "whole generation / baseline's": _spread(total_ratio),
    "waits: prefill, step": lambda case: (
        "-" if case.untimed is None else f"{case.untimed.prefill_waits}, {case.untimed.step_waits}"
    ),
    "KV + Aux / baseline's KV, after prefill": _memory,
    "peak beyond weights, of baseline's": _peak,
}
