"""The table of one run and the comparison of several: datasets and tasks, with confidence intervals.

`eval.store.aggregate` computes the numbers and defines them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.table import COMPUTED, Table, cell
from eval.benchmarks.datasets import DATASETS
from eval.store.aggregate import VALUES, rows_of
from eval.store.record import Failure, Record
from eval.store.runs import example_rows


@dataclass(frozen=True)
class Value:
    """A mean with its 95 % interval; low and high are None if a dataset has only one example."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class SummaryRow:
    """One line of the table. kind: "dataset", "task" or "all".

    failed: number of examples that could not be measured; no other column counts them. score_failed_as_zero: the score
    if they count as 0. values: by column of `eval.store.aggregate.by_task`, None if not measured; of the baseline only
    score, TTFT and length of answers. generation_speedup compares whole answers, which may differ in length;
    step_speedup compares the mean decoding steps after the first token.
    """

    name: str
    kind: str
    task: str
    examples: int
    failed: int
    score_failed_as_zero: float
    values: Mapping[str, Value | None]

    def __getitem__(self, column: str) -> Value:
        """The value of a column that was measured."""
        value = self.values[column]
        assert value is not None, column
        return value


_VALUES = [
    name
    for name in VALUES
    if not name.startswith("baseline_") or name in ("baseline_score", "baseline_ttft_s", "baseline_generated_tokens")
]


@dataclass(frozen=True)
class Summary:
    """All rows: the datasets of each task followed by the task, then the mean over tasks.

    failed, score_failed_as_zero: of the whole run, including datasets without a measured example.
    examples, cut: number of measured examples, and of those whose prompt lost its middle (`model.max_prompt_tokens`).
    """

    rows: tuple[SummaryRow, ...]
    failed: int = 0
    score_failed_as_zero: float = float("nan")
    examples: int = 0
    cut: int = 0


def summarise(records: Sequence[Record], failures: Sequence[Failure] = ()) -> Summary:
    """The table of a run. failures: those of examples without a record. Raises ValueError if there is no record."""
    if not records:
        raise ValueError("no record to summarise")
    rows = rows_of(example_rows(records).assign(seed=0))
    if sum(row["level"] == "task" for row in rows) == 1:
        rows.pop()  # the mean over one task is that task
    failed, zeroed = _with_failures(rows, failures)
    lines = tuple(_row(row, failed[row["name"]], zeroed[row["name"]]) for row in rows)
    cut = sum(record.prompt_tokens < record.prompt_tokens_before_truncation for record in records)
    return Summary(lines, failed["all"], zeroed["all"], len(records), cut)


def _with_failures(
    rows: Sequence[dict[str, Any]], failures: Sequence[Failure]
) -> tuple[Counter[str], dict[str, float]]:
    """{row: number of failed examples} and {row: the score if each of these counts as 0}."""
    failed = Counter(failure.dataset for failure in failures)
    measured = {row["name"]: row for row in rows if row["level"] == "dataset"}
    zeroed = {
        name: float(row["score"] * row["examples"] / (row["examples"] + failed[name])) for name, row in measured.items()
    } | {name: 0.0 for name in failed if name not in measured}
    datasets = list(zeroed)
    tasks = {DATASETS[name].task for name in datasets}
    for task in tasks:
        of_task = [name for name in datasets if DATASETS[name].task == task]
        failed[task] = sum(failed[name] for name in of_task)
        zeroed[task] = float(np.mean([zeroed[name] for name in of_task]))
    failed["all"] = len(failures)
    zeroed["all"] = float(np.mean([zeroed[task] for task in tasks]))
    return failed, zeroed


def _row(row: dict[str, Any], failed: int, zeroed: float) -> SummaryRow:
    def value(column: str) -> Value | None:
        mean, low, high = (float(row[f"{column}{end}"]) for end in ("", "_low", "_high"))
        if np.isnan(mean):
            return None
        return Value(mean) if np.isnan(low) else Value(mean, low, high)

    return SummaryRow(
        name="mean over tasks" if row["level"] == "all" else row["name"],
        kind=row["level"],
        task=row["task"],
        examples=row["examples"],
        failed=failed,
        score_failed_as_zero=zeroed,
        values={column: value(column) for column in _VALUES},
    )


def to_json(summary: Summary, about: dict[str, Any]) -> str:
    """The rows at full precision, after `about`, which describes the run."""
    rows = [
        {key: asdict(value) if isinstance(value, Value) else value for key, value in row_columns(row).items()}
        for row in summary.rows
    ]
    return json.dumps({"rows": rows, **about}, indent=2, sort_keys=True, default=str) + "\n"


def row_columns(row: SummaryRow) -> dict[str, Any]:
    """{column: its value} of a row, `values` included."""
    named = dict(vars(row))
    return named | named.pop("values")


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns with each `Value` split in three: its mean under the column's name, `_low` and `_high`."""
    cells: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Value):
            cells |= {key: value.mean, f"{key}_low": value.low, f"{key}_high": value.high}
        else:
            cells[key] = value
    return cells


# -------------------------------------------------------------------------------------------------------------- tables

# {column: (heading, digits shown, factor)}
_SHOWN = {
    "score": ("score", 2, 1),
    "baseline_score": ("baseline score", 2, 1),
    "ttft_s": ("TTFT, ms", 1, 1000),
    "ttft_speedup": ("TTFT speedup", 2, 1),
    "generation_speedup": ("generation speedup", 2, 1),
    "pct_prompt_tokens_computed": ("% tokens computed", 1, 1),
    "kl": ("KL, nats", 5, 1),
}
# Columns after the score if examples failed
_WITH_FAILED = {"failed": ("failed", 0, 1), "score_failed_as_zero": ("score, failed as 0", 2, 1)}
_PLAIN = ("ttft_s", "kl")  # shown without intervals, so that the table fits a terminal; the CSV has both ends
_FEWEST = 5  # least number of examples for an interval: with fewer, the bootstrap is too narrow (±0 if they agree)


def summary_table(summary: Summary, title: str) -> Table:
    """A run's datasets and tasks; each task follows its datasets."""
    lines = [row_columns(row) for row in summary.rows]
    names = [{"dataset, **task**": row.name if row.kind == "dataset" else f"**{row.name}**"} for row in summary.rows]
    return _table("summary", title, lines, names, {"": summary}, tuple(_SHOWN))


def compared_table(summaries: Mapping[str, Summary], title: str) -> Table:
    """Methods by tasks, as in the paper's Table 1, each beside its own paired baseline. summaries: by label."""
    by_label = {
        label: {row.name: row_columns(row) for row in summary.rows if row.kind != "dataset"}
        for label, summary in summaries.items()
    }
    lines = []
    for task in dict.fromkeys(name for rows in by_label.values() for name in rows):
        rows = {label: rows[task] for label, rows in by_label.items() if task in rows}
        first = next(iter(rows.values()))
        if first["baseline_score"] is not None:
            unit = {"ttft_speedup": Value(1.0), "generation_speedup": Value(1.0)}
            same = {"pct_prompt_tokens_computed": Value(100.0), "kl": Value(0.0)}
            # its number of failed examples is unknown: it is measured only beside a method's example
            known = {
                "examples": first["examples"],
                "score": first["baseline_score"],
                "ttft_s": first["baseline_ttft_s"],
            }
            lines.append({"task": task, "method": "baseline", **known, **unit, **same})
        lines += [{"task": task, "method": label} | {name: row[name] for name in _COMPARED}
                  for label, row in rows.items()]  # fmt: skip
    lines = [dict.fromkeys(("task", "method", *_COMPARED)) | line for line in lines]
    names = [{"task": line["task"], "method": line["method"]} for line in lines]
    captioned = {f"{label}: ": summary for label, summary in summaries.items()}
    return _table("compared", title, lines, names, captioned, _COMPARED[1:7])


_COMPARED = (
    "examples", "score", "ttft_s", "ttft_speedup", "generation_speedup", "pct_prompt_tokens_computed", "kl", "failed",
    "score_failed_as_zero",
)  # fmt: skip


def _table(
    name: str,
    title: str,
    lines: Sequence[Mapping[str, Any]],
    names: Sequence[dict[str, str]],
    summaries: Mapping[str, Summary],
    columns: Sequence[str],
) -> Table:
    """names: for each line, the cells that name it. summaries: {prefix of a sentence about it: summary}."""
    if any(summary.failed for summary in summaries.values()):
        columns = [columns[0], *_WITH_FAILED, *columns[1:]]
    shown = {column: (_SHOWN | _WITH_FAILED)[column] for column in columns}
    cells = [
        {**of_line, "n": str(line["examples"])}
        | {
            heading: _cell(line[column], digits, factor, line["examples"] >= _FEWEST and column not in _PLAIN)
            for column, (heading, digits, factor) in shown.items()
        }
        for of_line, line in zip(names, lines, strict=True)
    ]
    frame = pd.DataFrame([flat(line) for line in lines])
    frame = frame.astype({"failed": "Int64"})  # an integer, even if other rows lack it
    caption = _about(next(iter(summaries.values()))) + _cut(summaries) + _failed(summaries)
    return Table(name, title, caption, frame, pd.DataFrame(cells), keys=len(names[0]))


def _cell(value: Value | float | None, digits: int, factor: int, has_interval: bool) -> str:
    if value is None:
        return "-"
    if not isinstance(value, Value):
        return f"{factor * value:.{digits}f}"
    low, high = (value.low, value.high) if has_interval else (None, None)
    scaled = [None if number is None else factor * number for number in (low, high)]
    return cell(factor * value.mean, scaled[0], scaled[1], digits)


def _cut(summaries: Mapping[str, Summary]) -> str:
    """A sentence if prompts were cut; all summaries have the same prompts."""
    summary = next(iter(summaries.values()))
    if not summary.cut:
        return ""
    return (
        f"\n{summary.cut} of {summary.examples} prompts are longer than model.max_prompt_tokens: their middle is cut "
        "out, as in LongBench."
    )


def _failed(summaries: Mapping[str, Summary]) -> str:
    """A sentence for each summary with failed examples."""
    return "".join(
        f"\n{label}{summary.failed} examples failed and are left out; if they count as 0, the score is "
        f"{summary.score_failed_as_zero:.2f}."
        for label, summary in summaries.items()
        if summary.failed
    )


def _about(summary: Summary) -> str:
    text = (
        "Scores 0 to 100. ±: half of the 95 % bootstrap interval over examples; both ends are in summary.csv. It is "
        f"not shown for n below {_FEWEST}.\n"
        f"% tokens computed: {COMPUTED}. KL: of the first token's distribution from the baseline's.\n"
    )
    if all(row.values["ttft_speedup"] is None for row in summary.rows):
        return text + "No speedup: no baseline was run beside the method (it is the baseline, or timing.paired=false)."
    return text + "Generation speedup compares whole answers, which may differ in length (see summary.csv)."
