"""Stored runs as one table: what tables, figures and reports are made from, without a model.

A *setting* is a method with its hyperparameters, whatever the seed; a run is one setting on one model with one seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.record import Failure, Measurement, Record
from eval.store import StoreError, read_failures, read_run
from eval.tasks import DATASETS

# What may differ between the runs of one model that lie in one table
_FREE = {"method", "parameters", "data", "seed", "paired", "warmup", "scorer_weights", "method_code"}
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


@dataclass(frozen=True)
class StoredRun:
    """A run folder's content. about: run.json; records: one an example."""

    folder: Path
    about: dict[str, Any]
    records: list[Record]

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
        done = {record.key for record in self.records}
        return [failure for failure in read_failures(self.folder) if failure.key not in done]

    @property
    def traces(self) -> list[Path]:
        """Files of `eval.trace`, one a traced example."""
        return sorted((self.folder / "traces").glob("*.json"))


def find_runs(folders: Sequence[Path]) -> list[StoredRun]:
    """All runs in or below the folders, in order of their names. Raises StoreError: none, damaged, or a mixture."""
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise StoreError(f"{missing[0]}: no such folder; give the folder that the runs lie in, e.g. runs")
    found = sorted({file.parent for folder in folders for file in folder.rglob("run.json")})
    runs = [StoredRun(folder, *read_run(folder)) for folder in found]
    runs = [run for run in runs if run.records]
    if not runs:
        raise StoreError(f"no run with records below {', '.join(map(str, folders))}")
    _refuse_mixtures(runs)
    return runs


def as_frame(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """One row an example of a run.

    model, paper_model (missing: the paper has no such model), method, settings (canonical JSON of the hyperparameters),
    label (the same for people), seed, run (the fingerprint), folder, paired, dataset, task, suite, id, prompt_tokens;
    then of the method, and with `baseline_` before it of the paired baseline (NaN where there is none): score, rouge_l
    (0 to 100), ttft_s, scoring_s, total_s, step_s (mean decoding step; NaN for answers of one token), tokens
    (generated), pct_computed (0 to 100), kv_bytes, aux_bytes, peak_bytes.

    Where two runs hold the same example with the same setting and seed, the paired one counts; of such, the one
    with more examples (a first look at one dataset gives way to the run of all). Raises StoreError where that does not
    decide.
    """
    rows = [row for run in runs for row in _rows(run)]
    table = pd.DataFrame(rows, columns=COLUMNS)
    table = table.assign(size=table.groupby("folder")["id"].transform("size"))
    table = table.sort_values(["paired", "size"], ascending=False, kind="stable")
    twice = table[table.duplicated([*_KEY, "paired", "size"], keep=False)]
    if len(twice):
        one = twice.iloc[0]
        both = sorted(set(twice[(twice[_KEY] == one[_KEY]).all(axis=1)]["folder"]))
        raise StoreError(
            f"{one['dataset']}, row {one['id']}, {one['label']}: measured twice, in {' and '.join(both)}; take one away"
        )
    return table.drop_duplicates(_KEY).sort_index().reset_index(drop=True).drop(columns="size")


def example_row(record: Record) -> dict[str, Any]:
    """The columns of `as_frame` that one record decides: those from dataset on."""
    return {
        "dataset": record.dataset,
        "task": DATASETS[record.dataset].task,
        "suite": DATASETS[record.dataset].suite,
        "id": record.id,
        "prompt_tokens": record.prompt_tokens,
        **_measured("", record.method),
        **_measured("baseline_", record.baseline),
    }


def label_of(method: str, settings: dict[str, Any]) -> str:
    """A setting for people: `lazy, schedule={2: 0.3}`; what is empty or LazyLLM as the paper has it is left out."""
    shown = {key: value for key, value in settings.items() if value is not None and _USUAL.get(key) is not value}
    return ", ".join([method, *(f"{key}={_plain(value)}" for key, value in shown.items())])


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {one}" for key, one in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _refuse_mixtures(runs: Sequence[StoredRun]) -> None:
    """Runs of one model must agree in all but method, data and seed: else their numbers do not share a table."""
    first: dict[str, StoredRun] = {}
    for run in runs:
        other = first.setdefault(run.model, run)
        for key in sorted({*run.identity, *other.identity} - _FREE):
            here, there = run.identity.get(key), other.identity.get(key)
            if here != there:
                raise StoreError(
                    f"{run.folder} and {other.folder} differ in {key} ({here!r} and {there!r}): they do not share a "
                    "table. Give folders that hold one of them only"
                )
    code: dict[tuple[str, str], StoredRun] = {}
    for run in runs:
        other = code.setdefault((run.model, run.method), run)
        here, there = run.identity.get("method_code"), other.identity.get("method_code")
        if here != there:
            raise StoreError(
                f"{run.folder} and {other.folder} were measured with different code of {run.method} ({here} and "
                f"{there}): they do not share a table. Give folders that hold one of them only"
            )
    data: dict[tuple[str, str], StoredRun] = {}
    for run in runs:
        for name, there in run.identity["data"].items():
            other = data.setdefault((run.model, name), run)
            if other.identity["data"][name] != there:
                raise StoreError(
                    f"{run.folder} and {other.folder} were measured on different rows or templates of {name}: they do "
                    "not share a table. Give folders that hold one of them only"
                )


def _rows(run: StoredRun) -> list[dict[str, Any]]:
    fixed = {
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
    return [{**fixed, **example_row(record)} for record in run.records]


def _measured(prefix: str, one: Measurement | None) -> dict[str, float]:
    nan = float("nan")
    if one is None:
        return {f"{prefix}{name}": nan for name in MEASURED}
    columns = {
        "score": 100 * one.score,
        "rouge_l": nan if one.rouge_l is None else 100 * one.rouge_l,
        "ttft_s": one.ttft_s,
        "scoring_s": one.scoring_s,
        "total_s": one.total_s,
        "step_s": float(np.mean(one.decode_step_s)) if one.decode_step_s else nan,
        "tokens": len(one.token_ids),
        "pct_computed": one.pct_prompt_tokens_computed,
        "kv_bytes": one.kv_bytes,
        "aux_bytes": one.aux_bytes,
        "peak_bytes": nan if one.peak_memory_bytes is None else one.peak_memory_bytes,
    }
    return {f"{prefix}{name}": columns[name] for name in MEASURED}
