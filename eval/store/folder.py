"""A run's folder: records appended one by one, and an identity that keeps different runs apart.

run.json        the run's identity and fingerprint, its config, and where it ran (`eval.run.identity`)
records.jsonl   one `Record` per line, flushed to disk when its example is done
failures.jsonl  one `Failure` per line, if any; the resumed run tries these examples again
jobs.jsonl      when each job began and ended, how it ended, and the machine's load (`eval.run.device_lock`)
summary.*       made from the records at the end (`eval.analysis.run_table`)

A shard of a run (`eval.benchmarks.subsets`) writes records-2-of-4.jsonl and so on; the run's records are those of all
these files. A last line that a kill left incomplete is removed when the job is resumed. Any other damage is refused;
`lazyllm-bench repair` repairs it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import pyarrow as pa
from filelock import FileLock, Timeout

from eval.store.record import SCHEMA, Failure, Record, job_event, lines_to_table, to_table
from lazyllm.errors import UserError

log = logging.getLogger(__name__)

_Line = TypeVar("_Line", Record, Failure)

VERSION = 2  # of run.json's layout, stored there as `schema`

# Exceptions raised by parsing an invalid line
NO_LINE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


def fingerprint(identity: dict[str, Any]) -> str:
    """12 hex digits, equal for two runs only if their records may share a folder."""
    return hashlib.sha256(_canonical(identity).encode()).hexdigest()[:12]


# ------------------------------------------------------------------------------------------------------------- writing


class RunStore:
    """The records of one run. Open it with `open_store`.

    part: suffix of the names of the files written here: "" or a shard's, such as `-2-of-4`. about: run.json's content.
    records: {example: record} of all jobs of the run.
    """

    def __init__(self, folder: Path, part: str = "", about: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.about = about or {}
        self._file, self._failures_file, self._jobs_file = (
            folder / f"{name}{part}.jsonl" for name in ("records", "failures", "jobs")
        )
        self.reload()
        _mend_end(self._file, Record.from_json)
        _mend_end(self._failures_file, Failure.from_json)
        _mend_end(self._jobs_file, job_event)

    def reload(self) -> None:
        """Read the records and failures of all jobs of the run again, other shards included. Raises UserError."""
        self.records = {record.key: record for record in read_records(self.folder)}
        self._failures = {failure.key: failure for failure in read_failures(self.folder)}

    @property
    def failures(self) -> list[Failure]:
        """The last failure of each example that has no record."""
        return [failure for key, failure in self._failures.items() if key not in self.records]

    def append(self, record: Record) -> None:
        """Write the record to the disk, so that it survives a kill of this process or a power failure.

        Raises UserError if it cannot be written.
        """
        _append_line(self._file, record.to_json())
        self.records[record.key] = record

    def fail(self, failure: Failure) -> None:
        """Record that an example could not be measured, as safely as a record is. Raises UserError."""
        _append_line(self._failures_file, failure.to_json())
        self._failures[failure.key] = failure

    def note(self, event: dict[str, Any]) -> None:
        """Record the begin or end of a job. Raises UserError."""
        _append_line(self._jobs_file, json.dumps(event))

    def has(self, name: str) -> bool:
        """Whether the folder has a file of this name."""
        return (self.folder / name).is_file()

    def write(self, name: str, text: str) -> None:
        """Write a file into the folder, completely or not at all. Raises UserError."""
        write_whole(self.folder / name, text)


@contextmanager
def open_store(folder: Path, identity: dict[str, Any], about: dict[str, Any], part: str = "") -> Iterator[RunStore]:
    """Open the store in `folder` (created if missing) and lock it against other processes until the block ends.

    identity: decides whether records belong together. about: config and provenance, for people. part: as in `RunStore`.
    Jobs of different shards may work in the folder at the same time; a job of the whole run works alone.
    Raises UserError if another process works in the folder, or if it holds a run with another identity.
    """
    with _held(folder, part, lambda: _check_identity(folder, identity, about)) as content:
        if not part:
            _remove_partial(folder)
        yield RunStore(folder, part, content)


@contextmanager
def held_alone(folder: Path) -> Iterator[None]:
    """Lock a run folder against all other processes until the block ends. Raises UserError if another works in it."""
    with _held(folder, "", lambda: None):
        yield


_Made = TypeVar("_Made")


@contextmanager
def _held(folder: Path, part: str, begin: Callable[[], _Made]) -> Iterator[_Made]:
    """Lock a shard of a run folder, "" for all of it. begin: called while no other job can start. Raises UserError."""
    with ExitStack() as held:
        with _locked(folder / ".lock-run.json", timeout=-1):
            held.enter_context(_locked(folder / f".lock{part}"))
            for other in [folder / ".lock"] if part else folder.glob(".lock-*-of-*"):
                with _locked(other):  # raises if it is held; no other job can start until this one holds its lock
                    pass
            made = begin()
        yield made


@contextmanager
def _locked(file: Path, timeout: float = 0) -> Iterator[None]:
    """Hold a lock file in a run folder, created if missing. timeout: seconds, -1 for no limit. Raises UserError."""
    lock = FileLock(file, timeout=timeout)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise UserError(
            f"{file.parent}: the run folder cannot be written ({error}); give another with out=FOLDER"
        ) from error
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(f"{file.parent}: another process is working in this run folder") from error
    except OSError as error:  # some cluster file systems do not support locks
        log.warning("%s: cannot be locked (%s); make sure that only one process works in it", file.parent, error)
    try:
        yield
    finally:
        lock.release()


def _append_line(file: Path, line: str) -> None:
    """Append one line and flush it to the disk, or leave the file unchanged. Raises UserError."""
    before = None
    try:
        with file.open("ab") as opened:
            before = opened.tell()
            opened.write(f"{line}\n".encode())
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        if before is not None:
            with suppress(OSError):  # if this fails too, the incomplete line is removed when the run is resumed
                os.truncate(file, before)
        raise UserError(
            f"{file}: the line could not be written ({error}). Those before it are safe: free some disk space, then "
            "run the same command again"
        ) from error


def _mend_end(file: Path, parse: Callable[[str], Any]) -> None:
    """Add a missing newline to a complete last line, or remove a last line that a kill left incomplete."""
    if not file.exists():
        return
    try:
        with file.open("r+b") as opened:
            data = opened.read()
            end = data.rfind(b"\n") + 1
            if isinstance(_parsed(data[end:], parse), Exception):
                opened.truncate(end)
            else:
                opened.write(b"\n")
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error}); fix that, or start a new run with out=FOLDER") from error


def write_whole(file: Path, text: str) -> None:
    """Write a file completely or not at all. Raises UserError if it cannot be written."""
    partial = file.with_name(f".{file.name}.{uuid4().hex[:8]}.partial")  # two shards may finish at the same time
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8", newline="") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        partial.replace(file)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(
            f"{file}: could not be written ({error}). An earlier file of this name is unchanged: fix the cause (such "
            "as a full disk), then run the same command again"
        ) from error


def _remove_partial(folder: Path) -> None:
    """Remove the incomplete files of `write_whole` that a killed process left behind."""
    for file in folder.glob(".*.partial"):
        with suppress(OSError):
            file.unlink()


# ------------------------------------------------------------------------------------------------------------- reading


def read_run(folder: Path) -> tuple[dict[str, Any], list[Record]]:
    """run.json's content and the records. Raises UserError."""
    return read_about(folder / "run.json"), read_records(folder)


def read_table(folder: Path) -> pa.Table:
    """The run's records in the columns of `eval.store.record.SCHEMA`, each example once. Raises UserError."""
    with suppress(ValueError):  # unusual files take the slow path below, which names the fault if there is one
        tables = [lines_to_table(read_data(file)) for file in files_of(folder, "records")]
        table = pa.concat_tables([SCHEMA.empty_table(), *tables])
        if len(table.group_by(["dataset", "id"]).aggregate([])) == len(table):
            return table
    records = read_records(folder)
    try:
        return to_table(records)
    except ValueError as error:
        raise UserError(
            f"{folder}: a record holds an impossible value ({error}). Nothing was changed: remove its line, and the "
            "run measures its example again"
        ) from error


def read_records(folder: Path) -> list[Record]:
    """The run's records, each example once. Raises UserError for an invalid line, or two different records of a row."""
    records: dict[tuple[str, str], Record] = {}
    places: dict[tuple[str, str], str] = {}
    for file in files_of(folder, "records"):
        for number, record in _read_lines(file, Record.from_json):
            place = f"{file}:{number}"
            first = places.setdefault(record.key, place)
            if records.setdefault(record.key, record) != record:
                raise UserError(
                    f"{place}: another record of {record.dataset}, row {record.id}, than {first}. Nothing was "
                    f"changed: remove the wrong one, or run `lazyllm-bench repair {folder}`, which keeps a copy"
                )
            if place != first:
                log.warning("%s: repeats %s; the record counts once", place, first)
    return list(records.values())


def read_failures(folder: Path) -> list[Failure]:
    """The last failure of each example, even if the example has a record by now. Raises UserError."""
    files = files_of(folder, "failures")
    failures = (failure for file in files for _, failure in _read_lines(file, Failure.from_json))
    return list({failure.key: failure for failure in failures}.values())


def files_of(folder: Path, name: str) -> list[Path]:
    """The files of a run's "records", "failures" or "jobs": the whole run's file, then each shard's."""
    whole = folder / f"{name}.jsonl"
    return [*([whole] if whole.exists() else []), *sorted(folder.glob(f"{name}-*-of-*.jsonl"))]


def read_data(file: Path) -> bytes:
    """The content of a file of lines. Raises UserError if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error}); fix that, or start a new run with out=FOLDER") from error


def lines_of(file: Path, parse: Callable[[str], Any]) -> Iterator[tuple[int, str, Any]]:
    """(number from 1, text, parsed line or the exception of parsing it) for each line that is not blank.

    A last line without its newline counts if it can be parsed: an incomplete one is not JSON. Raises UserError if the
    file cannot be read.
    """
    *lines, tail = read_data(file).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, line.decode(errors="replace"), _parsed(line, parse)
    whole = _parsed(tail, parse)
    if not isinstance(whole, Exception):
        yield len(lines) + 1, tail.decode(), whole


def _parsed(line: bytes, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(line.decode())
    except NO_LINE as error:
        return error


def _read_lines(file: Path, parse: Callable[[str], _Line]) -> Iterator[tuple[int, _Line]]:
    """(number, parsed line) of a file. Raises UserError at the first invalid line."""
    for number, _, line in lines_of(file, parse):
        if isinstance(line, Exception):
            raise UserError(
                f"{file}:{number}: not a record ({type(line).__name__}: {line}). Nothing was changed: remove the line, "
                f"or run `lazyllm-bench repair {file.parent}`, which keeps a copy; the run then measures its example "
                "again. Or start a new run with out=FOLDER"
            ) from line
        yield number, line


# ------------------------------------------------------------------------------------------------------------ run.json


def _check_identity(folder: Path, identity: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """run.json's content, written if missing. Raises UserError for another identity, or records without run.json."""
    file = folder / "run.json"
    if not file.exists():
        if any(folder.glob("records*.jsonl")):
            raise UserError(f"{folder}: holds records but no run.json; give another folder with out=FOLDER")
        text = about_text(identity, about)
        write_whole(file, text)
        return json.loads(text)
    content = read_about(file)
    check_same(folder, "run", content["identity"], json.loads(_canonical(identity)))
    return content


def check_same(folder: Path, kind: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise UserError, with the differences, if a folder's run or study has another identity than the current one."""
    differing = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    if differing:
        changes = "; ".join(f"{key}: {_short(before.get(key))} there, {_short(now.get(key))} now" for key in differing)
        raise UserError(
            f"{folder}: holds a {kind} that differs ({changes}). Their records cannot be mixed: give another "
            "folder with out=FOLDER, or omit out= for a new one"
        )


def about_text(identity: dict[str, Any], about: dict[str, Any]) -> str:
    """run.json's text."""
    content = {"schema": VERSION, "fingerprint": fingerprint(identity), "identity": identity, **about}
    return json.dumps(content, indent=2, sort_keys=True, default=str) + "\n"


def read_about(file: Path) -> dict[str, Any]:
    """The content of a run.json. Raises UserError if it is missing, damaged, or written by another version."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        version = content["schema"]
        if not isinstance(content["identity"], dict):
            raise TypeError(f"identity is {_short(content['identity'])}")
    except (OSError, *NO_LINE) as error:
        raise UserError(
            f"{file}: cannot be read as a run's description ({type(error).__name__}: {error}). Nothing was changed: "
            f"restore it, or run `lazyllm-bench repair {file.parent}`; or start a new run with out=FOLDER"
        ) from error
    if version != VERSION:
        raise UserError(f"{file}: written with schema {version}, this version reads {VERSION}; give another out=FOLDER")
    return content


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def _short(value: Any) -> str:
    text = _canonical(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
