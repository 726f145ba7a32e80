"""Collect run folders into one campaign: lazyllm-bench collect RUNS [RUNS ...] [--out FOLDER]

The campaign (runs/collected by default) is written completely or not at all:

records.parquet   every record of every run, in columns (`eval.store.record.SCHEMA`); a run's rows are contiguous
campaign.json     each run's range of rows, the hash of its record files, and its missing examples
RUN/...           each run's run.json, examples.json, failures, jobs and traces, unchanged

Tables, figures and reports of a campaign equal those of its run folders; of a run that is there raw and collected, they
count the raw one. Shards that hold different records of the same example are refused.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow.parquet as pq

from eval.store.folder import fingerprint, read_failures, read_planned
from eval.store.record import SCHEMA
from eval.store.results import add_choice, as_frame, chosen, find_runs, tell_apart
from eval.store.runs import CAMPAIGN, CAMPAIGN_RECORDS, CAMPAIGN_VERSION, StoredRun, counted, stored_runs
from lazyllm.errors import UserError, parser_of
from lazyllm.files import write_whole

KEPT = ("run.json", "examples.json", "failures*.jsonl", "jobs*.jsonl", "traces/*.json")  # in a run folder


def collect(
    folders: Sequence[Path], out: Path, where: Sequence[str] = (), newest: bool = False
) -> list[dict[str, Any]]:
    """Write the campaign of all runs in the folders and their subfolders, including runs without records.

    Returns campaign.json's entries of the runs.

    where, newest: as in `eval.store.results.chosen`. Memory holds one run's records at a time. Raises UserError if
    there is no run, if a run is damaged, or if `out` is something other than a campaign or holds runs of its own.
    """
    runs = tell_apart(chosen(stored_runs(folders), where, newest))
    if out.exists() and not (out / CAMPAIGN).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not a campaign; give another folder with --out")
    for run in runs:
        if run.source is None and run.folder.resolve().is_relative_to(out.resolve()):
            raise UserError(f"{out}: holds runs to collect, and would be replaced; give another folder with --out")
        if run.about.get("fingerprint") != fingerprint(run.identity):
            raise UserError(f"{run.folder / 'run.json'}: the fingerprint differs from the identity's: it was edited")
    root = Path(os.path.commonpath([run.folder.parent.absolute() for run in runs])) if runs else Path()
    with _whole_folder(out) as partial:
        entries = _write_records(runs, root, partial)
        if not any(entry["records"] for entry in entries):
            raise UserError(f"no run with records in {', '.join(map(str, folders))}")
        content = {"schema": CAMPAIGN_VERSION, "runs": entries}
        write_whole(partial / CAMPAIGN, json.dumps(content, indent=1, sort_keys=True) + "\n")
        as_frame(find_runs([partial]))  # raises if two runs would share a table's cell
    return entries


def _write_records(runs: Sequence[StoredRun], root: Path, out: Path) -> list[dict[str, Any]]:
    """Write every run's records and files. Returns campaign.json's entries. A model's prompts must not differ."""
    entries, groups = list[dict[str, Any]](), 0
    prompts: dict[tuple[str, str, str], str] = {}
    options: Any = {"compression": "zstd", "use_dictionary": ["dataset"], "write_statistics": False}
    with pq.ParquetWriter(out / CAMPAIGN_RECORDS, SCHEMA, **options) as writer:
        for run in runs:
            table, first_group = run.table(), groups
            rows = [*zip(*(table[name].to_pylist() for name in ("dataset", "id", "prompt_sha256")), strict=True)]
            for dataset, example, sha256 in rows:
                if prompts.setdefault((run.model, dataset, example), sha256) != sha256:
                    raise UserError(
                        f"{run.folder}: {dataset}, row {example} has another prompt than in earlier runs of "
                        f"{run.model}: the folder holds another run's records, or the data has changed"
                    )
            if len(table):
                writer.write_table(table, row_group_size=len(table))
                groups += 1
            name = run.folder.absolute().relative_to(root).as_posix()
            for file in sorted(file for pattern in KEPT for file in run.folder.glob(pattern)):
                target = out / name / file.relative_to(run.folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
            keys, planned = {(dataset, example) for dataset, example, _ in rows}, read_planned(run.folder)
            entries.append(
                {
                    "folder": name,
                    "records": len(table),
                    "row_groups": [first_group, groups],
                    "records_sha256": run.records_sha256,
                    "missing": None if planned is None else [key for key in planned if key not in keys],
                    "failed": len({failure.key for failure in read_failures(run.folder)} - keys),
                }
            )
    return entries


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """A temporary folder, which replaces `out` if the block ends without an error."""
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


def describe(entries: Sequence[dict[str, Any]], out: Path) -> str:
    """A summary to print: a line for each incomplete run, then the totals. entries: from `collect`."""
    lines = []
    for run in entries:
        if missing := run["missing"]:
            failed = f" ({run['failed']} failed)" if run["failed"] else ""
            lines.append(f"{run['folder']}: lacks {counted(len(missing), 'example')}{failed}")
        elif not run["records"]:
            lines.append(f"{run['folder']}: no records, {counted(run['failed'], 'failed example')}")
    if unknown := sum(run["missing"] is None for run in entries):
        lines.append(f"without a list of planned examples, so that missing ones are unknown: {counted(unknown, 'run')}")
    records, files = sum(run["records"] for run in entries), sum(len(run["records_sha256"]) for run in entries)
    lines.append(
        f"{out}: {counted(records, 'record')} of {counted(len(entries), 'run')}, from {counted(files, 'file')}"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code 0; raises UserError if no campaign was written."""
    parser = parser_of("collect", __doc__)
    add_choice(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/collected"), help="default: %(default)s")
    options = parser.parse_args(argv)
    print(describe(collect(options.runs, options.out, options.where, options.newest), options.out))
    return 0
