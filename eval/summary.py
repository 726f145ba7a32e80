"""From records to the table: datasets and tasks, with confidence intervals, as text, CSV, Markdown and JSON.

Of a dataset: score and share of tokens computed are means over its examples; a speedup is the baseline's summed time
over the method's, on the same examples. Of a task: the mean over its datasets, for every column, as LongBench does for
scores. Intervals are 95 % percentile bootstrap intervals over examples (resampled within each dataset); an example's
own baseline stays with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table

from eval.metrics import dataset_score
from eval.record import Record
from eval.tasks import DATASETS, TASKS

RESAMPLES = 2000


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
    after the first token, whatever the length.
    """

    name: str
    kind: str
    task: str
    examples: int
    score: Value
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
    """All rows: the datasets of each task followed by the task, then the mean over tasks."""

    rows: tuple[Row, ...]


# Columns: how each is computed from the records of one dataset, in arrays over examples [..., n]
def _mean(values: np.ndarray) -> np.ndarray:
    return values.mean(axis=-1)


def _speedup(baseline: np.ndarray, method: np.ndarray) -> np.ndarray:
    return baseline.sum(axis=-1) / method.sum(axis=-1)


@dataclass(frozen=True)
class _Column:
    """Per-example arrays and the statistic over them."""

    arrays: tuple[np.ndarray, ...]
    statistic: Callable[..., np.ndarray]

    def resampled(self, picks: np.ndarray) -> np.ndarray:
        """[RESAMPLES] the statistic over each row of picks [RESAMPLES, n]."""
        return self.statistic(*(values[picks] for values in self.arrays))

    def value(self) -> float:
        return float(self.statistic(*self.arrays))


def summarise(records: Sequence[Record]) -> Summary:
    """The table of a run. Raises ValueError where there is no record."""
    if not records:
        raise ValueError("no record to summarise")
    by_dataset: dict[str, list[Record]] = {}
    for record in records:
        by_dataset.setdefault(record.dataset, []).append(record)
    # a seed of its own per dataset, so that a row does not depend on which others are there
    draws = {name: _draws(name, _columns(group)) for name, group in by_dataset.items()}
    means = {name: _means(group) for name, group in by_dataset.items()}
    rows: list[Row] = []
    task_names: list[str] = []
    for task in TASKS:
        names = [name for name in DATASETS if name in by_dataset and DATASETS[name].task == task]
        for name in names:
            rows.append(_row(name, "dataset", task, [len(by_dataset[name])], [means[name]], [draws[name]]))
        if names:
            sizes = [len(by_dataset[name]) for name in names]
            rows.append(_row(task, "task", task, sizes, [means[n] for n in names], [draws[n] for n in names]))
            task_names.append(task)
    if len(task_names) > 1:
        tasks = [[name for name in by_dataset if DATASETS[name].task == task] for task in task_names]
        rows.append(
            _row(
                "mean over tasks",
                "all",
                "all",
                [len(group) for group in by_dataset.values()],
                [_average([means[name] for name in names]) for names in tasks],
                [_average([draws[name] for name in names]) for names in tasks],
            )
        )
    return Summary(tuple(rows))


def _columns(records: Sequence[Record]) -> dict[str, _Column]:
    methods = [record.method for record in records]
    columns = {
        "score": _Column((100 * _array(methods, "score"),), _mean),
        "pct_prompt_tokens_computed": _Column((_array(methods, "pct_prompt_tokens_computed"),), _mean),
        "ttft_s": _Column((_array(methods, "ttft_s"),), _mean),
        "total_s": _Column((_array(methods, "total_s"),), _mean),
        "generated_tokens": _Column((_lengths(methods),), _mean),
        "kv_bytes": _Column((_array(methods, "kv_bytes"),), _mean),
        "aux_bytes": _Column((_array(methods, "aux_bytes"),), _mean),
    }
    if all(one.rouge_l is not None for one in methods):
        columns["rouge_l"] = _Column((100 * _array(methods, "rouge_l"),), _mean)
    baselines = [record.baseline for record in records]
    if all(baselines):
        columns["baseline_score"] = _Column((100 * _array(baselines, "score"),), _mean)
        for name, clock in (("ttft_speedup", "ttft_s"), ("generation_speedup", "total_s")):
            columns[name] = _Column((_array(baselines, clock), _array(methods, clock)), _speedup)
        columns["baseline_generated_tokens"] = _Column((_lengths(baselines),), _mean)
        steps = _mean_steps(baselines), _mean_steps(methods)
        if not np.isnan(steps).any():  # an answer of one token has no step
            columns["step_speedup"] = _Column(steps, _speedup)
    return columns


def _mean_steps(measurements: Sequence[Any]) -> np.ndarray:
    return np.array([np.mean(one.decode_step_s or [np.nan]) for one in measurements])


def _lengths(measurements: Sequence[Any]) -> np.ndarray:
    return np.array([len(one.token_ids) for one in measurements], dtype=float)


def _array(measurements: Sequence[Any], field: str) -> np.ndarray:
    return np.array([getattr(one, field) for one in measurements], dtype=float)


def _draws(name: str, columns: dict[str, _Column]) -> dict[str, np.ndarray]:
    """{column: [RESAMPLES]}; the same examples are drawn for every column."""
    n = columns["score"].arrays[0].shape[0]
    picks = np.random.default_rng(list(name.encode())).integers(0, n, size=(RESAMPLES, n))
    return {column: values.resampled(picks) for column, values in columns.items()}


def _means(records: Sequence[Record]) -> dict[str, np.ndarray]:
    means = {column: np.array(values.value()) for column, values in _columns(records).items()}
    # the official score is rounded before it is averaged over datasets
    means["score"] = np.array(dataset_score([record.method.score for record in records]))
    baselines = [record.baseline.score for record in records if record.baseline is not None]
    if "baseline_score" in means:
        means["baseline_score"] = np.array(dataset_score(baselines))
    return means


def _average(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Mean over datasets of the columns that all of them have."""
    shared = [column for column in parts[0] if all(column in part for part in parts)]
    return {column: np.mean([part[column] for part in parts], axis=0) for column in shared}


def _row(
    name: str,
    kind: str,
    task: str,
    sizes: Sequence[int],
    means: Sequence[dict[str, np.ndarray]],
    draws: Sequence[dict[str, np.ndarray]],
) -> Row:
    mean, drawn = _average(means), _average(draws)

    def value(column: str) -> Value:
        if min(sizes) < 2:  # one example of a dataset does not tell how much its examples differ
            return Value(float(mean[column]), None, None)
        low, high = np.percentile(drawn[column], [2.5, 97.5])
        return Value(float(mean[column]), float(low), float(high))

    def optional(column: str) -> Value | None:
        return value(column) if column in mean else None

    return Row(
        name=name,
        kind=kind,
        task=task,
        examples=sum(sizes),
        score=value("score"),
        baseline_score=optional("baseline_score"),
        rouge_l=optional("rouge_l"),
        ttft_speedup=optional("ttft_speedup"),
        generation_speedup=optional("generation_speedup"),
        step_speedup=optional("step_speedup"),
        pct_prompt_tokens_computed=value("pct_prompt_tokens_computed"),
        ttft_s=value("ttft_s"),
        total_s=value("total_s"),
        generated_tokens=value("generated_tokens"),
        baseline_generated_tokens=optional("baseline_generated_tokens"),
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


def as_table(summary: Summary, title: str) -> Table:
    """The table for a terminal; task rows in bold below their datasets."""
    table = _empty_table(title, _caption(summary), ["dataset, task"], _SHOWN)
    for row in summary.rows:
        style = None if row.kind == "dataset" else "bold"
        name = f"  {row.name}" if row.kind == "dataset" else row.name
        table.add_row(name, str(row.examples), *_cells(row, _SHOWN), style=style, end_section=row.kind != "dataset")
    return table


def to_markdown(summary: Summary, title: str) -> str:
    """The same table in Markdown, task rows in bold."""
    rows = [
        [row.name if row.kind == "dataset" else f"**{row.name}**", str(row.examples), *_cells(row, _SHOWN)]
        for row in summary.rows
    ]
    return _markdown(title, _caption(summary), ["dataset, **task**"], _SHOWN, rows)


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
    return pd.DataFrame([flat(row) for row in rows]).to_csv(index=False)


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
                _Compared(task, "baseline", one.examples, one.baseline_score, unit, unit, Value(100.0, None, None))
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
                )
            )
    return lines


def compared_table(summaries: dict[str, Summary], title: str) -> Table:
    """Methods by tasks for a terminal, as in the paper's Table 1; each method beside its own paired baseline."""
    table = _empty_table(title, _caption(next(iter(summaries.values()))), ["task", "method"], _COMPARED)
    lines = _compared(summaries)
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        ends = following is None or following.task != line.task
        table.add_row(line.task, line.method, str(line.examples), *_cells(line, _COMPARED), end_section=ends)
    return table


def compared_markdown(summaries: dict[str, Summary], title: str) -> str:
    """The same in Markdown."""
    rows = [[line.task, line.method, str(line.examples), *_cells(line, _COMPARED)] for line in _compared(summaries)]
    return _markdown(title, _caption(next(iter(summaries.values()))), ["task", "method"], _COMPARED, rows)


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
    headings = [*names, "n", *(heading for _, heading, _ in columns)]
    rule = "|" + "---|" * len(names) + "---:|" * (1 + len(columns))
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, *rows)]
    return "\n".join([f"# {title}", "", lines[0], rule, *lines[1:], "", caption, ""])


def _cells(row: Row | _Compared, columns: _Columns) -> list[str]:
    return [_cell(getattr(row, column), digits) for column, _, digits in columns]


def _cell(value: Value | None, digits: int) -> str:
    if value is None:
        return "-"
    text = f"{value.mean:.{digits}f}"
    if value.low is None or value.high is None:
        return text
    return f"{text} ±{(value.high - value.low) / 2:.{digits}f}"


def _caption(summary: Summary) -> str:
    text = "Scores 0 to 100. ±: half of the 95 % bootstrap interval over examples; both ends are in summary.csv.\n"
    if all(row.ttft_speedup is None for row in summary.rows):
        return text + "No speedup: no baseline was run beside the method (it is the baseline, or timing.paired=false)."
    return text + "Generation speedup is of whole answers, which may differ in length (see summary.csv)."
