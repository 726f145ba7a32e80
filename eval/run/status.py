"""The state of every run in a folder and its subfolders: done, missing or failed, and why.

lazyllm-bench status RUNS [RUNS ...] [--json]

One line a run. Exit code: 0 if all are done, 1 if some failed, 3 if some are not finished and none failed, 2 if folders
cannot be read. Give a sweep's command again to run what is missing: finished runs end without loading a model.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from eval.store.folder import files_of, read_about, read_jobs, read_planned
from eval.store.runs import CAMPAIGN, StoredRun, counted
from lazyllm.errors import UserError, parser_of

DONE, RUNNING, UNCLEAR, FAILED, INCOMPLETE = "done", "running", "unclear", "failed", "incomplete"
_EXIT = {FAILED: 1, UNCLEAR: 3, RUNNING: 3, INCOMPLETE: 3, DONE: 0}


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


def status(folders: Sequence[Path]) -> list[Status]:
    """Every run in or below the folders. Raises UserError if a folder does not exist, or if no run is found."""
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; give the folder that holds the runs, e.g. runs")
    campaigns = sorted({file.parent for folder in folders for file in folder.rglob(CAMPAIGN)})
    runs = sorted({file.parent for folder in folders for file in folder.rglob("run.json")})
    runs = [folder for folder in runs if not any(folder.is_relative_to(campaign) for campaign in campaigns)]
    if not runs:
        where = f"{campaigns[0]}: a collected campaign" if campaigns else ", ".join(map(str, folders))
        raise UserError(f"no run in or below {where}; give the folder that holds the runs")
    return [_status(folder) for folder in runs]


def _status(folder: Path) -> Status:
    try:
        run = StoredRun(folder, read_about(folder / "run.json"))
        keys, planned, failures, why = set(run.keys), read_planned(folder), run.failures, list[str]()
        seconds = max((file.stat().st_mtime for file in files_of(folder, "records") if keys), default=None)
        last = None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        missing = len(set(planned or ()) - keys)
        counts = Counter(failure.reason for failure in failures)
        why += [f"{number} failed: {reason}" for reason, number in counts.most_common(3)]
        states = [FAILED] if failures else []
        for file, events in read_jobs(folder).items():
            state, reason = _state_of(file.stem.replace("jobs", "job"), events, last)
            states.append(state)
            why.append(reason)
        if planned is not None and not missing and RUNNING not in states:
            states, why = [DONE], []
        elif not {RUNNING, UNCLEAR, FAILED} & {*states}:
            lacks = "its number of examples is unknown" if planned is None else f"{counted(missing, 'example')} missing"
            why.append(f"{lacks}; the same command goes on")
        state = next((state for state in (RUNNING, UNCLEAR, FAILED, DONE) if state in states), INCOMPLETE)
        done, expected = (len(keys), None) if planned is None else (len(planned) - missing, len(planned))
        words = "; ".join(filter(None, why))
        return Status(folder.name, run.model, run.label, run.seed, state, done, expected, len(failures), last, words)
    except (ValueError, KeyError, TypeError) as error:  # a damaged run; the others are still listed
        return Status(folder.name, "", "", None, FAILED, 0, None, 0, None, str(error))


def _state_of(job: str, events: Sequence[Mapping[str, Any]], last: str | None) -> tuple[str, str]:
    """The state after the last job of a jobs file, and the reason. last: time of the last record."""
    event = events[-1]
    if event["event"] == "end":
        error = event["error"] or ""
        if error.startswith(KeyboardInterrupt.__name__):  # Ctrl-C is not a failure
            return INCOMPLETE, "stopped"
        return (FAILED, f"{job} ended at {event['time']}: {error}") if error else (INCOMPLETE, "")
    if event["host"] != socket.gethostname():
        return UNCLEAR, f"running or died on {event['host']} since {event['time']}, last record {last or 'never'}"
    try:
        os.kill(event["process"], 0)
    except PermissionError:  # another user's
        pass
    except OSError:
        return FAILED, f"{job} began at {event['time']} and died (killed, or out of memory)"
    return RUNNING, ""


def main(arguments: Sequence[str] | None = None) -> int:
    """The verb `status`; returns the exit code. Raises UserError."""
    parser = parser_of("status", __doc__)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUNS", default=[Path("runs")], help="default: runs")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    options = parser.parse_args(arguments)
    lines = status(options.runs)
    if options.json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        headings = ("run", "state", Column("examples", justify="right"), "last record", Column("", overflow="fold"))
        table = Table(*headings, box=None, pad_edge=False)
        for line in lines:
            expected = "?" if line.expected is None else str(line.expected)
            table.add_row(line.run, line.state, f"{line.done}/{expected}", line.last or "", line.why)
        (Console() if Console().is_terminal else Console(width=160)).print(table)
        states = Counter(line.state for line in lines)
        print(f"{counted(len(lines), 'run')}:", ", ".join(f"{states[one]} {one}" for one in _EXIT if states[one]))
    codes = {_EXIT[line.state] for line in lines}
    return 1 if 1 in codes else max(codes)
