"""Scores a folder of official LongBench predictions: `lazyllm-bench score FOLDER [--json]`.

FOLDER holds the output of LongBench's `pred.py`: `<dataset>.jsonl`, a line `{"pred", "answers",
"all_classes", "length"}` per example. It prints the scores of LongBench's `eval.py` for each
dataset and task, and also rouge-score's ROUGE-L for the datasets scored by ROUGE.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.benchmarks import SUITES, longbench
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.metrics import check_gold, dataset_score, score_example, second_score
from eval.benchmarks.rows import CLASSES, TEXTS, check_fields, read_lines
from eval.benchmarks.suite import Dataset
from lazyllm.errors import UserError, nearest, parser_of

# LongBench's Chinese datasets: official folders hold them too; the paper leaves them out.
CHINESE_DATASETS = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
_SCORED = {
    name: each
    for name, each in DATASETS.items()
    if each.metric in {dataset.metric for dataset in longbench.DATASETS}
}


def score_folder(path: str | Path) -> dict[str, Any]:
    """Score every `<dataset>.jsonl` of a folder of official `pred.py` output.

    Returns the object of `--json`; scores are 0 to 100, rounded to 2 digits:
    datasets: {"dataset", "task", "suite", "metric", "rows", "score", "rouge_score"} of each; the
        last is ROUGE-L F,
        None if the metric is not ROUGE.
    tasks: {"task", "suite", "score", "datasets", "missing"} of each; its score is the mean over its
        datasets. `missing` are its datasets without a file, which published scores have.
    folder, ignored: its name, and its files of LongBench's Chinese datasets, which are not scored.
    Raises UserError for a missing folder, no file to score, an unknown dataset, an invalid line or
    a missing field.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; expected one with <dataset>.jsonl files of LongBench's "
            "pred.py"
        )
    files = {
        file.stem: file for file in sorted(folder.glob("*.jsonl")) if not file.name.startswith(".")
    }
    ignored = [file.name for name, file in files.items() if name in CHINESE_DATASETS]
    unknown = [name for name in files if name not in (*_SCORED, *CHINESE_DATASETS)]
    if unknown:
        raise UserError(
            f"{files[unknown[0]]}: unknown dataset {unknown[0]!r}: {nearest(unknown[0], _SCORED)}"
        )
    predictions = {
        name: _read(files[name], dataset) for name, dataset in _SCORED.items() if name in files
    }
    if not predictions:
        note = f", only {', '.join(ignored)}, which are not scored here" if ignored else ""
        raise UserError(
            f"{folder}: no <dataset>.jsonl to score{note}; known datasets are {', '.join(_SCORED)}"
        )
    datasets = [_score(DATASETS[name], rows) for name, rows in predictions.items()]
    scores, tasks = {entry["dataset"]: entry["score"] for entry in datasets}, list[dict[str, Any]]()
    for suite in SUITES.values():
        for task in suite.all_tasks:
            names = [dataset.name for dataset in suite.datasets if dataset.task == task]
            if here := [name for name in names if name in scores]:
                score = round(sum(scores[name] for name in here) / len(here), 2)
                missing = [name for name in names if name not in here]
                tasks.append(
                    {
                        "task": task,
                        "suite": suite.name,
                        "score": score,
                        "datasets": here,
                        "missing": missing,
                    }
                )
    return {"folder": str(folder), "datasets": datasets, "tasks": tasks, "ignored": ignored}


# without `length`, which only LongBench-E's buckets need
_FIELDS = {
    "pred": (lambda value: isinstance(value, str), "a string"),
    "answers": TEXTS,
    "all_classes": CLASSES,
}


def _read(file: Path, dataset: Dataset) -> list[dict[str, Any]]:
    """The lines of one prediction file. Raises UserError that names file and line if a line
    cannot be scored.
    """
    rows = []
    for where, row in read_lines(file.read_bytes(), str(file)):
        try:
            if isinstance(row, UserError):
                raise row
            check_fields(row, _FIELDS)
            check_gold(dataset, row["answers"], row["all_classes"])
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        rows.append(row)
    if not rows:
        raise UserError(f"{file}: no lines; expected one JSON object a line")
    return rows


def _score(dataset: Dataset, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One dataset's score. As in the official `eval.py`, the class names of the last line hold
    for all lines.
    """
    classes = rows[-1]["all_classes"]
    seconds = [second_score(dataset, row["pred"], row["answers"]) for row in rows]
    return {
        "dataset": dataset.name,
        "task": dataset.task,
        "suite": dataset.suite,
        "metric": dataset.metric,
        "rows": len(rows),
        "score": dataset_score(
            [score_example(dataset, row["pred"], row["answers"], classes) for row in rows]
        ),
        "rouge_score": None
        if None in seconds
        else dataset_score([second for second in seconds if second is not None]),
    }


def as_text(scores: Mapping[str, Any]) -> str:
    """The results as a plain text table."""
    lines = [f"{'dataset':24}{'task':16}{'metric':16}{'rows':>9}{'score':>8}  rouge-score"]
    for entry in scores["datasets"]:
        rouge = "" if entry["rouge_score"] is None else f"{entry['rouge_score']:.2f}"
        lines.append(
            "{dataset:24}{task:16}{metric:16}{rows:>9}{score:>8.2f}  ".format(**entry) + rouge
        )
    lines.append(f"\n{'task':24}{'suite':32}{'datasets':>9}{'score':>8}")
    for entry in scores["tasks"]:
        here, missing = entry["datasets"], entry["missing"]
        part = f"{len(here)} of {len(here) + len(missing)}"
        lacks = f"without {', '.join(missing)}" if missing else ""
        lines.append(
            f"{entry['task']:24}{entry['suite']:32}{part:>9}{entry['score']:>8.2f}  {lacks}"
        )
    if scores["ignored"]:
        lines.append(
            f"\nnot scored (Chinese, not among the paper's 16): {', '.join(scores['ignored'])}"
        )
    return "\n".join(line.rstrip() for line in lines)


def main(arguments: Sequence[str]) -> int:
    """The command `score`. Returns the exit code. Raises UserError if the folder cannot be
    scored.
    """
    parser = parser_of("score", __doc__)
    parser.add_argument("folder", help="folder of <dataset>.jsonl files of LongBench's pred.py")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    options = parser.parse_args(arguments)
    scores = score_folder(options.folder)
    print(json.dumps(scores, indent=2, ensure_ascii=False) if options.json else as_text(scores))
    return 0
