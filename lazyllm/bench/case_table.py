"""One table for each prompt length: a row for each quantity, a column for each method."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lazyllm.bench.cases import BenchCase, Pair


def table(cases: Sequence[BenchCase]) -> str:
    """The cases of one prompt length: medians over pairs; ratios within a pair with quartiles."""
    rows = [["", *(case.name for case in cases)]]
    rows += [[heading, *(cell(case) for case in cases)] for heading, cell in ROWS.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(first quartile, median, third quartile)."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return low, middle, high


def markdown(columns: Mapping[str, Callable[[Any], str]], cases: Sequence[Any]) -> str:
    """A Markdown table with a row for each case; the first column is aligned to the left."""
    rows = [list(columns), *([cell(case) for cell in columns.values()] for case in cases)]
    head, *lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|---|" + "---:|" * (len(columns) - 1), *lines])


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The median with quartiles; "-" without values."""
    if not values:
        return "-"
    low, middle, high = (f"{value:.{digits}f}" for value in quartiles(values))
    return f"{middle} [{low}, {high}]"


def _median(values: Sequence[float], unit: str = "") -> str:
    return f"{statistics.median(values):.4g}{unit}" if values else "-"


def _selection(case: BenchCase) -> str:
    if case.untimed is None:
        return "-"
    share = case.untimed.selection_share
    return f"{share:.4f} ({share * case.untimed.prefill_s:.2g} s)"


def _memory(case: BenchCase) -> str:
    if case.untimed is None:
        return "-"
    kv, aux = megabytes(case.untimed.kv_bytes), megabytes(case.untimed.aux_bytes)
    return f"{case.memory_ratio():.3f} ({kv} + {aux} of {megabytes(case.baseline_untimed.kv_bytes)})"


def _peak(case: BenchCase) -> str:
    ours, theirs = case.untimed and case.untimed.peak_bytes, case.baseline_untimed.peak_bytes
    return f"{megabytes(ours)} of {megabytes(theirs)}" if ours is not None and theirs is not None else "-"


def megabytes(count: int) -> str:
    """Bytes as text."""
    return f"{count / 1e6:.1f} MB"


ROWS: dict[str, Callable[[BenchCase], str]] = {
    "baseline's TTFT": lambda case: _median([pair.baseline.ttft_s for pair in case.pairs], " s"),
    "TTFT": lambda case: _median([pair.other.ttft_s for pair in case.pairs], " s"),
    "TTFT speedup": lambda case: spread(case.of_pairs(Pair.ttft_speedup)),
    "  ideal": lambda case: f"{case.ideal_ttft_speedup:.3f}",
    "  share of the ideal": lambda case: f"{case.share_of_ideal():.3f}",
    "FLOPs utilisation, baseline": lambda case: _median(
        [pair.baseline.utilisation(case.baseline_prefill_flops) for pair in case.pairs]
    ),
    "FLOPs utilisation": lambda case: _median([pair.other.utilisation(case.prefill_flops) for pair in case.pairs]),
    "selection, share of TTFT": _selection,
    "baseline's step": lambda case: _median([step for pair in case.pairs for step in pair.baseline.step_s], " s"),
    "step": lambda case: _median([step for pair in case.pairs for step in pair.other.step_s], " s"),
    "step / baseline's": lambda case: spread(case.of_pairs(Pair.step_ratio)),
    "  nothing revived / baseline's": lambda case: spread(case.of_pairs(Pair.idle_step_ratio)),
    "  reviving / baseline's": lambda case: spread(case.of_pairs(Pair.reviving_step_ratio)),
    "cost of revival / its FLOPs' time": lambda case: spread(case.revival_costs()),
    "baseline's whole generation": lambda case: _median([pair.baseline.total_s for pair in case.pairs], " s"),
    "whole generation": lambda case: _median([pair.other.total_s for pair in case.pairs], " s"),
    "whole generation / baseline's": lambda case: spread(case.of_pairs(Pair.total_ratio)),
    "waits: prefill, step": lambda case: (
        f"{case.untimed.prefill_waits}, {case.untimed.step_waits}" if case.untimed else "-"
    ),
    "KV + Aux / baseline's KV, after prefill": _memory,
    "peak beyond weights, of baseline's": _peak,
}
