"""Stored runs as one table: what tables, figures and reports are made from, without a model.

A *setting* is a method with its hyperparameters, whatever the seed; a run is one setting on one model with one seed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from eval.benchmarks.datasets import DATASETS
from eval.store.columns import CollectedRecords, LineRecords, StoredRecords, table_of
from eval.store.folder import files_of, read_about, read_failures
from eval.store.record import Failure, Record
from lazyllm.errors import UserError

# What may differ between the runs of one model that lie in one table
_FREE = {"method", "parameters", "data", "seed", "paired", "warmup", "method_weights", "method_code"}
# Columns of `as_frame` that a measurement gives
MEASURED = (
    "score", "rouge_l", "ttft_s", "scoring_s", "total_s", "step_s", "tokens", "pct_computed",
    "kv_bytes", "aux_bytes", "peak_bytes",
)  # fmt: skip
COLUMNS = [
    "model", "paper_model", "method", "settings", "label", "seed", "run", "folder", "paired",
    "dataset", "task", "suite", "id", "prompt_tokens", *MEASURED, *(f"baseline_{name}" for name in MEASURED),
]  # fmt: skip
_USUAL = {"revive": True, "prune_generated": False}
_KEY = ["model", "method", "settings", "seed", "dataset", "id"]

PLANNED = "examples.json"  # in a run folder: {dataset: ids of its examples that the run is to measure}
CAMPAIGN = "campaign.json"  # beside the records that `eval.store.collect` has put into one file
CAMPAIGN_SCHEMA = 1
CAMPAIGN_RECORDS = "records.parquet"


@dataclass(frozen=True)
class StoredRun:
    """A run folder's content. about: run.json; records: one an example, in memory or read when they are asked for."""

    folder: Path
    about: dict[str, Any]
    records: Sequence[Record]

    @cached_property
    def examples(self) -> pd.DataFrame:
        """One row a record: the columns of `as_frame` that its record decides. Raises UserError."""
        return example_rows(self.records)

    @property
    def datasets(self) -> list[str]:
        """Of which there are records, in their order."""
        return [str(name) for name in self.examples["dataset"].unique()]

    @property
    def identity(self) -> dict[str, Any]:
        return self.about["identity"]

    @property
    def model(self) -> str:
        """The model's short name: the preset, or the last part of its folder or hub id."""
        return Path(self.about["config"]["model"]["name"]).name

    @property
    def paper_model(self) -> str | None:
        """The column of the paper's tables that this model stands in: llama2, xgen or None."""
        return self.about["config"]["model"]["paper"]

    @property
    def method(self) -> str:
        return self.identity["method"]["name"]

    @property
    def settings(self) -> dict[str, Any]:
        """The method's hyperparameters as they were configured, without name and seed."""
        return {key: value for key, value in self.identity["method"].items() if key not in ("name", "seed")}

    @property
    def seed(self) -> int:
        return self.identity["method"].get("seed", self.identity["seed"])

    @property
    def failures(self) -> list[Failure]:
        """Examples that could not be measured."""
        failures = read_failures(self.folder)
        done = set(self.keys) if failures else set()
        return [failure for failure in failures if failure.key not in done]

    @property
    def keys(self) -> list[tuple[str, str]]:
        """(dataset, id) of each record."""
        return list(zip(self.examples["dataset"], self.examples["id"], strict=True))

    @property
    def records_sha256(self) -> dict[str, str]:
        """{name: SHA-256} of the files that the records were written to."""
        if isinstance(self.records, StoredRecords):
            return self.records.sha256()
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files_of(self.folder, "records")}

    @property
    def planned(self) -> list[tuple[str, str]] | None:
        """(dataset, id) of the examples that the run's last job wanted of it; None for runs of before that was kept.

        Raises UserError.
        """
        file = self.folder / PLANNED
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            return [(dataset, one) for dataset, ids in content.items() for one in ids]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise UserError(f"{file}: cannot be read ({type(error).__name__}: {error}); remove it") from error

    @property
    def traces(self) -> list[Path]:
        """Files of `eval.store.trace`, one a traced example."""
        return sorted((self.folder / "traces").glob("*.json"))


def find_runs(folders: Sequence[Path]) -> list[StoredRun]:
    """All runs with records in or below the folders, in order of their names, raw or collected (`eval.store.collect`).

    Raises UserError: none, damaged, or a mixture.
    """
    runs = [run for run in stored_runs(folders) if len(run.examples)]
    if not runs:
        raise UserError(f"no run with records below {', '.join(map(str, folders))}")
    refuse_mixtures(runs)
    return runs


def stored_runs(folders: Sequence[Path]) -> list[StoredRun]:
    """All runs in or below the folders, in order of their names, also those without a record. Raises UserError."""
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise UserError(f"{missing[0]}: no such folder; give the folder that the runs lie in, e.g. runs")
    campaigns = sorted({file.parent for folder in folders for file in folder.rglob(CAMPAIGN)})
    collected = {run.folder: run for folder in campaigns for run in _collected_runs(folder)}
    raw = {file.parent for folder in folders for file in folder.rglob("run.json")} - collected.keys()
    runs = {folder: StoredRun(folder, read_about(folder / "run.json"), LineRecords(folder)) for folder in raw}
    return [run for _, run in sorted((runs | collected).items())]


def planned_text(keys: Iterable[tuple[str, str]]) -> str:
    """The content of `PLANNED`."""
    content: dict[str, list[str]] = {}
    for dataset, one in keys:
        content.setdefault(dataset, []).append(one)
    return json.dumps(content) + "\n"


def _collected_runs(campaign: Path) -> list[StoredRun]:
    file = campaign / CAMPAIGN
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["schema"] != CAMPAIGN_SCHEMA:
            raise UserError(
                f"{file}: written with schema {content['schema']}, this version reads {CAMPAIGN_SCHEMA}; collect again"
            )
        return [
            StoredRun(
                campaign / one["folder"],
                read_about(campaign / one["folder"] / "run.json"),
                CollectedRecords(
                    campaign / CAMPAIGN_RECORDS, range(*one["row_groups"]), one["records"], one["records_sha256"]
                ),
            )
            for one in content["runs"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: cannot be read as a campaign ({type(error).__name__}: {error})") from error


def as_frame(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """One row an example of a run.

    model, paper_model (missing: the paper has no such model), method, settings (canonical JSON of the hyperparameters),
    label (the same for people), seed, run (the fingerprint), folder, paired, dataset, task, suite, id, prompt_tokens;
    then of the method, and with `baseline_` before it of the paired baseline (NaN where there is none): score, rouge_l
    (0 to 100), ttft_s, scoring_s, total_s, step_s (mean decoding step; NaN for answers of one token), tokens
    (generated), pct_computed (0 to 100), kv_bytes, aux_bytes, peak_bytes.

    Where two runs hold the same example with the same setting and seed, the paired one counts; of such, the one
    with more examples (a first look at one dataset gives way to the run of all). Raises UserError where that does not
    decide.
    """
    runs = [run for run in runs if len(run.examples)]
    if not runs:
        return pd.DataFrame(columns=COLUMNS)
    examples = pd.concat([run.examples for run in runs], ignore_index=True)
    sizes = [len(run.examples) for run in runs]
    described = [_described(run) for run in runs]
    fixed = {name: np.repeat(np.array([one[name] for one in described], dtype=object), sizes) for name in described[0]}
    fixed |= {"seed": fixed["seed"].astype(int), "paired": fixed["paired"].astype(bool)}
    table: Any = pd.concat([pd.DataFrame(fixed), examples], axis=1)[COLUMNS]
    settings = {(one["model"], one["method"], one["settings"], one["seed"]) for one in described}
    if len(settings) == len(runs):  # and a run holds an example once
        return table
    return _without_repeated(table)


def _without_repeated(table: pd.DataFrame) -> pd.DataFrame:
    table = table.assign(size=table.groupby("folder")["id"].transform("size"))
    table = table.sort_values(["paired", "size"], ascending=False, kind="stable")
    twice = table[table.duplicated([*_KEY, "paired", "size"], keep=False)]
    if len(twice):
        one = twice.iloc[0]
        both = sorted(set(twice[(twice[_KEY] == one[_KEY]).all(axis=1)]["folder"]))
        raise UserError(
            f"{one['dataset']}, row {one['id']}, {one['label']}: measured twice, in {' and '.join(both)}; take one away"
        )
    return table.drop_duplicates(_KEY).sort_index().reset_index(drop=True).drop(columns="size")


def example_rows(records: Sequence[Record]) -> pd.DataFrame:
    """The columns of `as_frame` that records decide: those from dataset on. Raises UserError."""
    sides = {"method": "", "baseline": "baseline_"}
    names = [f"{side}.{name}" for side in sides for name in _MEASURED_FROM]
    table = table_of(records, ["dataset", "id", "prompt_tokens", *names])
    datasets = table["dataset"].to_pandas().astype("category")
    columns: dict[str, Any] = {"dataset": datasets.astype(str)}
    for fact in ("task", "suite"):
        columns[fact] = datasets.map({name: getattr(DATASETS[name], fact) for name in datasets.cat.categories})
    columns |= {"task": columns["task"].astype(str), "suite": columns["suite"].astype(str)}
    columns |= {"id": table["id"].to_pandas(), "prompt_tokens": table["prompt_tokens"].to_numpy()}
    for side, prefix in sides.items():
        columns |= _measured(prefix, {name: table[f"{side}.{name}"] for name in _MEASURED_FROM})
    return pd.DataFrame(columns)


def label_of(method: str, settings: dict[str, Any]) -> str:
    """A setting for people: `lazy, schedule={2: 0.3}`; what is empty or LazyLLM as the paper has it is left out."""
    shown = {key: value for key, value in settings.items() if value is not None and _USUAL.get(key) is not value}
    return ", ".join([method, *(f"{key}={_plain(value)}" for key, value in shown.items())])


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {one}" for key, one in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def refuse_mixtures(runs: Sequence[StoredRun]) -> None:
    """Runs of one model must agree in all but method, data and seed: else their numbers do not share a table."""
    first: dict[str, StoredRun] = {}
    for run in runs:
        other = first.setdefault(run.model, run)
        for key in sorted({*run.identity, *other.identity} - _FREE):
            here, there = run.identity.get(key), other.identity.get(key)
            if here != there:
                raise UserError(
                    f"{run.folder} and {other.folder} differ in {key} ({here!r} and {there!r}): they do not share a "
                    "table. Give folders that hold one of them only"
                )
    code: dict[tuple[str, str], StoredRun] = {}
    for run in runs:
        other = code.setdefault((run.model, run.method), run)
        here, there = run.identity.get("method_code"), other.identity.get("method_code")
        if here != there:
            raise UserError(
                f"{run.folder} and {other.folder} were measured with different code of {run.method} ({here} and "
                f"{there}): they do not share a table. Give folders that hold one of them only"
            )
    data: dict[tuple[str, str], StoredRun] = {}
    for run in runs:
        for name, there in run.identity["data"].items():
            other = data.setdefault((run.model, name), run)
            if other.identity["data"][name] != there:
                raise UserError(
                    f"{run.folder} and {other.folder} were measured on different rows or templates of {name}: they do "
                    "not share a table. Give folders that hold one of them only"
                )


def _described(run: StoredRun) -> dict[str, Any]:
    """The columns of `as_frame` that are the same in all rows of a run."""
    return {
        "model": run.model,
        "paper_model": run.paper_model,
        "method": run.method,
        "settings": json.dumps(run.settings, sort_keys=True),
        "label": label_of(run.method, run.settings),
        "seed": run.seed,
        "run": run.about["fingerprint"],
        "folder": str(run.folder),
        "paired": run.identity["paired"],
    }


# What of a measurement `_measured` reads
_MEASURED_FROM = (
    "score", "rouge_l", "ttft_s", "scoring_s", "total_s", "decode_step_s", "token_ids", "pct_prompt_tokens_computed",
    "kv_bytes", "aux_bytes", "peak_memory_bytes",
)  # fmt: skip


def _measured(prefix: str, values: dict[str, pa.ChunkedArray]) -> dict[str, np.ndarray]:
    """The `MEASURED` columns of all records; NaN where there is no measurement, or it lacks the value."""
    steps = values["decode_step_s"].combine_chunks()
    columns = {
        "score": 100 * _numbers(values["score"]),
        "rouge_l": 100 * _numbers(values["rouge_l"]),
        "ttft_s": _numbers(values["ttft_s"]),
        "scoring_s": _numbers(values["scoring_s"]),
        "total_s": _numbers(values["total_s"]),
        "step_s": _mean_of_each(steps),
        "tokens": _numbers(_lengths(values["token_ids"])),
        "pct_computed": _numbers(values["pct_prompt_tokens_computed"]),
        "kv_bytes": _numbers(values["kv_bytes"]),
        "aux_bytes": _numbers(values["aux_bytes"]),
        "peak_bytes": _numbers(values["peak_memory_bytes"]),
    }
    return {f"{prefix}{name}": columns[name] for name in MEASURED}


def _lengths(lists: Any) -> Any:
    return pc.call_function("list_value_length", [lists])


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """[rows]; integers become floats only where one is missing, which is NaN."""
    if not column.null_count:
        return column.to_numpy().astype(np.int64 if pa.types.is_integer(column.type) else np.float64)
    return pc.fill_null(column.cast(pa.float64()), float("nan")).to_numpy()


def _mean_of_each(lists: pa.ListArray) -> np.ndarray:
    """[rows] the mean of each list, as `numpy.mean` computes it; NaN where it is empty or missing."""
    lengths = pc.fill_null(_lengths(lists), 0).to_numpy()
    starts, values = lists.offsets.to_numpy()[:-1], lists.values.to_numpy()
    means = np.full(len(lengths), np.nan)
    for length in np.unique(lengths[lengths > 0]):
        rows = np.flatnonzero(lengths == length)
        # rows of one array, so that each is summed as it would be alone
        means[rows] = values[starts[rows, None] + np.arange(length)].mean(axis=1)
    return means
