"""What the measurements of one machine say of each target: met, missed, or not measured.

    python -m lazyllm.bench.targets results/reference/cpu

reads every JSON file that `python -m lazyllm.bench --json` wrote below the folder and prints one table.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazyllm.bench.clock import Case, Pair, Run, Untimed
from lazyllm.bench.ratios import (
    idle_step_ratio,
    memory_ratio,
    of_pairs,
    revival_cost,
    share_of_ideal,
    step_ratio,
    total_ratio,
    ttft_speedup,
)

LONG = 2000  # tokens from which on a prefill is held against the arithmetic


@dataclass(frozen=True)
class Target:
    """A promise about speed or memory.

    what: the quantity. wanted: the bound, ">= x" or "<= x"; "0" is "<= 0". read: the numbers of a case, which may need
    the other cases of its file.
    """

    what: str
    wanted: str
    read: Callable[[Case, Sequence[Case]], Iterable[float]]

    @property
    def is_least(self) -> bool:
        """Whether the bound is a lower one."""
        return self.wanted.startswith(">=")

    def holds(self, value: float) -> bool:
        bound = float(self.wanted.split()[-1])
        return value >= bound if self.is_least else value <= bound


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """The benchmark's JSON files below a folder, by name. Raises ValueError if there is none."""
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("*.json"))]
    reports = [report for report in reports if isinstance(report, dict) and "cases" in report]
    if not reports:
        raise ValueError(f"{folder}: no file of `python -m lazyllm.bench --json` lies there")
    return reports


def cases_of(report: dict[str, Any]) -> list[Case]:
    """The cases of one JSON file, as they were when they were measured."""
    return [_case(dict(values)) for values in report["cases"]]


def _case(values: dict[str, Any]) -> Case:
    values["pairs"] = [Pair(Run(**pair["baseline"]), Run(**pair["other"])) for pair in values["pairs"]]
    for name in ("untimed", "baseline_untimed"):
        values[name] = None if values[name] is None else Untimed(**values[name])
    return Case(**values)


def table(reports: Sequence[dict[str, Any]]) -> str:
    """Markdown: for each target the worst reading of all cases, the range, and whether each of them keeps it."""
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


def _row(target: Target, readings: Sequence[tuple[float, str]]) -> str:
    """readings: (value, what it was measured on)."""
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


def _medians(case: Case, *ratios: Callable[[Pair], float | None]) -> list[float]:
    """The median over the pairs of each ratio that any of them has."""
    return [statistics.median(values) for ratio in ratios if (values := of_pairs(case, ratio))]


def _ttft_ratio(pair: Pair) -> float:
    return pair.other.ttft_s / pair.baseline.ttft_s


def _share_of_ideal(case: Case) -> list[float]:
    return [share_of_ideal(case)] if case.boundaries and case.tokens >= LONG else []


def _step_beside_transformers(case: Case) -> list[float]:
    return [1 / ratio for ratio in _medians(case, step_ratio)] if case.untimed is None else []


def _whole(case: Case) -> list[float]:
    # a single sample of a prefill says nothing of an answer
    has_answers = len(case.pairs[0].baseline.step_s) == case.new_tokens - 1
    return _medians(case, total_ratio) if case.untimed is not None and has_answers else []


def _peak_growth(case: Case, cases: Sequence[Case]) -> Iterable[float]:
    """From the method's shortest prompt to this one: growth of the peak beyond the weights over the prompt's.

    What is linear gives 1, less if something does not grow at all; what is quadratic gives the prompt's growth. On a
    CPU the peak is the process', and what the C library holds back comes on top.
    """
    alike = [other for other in cases if other.name == case.name and other.tokens >= LONG and other.untimed]
    shortest = min(alike, key=lambda other: other.tokens, default=case)
    before, after = (each.untimed and each.untimed.prefill_peak_bytes for each in (shortest, case))
    growth = case.tokens / shortest.tokens
    return [after / before / growth] if before and after and growth > 1 else []


TARGETS = (
    Target("TTFT speedup / ideal speedup, 2,000 tokens and more", ">= 0.97", lambda case, _: _share_of_ideal(case)),
    Target(
        "baseline's prefill / `model(...)`",
        "<= 1.00",
        lambda case, _: _medians(case, ttft_speedup) if case.untimed is None else [],
    ),
    Target("baseline's step / `model.generate`'s", "<= 1.00", lambda case, _: _step_beside_transformers(case)),
    Target(
        "keep ratio 1 / baseline: TTFT, step, whole",
        "<= 1.02",
        lambda case, _: (
            _medians(case, _ttft_ratio, idle_step_ratio, total_ratio) if case.untimed and not case.boundaries else []
        ),
    ),
    Target(
        "step in which nothing is revived / baseline's",
        "<= 1.05",
        lambda case, _: _medians(case, idle_step_ratio) if case.boundaries else [],
    ),
    Target(
        "cost of revival / its FLOPs' time",
        "<= 1.2",
        lambda case, _: _medians(case, lambda pair: revival_cost(pair, case.prefill_flops)) if case.boundaries else [],
    ),
    Target("whole generation / baseline's", "<= 1.02", lambda case, _: _whole(case)),
    Target(
        "selection, share of TTFT",
        "<= 0.01",
        lambda case, _: [case.untimed.selection_share] if case.untimed and case.boundaries else [],
    ),
    Target("waits in prefill", "0", lambda case, _: [case.untimed.prefill_waits] if case.untimed else []),
    Target(
        "waits in a step beyond one per boundary",
        "0",
        lambda case, _: [max(0, case.untimed.step_waits - case.boundaries)] if case.untimed else [],
    ),
    Target(
        "KV + Aux / baseline's KV, Figure 4's schedule",
        "<= 0.75",
        lambda case, _: [memory_ratio(case)] if case.untimed and case.name.startswith("paper") else [],
    ),
    Target("growth of the peak beyond weights / the prompt's", "<= 1.05", _peak_growth),
    Target(
        "TTFT / (baseline's / ideal), by length",
        "<= 1.05",
        lambda case, _: [1 / share for share in _share_of_ideal(case)],
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        sys.exit("usage: python -m lazyllm.bench.targets FOLDER")
    try:
        print(table(read_reports(Path(arguments[0]))))
    except (OSError, ValueError, TypeError, KeyError) as error:
        sys.exit(f"error: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
