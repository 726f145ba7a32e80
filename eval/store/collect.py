"""Run folders into one campaign: python -m eval.store.collect RUNS [RUNS ...] [--out FOLDER]

What is written, whole or not at all:

records.parquet   every record of every run, in columns (`eval.store.columns.SCHEMA`); a run's rows lie together
campaign.json     which rows are whose, and of each run the hash of the files that its records came from, and which
                  examples are missing
RUN/...           of each run, under its old name: run.json, examples.json, failures, jobs and traces, as they were

Tables, figures and reports read this folder as they read the runs' own, with the same results. Runs that do not share a
table are refused, and so are shards that hold the same example with different outcomes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eval.store.columns import SCHEMA, LineRecords, repeated
from eval.store.folder import fingerprint, read_failures, write_whole
from eval.store.frame import (
    CAMPAIGN,
    CAMPAIGN_RECORDS,
    CAMPAIGN_SCHEMA,
    StoredRun,
    as_frame,
    find_runs,
    refuse_mixtures,
    stored_runs,
)
from lazyllm.errors import UserError

KEPT = ("run.json", "examples.json", "failures*.jsonl", "jobs*.jsonl", "traces/*.json")  # of a run's folder
_SHOWN = 3  # examples that are named of those that a run lacks; campaign.json has all


@dataclass(frozen=True)
class Collected:
    """What became of one run. folder: its name in the campaign. files: how many its records came from.

    twice: records that two shards, or one file, hold with the same outcome; one is kept. missing: None where it is not
    known what the run was to measure.
    """

    folder: str
    records: int
    files: int
    twice: int
    missing: list[tuple[str, str]] | None
    failed: int


def collect(folders: Sequence[Path], out: Path) -> list[Collected]:
    """Write the campaign of all runs in or below the folders, also of those without a record.

    At most two runs' records are in memory at a time. Raises UserError: no run, a mixture, damage, or a folder `out`
    that lies below the runs or holds something else.
    """
    runs = stored_runs(folders)
    _check_out(out, folders, runs)
    for run in runs:
        if run.about.get("fingerprint") != fingerprint(run.identity):
            raise UserError(f"{run.folder / 'run.json'}: the fingerprint is not the identity's: it was changed by hand")
    refuse_mixtures(runs)
    root = Path(os.path.commonpath([run.folder.parent.absolute() for run in runs])) if runs else Path()
    with _whole_folder(out) as partial:
        entries, done = _write_records(runs, root, partial)
        if not any(one.records for one in done):
            raise UserError(f"no run with records below {', '.join(map(str, folders))}")
        content = {"schema": CAMPAIGN_SCHEMA, "runs": entries}
        write_whole(partial / CAMPAIGN, json.dumps(content, indent=1, sort_keys=True) + "\n")
        _check_cells(find_runs([partial]))
    return done


def _write_records(runs: Sequence[StoredRun], root: Path, out: Path) -> tuple[list[dict[str, Any]], list[Collected]]:
    """Every run's records and files; what campaign.json says of each, and what became of it."""
    entries: list[dict[str, Any]] = []
    done: list[Collected] = []
    prompts: dict[tuple[str, str, str], str] = {}
    writing: Future[None] | None = None
    groups = 0
    options: Any = {"compression": "zstd", "use_dictionary": ["dataset"], "write_statistics": False}
    with pq.ParquetWriter(out / CAMPAIGN_RECORDS, SCHEMA, **options) as writer, ThreadPoolExecutor(1) as pool:
        for run in runs:
            table, files, twice = _records_of(run)
            _check_prompts(run, table, prompts)
            first_group = groups
            if len(table):
                if writing is not None:
                    writing.result()
                writing = pool.submit(writer.write_table, table, row_group_size=len(table))
                groups += 1
            name = run.folder.absolute().relative_to(root).as_posix()
            _copy_files(run.folder, out / name)
            keys = set(zip(table["dataset"].to_pylist(), table["id"].to_pylist(), strict=True))
            planned = run.planned
            missing = None if planned is None else [key for key in planned if key not in keys]
            failed = len({failure.key for failure in read_failures(run.folder)} - keys)
            done.append(Collected(name, len(table), files, twice, missing, failed))
            entries.append(
                {
                    "folder": name,
                    "records": len(table),
                    "row_groups": [first_group, groups],
                    "records_sha256": run.records_sha256,
                    "missing": missing,
                }
            )
        if writing is not None:
            writing.result()
    return entries, done


def _records_of(run: StoredRun) -> tuple[pa.Table, int, int]:
    """A run's records, each example once; from how many files, and how many stood there twice. Raises UserError."""
    if not isinstance(run.records, LineRecords):  # collected before
        return run.records.table(), 0, 0  # type: ignore[union-attr]
    files = run.records.by_file()
    if files is None:
        table = run.records.table()  # raises what is wrong, or leaves out what does not count
        return table, 0, 0
    table = pa.concat_tables([SCHEMA.empty_table(), *files.values()])
    again = np.flatnonzero(repeated(table))
    if len(again):
        _refuse_differing(run, table, again, [name for name, part in files.items() for _ in range(len(part))])
        table = table.filter(pa.array(~repeated(table)))
    return table, len(files), len(again)


def _refuse_differing(run: StoredRun, table: pa.Table, again: np.ndarray, names: list[str]) -> None:
    """Raise UserError where an example stands twice with different outcomes. names: [rows] the file of each."""
    keys = list(zip(table["dataset"].to_pylist(), table["id"].to_pylist(), strict=True))
    first: dict[tuple[str, str], int] = {}
    for row, key in enumerate(keys):
        first.setdefault(key, row)
    for row in again.tolist():
        other = first[keys[row]]
        if table.slice(row, 1).to_pylist() != table.slice(other, 1).to_pylist():
            dataset, one = keys[row]
            raise UserError(
                f"{run.folder}: {dataset}, row {one} was measured twice with different outcomes, in {names[other]} and "
                f"{names[row]}: remove one of the lines"
            )


def _check_prompts(run: StoredRun, table: pa.Table, prompts: dict[tuple[str, str, str], str]) -> None:
    """Refuse an example whose prompt is another one than in a run of the model before. prompts: grows by the run's."""
    columns = (table[name].to_pylist() for name in ("dataset", "id", "prompt_sha256"))
    for dataset, one, sha256 in zip(*columns, strict=True):
        if prompts.setdefault((run.model, dataset, one), sha256) != sha256:
            raise UserError(
                f"{run.folder}: {dataset}, row {one} was measured with another prompt than in the runs of {run.model} "
                "before it: records of another run lie in this folder, or the data was changed"
            )


def _check_cells(runs: Sequence[StoredRun]) -> None:
    """Refuse what would stand twice in one cell of a table. Raises UserError."""
    settings: dict[tuple[Any, ...], list[StoredRun]] = {}
    for run in runs:
        key = (run.model, run.method, json.dumps(run.settings, sort_keys=True), run.seed)
        settings.setdefault(key, []).append(run)
    for several in settings.values():
        if len(several) > 1:
            as_frame(several)


def _copy_files(folder: Path, out: Path) -> None:
    for pattern in KEPT:
        for file in sorted(folder.glob(pattern)):
            target = out / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def _check_out(out: Path, folders: Sequence[Path], runs: Sequence[StoredRun]) -> None:
    if out.exists() and not (out / CAMPAIGN).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is there and is no campaign; give another folder with --out")
    place = out.absolute().resolve()
    if any(place.is_relative_to(folder.resolve()) for folder in folders):
        raise UserError(f"{out}: lies below the runs, which would then be found twice; give another with --out")
    if any(run.folder.resolve().is_relative_to(place) for run in runs):
        raise UserError(f"{out}: holds the runs that are to be collected; give another folder with --out")


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` when the block ends well, in the place of an older campaign."""
    partial = out.with_name(f".{out.name}.{uuid4().hex[:8]}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        if out.exists():
            shutil.rmtree(out)
        partial.replace(out)
    except OSError as error:
        raise UserError(f"{out}: could not be written ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def describe(done: Sequence[Collected], out: Path) -> str:
    """What was done, for people: a line for each run that lacks something, then the whole."""
    lines = []
    for one in done:
        if one.twice:
            lines.append(f"{one.folder}: {one.twice} records stood there twice, the same each time; one was kept")
        if one.missing:
            named = ", ".join(f"{dataset}, row {row}" for dataset, row in one.missing[:_SHOWN])
            more = f" and {len(one.missing) - _SHOWN} more" if len(one.missing) > _SHOWN else ""
            failed = f", {one.failed} of them failed" if one.failed else ""
            lines.append(f"{one.folder}: {len(one.missing)} examples are missing{failed}: {named}{more}")
        elif not one.records:
            lines.append(f"{one.folder}: it has no record, and {one.failed} examples failed")
    unknown = sum(one.missing is None for one in done)
    if unknown:
        lines.append(f"{unknown} runs do not say what they were to measure, so nobody knows what they lack")
    records, files = sum(one.records for one in done), sum(one.files for one in done)
    return "\n".join([*lines, f"{out}: {records} records of {len(done)} runs, from {files} files"])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 with one message on stderr where there is no campaign."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.store.collect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders that the runs lie in, or below")
    parser.add_argument(
        "--out", type=Path, help="where to (default: the first of RUNS with -collected at its name's end)"
    )
    given = parser.parse_args(arguments)
    first = given.runs[0].absolute()
    out = given.out or first.with_name(f"{first.name}-collected")
    try:
        done = collect(given.runs, out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe(done, out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
