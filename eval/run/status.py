"""The state of every run in a folder and its subfolders: done, missing or failed, and why.

lazyllm-bench status RUNS [RUNS ...] [--json] [--expect experiment=table1 model=llama2,xgen]

One line a run. With the arguments of a sweep after --expect, runs that have no folder are listed as missing, refused
ones with their reason, and those that cannot reach their target speedup, which jobs skip. Exit code: 0 if all others
are done, 1 if some failed, 3 if some are not finished and none failed, 2 if folders cannot be read.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from eval.store.folder import files_of, read_about, read_jobs, read_planned
from eval.store.runs import CAMPAIGN, StoredRun
from lazyllm.errors import UserError

if TYPE_CHECKING:
    from eval.run.expect import Expected

DONE, RUNNING, UNCLEAR, FAILED, INCOMPLETE, MISSING = "done", "running", "unclear", "failed", "incomplete", "missing"
OUT_OF_REACH = "cannot reach"
_EXIT = {FAILED: 1, UNCLEAR: 3, RUNNING: 3, INCOMPLETE: 3, MISSING: 3, DONE: 0, OUT_OF_REACH: 0}


@dataclass(frozen=True)
class Status:
    """One line. expected: the run's number of examples; None if unknown.

    last: time of the last record, in UTC; None if there is none. why: what is missing or failed.
    """

    run: str
    model: str
    setting: str
    seed: int | None
    state: str
    done: int
    expected: int | None
    failed: int
    last: str | None
    why: str


@dataclass(frozen=True)
class Job:
    """The last job in one of a run's jobs files. part: the shard's part of the file name.

    ended: None if the job has not written its end. error: why it ended early.
    """

    part: str
    host: str
    process: int
    began: str
    ended: str | None
    error: str | None

    @property
    def is_running(self) -> bool:
        """Whether its process runs on this machine."""
        if self.ended is not None or self.host != socket.gethostname():
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's process
            pass
        return True


def last_jobs(folder: Path) -> list[Job]:
    """The last job of each jobs file. Raises UserError if a line is invalid; an unfinished last line is ignored."""
    jobs = []
    for file, events in read_jobs(folder).items():
        begin: dict[str, Any] = {}
        end: dict[str, Any] = {}
        for event in events:
            begin, end = (event, {}) if event["event"] == "begin" else (begin, event)
        if begin:
            part = file.stem.removeprefix("jobs")
            ends = end.get("time"), end.get("error")
            jobs.append(Job(part, begin["host"], begin["process"], begin["time"], *ends))
    return jobs


def status(folders: Sequence[Path], expected: Sequence[Expected] = ()) -> list[Status]:
    """Every run in or below the folders, then every expected run that has no folder.

    Raises UserError if a folder does not exist or is a collected campaign, or if no run is found.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; give the folder that holds the runs, e.g. runs")
    campaigns = sorted({file.parent for folder in folders for file in folder.rglob(CAMPAIGN)})
    runs = sorted({file.parent for folder in folders for file in folder.rglob("run.json")})
    runs = [folder for folder in runs if not any(folder.is_relative_to(campaign) for campaign in campaigns)]
    if not runs and campaigns:
        campaign = campaigns[0]
        raise UserError(
            f"{campaign}: a collected campaign, whose runs have ended: {campaign / CAMPAIGN} lists missing examples. "
            "Give the folder that it was collected from"
        )
    if not runs and not expected:
        raise UserError(f"no run in or below {', '.join(map(str, folders))}; give the folder that holds the runs")
    lines = []
    begun: set[int] = set()
    for folder in runs:
        try:
            stored = StoredRun(folder, read_about(folder / "run.json"))
            numbers = [number for number, job in enumerate(expected) if job.is_of(stored.identity)]
            begun.update(numbers)
            lines.append(_line(stored, expected[numbers[-1]].examples if numbers else read_planned(folder)))
        except (ValueError, KeyError, TypeError) as error:  # a damaged run; the others are still listed
            lines.append(Status(folder.name, "", "", None, FAILED, 0, None, 0, None, str(error)))
    return lines + [_never_begun(job) for number, job in enumerate(expected) if number not in begun]


def _line(stored: StoredRun, planned: list[tuple[str, str]] | None) -> Status:
    """planned: (dataset, id) of all examples of the run; None if unknown."""
    failures, keys = stored.failures, set(stored.keys)
    missing = None if planned is None else [key for key in planned if key not in keys]
    times = [file.stat().st_mtime for file in files_of(stored.folder, "records")]
    last = datetime.fromtimestamp(max(times), UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if keys else None
    counts = Counter(failure.reason for failure in failures).most_common()
    reasons = [f"{number} failed: {reason}" for reason, number in counts]
    reasons = [*reasons[:2], *([f"{len(reasons) - 2} other reasons"] if len(reasons) > 2 else [])]
    state, why = _state(last_jobs(stored.folder), None if missing is None else len(missing), reasons, last)
    return Status(
        run=stored.folder.name,
        model=stored.model,
        setting=stored.label,
        seed=stored.seed,
        state=state,
        done=len(keys) if planned is None or missing is None else len(planned) - len(missing),
        expected=None if planned is None else len(planned),
        failed=len(failures),
        last=last,
        why=why,
    )


def _state(jobs: Sequence[Job], missing: int | None, reasons: list[str], last: str | None) -> tuple[str, str]:
    """The state, and its reasons in words. missing: number of examples without a record; None if unknown."""
    if any(job.is_running for job in jobs):
        return RUNNING, "; ".join(reasons)
    if missing == 0:
        return DONE, ""
    here, stopped, elsewhere = socket.gethostname(), "", []
    for job in jobs:
        if job.ended is None and job.host != here:
            elsewhere.append(f"running or died on {job.host} since {job.began}, last record {last or 'never'}")
        elif job.ended is None:
            reasons.append(f"job{job.part} began at {job.began} and died (killed, or out of memory)")
        elif job.error is not None and job.error.startswith(KeyboardInterrupt.__name__):
            stopped = "stopped; "  # by Ctrl-C: not a failure
        elif job.error is not None:
            reasons.append(f"job{job.part} ended at {job.ended}: {job.error}")
    if elsewhere:
        return UNCLEAR, "; ".join([*elsewhere, *reasons])
    if reasons:
        return FAILED, "; ".join(reasons)
    if missing is None:
        return INCOMPLETE, f"{stopped}its number of examples is unknown"
    return INCOMPLETE, f"{stopped}{missing} examples are missing; the same command goes on"


def _never_begun(job: Expected) -> Status:
    refusal = OUT_OF_REACH if job.out_of_reach else FAILED
    state, why = (MISSING, "never begun") if job.refused is None else (refusal, job.refused)
    expected = len(job.examples) if job.refused is None else None
    return Status(job.name, job.model, job.setting, job.seed, state, 0, expected, 0, None, why)


def exit_code(lines: Sequence[Status]) -> int:
    """The exit code, as in this module's docstring."""
    codes = {_EXIT[line.state] for line in lines}
    return 1 if 1 in codes else max(codes, default=0)


def _as_text(lines: Sequence[Status]) -> str:
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "state", "examples", "last record", ""):
        table.add_column(heading, justify="right" if heading == "examples" else "left", overflow="fold")
    for line in lines:
        expected = "?" if line.expected is None else str(line.expected)
        table.add_row(line.run, line.state, f"{line.done}/{expected}", line.last or "", line.why)
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    with console.capture() as captured:
        console.print(table)
    states = Counter(line.state for line in lines)
    counted = ", ".join(f"{states[state]} {state}" for state in _EXIT if states[state])
    return f"{captured.get()}{len(lines)} runs: {counted}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The verb `status`; returns the exit code. Raises UserError."""
    parser = argparse.ArgumentParser(
        prog="lazyllm-bench status", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUNS", default=[Path("runs")], help="default: runs")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    parser.add_argument("--expect", nargs="+", default=[], metavar="KEY=VALUE", help="the arguments of the sweep")
    options = parser.parse_args(arguments)
    expected: Sequence[Expected] = ()
    if options.expect:
        from eval.run.expect import expected_runs  # not at the top: it imports transformers

        expected = expected_runs(options.expect)
    lines = status(options.runs, expected)
    print(json.dumps([asdict(line) for line in lines], indent=2) if options.json else _as_text(lines))
    return exit_code(lines)
