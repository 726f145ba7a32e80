"""A run's folder: visits appended one by one, and an identity that keeps different runs apart.

run.json        the run's identity and fingerprint, its config and machine (`eval.run.identity`)
examples.json   {dataset: ids of the examples that the run's last job planned}
visits.jsonl    one `Visit` per line, flushed to disk when all arms have answered its example
jobs.jsonl      when each job began and ended, how it ended, and the machine's load average
traces          one `Trace` per file, of an example under an arm
summary.*       made from the visits at the end (`eval.analysis.run_table`)

A committed campaign holds visits.jsonl.gz, which readers take as it is. A job that resumes the run
removes what a kill left incomplete, and sets damaged lines aside in a file beside, such as
visits.jsonl.damaged-1. Readers change nothing and refuse damage.
"""

import gzip
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from eval.benchmarks.datasets import add_own
from eval.benchmarks.rows import canonical, sha256_of
from eval.store.record import Visit
from lazyllm.errors import UserError
from lazyllm.files import write_whole

log = logging.getLogger(__name__)

VERSION = 5  # of run.json's layout, stored there as `schema`
PLANNED = "examples.json"

# Exceptions raised by parsing an invalid line
BAD_LINE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


def job_event(line: bytes) -> dict[str, Any]:
    """A line of jobs.jsonl: "event", which is begin or end, its "time", and more. Raises one of
    `BAD_LINE`.
    """
    values = json.loads(line)
    if values["event"] not in ("begin", "end"):
        raise ValueError(f"event is {values['event']!r}, not begin or end")
    datetime.fromisoformat(values["time"])
    return values


_PARSE: dict[str, Callable[[bytes], Any]] = {"visits": Visit.from_json, "jobs": job_event}


def fingerprint(identity: dict[str, Any]) -> str:
    """12 hex digits, equal for two runs only if their visits may share a folder."""
    return sha256_of(identity)[:12]


class RunStore:
    """The visits of one run. Open it with `open_store`.

    about: run.json's content. visits: {example: its visits, in order} of all jobs of the run.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder = folder
        self.about = about
        self._files = {name: folder / f"{name}.jsonl" for name in _PARSE}
        for name, file in self._files.items():
            if file.exists():
                _mend(file, name)
        self.visits: dict[tuple[str, str], list[Visit]] = {}
        for visit in read_visits(folder):
            self.visits.setdefault(visit.key, []).append(visit)

    def answered(self, key: tuple[str, str]) -> set[str]:
        """The labels of the arms that have answered an example."""
        return {label for visit in self.visits.get(key, ()) for label in visit.answers}

    def append(self, visit: Visit) -> None:
        """Write the visit to the disk, where it survives a kill or a power failure. Raises
        UserError if it cannot.
        """
        _append_line(self._files["visits"], visit.to_json())
        self.visits.setdefault(visit.key, []).append(visit)

    def plan(self, keys: Iterable[tuple[str, str]]) -> None:
        """List the examples that the job plans, then others in the folder from a wider run. Raises
        UserError if visits are missing and cannot be appended."""
        planned = dict.fromkeys([*keys, *self.visits])
        if not self.visits.keys() >= planned.keys():
            self.check_appends()
        content: dict[str, list[str]] = {}
        for dataset, example in planned:
            content.setdefault(dataset, []).append(example)
        write_whole(self.folder / PLANNED, json.dumps(content) + "\n")

    def check_appends(self) -> None:
        """Raise UserError if the visits are compressed."""
        for file in files_of(self.folder, "visits"):
            if file.suffix == ".gz":
                raise UserError(
                    f"{file}: a job cannot append to it: gunzip it, or give another folder with "
                    "out=FOLDER"
                )

    def note(self, event: dict[str, Any]) -> None:
        """Record the begin or end of a job. Raises UserError as `check_appends`, and for a full
        disk.
        """
        self.check_appends()
        _append_line(self._files["jobs"], json.dumps(event))


@contextmanager
def open_store(folder: Path, identity: dict[str, Any], about: dict[str, Any]) -> Iterator[RunStore]:
    """Open the store in `folder` (created if missing) and lock it against other processes until the
    block ends.

    identity: as in JSON; decides whether visits belong together. about: config and provenance, for
    people. Raises UserError if another process works in the folder, if it holds a run with another
    identity, or visits without run.json.
    """
    with _locked(folder / ".lock"):
        with suppress(OSError):
            for partial in folder.glob(".*.partial"):  # what a killed process was writing
                partial.unlink(missing_ok=True)
        if not (folder / "run.json").exists():
            if files_of(folder, "visits"):
                raise UserError(
                    f"{folder}: holds visits but no run.json; give another folder with out=FOLDER"
                )
            content = {
                "schema": VERSION,
                "fingerprint": fingerprint(identity),
                "identity": identity,
                **about,
            }
            write_whole(folder / "run.json", json.dumps(content, indent=2, default=str) + "\n")
        content = read_about(folder / "run.json")
        check_same(folder, "run", content["identity"], identity)
        yield RunStore(folder, content)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock file in a run folder, created if missing. Raises UserError."""
    lock = FileLock(file, timeout=0)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise UserError(
            f"{file.parent}: cannot be written ({error}); give another with out=FOLDER"
        ) from error
    try:
        lock.acquire()
    except Timeout as error:
        last = read_jobs(file.parent)[-1:]
        jobs = [event for event in last if event["event"] == "begin"]
        others = [
            f"process {job['process']} on {job['host']} since {job['time']}" for job in jobs
        ] or ["preparing"]
        raise UserError(
            f"{file.parent}: another process is working in this run folder ({others[0]})"
        ) from error
    except OSError as error:  # some cluster file systems do not support locks
        log.warning(
            "%s: cannot be locked (%s); make sure that only one process works in it",
            file.parent,
            error,
        )
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
            with suppress(
                OSError
            ):  # if this fails too, the incomplete line is removed when the run is resumed
                os.truncate(file, before)
        raise UserError(
            f"{file}: the line could not be written ({error}). Those before it are safe: free some "
            "disk space, then run the same command again"
        ) from error


def _mend(file: Path, name: str) -> None:
    """Set a file's bad lines aside, into a new one, and remove a last line that is incomplete.
    Raises UserError.
    """
    lines = _lines(file, name)
    if bad := [line for line in lines if line.fault is not None]:
        names = (file.with_name(f"{file.name}.damaged-{number}") for number in count(1))
        aside = next(path for path in names if not path.exists())
        write_whole(aside, b"".join(line.data + b"\n" for line in bad))
        faults = [f"line {line.number}: {line.fault}" for line in bad]
        about = "; ".join(faults[:3] + ["..."] * (len(faults) > 3))
        log.warning(
            "%s: damaged lines are set aside in %s: %d (%s)", file, aside.name, len(faults), about
        )
    good = b"".join(line.data + b"\n" for line in lines if line.fault is None)
    if good != _data(file):
        write_whole(file, good)


def read_visits(folder: Path) -> list[Visit]:
    """The run's visits, each once. Raises UserError for an invalid line."""
    first: dict[bytes, _Line] = {}
    for line in _sound_lines(folder, "visits"):
        if (before := first.setdefault(line.data, line)) is not line:
            places = line.file, line.number, before.file, before.number
            log.warning("%s:%d: repeats %s:%d; the visit counts once", *places)
    return [line.value for line in first.values()]


def read_jobs(folder: Path) -> list[dict[str, Any]]:
    """The begins and ends of the run's jobs, in order. Raises UserError."""
    return [line.value for line in _sound_lines(folder, "jobs")]


def read_planned(folder: Path) -> list[tuple[str, str]] | None:
    """(dataset, id) of the examples that the run's last job planned; None without its list.
    Raises UserError.
    """
    file = folder / PLANNED
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return [(dataset, example) for dataset, ids in content.items() for example in ids]
    except FileNotFoundError:
        return None
    except (OSError, *BAD_LINE) as error:
        raise UserError(
            f"{file}: cannot be read ({type(error).__name__}: {error}); remove it"
        ) from error


def files_of(folder: Path, name: str) -> list[Path]:
    """The files of a run's "visits" or "jobs" that are there, the gzipped one of a campaign
    first.
    """
    return [file for end in (".jsonl.gz", ".jsonl") if (file := folder / f"{name}{end}").exists()]


@dataclass(frozen=True)
class _Line:
    file: Path
    number: int  # from 1
    data: bytes
    value: Any
    fault: str | None  # why it does not count; None if it does


def _lines(file: Path, name: str) -> list[_Line]:
    """The lines of a file of one kind of `_PARSE` that are not blank. Raises UserError if it cannot
    be read.

    A last line without its newline counts if it can be parsed: an incomplete one is not JSON, and
        is left out.
    """
    lines: list[_Line] = []
    whole = _data(file).split(b"\n")
    for number, data in enumerate(whole, start=1):
        if not data.strip():
            continue
        try:
            value, fault = _PARSE[name](data), None
        except BAD_LINE as error:
            if number == len(whole):
                continue
            value, fault = None, f"not a line of {name} ({type(error).__name__}: {error})"
        lines.append(_Line(file, number, data, value, fault))
    return lines


def _sound_lines(folder: Path, name: str) -> list[_Line]:
    """The lines of all of a run's files of one kind. Raises UserError at the first with a fault."""
    lines = [line for file in files_of(folder, name) for line in _lines(file, name)]
    for line in lines:
        if line.fault is not None:
            raise UserError(
                f"{line.file}:{line.number}: {line.fault}. Nothing was changed: run the run's "
                "command again, which sets such lines aside and measures their examples. Or start "
                "a new run with out=FOLDER"
            )
    return lines


def _data(file: Path) -> bytes:
    try:
        return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{file}: cannot be read ({error}); fix that, or start a new run with out=FOLDER"
        ) from error


def check_same(folder: Path, kind: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise UserError, with the differences, if a folder's run or study has another identity
    than the current one.
    """
    if before != now:
        raise UserError(
            f"{folder}: holds another {kind}, and their visits cannot be mixed: give another "
            "folder with out=FOLDER, or omit out= for a new one. They differ: "
            + "; ".join(_differences(before, now))
        )


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    if not (isinstance(before, dict) and isinstance(now, dict)):
        yield f"{name}: {_short(before)} there, {_short(now)} now"
        return
    for key in sorted(key for key in {*before, *now} if before.get(key) != now.get(key)):
        yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)


def read_about(file: Path) -> dict[str, Any]:
    """The content of a run.json. Raises UserError if it is missing, damaged, or written by
    another version.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        version = content["schema"]
        if not isinstance(content["identity"], dict):
            raise TypeError(f"identity is {_short(content['identity'])}")
        # a user's own datasets, which visits and tables then name
        add_own(content.get("descriptions", {}))
    except (OSError, *BAD_LINE) as error:
        raise UserError(
            f"{file}: cannot be read as a run's description ({type(error).__name__}: {error}). "
            "Nothing was changed: copy the run.json of another run of the same command there, or "
            "start a new run with out=FOLDER"
        ) from error
    if version != VERSION:
        raise UserError(
            f"{file}: written with schema {version} (another version of lazyllm-bench), this "
            f"version reads {VERSION}: run it again with another out=FOLDER"
        )
    return content


def _short(value: Any) -> str:
    text = canonical(value).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."
