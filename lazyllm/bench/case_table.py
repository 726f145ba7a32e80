"""One table for each prompt length: a row for each quantity, a column for each method."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from lazyllm.bench.clock import Case, Pair, quartiles
from lazyllm.bench.ratios import (
    idle_step_ratio,
    memory_ratio,
    of_pairs,
    revival_cost,
    reviving_step_ratio,
    share_of_ideal,
    step_ratio,
    total_ratio,
    ttft_speedup,
    utilisation,
)


def table(cases: Sequence[Case]) -> str:
    """The cases of one prompt length: medians over pairs, with quartiles if a ratio is a pair's own."""
    rows = [["", *(case.name for case in cases)]]
    rows += [[heading, *(cell(case) for case in cases)] for heading, cell in ROWS.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def _spread(ratio: Callable[[Case, Pair], float | None]) -> Callable[[Case], str]:
    def cell(case: Case) -> str:
        values = of_pairs(case, lambda pair: ratio(case, pair))
        if not values:
            return "-"
        low, middle, high = quartiles(values)
        return f"{middle:.3f} [{low:.3f}, {high:.3f}]"

    return cell


def _median(values_of: Callable[[Case], Sequence[float]], unit: str = "") -> Callable[[Case], str]:
    def cell(case: Case) -> str:
        values = values_of(case)
        return f"{statistics.median(values):.4g}{unit}" if values else "-"

    return cell


def _selection(case: Case) -> str:
    if case.untimed is None:
        return "-"
    share = case.untimed.selection_share
    return f"{share:.4f} ({share * case.untimed.prefill_s:.2g} s)"


def _memory(case: Case) -> str:
    if case.untimed is None:
        return "-"
    kv, aux = _mb(case.untimed.kv_bytes), _mb(case.untimed.aux_bytes)
    return f"{memory_ratio(case):.3f} ({kv} + {aux} of {_mb(case.baseline_untimed.kv_bytes)})"


def _peak(case: Case) -> str:
    ours, theirs = case.untimed and case.untimed.prefill_peak_bytes, case.baseline_untimed.prefill_peak_bytes
    return f"{_mb(ours)} of {_mb(theirs)}" if ours is not None and theirs is not None else "-"


def _waits(case: Case) -> str:
    return "-" if case.untimed is None else f"{case.untimed.prefill_waits}, {case.untimed.step_waits}"


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


ROWS: dict[str, Callable[[Case], str]] = {
    "baseline's TTFT": _median(lambda case: [pair.baseline.ttft_s for pair in case.pairs], " s"),
    "TTFT": _median(lambda case: [pair.other.ttft_s for pair in case.pairs], " s"),
    "TTFT speedup": _spread(lambda case, pair: ttft_speedup(pair)),
    "  ideal": lambda case: f"{case.ideal_ttft_speedup:.3f}",
    "  share of the ideal": lambda case: f"{share_of_ideal(case):.3f}",
    "FLOPs utilisation, baseline": _median(
        lambda case: [utilisation(pair.baseline, case.baseline_prefill_flops) for pair in case.pairs]
    ),
    "FLOPs utilisation": _median(lambda case: [utilisation(pair.other, case.prefill_flops) for pair in case.pairs]),
    "selection, share of TTFT": _selection,
    "baseline's step": _median(lambda case: [step for pair in case.pairs for step in pair.baseline.step_s], " s"),
    "step": _median(lambda case: [step for pair in case.pairs for step in pair.other.step_s], " s"),
    "step / baseline's": _spread(lambda case, pair: step_ratio(pair)),
    "  nothing revived / baseline's": _spread(lambda case, pair: idle_step_ratio(pair)),
    "  reviving / baseline's": _spread(lambda case, pair: reviving_step_ratio(pair)),
    "cost of revival / its FLOPs' time": _spread(lambda case, pair: revival_cost(pair, case.prefill_flops)),
    "baseline's whole generation": _median(lambda case: [pair.baseline.total_s for pair in case.pairs], " s"),
    "whole generation": _median(lambda case: [pair.other.total_s for pair in case.pairs], " s"),
    "whole generation / baseline's": _spread(lambda case, pair: total_ratio(pair)),
    "waits: prefill, step": _waits,
    "KV + Aux / baseline's KV, after prefill": _memory,
    "peak beyond weights, of baseline's": _peak,
}
