"""A run's own table: datasets and tasks, with confidence intervals, as text, CSV, Markdown and JSON.

What the numbers mean is said in `eval.paper.aggregate`, which computes them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table

from eval.benchmarks.datasets import DATASETS
from eval.paper.aggregate import rows_of
from eval.paper.table import cell, markdown_lines
from eval.store.frame import example_rows
from eval.store.record import Failure, Record


@dataclass(frozen=True)
class Value:
    """A mean with its 95 % interval; low and high are None where one example cannot tell."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Row:
    """One line of the table. kind: "dataset", "task" or "all". Columns that were not measured are None.

    generation_speedup compares whole answers, which may differ in length; step_speedup compares the mean decoding step
    after the first token, whatever the length. failed: examples that could not be measured and are in no other column;
    score_failed_as_zero: the score if they count as 0.
    """

    name: str
    kind: str
    task: str
    examples: int
    failed: int
    score: Value
    score_failed_as_zero: float
    baseline_score: Value | None
    rouge_l: Value | None
    ttft_speedup: Value | None
    generation_speedup: Value | None
    step_speedup: Value | None
    pct_prompt_tokens_computed: Value
    ttft_s: Value
    total_s: Value
    generated_tokens: Value
    baseline_generated_tokens: Value | None
    kv_bytes: Value
    aux_bytes: Value


@dataclass(frozen=True)
class Summary:
    """All rows: the datasets of each task followed by the task, then the mean over tasks.

    failed, score_failed_as_zero: of the whole run, datasets of which nothing could be measured included.
    """

    rows: tuple[Row, ...]
    failed: int = 0
    score_failed_as_zero: float = float("nan")


def summarise(records: Sequence[Record], failures: Sequence[Failure] = ()) -> Summary:
    """The table of a run. failures: of examples without a record. Raises ValueError where there is no record."""
    if not records:
        raise ValueError("no record to summarise")
    rows = rows_of(example_rows(records).assign(seed=0))
    if sum(row["level"] == "task" for row in rows) == 1:
        rows.pop()  # the mean over one task is that task
    failed, zeroed = _with_failures(rows, failures)
    lines = tuple(_row(row, failed[row["name"]], zeroed[row["name"]]) for row in rows)
    return Summary(lines, failed["all"], zeroed["all"])


def _with_failures(
    rows: Sequence[dict[str, Any]], failures: Sequence[Failure]
) -> tuple[Counter[str], dict[str, float]]:
    """By the name of a row: how many examples failed, and the score if each of them counts as 0."""
    failed = Counter(failure.dataset for failure in failures)
    measured = {row["name"]: row for row in rows if row["level"] == "dataset"}
    zeroed = {
        name: float(row["score"] * row["examples"] / (row["examples"] + failed[name])) for name, row in measured.items()
    } | {name: 0.0 for name in failed if name not in measured}
    datasets = list(zeroed)
    for task in {DATASETS[name].task for name in datasets}:
        of_task = [name for name in datasets if DATASETS[name].task == task]
        failed[task] = sum(failed[name] for name in of_task)
        zeroed[task] = float(np.mean([zeroed[name] for name in of_task]))
    tasks = {DATASETS[name].task for name in datasets}
    failed["all"] = len(failures)
    zeroed["all"] = float(np.mean([zeroed[task] for task in tasks]))
    return failed, zeroed


def _row(row: dict[str, Any], failed: int, zeroed: float) -> Row:
    def value(column: str) -> Value:
        interval = row[f"{column}_low"], row[f"{column}_high"]
        low, high = (None if np.isnan(end) else float(end) for end in interval)
        return Value(float(row[column]), low, high)

    def optional(column: str) -> Value | None:
        return None if np.isnan(row[column]) else value(column)

    return Row(
        name="mean over tasks" if row["level"] == "all" else row["name"],
        kind=row["level"],
        task=row["task"],
        examples=row["examples"],
        failed=failed,
        score=value("score"),
        score_failed_as_zero=zeroed,
        baseline_score=optional("baseline_score"),
        rouge_l=optional("rouge_l"),
        ttft_speedup=optional("ttft_speedup"),
        generation_speedup=optional("generation_speedup"),
        step_speedup=optional("step_speedup"),
        pct_prompt_tokens_computed=value("pct_computed"),
        ttft_s=value("ttft_s"),
        total_s=value("total_s"),
        generated_tokens=value("tokens"),
        baseline_generated_tokens=optional("baseline_tokens"),
        kv_bytes=value("kv_bytes"),
        aux_bytes=value("aux_bytes"),
    )


# ------------------------------------------------------------------------------------------------------------- display

_Columns = tuple[tuple[str, str, int], ...]  # (field, heading, digits shown)

_SHOWN: _Columns = (
    ("score", "score", 2),
    ("baseline_score", "baseline score", 2),
    ("ttft_speedup", "TTFT speedup", 2),
    ("generation_speedup", "generation speedup", 2),
    ("pct_prompt_tokens_computed", "% tokens computed", 1),
)
# Beside the score where examples failed: how many, and the score with them
_WITH_FAILED: _Columns = (("failed", "failed", 0), ("score_failed_as_zero", "score, failed as 0", 2))


def as_table(summary: Summary, title: str) -> Table:
    """The table for a terminal; task rows in bold below their datasets."""
    columns = _columns(_SHOWN, [summary])
    table = _empty_table(title, _caption(summary), ["dataset, task"], columns)
    for row in summary.rows:
        style = None if row.kind == "dataset" else "bold"
        name = f"  {row.name}" if row.kind == "dataset" else row.name
        table.add_row(name, str(row.examples), *_cells(row, columns), style=style, end_section=row.kind != "dataset")
    return table


def to_markdown(summary: Summary, title: str) -> str:
    """The same table in Markdown, task rows in bold."""
    columns = _columns(_SHOWN, [summary])
    rows = [
        [row.name if row.kind == "dataset" else f"**{row.name}**", str(row.examples), *_cells(row, columns)]
        for row in summary.rows
    ]
    return _markdown(title, _caption(summary), ["dataset, **task**"], columns, rows)


def to_csv(summary: Summary) -> str:
    """One line a row, every column with its interval, full precision."""
    return _flat_csv(summary.rows)


def flat(row: Any) -> dict[str, Any]:
    """A row's columns side by side: of a `Value` the mean under the column's name, and `_low` and `_high`."""
    cells: dict[str, Any] = {}
    for key, value in asdict(row).items():
        if isinstance(value, dict):
            cells |= {key: value["mean"], f"{key}_low": value["low"], f"{key}_high": value["high"]}
        else:
            cells[key] = value
    return cells


def _flat_csv(rows: Sequence[Any]) -> str:
    table = pd.DataFrame([flat(row) for row in rows])
    return table.astype({"failed": "Int64"}).to_csv(index=False)  # a whole number, also beside rows that have none


def to_json(summary: Summary, about: dict[str, Any]) -> str:
    """The rows at full precision, with what the run was (`about`)."""
    content = {"rows": [asdict(row) for row in summary.rows], **about}
    return json.dumps(content, indent=2, sort_keys=True, default=str) + "\n"


@dataclass(frozen=True)
class _Compared:
    """One line of a comparison: a method on one task."""

    task: str
    method: str
    examples: int
    score: Value | None
    ttft_speedup: Value | None
    generation_speedup: Value | None
    pct_prompt_tokens_computed: Value | None
    failed: int | None  # None for the baseline, of which only what stands beside a measured example is known
    score_failed_as_zero: float | None


_COMPARED = tuple(column for column in _SHOWN if column[0] != "baseline_score")


def _compared(summaries: dict[str, Summary]) -> list[_Compared]:
    """Methods by tasks, the paired baseline first; joined by the task's name."""
    by_method = {
        label: {row.name: row for row in summary.rows if row.kind != "dataset"} for label, summary in summaries.items()
    }
    tasks = list(dict.fromkeys(name for rows in by_method.values() for name in rows))
    lines = []
    for task in tasks:
        found = {label: rows[task] for label, rows in by_method.items() if task in rows}
        one = next(iter(found.values()))
        if one.baseline_score is not None:
            unit = Value(1.0, None, None)
            lines.append(
                _Compared(
                    task,
                    "baseline",
                    one.examples,
                    one.baseline_score,
                    unit,
                    unit,
                    Value(100.0, None, None),
                    None,
                    None,
                )
            )
        for label, row in found.items():
            lines.append(
                _Compared(
                    task,
                    label,
                    row.examples,
                    row.score,
                    row.ttft_speedup,
                    row.generation_speedup,
                    row.pct_prompt_tokens_computed,
                    row.failed,
                    row.score_failed_as_zero,
                )
            )
    return lines


def compared_table(summaries: dict[str, Summary], title: str) -> Table:
    """Methods by tasks for a terminal, as in the paper's Table 1; each method beside its own paired baseline."""
    columns = _columns(_COMPARED, summaries.values())
    table = _empty_table(title, _compared_caption(summaries), ["task", "method"], columns)
    lines = _compared(summaries)
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        ends = following is None or following.task != line.task
        table.add_row(line.task, line.method, str(line.examples), *_cells(line, columns), end_section=ends)
    return table


def compared_markdown(summaries: dict[str, Summary], title: str) -> str:
    """The same in Markdown."""
    columns = _columns(_COMPARED, summaries.values())
    rows = [[line.task, line.method, str(line.examples), *_cells(line, columns)] for line in _compared(summaries)]
    return _markdown(title, _compared_caption(summaries), ["task", "method"], columns, rows)


def compared_csv(summaries: dict[str, Summary]) -> str:
    """The same with intervals at full precision."""
    return _flat_csv(_compared(summaries))


def _empty_table(title: str, caption: str, names: Sequence[str], columns: _Columns) -> Table:
    """A table for a terminal with its headings: the names, n, and each column's in two lines."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, caption=caption, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True)
    table.add_column("n", justify="right")
    for _, heading, _ in columns:
        first, _, rest = heading.partition(" ")
        table.add_column(f"{first}\n{rest}", justify="right", no_wrap=True)
    return table


def _markdown(title: str, caption: str, names: Sequence[str], columns: _Columns, rows: Sequence[Sequence[str]]) -> str:
    lines = markdown_lines([*names, "n", *(heading for _, heading, _ in columns)], rows, keys=len(names))
    return "\n".join([f"# {title}", "", *lines, "", caption, ""])


def _cells(row: Row | _Compared, columns: _Columns) -> list[str]:
    return [_cell(getattr(row, column), digits) for column, _, digits in columns]


def _cell(value: Value | float | None, digits: int) -> str:
    if value is None:
        return "-"
    return cell(value.mean, value.low, value.high, digits) if isinstance(value, Value) else f"{value:.{digits}f}"


def _columns(columns: _Columns, summaries: Iterable[Summary]) -> _Columns:
    """The columns, and those that say what failed where something did."""
    first, *rest = columns
    return (first, *(_WITH_FAILED if any(summary.failed for summary in summaries) else ()), *rest)


def _caption(summary: Summary) -> str:
    return _about(summary) + _failed({"": summary})


def _compared_caption(summaries: dict[str, Summary]) -> str:
    return _about(next(iter(summaries.values()))) + _failed({f"{label}: ": one for label, one in summaries.items()})


def _failed(summaries: dict[str, Summary]) -> str:
    """A line for each summary in which examples failed."""
    return "".join(
        f"\n{label}{summary.failed} examples failed and are left out; if they count as 0, the score is "
        f"{summary.score_failed_as_zero:.2f}."
        for label, summary in summaries.items()
        if summary.failed
    )


def _about(summary: Summary) -> str:
    text = "Scores 0 to 100. ±: half of the 95 % bootstrap interval over examples; both ends are in summary.csv.\n"
    if all(row.ttft_speedup is None for row in summary.rows):
        return text + "No speedup: no baseline was run beside the method (it is the baseline, or timing.paired=false)."
    return text + "Generation speedup is of whole answers, which may differ in length (see summary.csv)."
