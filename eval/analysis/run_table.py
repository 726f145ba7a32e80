"""The table of one run, and the comparison of several: datasets and tasks, with confidence intervals.

`eval.store.aggregate` computes the numbers and defines them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import comb
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.columns import BASELINE, range_of, ranges_in, with_ends
from eval.analysis.table import COMPUTED, EXAMPLES, Column, Table, cells, forms
from eval.benchmarks.datasets import DATASETS
from eval.store.aggregate import VALUES, drawn_means, on_common_examples, rows_of
from eval.store.folder import read_planned
from eval.store.results import Results, without_baseline
from eval.store.runs import StoredRun, counted
from lazyllm.machine import accelerator

FEWEST = 5  # least number of examples for an interval: with fewer, the bootstrap is too narrow (±0 if they agree)
_OF_BASELINE = ["baseline_score", "baseline_ttft_s", "baseline_generated_tokens", "baseline_prefill_mfu"]
_VALUES = [name for name in VALUES if not name.startswith("baseline_") or name in _OF_BASELINE]
# TTFT and KL are shown without intervals, so that the table fits a terminal; the CSV has both ends
SHOWN = (
    Column("score", "score", 2),
    Column("baseline_score", "baseline score", 2),
    Column("ttft_s", "TTFT, ms", 1, scale=1e-3, interval=False),
    Column("ttft_speedup", "TTFT speedup", 2),
    Column("baseline_prefill_mfu", "baseline MFU, %", 1, interval=False),
    Column("generation_speedup", "generation speedup", 2),
    Column("pct_prompt_tokens_computed", "% tokens computed", 1),
    Column("kl", "KL, nats", 5, interval=False),
)
_OF_FAILED = (Column("failed", "failed"), Column("score_failed_as_zero", "score, failed as 0", 2))
_FAILED = [column.name for column in _OF_FAILED]
_COLUMNS = ["name", "kind", "task", "examples", *_FAILED, *forms(*_VALUES)]
_COMPARED = ("score", "ttft_s", "ttft_speedup", "generation_speedup", "pct_prompt_tokens_computed", "kl")


def run_table(results: Results, title: str) -> Table:
    """A run's datasets and tasks; each task follows its datasets. results: of one run.

    frame: name, kind ("dataset", "task", "all", or "length": a range of prompt tokens, if there are several), task,
    examples, failed (the number of examples that could not be measured; no other column counts them),
    score_failed_as_zero (the score if they count as 0), and the columns of `eval.store.aggregate.by_task`, of the
    baseline only score, TTFT, MFU and length of answers.
    """
    rows = _rows(results)
    shown = _without_mean_of_one(rows) + _by_length(results)
    frame = pd.DataFrame(shown, columns=_COLUMNS)
    of_task = Counter(row["task"] for row in shown if row["kind"] == "dataset")
    only = {row["task"]: row["name"] for row in shown if row["kind"] == "dataset" and of_task[row["task"]] == 1}
    lines = []
    for row in shown:  # a task's only dataset has the task's numbers: both are one row
        if row["kind"] != "dataset":
            of = f": {only[row['task']]}" if row["kind"] == "task" and row["task"] in only else ""
            lines.append({**row, "shown_name": f"**{row['name']}**{of}"})
        elif row["task"] not in only:
            lines.append({**row, "shown_name": row["name"]})
    columns = ["shown_name", *_COLUMNS]
    table = _cells(pd.DataFrame(lines, columns=columns), [Column("shown_name", "dataset, **task**")], [rows])
    return Table("summary", title, _caption({"": results}, {"": rows}), frame, table)


def compared_table(runs: Mapping[str, Results], title: str) -> Table:
    """Methods by tasks, as in the paper's Table 1, each with its own paired baseline. runs: by the method's label."""
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
    frame = pd.DataFrame(lines, columns=["task", "method", "examples", *forms(*_COMPARED), *_FAILED])
    frame = frame.astype({"failed": "Int64"})  # an integer, even if baselines lack it
    table = _cells(frame, [Column("task", "task"), Column("method", "method")], rows.values())
    caption = _caption(dict(zip(rows, runs.values(), strict=True)), rows)
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
    text = json.dumps({"rows": rows, **about}, sort_keys=True, default=str)
    return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=2) + "\n"  # NaN is no JSON


def _rows(results: Results) -> list[dict[str, Any]]:
    """The rows of `run_table`'s frame; the last one is the mean over tasks, also of one task."""
    rows = rows_of(results.frame)
    failures: Counter[str] = Counter()
    for run in results.runs:
        planned = read_planned(run.folder)
        failures.update(failure.dataset for failure in run.failures if planned is None or failure.key in planned)
    zeroed: dict[str, float] = {}
    for row in rows:
        if row["level"] == "dataset":
            zeroed[row["name"]] = row["score"] * row["examples"] / (row["examples"] + failures[row["name"]])
    zeroed |= {name: 0.0 for name in failures if name not in zeroed}
    by_task: dict[str, list[float]] = {}
    for name, score in zeroed.items():
        by_task.setdefault(DATASETS[name].task, []).append(score)
    zeroed |= {task: float(np.mean(scores)) for task, scores in by_task.items()}
    zeroed["all"] = float(np.mean([zeroed[task] for task in by_task]))
    for row in rows:
        within = [count for name, count in failures.items() if row["name"] in (name, DATASETS[name].task, "all")]
        row |= {"kind": row["level"], "failed": sum(within), "score_failed_as_zero": zeroed[row["name"]]}
    rows[-1]["name"] = "mean over tasks"
    return rows


def _by_length(results: Results) -> list[dict[str, Any]]:
    """A row for each range of prompt tokens, of all tasks; none if all prompts are in one. Failures are not counted."""
    ranges = range_of(results.frame["prompt_tokens"])
    present = ranges_in(ranges)
    more = {"kind": "length", "failed": 0, "score_failed_as_zero": np.nan}
    return [
        rows_of(results.frame.loc[ranges == name])[-1] | more | {"name": f"{name} prompt tokens"}
        for name in (present if len(present) > 1 else [])
    ]


def _without_mean_of_one(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the mean over tasks if there is one task."""
    return rows[:-1] if sum(row["kind"] == "task" for row in rows) == 1 else rows


def _cells(frame: pd.DataFrame, keys: Sequence[Column], rows: Iterable[list[dict[str, Any]]]) -> pd.DataFrame:
    """The cells: keys, then the values that the frame has; columns of failures only if there are any."""
    ends = [name for name in frame if name.endswith(("_low", "_high"))]
    shown = frame.copy()
    shown.loc[frame["examples"] < FEWEST, ends] = np.nan
    of_failed = _OF_FAILED if any(of_run[-1]["failed"] for of_run in rows) else ()
    score, *others = (column for column in SHOWN if column.name in frame)
    return cells(shown, [*keys, EXAMPLES, score, *of_failed, *others])


def _caption(runs: Mapping[str, Results], rows: Mapping[str, list[dict[str, Any]]]) -> str:
    """runs, rows: by the beginning of a sentence about a run. All runs have the same prompts."""
    stored = [run for results in runs.values() for run in results.runs]
    text = (
        "Scores 0 to 100. ±: half of the 95 % bootstrap interval over examples; both ends are in summary.csv. It is "
        f"not shown for n below {FEWEST}.\n"
        f"% tokens computed: {COMPUTED}. KL: of the first token's distribution from the baseline's.\n"
    )
    if all(np.isnan(row["ttft_speedup"]) for of_run in rows.values() for row in of_run):
        text += "No speedup: no baseline was run beside the method (it is the baseline, or timing.paired=false)."
    elif lacking := without_baseline(stored):
        text += "\n".join(lacking)
    else:
        text += "Generation speedup compares whole answers, which may differ in length (see summary.csv)."
    beside = {label: difference(of_run) for label, of_run in runs.items()}
    told = {label.removesuffix(": ") or "The method": _told(result) for label, result in beside.items() if result}
    text += "".join(f"\n{label} beside its baseline: {said}." for label, said in told.items())
    controls = [difference(of_run.control) for of_run in runs.values() if of_run.control is not None]
    text += "".join(f"\nBy chance, the baseline beside itself: {_told(result)}." for result in controls[:1] if result)
    text += _physics(stored)
    prompts = stored[0].table(["prompt_tokens", "prompt_tokens_before_truncation"]).to_pylist()
    cut = sum(row["prompt_tokens"] < row["prompt_tokens_before_truncation"] for row in prompts)
    if cut:
        text += (
            f"\n{cut} of {len(prompts)} prompts are longer than model.max_prompt_tokens: their middle is cut out, as "
            "in LongBench."
        )
    for label, of_run in rows.items():
        if whole := of_run[-1]["failed"]:
            text += (
                f"\n{label}{counted(whole, 'example')} failed, left out here; counted as 0, the score is "
                f"{of_run[-1]['score_failed_as_zero']:.2f}."
            )
    return text


def _physics(runs: Sequence[StoredRun]) -> str:
    """Lines about the baselines' speed: the attention kernels that ran, what MFU is, and what flatters speedups."""
    kernels = ", ".join(dict.fromkeys(kernel for run in runs for kernel in run.kernels))
    text = f"\nAttention kernel of the baseline, by profiler: {kernels}." if kernels else ""
    for device in dict.fromkeys(run.device for run in runs if len(run.examples.dropna(subset="prefill_mfu"))):
        peak = "its maker's dense peak" if accelerator(device) else "the rate of a matrix product measured here"
        text += f" MFU: model FLOPs utilisation of the prefill, FLOPs / TTFT over {peak} ({device})."
    cautions = dict.fromkeys(sentence for run in runs for sentence in run.handicaps)
    return text + "".join(f"\nCaution: {sentence}." for sentence in cautions)


def difference(results: Results) -> dict[str, Any] | None:
    """A method beside its baseline, as a mean over tasks; None without a paired baseline. results: of one run.

    score: the method's minus the baseline's, 0 to 100. ttft: the speedup. Both with the ends of their 95 % bootstrap
    intervals (`_low`, `_high`), paired, NaN below `FEWEST`. examples, better, worse: all with both answers, and those
    that score higher or lower. p: of the exact two-sided binomial test of these two, which for right and wrong answers
    is McNemar's. changed: answers whose text or tokens differ; None if unknown.
    """
    frame: Any = results.frame.dropna(subset=["baseline_ttft_s", "baseline_score"])
    if frame.empty:
        return None
    gains = on_common_examples(frame.assign(gain=frame["score"] - frame["baseline_score"]), "gain")
    speedup, same = rows_of(frame)[-1], frame["same_answer"].dropna()
    better, worse = int((gains > 0).to_numpy().sum()), int((gains < 0).to_numpy().sum())
    beside = {
        "examples": len(gains),
        **dict(zip(forms("score"), with_ends(drawn_means(gains)[:, 0]), strict=True)),
        **{ttft: float(speedup[of]) for ttft, of in zip(forms("ttft"), forms("ttft_speedup"), strict=True)},
        "better": better,
        "worse": worse,
        "p": binomial(better, worse),
        "changed": None if same.empty else int((same < 100).sum()),
    }
    if len(gains) < FEWEST:
        beside |= dict.fromkeys(["score_low", "score_high", "ttft_low", "ttft_high"], float("nan"))
    return beside


def _told(beside: dict[str, Any]) -> str:
    score = "score {score:+.2f} (95 % interval {score_low:+.2f} to {score_high:+.2f})"
    ttft = "TTFT speedup {ttft:.2f} ({ttft_low:.2f} to {ttft_high:.2f})"
    if np.isnan(beside["score_low"]):
        score, ttft = "score {score:+.2f} (too few examples for an interval)", "TTFT speedup {ttft:.2f}"
    parts = [f"{score}, {counted(beside['better'], 'example')} better and {{worse}} worse (p = {{p:.2g}})", ttft]
    parts += ["{changed} of {examples} answers differ"] * (beside["changed"] is not None)
    return "; ".join(parts).format_map(beside)


def binomial(better: int, worse: int) -> float:
    """The chance of a split at least as uneven, if both sides are equally likely."""
    n = better + worse
    return min(1.0, 2 * sum(comb(n, k) for k in range(min(better, worse) + 1)) / 2**n)


def passes(differences: Sequence[dict[str, Any] | None], bounds: dict[str, float]) -> bool:
    """Whether every method's interval lies above the bounds, so that chance alone does not pass."""
    lows = [one is not None and one[f"{name}_low"] >= bound for one in differences for name, bound in bounds.items()]
    return bool(lows) and all(lows)
