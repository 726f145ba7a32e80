"""Stored runs, raw or collected, as values.

A *setting* is a method with its hyperparameters but without its seed; a run is one setting on one model with one seed.
Columns have the names of a record's fields, with a dot before nested ones: `prompt_tokens`, `method.ttft_s`,
`baseline.computed`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eval.benchmarks.datasets import DATASETS
from eval.store.folder import files_of, read_about, read_failures, read_records
from eval.store.record import SCALES, SCHEMA, Failure, Record, to_records, to_table
from lazyllm.errors import UserError
from lazyllm.machine import LONG, handicaps
from lazyllm.methods import Lazy, settings_of

if TYPE_CHECKING:
    import pandas as pd

CAMPAIGN = "campaign.json"  # in a collected campaign (`eval.store.collect`)
CAMPAIGN_VERSION = 1
CAMPAIGN_RECORDS = "records.parquet"

_SIDES = {"method": "", "baseline": "baseline_"}  # {measurement of a record: prefix of its columns}
# LazyLLM's switches, which labels leave out at their defaults
_USUAL = {name: value for name, value in settings_of(Lazy).items() if isinstance(value, bool)}


@dataclass(frozen=True)
class Part:
    """A run's part of a collected campaign. row_groups: of the Parquet file. sha256: as `StoredRun.records_sha256`."""

    file: Path
    row_groups: range
    sha256: dict[str, str]

    def table(self, columns: Sequence[str] | None) -> pa.Table:
        """The records, nested, with at least these columns. Raises UserError."""
        try:
            with pq.ParquetFile(self.file) as opened:
                if opened.schema_arrow.equals(SCHEMA):
                    return opened.read_row_groups(list(self.row_groups), None if columns is None else list(columns))
                return to_table(to_records(opened.read_row_groups(list(self.row_groups))))  # lacks newer columns
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{self.file}: cannot be read ({error}); collect the runs again") from error


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A run: run.json's content, and its records, which are read on first use.

    source: of the records: the folder's lines (None), a campaign's part, or records in memory.
    apart: follows the model's short name if the run shares no table with most runs of the model; facts: the facts in
    which it differs from them (`eval.store.results`).
    baselines: the baseline's runs of the same table, if this run timed only the baseline's first tokens.
    """

    folder: Path
    about: dict[str, Any]
    source: Sequence[Record] | Part | None = None
    apart: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    baselines: tuple[StoredRun, ...] = ()

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Every record, in order. columns: flat, as in this module's docstring; None for `SCHEMA`'s, nested.

        Raises UserError.
        """
        if isinstance(self.source, Part) and not self.baselines:
            table = self.source.table(columns)
        else:
            records = self.records
            try:
                table = to_table(records)
            except ValueError as error:
                raise UserError(
                    f"{self.folder}: a record holds an impossible value ({error}). Nothing was changed: remove its "
                    "line, and the run measures its example again"
                ) from error
        return table if columns is None else table.flatten().select(list(columns)).combine_chunks()

    @property
    def records(self) -> list[Record]:
        """Every record, in order. Raises UserError."""
        if isinstance(self.source, Part):
            records = to_records(self.source.table(None))
        else:
            records = read_records(self.folder) if self.source is None else list(self.source)
        return [*_with_baseline(records, self.baselines)] if self.baselines else records

    @property
    def may_have_records(self) -> bool:
        """False only if the run has no record. It reads none: what `examples` caches is lost if the run is copied."""
        if isinstance(self.source, Part):
            return len(self.source.row_groups) > 0
        return self.source is not None or any(file.stat().st_size for file in files_of(self.folder, "records"))

    @cached_property
    def examples(self) -> pd.DataFrame:
        """A row for each turn of an example: the columns of `as_frame` from `dataset` on. Raises UserError."""
        table = self.table(_READ)
        return _example_rows(table) if table["later"].null_count == len(table) else example_rows(self.records)

    @property
    def keys(self) -> list[tuple[str, str]]:
        """(dataset, id) of each record."""
        return list(dict.fromkeys(zip(self.examples["dataset"], self.examples["id"], strict=True)))

    @property
    def datasets(self) -> list[str]:
        """Datasets with records, in order."""
        return [str(name) for name in self.examples["dataset"].unique()]

    @property
    def failures(self) -> list[Failure]:
        """Examples that could not be measured."""
        failures = read_failures(self.folder)
        done = set(self.keys) if failures else set()
        return [failure for failure in failures if failure.key not in done]

    @property
    def identity(self) -> dict[str, Any]:
        return self.about["identity"]

    @property
    def model(self) -> str:
        """The model's short name (`short_name`), then `apart`."""
        return short_name(self.about["config"]["model"]) + self.apart

    @property
    def paper_model(self) -> str | None:
        """The model's column in the paper's tables: llama2, xgen or None."""
        return self.about["config"]["model"]["paper"]

    @property
    def method(self) -> str:
        return self.identity["method"]["name"]

    @property
    def settings(self) -> dict[str, Any]:
        """The method's hyperparameters in the config, without name and seed."""
        return settings_in(self.identity["method"])

    @property
    def label(self) -> str:
        """The setting, for people."""
        return label_of(self.method, self.settings)

    @property
    def seed(self) -> int:
        return self.identity["method"].get("seed", self.identity["seed"])

    @property
    def device(self) -> str:
        """The name of the accelerator or processor; "" if it is not stored."""
        return str(((self.about.get("provenance") or {}).get("machine") or {}).get("device", ""))

    @cached_property
    def kernels(self) -> list[str]:
        """The attention kernels of the baseline (`Record.attention_kernel`); usually one."""
        return sorted({*self.table(["attention_kernel"])["attention_kernel"].to_pylist()} - {None})

    @property
    def handicaps(self) -> list[str]:
        """`lazyllm.machine.handicaps` of its baseline."""
        side = "" if self.method == "baseline" else "baseline_"
        long: Any = self.examples[self.examples["prompt_tokens"] >= LONG]
        return handicaps(self.device, self.kernels, float(long[f"{side}prefill_mfu"].min()))

    @property
    def records_sha256(self) -> dict[str, str]:
        """{name: SHA-256} of the record files."""
        if isinstance(self.source, Part):
            return dict(self.source.sha256)
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files_of(self.folder, "records")}

    @property
    def traces(self) -> list[Path]:
        """Files with a `Trace`, one for each traced example."""
        return sorted((self.folder / "traces").glob("*.json"))


def short_name(model: Mapping[str, Any]) -> str:
    """A preset, the last part of a folder or hub id, or the whole name of a server's model. model: its config."""
    return model["name"] if model.get("url") is not None else Path(model["name"]).name


def settings_in(method: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters in a method's config, without name and seed."""
    return {key: value for key, value in method.items() if key not in ("name", "seed")}


def label_of(method: str, settings: dict[str, Any]) -> str:
    """A setting for people: `lazy, schedule={2: 0.3}`, without empty values, and without LazyLLM's usual ones.

    A server's setting may have its own label.
    """
    if settings.get("label") is not None:
        return settings["label"]
    shown = {key: value for key, value in settings.items() if value is not None and _USUAL.get(key) is not value}
    return ", ".join([method, *(f"{key}={_plain(value)}" for key, value in shown.items())])


def is_ablation(settings: Mapping[str, Any]) -> bool:
    """Whether LazyLLM runs without revival, or prunes generated tokens too."""
    return any(settings.get(key, usual) != usual for key, usual in _USUAL.items())


def counted(number: int, noun: str) -> str:
    """`1 run`, `2,000 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {inner}" for key, inner in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def stored_runs(folders: Sequence[Path]) -> list[StoredRun]:
    """All runs in the folders and their subfolders, by name, also without records. Raises UserError.

    Of a run that is there raw and in a campaign, only the raw one.
    """
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise UserError(f"{missing[0]}: no such folder; give the folder of the runs, e.g. runs")
    campaigns = sorted({file.parent for folder in folders for file in folder.rglob(CAMPAIGN)})
    collected = {run.folder: run for folder in campaigns for run in _collected_runs(folder)}
    found = {file.parent for folder in folders for file in folder.rglob("run.json") if ".partial/" not in str(file)}
    raw = {folder: StoredRun(folder, read_about(folder / "run.json")) for folder in found - collected.keys()}
    there = {run.about.get("fingerprint") for run in raw.values()}
    runs = raw | {folder: run for folder, run in collected.items() if run.about.get("fingerprint") not in there}
    return [run for _, run in sorted(runs.items())]


def _collected_runs(campaign: Path) -> list[StoredRun]:
    file = campaign / CAMPAIGN
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["schema"] != CAMPAIGN_VERSION:
            raise UserError(
                f"{file}: has schema {content['schema']}, but this version reads {CAMPAIGN_VERSION}; collect again"
            )
        return [
            StoredRun(
                campaign / run["folder"],
                read_about(campaign / run["folder"] / "run.json"),
                Part(campaign / CAMPAIGN_RECORDS, range(*run["row_groups"]), run["records_sha256"]),
            )
            for run in content["runs"]
        ]
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: cannot be read as a campaign ({type(error).__name__}: {error})") from error


def stored_once(runs: Iterable[StoredRun], columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """The columns' values of each example; once if several runs of a setting and seed hold it."""
    rows = ((run, row) for run in runs for row in run.table(["dataset", "id", *columns]).to_pylist())
    once = {(run.label, run.seed, row["dataset"], row["id"]): row for run, row in rows}
    return [tuple(row[name] for name in columns) for row in once.values()]


def _with_baseline(records: Iterable[Record], runs: Iterable[StoredRun]) -> Iterator[Record]:
    """Records with `baseline` from the baseline's own runs, by their prompts; None if these lack it.

    The time to the first token is the one measured beside the method; the total time is this plus the decoding.
    """
    whole = {(one.key, one.prompt_sha256): one.method for run in runs for one in run.records}
    for record in records:
        baseline, ttft = whole.get((record.key, record.prompt_sha256)), record.baseline_ttft_s
        if baseline is not None and ttft is not None:
            totals = baseline.total_s, baseline.total_s_so_far
            total, so_far = (None if value is None else value - baseline.ttft_s + ttft for value in totals)
            record = replace(record, baseline=replace(baseline, ttft_s=ttft, total_s=total, total_s_so_far=so_far))
        yield record


def example_rows(records: Sequence[Record]) -> pd.DataFrame:
    """A row for each turn of a record: the columns of `as_frame` from `dataset` on."""
    turns = (turn for record in records for turn in record.by_turn)
    return _example_rows(to_table(turns).flatten().combine_chunks())


# The columns of records that `_example_rows` reads
_READ = [
    "dataset", "id", "groups", "prompt_tokens", "turn", "later", "baseline_ttft_s",
    *(f"{side}.{name}" for side in _SIDES for name in (*SCALES, "decode_step_s", "token_ids", "text", "request")),
]  # fmt: skip


def _example_rows(table: pa.Table) -> pd.DataFrame:
    """`example_rows` of a flat table."""
    import pandas as pd

    table = table.flatten()
    datasets: Any = table["dataset"].to_pandas()
    columns: dict[str, Any] = {"dataset": datasets}
    for fact in ("task", "suite"):
        columns[fact] = datasets.map({name: getattr(dataset, fact) for name, dataset in DATASETS.items()})
    columns |= {name: table[name].to_pandas() for name in ("id", "groups")}
    columns |= {name: table[name].to_numpy() for name in ("prompt_tokens", "turn")}
    for side, prefix in _SIDES.items():
        columns |= {f"{prefix}{name}": scale * _numbers(table[f"{side}.{name}"]) for name, scale in SCALES.items()}
        request = f"{side}.request"  # tells what a server's answer has no lists for
        lists = table[f"{side}.decode_step_s"].to_pandas()
        steps = np.array([np.nan if values is None or not len(values) else values.mean() for values in lists])
        columns[f"{prefix}step_s"] = np.where(np.isnan(steps), _numbers(table[f"{request}.tpot_s"]), steps)
        lengths = pc.call_function("list_value_length", [table[f"{side}.token_ids"]])
        told = table[f"{request}.completion_tokens"]
        columns[f"{prefix}generated_tokens"] = _numbers(pc.call_function("coalesce", [lengths.cast(pa.int64()), told]))
        answered = pc.call_function("not_equal", [table[f"{side}.text"], pa.scalar("")])
        columns[f"{prefix}pct_answered"] = 100 * _numbers(answered)
    columns["baseline_ttft_s"] = columns["baseline_ttft_s"].fillna(_numbers(table["baseline_ttft_s"]))
    return pd.DataFrame(columns)


def _numbers(column: pa.ChunkedArray) -> pd.Series:
    """[rows] the numbers; integers become floats only if one is missing (NaN)."""
    return column.cast(column.type if pa.types.is_floating(column.type) else pa.int64()).to_pandas()
