"""A run's folder: records appended one by one, and an identity that keeps different runs apart.

run.json        the run's identity and its fingerprint, its config, and where it ran (`eval.run.provenance`)
records.jsonl   one `Record` a line, flushed when its example is done
failures.jsonl  one `Failure` a line, where there are any: examples that are tried again when the run goes on
jobs.jsonl      when a job began and ended to measure, how, and the load that it saw (`eval.run.device_lock`)
summary.*       made from the records at the end (`eval.paper.summary`)

A shard of a run (`eval.benchmarks.split`) writes records-2-of-4.jsonl and so on; a run's records are those of all its
files.
What a kill leaves of a last line is cut off when its job goes on; any other damage is refused, and
`eval.store.repair` mends
it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from eval.store.record import Failure, Record, job_event
from lazyllm.errors import UserError

log = logging.getLogger(__name__)

Line = TypeVar("Line", Record, Failure)

SCHEMA = 2  # of run.json and records.jsonl

# What a line that is none raises where it is parsed
NO_LINE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


def fingerprint(identity: dict[str, Any]) -> str:
    """12 hex digits that two runs share only if their records may lie together."""
    return hashlib.sha256(_canonical(identity).encode()).hexdigest()[:12]


class RunStore:
    """The records of one run. Open it with `open_store`.

    part: what the names of the files that are written here end in: nothing, or a shard's.
    """

    def __init__(self, folder: Path, part: str = "") -> None:
        self.folder = folder
        self._file, self._failures_file, self._jobs_file = (
            folder / f"{name}{part}.jsonl" for name in ("records", "failures", "jobs")
        )
        self.reload()
        _mend_end(self._file, Record.from_json)
        _mend_end(self._failures_file, Failure.from_json)
        _mend_end(self._jobs_file, job_event)

    def reload(self) -> None:
        """Read again what the run's jobs have measured, this one and those of other shards. Raises UserError."""
        self.records = _read_records(self.folder)
        self._failures = {one.key: one for one in read_failures(self.folder)}

    @property
    def failures(self) -> list[Failure]:
        """The last failure of each example that has no record."""
        return [failure for key, failure in self._failures.items() if key not in self.records]

    def append(self, record: Record) -> None:
        """Write the record so that it survives a kill of this process, and of the machine as far as the disk obeys.

        Raises UserError where the disk does not take it.
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


def _read_records(folder: Path) -> dict[tuple[str, str], Record]:
    """The run's records by example. Raises UserError: a line that is none, two different records of one example."""
    records: dict[tuple[str, str], Record] = {}
    places: dict[tuple[str, str], str] = {}
    for file in files_of(folder, "records"):
        for number, record in _read_lines(file, Record.from_json):
            where = f"{file}:{number}"
            other = records.setdefault(record.key, record)
            first = places.setdefault(record.key, where)
            if other is record:
                continue
            if other != record:
                raise UserError(
                    f"{where}: another record of {record.dataset}, row {record.id}, than {first}. Nothing was changed: "
                    f"remove the wrong one, or {_to_repair(folder)}"
                )
            log.warning("%s: the same line as %s; it counts once", where, first)
    return records


def _to_repair(folder: Path) -> str:
    return (
        f"`python -m eval.store.repair {folder}` sets damaged files aside and keeps the good ones; then the run's "
        "command measures the lost examples again"
    )


def files_of(folder: Path, name: str) -> list[Path]:
    """The files that hold a run's "records" or "failures": the whole run's, then each shard's."""
    whole = folder / f"{name}.jsonl"
    return [*([whole] if whole.exists() else []), *sorted(folder.glob(f"{name}-*-of-*.jsonl"))]


def lines_of(file: Path, parse: Callable[[str], Any]) -> Iterator[tuple[int, str, Any]]:
    """(number from 1, text, what `parse` makes of it or the exception that it raises) of every line that is not blank.

    A last line without its end counts if it is whole: what a kill leaves of one is no JSON. Raises UserError where the
    file cannot be read.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error}); mend that, or start a new run with out=FOLDER") from error
    *lines, tail = data.split(b"\n")
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


def _read_lines(file: Path, parse: Callable[[str], Line]) -> Iterator[tuple[int, Line]]:
    """(number, line parsed) of a file. Raises UserError at the first that is none."""
    for number, _, line in lines_of(file, parse):
        if isinstance(line, Exception):
            raise UserError(
                f"{file}:{number}: not a record ({type(line).__name__}: {line}). Nothing was changed: remove that line "
                f"to have its example redone, or {_to_repair(file.parent)}; or start a new run with out=FOLDER"
            ) from line
        yield number, line


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


@contextmanager
def open_store(folder: Path, identity: dict[str, Any], about: dict[str, Any], part: str = "") -> Iterator[RunStore]:
    """The store in `folder`, made if it is not there, held against other processes until the block ends.

    identity: what decides whether records belong together. about: config and provenance, for people. part: as in
    `RunStore`; jobs of different parts may work in the folder at once, beside a job of the whole run none.
    Raises UserError: another process works in the folder, or it holds a run of another identity.
    """
    with ExitStack() as locks:
        locks.enter_context(_locked(folder / ".lock", (fcntl.LOCK_SH if part else fcntl.LOCK_EX) | fcntl.LOCK_NB))
        if part:
            locks.enter_context(_locked(folder / f".lock{part}", fcntl.LOCK_EX | fcntl.LOCK_NB))
        with _locked(folder / ".lock-run.json", fcntl.LOCK_EX):  # shards may begin at the same time
            _check_identity(folder, identity, about)
        if not part:
            _remove_partial(folder)
        yield RunStore(folder, part)


@contextmanager
def held_alone(folder: Path) -> Iterator[None]:
    """Hold a run folder against all other processes until the block ends. Raises UserError: another works in it."""
    with _locked(folder / ".lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
        yield


@contextmanager
def _locked(file: Path, how: int) -> Iterator[None]:
    """Hold a lock file in a run folder, made if it is not there; how: as in `fcntl.flock`. Raises UserError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("w")
    except OSError as error:
        raise UserError(
            f"{file.parent}: the run folder cannot be written ({error}); give another with out=FOLDER"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, how)
        except BlockingIOError as error:
            raise UserError(f"{file.parent}: another process is working in this run folder") from error
        except OSError as error:  # some cluster file systems know no locks
            log.warning("%s: cannot be locked (%s); see to it that one process works in it", file.parent, error)
        yield


def read_run(folder: Path) -> tuple[dict[str, Any], list[Record]]:
    """A stored run for tables and figures: run.json's content and the records. Raises UserError."""
    return read_about(folder / "run.json"), list(_read_records(folder).values())


def read_failures(folder: Path) -> list[Failure]:
    """The last failure of each example; some may have a record by now. Raises UserError."""
    files = files_of(folder, "failures")
    lines = (failure for file in files for _, failure in _read_lines(file, Failure.from_json))
    return list({failure.key: failure for failure in lines}.values())


def _check_identity(folder: Path, identity: dict[str, Any], about: dict[str, Any]) -> None:
    file = folder / "run.json"
    if not file.exists():
        if any(folder.glob("records*.jsonl")):
            raise UserError(f"{folder}: holds records but no run.json that says whose; give another with out=FOLDER")
        write_whole(file, about_text(identity, about))
        return
    before = read_about(file)["identity"]
    now = json.loads(_canonical(identity))
    if before != now:
        differing = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
        changes = "; ".join(f"{key}: {_short(before.get(key))} there, {_short(now.get(key))} now" for key in differing)
        raise UserError(
            f"{folder}: holds a run that differs ({changes}). Its records do not mix with this one's: give another "
            "folder with out=FOLDER, or leave out= away to have one made"
        )


def about_text(identity: dict[str, Any], about: dict[str, Any]) -> str:
    """What run.json holds."""
    content = {"schema": SCHEMA, "fingerprint": fingerprint(identity), "identity": identity, **about}
    return json.dumps(content, indent=2, sort_keys=True, default=str) + "\n"


def read_about(file: Path) -> dict[str, Any]:
    """The content of a run.json. Raises UserError: none, damaged, or written by another version."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        schema = content["schema"]
        if not isinstance(content["identity"], dict):
            raise TypeError(f"identity is {_short(content['identity'])}")
    except (OSError, *NO_LINE) as error:
        raise UserError(
            f"{file}: cannot be read as a run's description ({type(error).__name__}: {error}). Nothing was changed: "
            f"put the right one there, or {_to_repair(file.parent)}; or start a new run with out=FOLDER"
        ) from error
    if schema != SCHEMA:
        raise UserError(f"{file}: written with schema {schema}, this version reads {SCHEMA}; give another out=FOLDER")
    return content


def write_whole(file: Path, text: str) -> None:
    """Put a file in place whole or not at all. Raises UserError where the disk does not take it."""
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


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def _short(value: Any) -> str:
    text = _canonical(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
