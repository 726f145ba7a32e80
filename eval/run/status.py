"""How far a sweep is: python -m eval.run.status RUNS [...] [--json] [--expect experiment=table1 model=llama2,xgen]

A line for each run: done, running, failed (and why), or incomplete (what is missing), and the time that is left.
With the sweep's own arguments after --expect, runs that never began are there too, as missing, and those that are
refused before they begin say why. Exit status: 0 all done, 1 some failed, 3 some not finished and none failed, 2 for
folders that cannot be read at all.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import socket
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.store.folder import files_of, lines_of, read_about
from eval.store.record import job_event
from eval.store.results import CAMPAIGN, StoredRun, label_of
from lazyllm.errors import UserError

DONE, RUNNING, UNCLEAR, FAILED, INCOMPLETE, MISSING = "done", "running", "unclear", "failed", "incomplete", "missing"
_EXIT = {FAILED: 1, UNCLEAR: 3, RUNNING: 3, INCOMPLETE: 3, MISSING: 3, DONE: 0}


@dataclass(frozen=True)
class Job:
    """The last job that wrote to one of a run's jobs files. part: as in `eval.store.folder.RunStore`.

    host, process: None where the job is of before these were written down. ended: None for a job that has not said so.
    """

    part: str
    host: str | None
    process: int | None
    began: str
    ended: str | None
    error: str | None


@dataclass(frozen=True)
class Status:
    """One line. expected: None where it is not known how many examples the run is to have.

    eta_s: what the missing examples take, with as many jobs as work on the run now, at least one; None: not known.
    """

    run: str
    model: str
    setting: str
    seed: int | None
    state: str
    done: int
    expected: int | None
    failed: int
    jobs: int
    eta_s: float | None
    why: str


class _Run:
    """A run folder as it is found: some of it may be unreadable, and some of it may change meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.stored = StoredRun(folder, read_about(folder / "run.json"))
        # read now, where a fault is the run's and not the table's
        self._keys = set(self.stored.keys)
        self.jobs = last_jobs(folder)
        self.wall_s = _wall_seconds(folder)
        self.failures = self.stored.failures
        self.planned = self.stored.planned
        self.held = [job for job in self.jobs if is_held(folder, job)] or _held_without_job(folder)

    @property
    def done(self) -> int:
        """Of the examples that are wanted of it; a run may hold others, of a wider command."""
        return len(self._keys if self.planned is None else self._keys.intersection(self.planned))

    @property
    def expected(self) -> int | None:
        return len(self.planned) if self.planned is not None else expected_count(self.stored.about)

    @property
    def missing(self) -> list[tuple[str, str | None]]:
        """(dataset, id) of the examples without a record; None for what is only known by its number."""
        if self.planned is not None:
            return [key for key in self.planned if key not in self._keys]
        return [("", None)] * max(0, (self.expected or 0) - self.done)


def last_jobs(folder: Path) -> list[Job]:
    """The last job of each jobs file. Raises UserError where a line is none."""
    jobs = []
    for part, events in _events(folder).items():
        begin, end = None, None
        for event in events:
            begin, end = (event, None) if event["event"] == "begin" else (begin, event)
        if begin is not None:
            ended, error = (end["time"], end.get("error")) if end is not None else (None, None)
            jobs.append(Job(part, begin.get("host"), begin.get("process"), begin["time"], ended, error))
    return jobs


def _events(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """{part: what its jobs file says}, without half a last line. Raises UserError where a line is none."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in files_of(folder, "jobs"):
        events = found[file.stem.removeprefix("jobs")] = []
        for number, _, event in lines_of(file, job_event):
            if isinstance(event, Exception):
                raise UserError(
                    f"{file}:{number}: not a job's begin or end ({type(event).__name__}: {event}); let "
                    f"`python -m eval.store.repair {folder}` take the line out"
                ) from event
            events.append(event)
    return found


def is_held(folder: Path, job: Job) -> bool:
    """Whether a living process of this machine works at the job's part of the run."""
    lock = folder / f".lock{job.part}"
    if _is_locked(lock):
        return True
    if job.ended is not None or job.host not in (None, socket.gethostname()):
        return False
    # some file systems list their locks under other numbers: try it. Only where nobody is expected to hold it, as a job
    # that begins in the microseconds of the trial would be refused
    try:
        with lock.open() as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:  # no locks there
        return job.process is not None and _is_alive(job.process)
    return False


def _held_without_job(folder: Path) -> list[Job]:
    """A run that is held and has not begun to measure: it loads its data, or waits for the device."""
    if not _is_locked(folder / ".lock"):
        return []
    return [Job("", socket.gethostname(), None, "", None, None)]


def _is_locked(file: Path) -> bool:
    """Whether the kernel's list has a lock (flock) on the file; looking there disturbs nobody."""
    try:
        stat = file.stat()
        held = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    wanted = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    # number, FLOCK, ADVISORY, WRITE or READ, process, file, from, to; -> in second place of those that wait
    return any(line[1] == "FLOCK" and line[5] == wanted for line in map(str.split, held))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def expected_count(about: dict[str, Any]) -> int | None:
    """How many examples a run was to have when it first began; for runs that do not list them (`StoredRun.planned`)."""
    sizes = about.get("examples")
    if sizes is None:
        return None
    config = about.get("config", {})
    limit, sample = config.get("limit"), config.get("sample")
    number = sum(size if limit is None else min(size, limit) for size in sizes.values())
    return number if sample is None else min(number, sample)


# --------------------------------------------------------------------------------------------------------------- times


class _Times:
    """Seconds that an example takes, baseline included: of the same run and dataset, else of what is nearest."""

    def __init__(self, runs: Sequence[_Run]) -> None:
        self._means: dict[tuple[str, ...], float] = {}
        sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        numbers: Counter[tuple[str, ...]] = Counter()
        measured = worked = 0.0
        for run in runs:
            stored = run.stored
            examples: Any = stored.examples
            seconds = examples["total_s"] + examples["baseline_total_s"].fillna(0)
            for dataset, group in seconds.groupby(examples["dataset"]):
                for key in self._keys(str(stored.folder), stored.model, str(dataset)):
                    sums[key] += float(group.sum())
                    numbers[key] += len(group)
            if run.wall_s is not None and len(examples):
                measured, worked = measured + float(seconds.sum()), worked + run.wall_s
        # loading, warming up, writing: what jobs that have ended took beside their examples
        self._overhead = max(1.0, worked / measured) if measured else 1.0
        self._means = {key: sums[key] / number for key, number in numbers.items()}

    @staticmethod
    def _keys(run: str, model: str, dataset: str) -> list[tuple[str, ...]]:
        return [("run", run, dataset), ("model", model, dataset), ("run", run), ("model", model)]

    def of(self, run: str, model: str, missing: Sequence[tuple[str, str | None]]) -> float | None:
        """Seconds for the missing examples; None where the model was not timed yet."""
        total = 0.0
        for dataset, number in Counter(dataset for dataset, _ in missing).items():
            mean = next((self._means[key] for key in self._keys(run, model, dataset) if key in self._means), None)
            if mean is None:
                return None
            total += number * mean
        return self._overhead * total


def _wall_seconds(folder: Path) -> float | None:
    """How long a run's jobs have measured; None while one is not known to have ended."""
    total = 0.0
    for events in _events(folder).values():
        begun = None
        for event in events:
            if event["event"] == "begin":
                if begun is not None:  # killed without a word
                    return None
                begun = _seconds(event["time"])
            elif begun is not None:
                total, begun = total + _seconds(event["time"]) - begun, None
        if begun is not None:
            return None
    return total or None


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


# -------------------------------------------------------------------------------------------------------------- states


def status(folders: Sequence[Path], wanted: Sequence[Any] = ()) -> list[Status]:
    """Every run in or below the folders, then every job of `wanted` (`eval.run.expect.Expected`) that has none.

    Raises UserError where a folder is not there or is a collected campaign, and where there is nothing to tell of.
    """
    absent = [str(folder) for folder in folders if not folder.is_dir()]
    if absent:
        raise UserError(f"{absent[0]}: no such folder; give the folder that the runs lie in, e.g. runs")
    collected = {file.parent for folder in folders for file in folder.rglob(CAMPAIGN)}
    found = sorted({file.parent for folder in folders for file in folder.rglob("run.json")})
    found = [folder for folder in found if not any(folder.is_relative_to(one) for one in collected)]
    if not found and collected:
        one = min(collected)
        raise UserError(
            f"{one}: a collected campaign, in which nothing runs: {one / CAMPAIGN} says what its runs lack. Give the "
            "folder that it was collected from"
        )
    if not found and not wanted:
        raise UserError(f"no run in or below {', '.join(map(str, folders))}; give the folder that the runs lie in")
    runs: list[_Run] = []
    lines: list[Status] = []
    for folder in found:
        try:
            runs.append(_Run(folder))
        except (ValueError, KeyError, TypeError) as error:
            lines.append(_damaged(folder, error))
    begun = []
    for job in wanted:
        of_job = [run for run in runs if job.is_of(run.stored.identity)]
        begun.append(bool(of_job))
        for run in of_job:
            run.planned = job.examples
    times = _Times(runs)
    lines += [_line(run, times) for run in runs]
    return lines + [_never_begun(job, times) for job, there in zip(wanted, begun, strict=True) if not there]


def _line(run: _Run, times: _Times) -> Status:
    stored = run.stored
    state, why = _state(run)
    seconds = times.of(str(stored.folder), stored.model, run.missing) if run.missing else 0.0
    return Status(
        run=stored.folder.name,
        model=stored.model,
        setting=label_of(stored.method, stored.settings),
        seed=stored.seed,
        state=state,
        done=run.done,
        expected=run.expected,
        failed=len(run.failures),
        jobs=len(run.held),
        eta_s=None if seconds is None else seconds / max(1, len(run.held)),
        why=why,
    )


def _state(run: _Run) -> tuple[str, str]:
    """The state, and what a user has to know of it."""
    reasons = Counter(failure.reason for failure in run.failures)
    said = [f"{number} failed: {reason}" for reason, number in reasons.most_common(2)]
    said += [f"{len(reasons) - 2} other reasons"] if len(reasons) > 2 else []
    if run.held:
        return RUNNING, "; ".join([*_waiting(run), *said])
    if run.expected is not None and not run.missing:
        return DONE, ""
    here = socket.gethostname()
    stopped = ""
    for job in run.jobs:
        if job.error is not None and job.error.startswith(KeyboardInterrupt.__name__):
            stopped = "stopped; "  # by Ctrl-C, which is no failure
        elif job.error is not None:
            said.append(f"job{job.part} ended at {job.ended}: {job.error}")
        elif job.ended is None and job.host in (None, here):
            said.append(f"job{job.part} began at {job.began} and died without a word (killed, or out of memory)")
    elsewhere = [job for job in run.jobs if job.ended is None and job.host not in (None, here)]
    if elsewhere:
        last = _last_sign(run.stored.folder)
        where = "; ".join(f"running or died on {job.host} since {job.began}" for job in elsewhere)
        return UNCLEAR, "; ".join([f"{where}, last record {last}", *said])
    if said:
        return FAILED, "; ".join(said)
    if run.expected is None:
        return INCOMPLETE, f"{stopped}it is not known how many examples the run was to have"
    return INCOMPLETE, f"{stopped}{len(run.missing)} examples are missing; the same command goes on"


def _waiting(run: _Run) -> list[str]:
    return [] if run.held[0].began else ["not measuring yet: it loads, or waits for the device"]


def _last_sign(folder: Path) -> str:
    """When a run's files were written to last, in UTC."""
    times = [file.stat().st_mtime for name in ("records", "failures", "jobs") for file in files_of(folder, name)]
    return datetime.fromtimestamp(max(times), UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if times else "never"


def _damaged(folder: Path, error: Exception) -> Status:
    return Status(folder.name, "", "", None, FAILED, 0, None, 0, 0, None, str(error))


def _never_begun(job: Any, times: _Times) -> Status:
    if job.refused is not None:
        return Status(job.name, job.model, job.setting, job.seed, FAILED, 0, None, 0, 0, None, job.refused)
    seconds = times.of("", job.model, job.examples)
    return Status(
        job.name, job.model, job.setting, job.seed, MISSING, 0, len(job.examples), 0, 0, seconds, "never begun"
    )


# -------------------------------------------------------------------------------------------------------------- output


def exit_code(lines: Sequence[Status]) -> int:
    """As this module's docstring says."""
    codes = {_EXIT[line.state] for line in lines}
    return 1 if 1 in codes else max(codes, default=0)


def as_table(lines: Sequence[Status]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading, justify in (("run", "left"), ("state", "left"), ("examples", "right"), ("ETA", "right"), ("", "left")):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for line in lines:
        expected = "?" if line.expected is None else str(line.expected)
        table.add_row(line.run, line.state, f"{line.done}/{expected}", _eta(line), line.why)
    return table


def _eta(line: Status) -> str:
    if line.state == DONE:
        return ""
    return "?" if line.eta_s is None else duration(line.eta_s)


def duration(seconds: float) -> str:
    """`2 d 4 h`, `3 h 5 min`, `12 min`, `40 s`: two units at most."""
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for (name, size), (below, part) in pairwise(units):
        if seconds >= size:
            rest = int(seconds % size // part) if name != "min" else 0
            return f"{int(seconds // size)} {name}" + (f" {rest} {below}" if rest else "")
    return f"{seconds:.0f} s"


def total(lines: Sequence[Status]) -> str:
    """One line about all: how many in each state, and how long the rest takes one after the other."""
    states = Counter(line.state for line in lines)
    counted = ", ".join(f"{states[state]} {state}" for state in _EXIT if states[state])
    rest = [line for line in lines if line.state != DONE]
    known = [line.eta_s * max(1, line.jobs) for line in rest if line.eta_s is not None]
    jobs = sum(line.jobs for line in lines)
    unknown = f", and {len(rest) - len(known)} of which it is not known" if len(known) < len(rest) else ""
    left = f"; left: {duration(sum(known))} of work{unknown}" if rest else ""
    shared = f", {duration(sum(known) / jobs)} with the {jobs} jobs that run" if known and jobs > 1 else ""
    return f"{len(lines)} runs: {counted}{left}{shared}"


def _as_text(lines: Sequence[Status]) -> str:
    """The table and the line below it, in colour where a terminal shows it."""
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    with console.capture() as captured:
        console.print(as_table(lines))
    return captured.get() + total(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.run.status", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders that the runs lie in, or below")
    parser.add_argument("--json", action="store_true", help="a list of objects instead of a table, times in seconds")
    parser.add_argument("--expect", nargs="+", default=[], metavar="KEY=VALUE", help="what the sweep was given")
    given = parser.parse_args(arguments)
    try:
        wanted: Sequence[Any] = ()
        if given.expect:
            from eval.run.expect import expected  # not at the top: it needs torch and transformers

            wanted = expected(given.expect)
        lines = status(given.runs, wanted)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        print(json.dumps([asdict(line) for line in lines], indent=2) if given.json else _as_text(lines), flush=True)
    except BrokenPipeError:  # `| head` has seen enough; nothing is left to be written at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_code(lines)


if __name__ == "__main__":
    sys.exit(main())
