"""Scores a folder of official LongBench predictions: `python -m eval.score FOLDER [--json]`.

FOLDER holds what LongBench's `pred.py` writes: `<dataset>.jsonl`, a line `{"pred", "answers", "all_classes", "length"}`
per example. Printed are each dataset's and each task's score as LongBench's `eval.py` gives them, and rouge-score's
ROUGE-L beside for the datasets scored by ROUGE.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.benchmarks.datasets import DATASETS, TASKS, Dataset
from eval.benchmarks.metrics import dataset_score, gold_problem, rouge_score_f, score_example, scored_text
from lazyllm.errors import UserError

# LongBench's Chinese datasets: official folders hold them beside the English ones; the paper leaves them out.
CHINESE_DATASETS = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")


@dataclass(frozen=True)
class Prediction:
    """One line of a prediction file: the answer, the gold answers and (trec) the class names."""

    pred: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...]


@dataclass(frozen=True)
class DatasetScore:
    """One dataset's result.

    score: the official score, 0 to 100, rounded to 2 digits.
    rouge_score: rouge-score's ROUGE-L F, 0 to 100, rounded to 2 digits; None where the metric is not ROUGE.
    """

    dataset: str
    task: str
    suite: str
    metric: str
    rows: int
    score: float
    rouge_score: float | None


@dataclass(frozen=True)
class TaskScore:
    """One task's result: the mean of its datasets' scores, rounded to 2 digits, and which datasets it is made of.

    missing: the task's datasets that the folder lacks; a score with some missing compares with nothing published.
    """

    task: str
    suite: str
    score: float
    datasets: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class FolderScores:
    """All results of one folder. ignored: files of LongBench's Chinese datasets, which are not scored."""

    folder: str
    datasets: tuple[DatasetScore, ...]
    tasks: tuple[TaskScore, ...]
    ignored: tuple[str, ...]


def score_folder(path: str | Path) -> FolderScores:
    """Scores every `<dataset>.jsonl` of a folder of official `pred.py` output.

    Raises UserError: no such folder, nothing to score in it, an unknown dataset, a malformed line, a missing field.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; expected one that holds <dataset>.jsonl, as LongBench's pred.py writes"
        )
    files = sorted(file for file in folder.glob("*.jsonl") if not file.name.startswith("."))
    ignored = tuple(file.name for file in files if file.stem in CHINESE_DATASETS)
    files = [file for file in files if file.name not in ignored]
    unknown = [file for file in files if file.stem not in DATASETS]
    if unknown:
        raise UserError(f"{unknown[0]}: unknown dataset {unknown[0].stem!r}; known are {', '.join(DATASETS)}")
    if not files:
        beside = f", only {', '.join(ignored)}, which are not scored here" if ignored else ""
        raise UserError(f"{folder}: no <dataset>.jsonl to score{beside}; known datasets are {', '.join(DATASETS)}")
    order = list(DATASETS)
    files.sort(key=lambda file: order.index(file.stem))
    datasets = tuple(score_dataset(DATASETS[file.stem], read_predictions(file)) for file in files)
    return FolderScores(str(folder), datasets, task_scores(datasets), ignored)


def read_predictions(file: Path) -> tuple[Prediction, ...]:
    """The lines of one prediction file `<dataset>.jsonl`, checked.

    Raises UserError naming file and line: malformed JSON, a missing field, a field of the wrong type, gold answers
    that the dataset's metric cannot score, no lines at all.
    """
    dataset = DATASETS[file.stem]
    predictions = []
    # Lines end at \n only: str.splitlines and text mode would also split at characters that a JSON string may hold.
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if line.strip():
            predictions.append(_prediction(dataset, line, f"{file}:{number}"))
    if not predictions:
        raise UserError(f"{file}: no lines; expected one JSON object a line, as LongBench's pred.py writes")
    return tuple(predictions)


def score_dataset(dataset: Dataset, predictions: Sequence[Prediction]) -> DatasetScore:
    """One dataset's score over its predictions.

    As in the official `eval.py`, the class names of the last line hold for all (in LongBench they are the same).
    """
    all_classes = predictions[-1].all_classes
    scores = [score_example(dataset, p.pred, p.answers, all_classes) for p in predictions]
    beside = None
    if dataset.metric == "rouge":
        beside = dataset_score([rouge_score_f(scored_text(dataset, p.pred), p.answers) for p in predictions])
    score = dataset_score(scores)
    return DatasetScore(dataset.name, dataset.task, dataset.suite, dataset.metric, len(predictions), score, beside)


def task_scores(datasets: Sequence[DatasetScore]) -> tuple[TaskScore, ...]:
    """The score of every task that has a dataset here: the mean over those datasets, tasks in the paper's order."""
    tasks = []
    for suite in dict.fromkeys(dataset.suite for dataset in DATASETS.values()):
        for task in TASKS:
            there = {d.dataset: d.score for d in datasets if (d.suite, d.task) == (suite, task)}
            if there:
                names = [d.name for d in DATASETS.values() if (d.suite, d.task) == (suite, task)]
                mean = round(sum(there.values()) / len(there), 2)
                tasks.append(TaskScore(task, suite, mean, tuple(there), tuple(n for n in names if n not in there)))
    return tuple(tasks)


def as_text(scores: FolderScores) -> str:
    """The results as a plain table, for people and for `grep`."""
    rows = [("dataset", "task", "metric", "rows", "score", "rouge-score")]
    for d in scores.datasets:
        beside = "" if d.rouge_score is None else f"{d.rouge_score:.2f}"
        rows.append((d.dataset, d.task, d.metric, str(d.rows), f"{d.score:.2f}", beside))
    rows.append(("", "", "", "", "", ""))
    rows.append(("task", "suite", "", "datasets", "score", ""))
    for t in scores.tasks:
        part = f"{len(t.datasets)} of {len(t.datasets) + len(t.missing)}"
        rows.append(
            (t.task, t.suite, "", part, f"{t.score:.2f}", f"without {', '.join(t.missing)}" if t.missing else "")
        )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[3:5], widths[3:5], strict=True)]
        lines.append("  ".join([*left, *right, row[5]]).rstrip())
    if scores.ignored:
        lines.append(f"\nnot scored (Chinese, not among the paper's 16): {', '.join(scores.ignored)}")
    return "\n".join(lines)


def as_json(scores: FolderScores) -> str:
    """The results as one JSON object, its keys those of `FolderScores`."""
    return json.dumps(asdict(scores), indent=2, ensure_ascii=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 with one message on stderr where the folder cannot be scored."""
    parser = argparse.ArgumentParser(prog="python -m eval.score", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", help="folder of <dataset>.jsonl, as LongBench's pred.py writes")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    try:
        scores = score_folder(options.folder)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(as_json(scores) if options.json else as_text(scores))
    return 0


def _prediction(dataset: Dataset, line: bytes, where: str) -> Prediction:
    """One line, checked; `where` (file:line) opens the message of the UserError that is raised otherwise."""
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON in UTF-8 ({error})") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
    for field, accepts, expected in _FIELDS:
        if field not in row:
            raise UserError(f"{where}: field {field!r} is missing; expected pred, answers and all_classes")
        if not accepts(row[field]):
            raise UserError(f"{where}: field {field!r} must be {expected}, got {type(row[field]).__name__}")
    problem = gold_problem(dataset, row["answers"], row["all_classes"])
    if problem is not None:
        raise UserError(f"{where}: {problem}")
    return Prediction(row["pred"], tuple(row["answers"]), tuple(row["all_classes"] or ()))


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


# `length` is not asked for: only LongBench-E's buckets need it, and the official scorer does without.
_FIELDS = (
    ("pred", lambda value: isinstance(value, str), "a string"),
    ("answers", _is_strings, "a list of strings"),
    ("all_classes", lambda value: value is None or _is_strings(value), "a list of strings or null"),
)


if __name__ == "__main__":
    sys.exit(main())
