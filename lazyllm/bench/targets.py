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

from lazyllm.bench.case_table import idle_step_ratio, revival_cost, step_ratio, total_ratio, ttft_speedup
from lazyllm.bench.clock import Case, Pair, Run, Untimed

LONG = 2000  # tokens from which on a prefill is held against the arithmetic


@dataclass(frozen=True)
class Reading:
    """One measured number. case: what it was measured on, for people."""

    value: float
    case: str


@dataclass(frozen=True)
class Target:
    """A promise about speed or memory.

    what: the quantity. wanted: the bound, for people. holds: whether a number keeps it. read: the numbers that one
    file's cases give.
    """

    what: str
    wanted: str
    holds: Callable[[float], bool]
    read: Callable[[Sequence[Case]], Iterable[tuple[Case, float]]]


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """The benchmark's JSON files below a folder, by name. Raises ValueError where there is none."""
    files = sorted(folder.rglob("*.json"))
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    found = [report for report in reports if isinstance(report, dict) and "cases" in report]
    if not found:
        raise ValueError(f"{folder}: no file of `python -m lazyllm.bench --json` lies there")
    return found


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
    for target in TARGETS:
        readings = [
            Reading(value, f"{report['settings']['shape']}, {case.name}, {case.tokens} + {case.new_tokens} tokens")
            for report in reports
            for case, value in target.read(cases_of(report))
        ]
        lines.append(_row(target, readings))
    return "\n".join(lines)


def _row(target: Target, readings: Sequence[Reading]) -> str:
    if not readings:
        return f"| {target.what} | {target.wanted} | - | not measured | |"
    missed = [reading for reading in readings if not target.holds(reading.value)]
    # a target that is a lower bound is worst where it is lowest
    order = sorted(readings, key=lambda reading: reading.value)
    worst = order[0] if target.holds(float("inf")) else order[-1]
    low, high = order[0].value, order[-1].value
    verdict = "met" if not missed else f"missed by {len(missed)} of {len(readings)}"
    return (
        f"| {target.what} | {target.wanted} | {worst.value:.3g} ({worst.case}) | "
        f"{low:.3g} to {high:.3g} of {len(readings)} | {verdict} |"
    )


def _each(of_case: Callable[[Case], Iterable[float]]) -> Callable[[Sequence[Case]], Iterable[tuple[Case, float]]]:
    return lambda cases: [(case, value) for case in cases for value in of_case(case)]


def _at_most(bound: float) -> Callable[[float], bool]:
    return lambda value: value <= bound


def _median(case: Case, of_pair: Callable[[Pair], float | None]) -> Iterable[float]:
    """The median over the pairs, if there is any."""
    values = [value for pair in case.pairs if (value := of_pair(pair)) is not None]
    return [statistics.median(values)] if values else []


def _is_hf(case: Case) -> bool:
    return case.untimed is None


def _keeps_all(case: Case) -> bool:
    return not _is_hf(case) and case.boundaries == 0


def _share_of_ideal(case: Case) -> Iterable[float]:
    if _is_hf(case) or case.boundaries == 0 or case.tokens < LONG:
        return []
    return [share / case.ideal_ttft_speedup for share in _median(case, ttft_speedup)]


def _prefill_against_transformers(case: Case) -> Iterable[float]:
    return _median(case, lambda pair: pair.baseline.ttft_s / pair.other.ttft_s) if _is_hf(case) else []


def _step_against_transformers(case: Case) -> Iterable[float]:
    return _median(case, _step_over_other) if _is_hf(case) else []


def _step_over_other(pair: Pair) -> float | None:
    ratio = step_ratio(pair)
    return None if ratio is None else 1 / ratio


def _keep_one(case: Case) -> Iterable[float]:
    if not _keeps_all(case):
        return []
    return [
        *_median(case, lambda pair: pair.other.ttft_s / pair.baseline.ttft_s),
        *_median(case, idle_step_ratio),
        *_median(case, total_ratio),
    ]


def _idle_step(case: Case) -> Iterable[float]:
    return _median(case, idle_step_ratio) if case.boundaries else []


def _revival(case: Case) -> Iterable[float]:
    return _median(case, lambda pair: revival_cost(pair, case.prefill_flops)) if case.boundaries else []


def _whole(case: Case) -> Iterable[float]:
    # a single sample of a prefill says nothing of an answer
    answered = [pair for pair in case.pairs if len(pair.baseline.step_s) == case.new_tokens - 1]
    return [statistics.median(map(total_ratio, answered))] if answered and not _is_hf(case) else []


def _selection(case: Case) -> Iterable[float]:
    return [case.untimed.selection_share] if case.untimed is not None and case.boundaries else []


def _prefill_waits(case: Case) -> Iterable[float]:
    return [case.untimed.prefill_waits] if case.untimed is not None else []


def _step_waits(case: Case) -> Iterable[float]:
    """How many more than one per boundary."""
    return [max(0, case.untimed.step_waits - case.boundaries)] if case.untimed is not None else []


def _memory(case: Case) -> Iterable[float]:
    if case.untimed is None or not case.name.startswith("paper"):
        return []
    return [(case.untimed.kv_bytes + case.untimed.aux_bytes) / case.baseline_untimed.kv_bytes]


def _peak_growth(cases: Sequence[Case]) -> Iterable[tuple[Case, float]]:
    """From a method's shortest prompt to each other one: growth of the peak beyond the weights over the prompt's.

    What is linear gives 1, less where something does not grow at all; what is quadratic gives the prompt's growth. On a
    CPU the peak is the process', and what the C library holds back comes on top.
    """
    for name in dict.fromkeys(case.name for case in cases):
        of_method = {case.tokens: case for case in cases if case.name == name and case.tokens >= LONG and case.untimed}
        for tokens in sorted(of_method)[1:]:
            shortest = min(of_method)
            before, after = _peak(of_method[shortest]), _peak(of_method[tokens])
            if before and after:
                yield of_method[tokens], after / before / (tokens / shortest)


def _peak(case: Case) -> int | None:
    return case.untimed.prefill_peak_bytes if case.untimed is not None else None


def _longer_prompts(case: Case) -> Iterable[float]:
    """TTFT over the baseline's divided by the ideal speedup, of prompts of each length."""
    return [1 / share for share in _share_of_ideal(case)]


TARGETS = (
    Target(
        "TTFT speedup / ideal speedup, 2,000 tokens and more", ">= 0.97", lambda x: x >= 0.97, _each(_share_of_ideal)
    ),
    Target("baseline's prefill / `model(...)`", "<= 1.00", _at_most(1.0), _each(_prefill_against_transformers)),
    Target("baseline's step / `model.generate`'s", "<= 1.00", _at_most(1.0), _each(_step_against_transformers)),
    Target("keep ratio 1 / baseline: TTFT, step, whole", "<= 1.02", _at_most(1.02), _each(_keep_one)),
    Target("step in which nothing is revived / baseline's", "<= 1.05", _at_most(1.05), _each(_idle_step)),
    Target("cost of revival / its FLOPs' time", "<= 1.2", _at_most(1.2), _each(_revival)),
    Target("whole generation / baseline's", "<= 1.02", _at_most(1.02), _each(_whole)),
    Target("selection, share of TTFT", "<= 0.01", _at_most(0.01), _each(_selection)),
    Target("waits in prefill", "0", _at_most(0), _each(_prefill_waits)),
    Target("waits in a step beyond one per boundary", "0", _at_most(0), _each(_step_waits)),
    Target("KV + Aux / baseline's KV, Figure 4's schedule", "<= 0.75", _at_most(0.75), _each(_memory)),
    Target("growth of the peak beyond weights / the prompt's", "<= 1.05", _at_most(1.05), _peak_growth),
    Target("TTFT / (baseline's / ideal), by length", "<= 1.05", _at_most(1.05), _each(_longer_prompts)),
)


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 1:
        sys.exit("usage: python -m lazyllm.bench.targets FOLDER")
    try:
        print(table(read_reports(Path(arguments[0]))))
    except (OSError, ValueError, TypeError, KeyError) as error:
        sys.exit(f"error: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
