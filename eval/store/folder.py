"""A run's folder: records appended one by one, and an identity that keeps different runs apart.

run.json        the run's identity and its fingerprint, its config, and where it ran (`eval.run.provenance`)
records.jsonl   one `Record` a line, flushed when its example is done
failures.jsonl  one `Failure` a line, if there are any: these examples are tried again when the run goes on
jobs.jsonl      when a job began and ended to measure, how, and the load that it saw (`eval.run.device_lock`)
summary.*       made from the records at the end (`eval.paper.summary`)

A shard of a run (`eval.benchmarks.split`) writes records-2-of-4.jsonl and so on; a run's records are those of all its
files. What a kill leaves of a last line is cut off when its job goes on. Any other damage is refused;
`lazyllm-bench repair` mends it.
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

VERSION = 2  # of run.json, which calls it its schema

# Exceptions raised by parsing an invalid line
NO_LINE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


def fingerprint(identity: dict[str, Any]) -> str:
    """12 hex digits that two runs share only if their records may lie together."""
    return hashlib.sha256(_canonical(identity).encode()).hexdigest()[:12]


# ------------------------------------------------------------------------------------------------------------- writing


class RunStore:
    """The records of one run. Open it with `open_store`.

    part: the end of the names of the files that are written here: nothing, or a shard's. about: run.json's content.
    records: by example, all that the run's jobs have measured.
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
        """Read again what the run's jobs have measured, this one and those of other shards. Raises UserError."""
        self.records = {record.key: record for record in read_records(self.folder)}
        self._failures = {failure.key: failure for failure in read_failures(self.folder)}

    @property
    def failures(self) -> list[Failure]:
        """The last failure of each example that has no record."""
        return [failure for key, failure in self._failures.items() if key not in self.records]

    def append(self, record: Record) -> None:
        """Write the record so that it survives a kill of this process, and of the machine as far as the disk obeys.

        Raises UserError if the disk does not take it.
        """
        _append_line(self._file, record.to_json())
        self.records[record.key] = record

    def fail(self, failure: Failure) -> None:
        """Write down that an example could not be measured, as safely as a record. Raises UserError."""
        _append_line(self._failures_file, failure.to_json())
        self._failures[failure.key] = failure

    def note(self, event: dict[str, Any]) -> None:
        """Write down when and how a job begins or ends. Raises UserError."""
        _append_line(self._jobs_file, json.dumps(event))

    def has(self, name: str) -> bool:
        """Whether a file lies beside the records."""
        return (self.folder / name).is_file()

    def write(self, name: str, text: str) -> None:
        """Put a file beside the records, whole or not at all. Raises UserError."""
        write_whole(self.folder / name, text)


@contextmanager
def open_store(folder: Path, identity: dict[str, Any], about: dict[str, Any], part: str = "") -> Iterator[RunStore]:
    """The store in `folder`, made if it is not there, held against other processes until the block ends.

    identity: decides whether records belong together. about: config and provenance, for people. part: as in `RunStore`.
    Jobs of different parts may work in the folder at once, but none beside a job of the whole run.
    Raises UserError: another process works in the folder, or it holds a run of another identity.
    """
    with _held(folder, part, lambda: _check_identity(folder, identity, about)) as content:
        if not part:
            _remove_partial(folder)
        yield RunStore(folder, part, content)


@contextmanager
def held_alone(folder: Path) -> Iterator[None]:
    """Hold a run folder against all other processes until the block ends. Raises UserError: another works in it."""
    with _held(folder, "", lambda: None):
        yield


_Made = TypeVar("_Made")


@contextmanager
def _held(folder: Path, part: str, begin: Callable[[], _Made]) -> Iterator[_Made]:
    """Hold a part of a run folder, "" for all of it. begin: called while no other job may begin. Raises UserError."""
    with ExitStack() as held:
        with _locked(folder / ".lock-run.json", timeout=-1):
            held.enter_context(_locked(folder / f".lock{part}"))
            for other in [folder / ".lock"] if part else folder.glob(".lock-*-of-*"):
                with _locked(other):  # free now, and nobody can take it before this job holds its own
                    pass
            made = begin()
        yield made


@contextmanager
def _locked(file: Path, timeout: float = 0) -> Iterator[None]:
    """Hold a lock file in a run folder, made if it is not there. timeout: seconds, -1 for no end. Raises UserError."""
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
    except OSError as error:  # some cluster file systems know no locks
        log.warning("%s: cannot be locked (%s); see to it that one process works in it", file.parent, error)
    try:
        yield
    finally:
        lock.release()


def _append_line(file: Path, line: str) -> None:
    """Write one line to the disk, or leave the file as it was. Raises UserError."""
    before = None
    try:
        with file.open("ab") as opened:
            before = opened.tell()
            opened.write(f"{line}\n".encode())
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        if before is not None:
            with suppress(OSError):  # what is left of the line then is cut off when the run goes on
                os.truncate(file, before)
        raise UserError(
            f"{file}: the line could not be written ({error}). Those before it are safe: make room, then "
            "give the same command again"
        ) from error


def _mend_end(file: Path, parse: Callable[[str], Any]) -> None:
    """End a last line that lacks its end, or remove what a kill left of one, so that the next begins on its own."""
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
        raise UserError(
            f"{file}: cannot be written ({error}); mend that, or start a new run with out=FOLDER"
        ) from error


def write_whole(file: Path, text: str) -> None:
    """Put a file in place whole or not at all. Raises UserError if the disk does not take it."""
    partial = file.with_name(f".{file.name}.{uuid4().hex[:8]}.partial")  # two shards may end at the same time
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
            f"{file}: could not be written ({error}). What was there before is unchanged: make room (or whatever "
            "it lacks), then give the same command again"
        ) from error


def _remove_partial(folder: Path) -> None:
    """Remove what a killed process left of files that it was writing (`write_whole`)."""
    for file in folder.glob(".*.partial"):
        with suppress(OSError):
            file.unlink()


# ------------------------------------------------------------------------------------------------------------- reading


def read_run(folder: Path) -> tuple[dict[str, Any], list[Record]]:
    """run.json's content and the records. Raises UserError."""
    return read_about(folder / "run.json"), read_records(folder)


def read_table(folder: Path) -> pa.Table:
    """The run's records in the columns of `eval.store.record.SCHEMA`, each example once. Raises UserError."""
    with suppress(ValueError):  # what is unusual goes the slow way, which says what is wrong, if anything is
        tables = [lines_to_table(read_data(file)) for file in files_of(folder, "records")]
        table = pa.concat_tables([SCHEMA.empty_table(), *tables])
        if len(table.group_by(["dataset", "id"]).aggregate([])) == len(table):
            return table
    records = read_records(folder)
    try:
        return to_table(records)
    except ValueError as error:
        raise UserError(
            f"{folder}: a record holds a value that no record has ({error}). Nothing was changed: remove its line to "
            "have its example redone"
        ) from error


def read_records(folder: Path) -> list[Record]:
    """The run's records, each example once. Raises UserError: an invalid line, two different records of one example."""
    records: dict[tuple[str, str], Record] = {}
    places: dict[tuple[str, str], str] = {}
    for file in files_of(folder, "records"):
        for number, record in _read_lines(file, Record.from_json):
            place = f"{file}:{number}"
            first = places.setdefault(record.key, place)
            if records.setdefault(record.key, record) != record:
                raise UserError(
                    f"{place}: another record of {record.dataset}, row {record.id}, than {first}. Nothing was "
                    f"changed: remove the wrong one, or {_to_repair(folder)}"
                )
            if place != first:
                log.warning("%s: the same line as %s; it counts once", place, first)
    return list(records.values())


def read_failures(folder: Path) -> list[Failure]:
    """The last failure of each example; some may have a record by now. Raises UserError."""
    files = files_of(folder, "failures")
    failures = (failure for file in files for _, failure in _read_lines(file, Failure.from_json))
    return list({failure.key: failure for failure in failures}.values())


def files_of(folder: Path, name: str) -> list[Path]:
    """The files that hold a run's "records", "failures" or "jobs": the whole run's, then each shard's."""
    whole = folder / f"{name}.jsonl"
    return [*([whole] if whole.exists() else []), *sorted(folder.glob(f"{name}-*-of-*.jsonl"))]


def read_data(file: Path) -> bytes:
    """A file of lines. Raises UserError if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error}); mend that, or start a new run with out=FOLDER") from error


def lines_of(file: Path, parse: Callable[[str], Any]) -> Iterator[tuple[int, str, Any]]:
    """(number from 1, text, the parsed line or the exception of parsing it) of every line that is not blank.

    A last line without its end counts if it is whole: what a kill leaves of one is no JSON. Raises UserError if the
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
                f"{file}:{number}: not a record ({type(line).__name__}: {line}). Nothing was changed: remove that line "
                f"to have its example redone, or {_to_repair(file.parent)}; or start a new run with out=FOLDER"
            ) from line
        yield number, line


def _to_repair(folder: Path) -> str:
    return (
        f"`lazyllm-bench repair {folder}` sets damaged files aside and keeps the good ones; then the run's "
        "command measures the lost examples again"
    )


# ------------------------------------------------------------------------------------------------------------ run.json


def _check_identity(folder: Path, identity: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """run.json's content, written if there is none yet. Raises UserError: a run of another identity, or of nobody."""
    file = folder / "run.json"
    if not file.exists():
        if any(folder.glob("records*.jsonl")):
            raise UserError(f"{folder}: holds records but no run.json that says whose; give another with out=FOLDER")
        text = about_text(identity, about)
        write_whole(file, text)
        return json.loads(text)
    content = read_about(file)
    check_same(folder, "run", content["identity"], json.loads(_canonical(identity)))
    return content


def check_same(folder: Path, kind: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise UserError, with the differences, if a folder holds a run or study of another identity than now."""
    differing = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    if differing:
        changes = "; ".join(f"{key}: {_short(before.get(key))} there, {_short(now.get(key))} now" for key in differing)
        raise UserError(
            f"{folder}: holds a {kind} that differs ({changes}). Its records do not mix with this one's: give another "
            "folder with out=FOLDER, or leave out= away to have one made"
        )


def about_text(identity: dict[str, Any], about: dict[str, Any]) -> str:
    """run.json's text."""
    content = {"schema": VERSION, "fingerprint": fingerprint(identity), "identity": identity, **about}
    return json.dumps(content, indent=2, sort_keys=True, default=str) + "\n"


def read_about(file: Path) -> dict[str, Any]:
    """The content of a run.json. Raises UserError: none, damaged, or written by another version."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        version = content["schema"]
        if not isinstance(content["identity"], dict):
            raise TypeError(f"identity is {_short(content['identity'])}")
    except (OSError, *NO_LINE) as error:
        raise UserError(
            f"{file}: cannot be read as a run's description ({type(error).__name__}: {error}). Nothing was changed: "
            f"put the right one there, or {_to_repair(file.parent)}; or start a new run with out=FOLDER"
        ) from error
    if version != VERSION:
        raise UserError(f"{file}: written with schema {version}, this version reads {VERSION}; give another out=FOLDER")
    return content


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def _short(value: Any) -> str:
    text = _canonical(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
