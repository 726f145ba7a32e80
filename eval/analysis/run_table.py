"""The table of one run, and the comparison of several: datasets and tasks, with confidence intervals.

`eval.store.aggregate` computes the numbers and defines them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.columns import PROMPT_ENDS, Column, cells, forms, range_names, range_of
from eval.analysis.difference import difference
from eval.analysis.known_methods import BASELINE
from eval.analysis.table import COMPUTED, Table
from eval.benchmarks.datasets import DATASETS
from eval.store.aggregate import VALUES, rows_of
from eval.store.comparable import without_baseline
from eval.store.folder import read_planned
from eval.store.results import Results
from lazyllm.machine import accelerator

FEWEST = 5  # least number of examples for an interval: with fewer, the bootstrap is too narrow (±0 if they agree)
_OF_BASELINE = (
    "baseline_score",
    "baseline_ttft_s",
    "baseline_generated_tokens",
    "baseline_prefill_mfu",
)  # other values are the method's
_VALUES = [name for name in VALUES if not name.startswith("baseline_") or name in _OF_BASELINE]
# TTFT and KL are shown without intervals, so that the table fits a terminal; the CSV has both ends
_SHOWN = (
    Column("score", "score", 2),
    Column("failed", "failed"),
    Column("score_failed_as_zero", "score, failed as 0", 2),
    Column("baseline_score", "baseline score", 2),
    Column("ttft_s", "TTFT, ms", 1, scale=1e-3, interval=False),
    Column("ttft_speedup", "TTFT speedup", 2),
    Column("baseline_prefill_mfu", "baseline MFU, %", 1, interval=False),
    Column("generation_speedup", "generation speedup", 2),
    Column("pct_prompt_tokens_computed", "% tokens computed", 1),
    Column("kl", "KL, nats", 5, interval=False),
)
_COLUMNS = ["name", "kind", "task", "examples", "failed", "score_failed_as_zero", *forms(*_VALUES)]
_COMPARED = ("score", "ttft_s", "ttft_speedup", "generation_speedup", "pct_prompt_tokens_computed", "kl")


def run_table(results: Results, title: str, control: Results | None = None) -> Table:
    """A run's datasets and tasks; each task follows its datasets. results: of one run. control: of its baseline beside
    itself.

    frame: name, kind ("dataset", "task", "all", or "length": a range of prompt tokens, if there are several), task,
    examples, failed (the number of examples that could not be measured; no other column counts them),
    score_failed_as_zero (the score if they count as 0), and the columns of `eval.store.aggregate.by_task`, of the
    baseline only score, TTFT, MFU and length of answers.
    """
    rows = _rows(results)
    shown = _without_mean_of_one(rows) + _by_length(results)
    frame = pd.DataFrame(shown, columns=_COLUMNS)
    names = [row["name"] if row["kind"] == "dataset" else f"**{row['name']}**" for row in shown]
    keys = [Column("shown_name", "dataset, **task**"), Column("examples", "n")]
    table = _cells(frame.assign(shown_name=names), keys, has_failed=rows[-1]["failed"] > 0)
    return Table("summary", title, _caption({"": results}, {"": rows}, control), frame, table)


def compared_table(runs: Mapping[str, Results], title: str, control: Results | None = None) -> Table:
    """Methods by tasks, as in the paper's Table 1, each with its own paired baseline. runs: by the method's label.

    control: of the baseline beside itself.
    """
    rows = {f"{label}: ": _rows(results) for label, results in runs.items()}
    baselines = {label for label, results in runs.items() if results.runs[0].method == BASELINE}
    by_task: dict[str, dict[str, dict[str, Any]]] = {}
    for label, of_run in zip(runs, rows.values(), strict=True):
        for row in _without_mean_of_one(of_run):
            if row["kind"] != "dataset":
                by_task.setdefault(row["name"], {})[label] = row
    lines: list[dict[str, Any]] = []
    for task, methods in by_task.items():
        first = next(iter(methods.values()))
        own = {"ttft_speedup": 1.0, "generation_speedup": 1.0}
        if not np.isnan(first["pct_prompt_tokens_computed"]):  # a server tells neither
            own |= {"pct_prompt_tokens_computed": 100.0, "kl": 0.0}
        if not np.isnan(first["baseline_score"]) and not baselines:
            line = {"task": task, "method": "baseline", "examples": first["examples"]}
            line |= {form: first[f"baseline_{form}"] for form in forms("score", "ttft_s")}
            lines.append(line | own)  # its failed examples are unknown: it is measured only for a method's example
        for label, row in methods.items():
            lines.append({**row, "task": task, "method": label} | (own if label in baselines else {}))
    columns = ["task", "method", "examples", *forms(*_COMPARED), "failed", "score_failed_as_zero"]
    frame = pd.DataFrame(lines, columns=columns).astype({"failed": "Int64"})  # an integer, even if baselines lack it
    keys = [Column("task", "task"), Column("method", "method"), Column("examples", "n")]
    table = _cells(frame, keys, has_failed=any(of_run[-1]["failed"] for of_run in rows.values()))
    caption = _caption(dict(zip(rows, runs.values(), strict=True)), rows, control)
    return Table("compared", title, caption, frame, table, keys=2)


def run_json(table: Table, about: Mapping[str, Any]) -> str:
    """A run's table at full precision, after `about`, which describes the run.

    Each value is a mean with both ends of its interval (null without one), or null if it was not measured.
    """
    rows = []
    for row in table.frame.astype(object).where(table.frame.notna(), None).to_dict("records"):
        for name in _VALUES:
            mean, low, high = (row.pop(form) for form in forms(name))
            row[name] = None if mean is None else {"mean": mean, "low": low, "high": high}
        rows.append(row)
    return json.dumps({"rows": rows, **about}, indent=2, sort_keys=True, default=str) + "\n"


def _rows(results: Results) -> list[dict[str, Any]]:
    """The rows of `run_table`'s frame; the last one is the mean over tasks, also of one task."""
    rows = rows_of(results.frame)
    failed, zeroed = _with_failures(results, {row["name"]: row for row in rows if row["level"] == "dataset"})
    for row in rows:
        row |= {"kind": row["level"], "failed": failed[row["name"]], "score_failed_as_zero": zeroed[row["name"]]}
    rows[-1]["name"] = "mean over tasks"
    return rows


def _by_length(results: Results) -> list[dict[str, Any]]:
    """A row for each range of prompt tokens, of all tasks; none if all prompts are in one. Failures are not counted."""
    ranges = range_of(results.frame["prompt_tokens"], PROMPT_ENDS)
    present = [name for name in range_names(PROMPT_ENDS) if name in set(ranges)]
    more = {"kind": "length", "failed": 0, "score_failed_as_zero": np.nan}
    return [
        rows_of(results.frame.loc[ranges == name])[-1] | more | {"name": f"{name} prompt tokens"}
        for name in present
        if len(present) > 1
    ]


def _without_mean_of_one(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the mean over tasks if there is one task."""
    return rows[:-1] if sum(row["kind"] == "task" for row in rows) == 1 else rows


def _with_failures(results: Results, measured: Mapping[str, dict[str, Any]]) -> tuple[dict[str, int], dict[str, float]]:
    """{row: number of failed examples} and {row: the score if each of these counts as 0}. measured: by dataset."""
    failures = [
        failure
        for run in results.runs
        for planned in [read_planned(run.folder)]
        for failure in run.failures
        if planned is None or failure.key in planned
    ]
    counts = Counter(failure.dataset for failure in failures)
    zeroed = {name: row["score"] * row["examples"] / (row["examples"] + counts[name]) for name, row in measured.items()}
    zeroed |= {name: 0.0 for name in counts if name not in measured}
    by_task: dict[str, list[str]] = {}
    for name in zeroed:
        by_task.setdefault(DATASETS[name].task, []).append(name)
    of_tasks = {task: float(np.mean([zeroed[name] for name in names])) for task, names in by_task.items()}
    failed = {name: counts[name] for name in zeroed} | {"all": len(failures)}
    failed |= {task: sum(counts[name] for name in names) for task, names in by_task.items()}
    return failed, zeroed | of_tasks | {"all": float(np.mean(list(of_tasks.values())))}


def _physics(results: Results) -> str:
    """Lines about the baseline's speed: the attention kernel that ran, what MFU is, and what flatters speedups."""
    [run] = results.runs
    kernels = ", ".join(run.kernels) or "unknown"
    text = f"\nAttention kernel of the baseline, by profiler: {kernels}."
    if bool(results.frame["prefill_mfu"].notna().any()):
        peak = "its maker's dense peak" if accelerator(run.device) else "the rate of a matrix product measured here"
        text += f" MFU: model FLOPs utilisation of the prefill, FLOPs / TTFT over {peak} ({run.device})."
    return text + "".join(f"\nCaution: {sentence}." for sentence in run.handicaps)


def _cells(frame: pd.DataFrame, keys: Sequence[Column], has_failed: bool) -> pd.DataFrame:
    """The cells: keys, then the values that the frame has; columns of failures only if there are any."""
    shown = frame.copy()
    ends = [name for name in frame if name.endswith(("_low", "_high"))]
    shown.loc[frame["examples"] < FEWEST, ends] = np.nan
    left_out = set() if has_failed else {"failed", "score_failed_as_zero"}
    return cells(shown, [*keys, *(column for column in _SHOWN if column.name in frame and column.name not in left_out)])


def _caption(
    runs: Mapping[str, Results], rows: Mapping[str, list[dict[str, Any]]], control: Results | None = None
) -> str:
    """runs, rows: by the beginning of a sentence about a run. All runs have the same prompts."""
    results = next(iter(runs.values()))
    text = (
        "Scores 0 to 100. ±: half of the 95 % bootstrap interval over examples; both ends are in summary.csv. It is "
        f"not shown for n below {FEWEST}.\n"
        f"% tokens computed: {COMPUTED}. KL: of the first token's distribution from the baseline's.\n"
    )
    if all(np.isnan(row["ttft_speedup"]) for of_run in rows.values() for row in of_run):
        text += "No speedup: no baseline was run beside the method (it is the baseline, or timing.paired=false)."
    elif lacking := without_baseline([run for of_one in runs.values() for run in of_one.runs]):
        text += "\n".join(lacking)
    else:
        text += "Generation speedup compares whole answers, which may differ in length (see summary.csv)."
    beside = {label: difference(of_run) for label, of_run in runs.items()}
    text += "".join(f"\n{label}beside its baseline: {found}." for label, found in beside.items() if found)
    if control is not None:
        text += f"\nBy chance, the baseline beside itself: {difference(control)}."
    text += _physics(results)
    columns = ["prompt_tokens", "prompt_tokens_before_truncation"]
    prompts = [row for run in results.runs for row in run.table(columns).to_pylist()]
    cut = sum(row["prompt_tokens"] < row["prompt_tokens_before_truncation"] for row in prompts)
    if cut:
        text += (
            f"\n{cut} of {len(prompts)} prompts are longer than model.max_prompt_tokens: their middle is cut out, as "
            "in LongBench."
        )
    for label, of_run in rows.items():
        if whole := of_run[-1]["failed"]:
            text += (
                f"\n{label}{whole} examples failed and are left out; if they count as 0, the score is "
                f"{of_run[-1]['score_failed_as_zero']:.2f}."
            )
    return text
