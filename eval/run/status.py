"""The state of every run in a folder and its subfolders: done, missing or failed, and why.

lazyllm-bench status RUNS [RUNS ...] [--json]

One line a run; done: every arm has answered all examples of its newest command, which may have had
a smaller limit.
Exit code: 0 if all are done, 1 if some failed, 3 if some are not finished and none failed, 2 if
folders cannot be read. Give a sweep's command again to run what is missing: finished runs end
without loading a model.
"""

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

from eval.store.folder import files_of, read_jobs
from eval.store.results import open_runs
from eval.store.runs import StoredRun, counted
from lazyllm.errors import UserError, parser_of

DONE, RUNNING, UNCLEAR, FAILED, INCOMPLETE = "done", "running", "unclear", "failed", "incomplete"
_EXIT = {FAILED: 1, UNCLEAR: 3, RUNNING: 3, INCOMPLETE: 3, DONE: 0}


@dataclass(frozen=True)
class Status:
    """A run's line.

    arms: their labels. done, expected: examples; failed: answers. last: of the last visit, in UTC.
    expected, last: None if unknown. why: what is missing or fails.
    """

    run: str
    model: str
    arms: list[str]
    state: str
    done: int
    expected: int | None
    failed: int
    last: str | None
    why: str


def status(folders: Sequence[Path]) -> list[Status]:
    """Every run in or below the folders. Raises UserError if a folder does not exist, or if no
    run is found.
    """
    runs, damaged = open_runs(folders)
    if not runs and not damaged:
        raise UserError(
            f"no run in or below {', '.join(map(str, folders))}; give the folder that holds the "
            "runs"
        )
    lines = {run.folder: _status(run) for run in runs} | {
        folder: Status(folder.name, "", [], FAILED, 0, None, 0, None, why)
        for folder, why in damaged.items()
    }
    return [lines[folder] for folder in sorted(lines)]


def _status(run: StoredRun) -> Status:
    folder = run.folder
    done, planned = run.done, run.planned
    seconds = max(
        (file.stat().st_mtime for file in files_of(folder, "visits") if run.visits),
        default=None,
    )
    last = (
        None
        if seconds is None
        else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    )
    missing = len(set(planned or ()) - done)
    failed = Counter((arm, reason) for (_, _, arm), reason in run.failed.items())
    findings = [
        (FAILED, f"{number} of {arm} failed: {reason}")
        for (arm, reason), number in failed.most_common(3)
    ]
    findings += [_state_after(event, last) for event in read_jobs(folder)[-1:]]
    state = next(
        (state for state in (RUNNING, UNCLEAR, FAILED) if state in dict(findings)), INCOMPLETE
    )
    if planned is not None and not missing and state != RUNNING:
        # a campaign's tables lie elsewhere
        made = [*folder.glob("summary.md"), *folder.glob("visits*.gz")]
        state, findings = (
            DONE,
            [] if made else [(DONE, "without a table: the same command makes it")],
        )
    elif state == INCOMPLETE:
        lacks = (
            "its number of examples is unknown"
            if planned is None
            else f"{counted(missing, 'example')} missing"
        )
        findings.append((INCOMPLETE, f"{lacks}; the same command goes on"))
    number, expected = (
        (len(done), None) if planned is None else (len(planned) - missing, len(planned))
    )
    why = "; ".join(reason for _, reason in findings if reason)
    return Status(
        folder.name, run.model, [*run.arms], state, number, expected, failed.total(), last, why
    )


def _state_after(event: Mapping[str, Any], last: str | None) -> tuple[str, str]:
    """The state after the last event of a job, and the reason. last: time of the last visit."""
    if event["event"] == "end":
        error = event["error"] or ""
        if error.startswith(KeyboardInterrupt.__name__):  # Ctrl-C is not a failure
            return INCOMPLETE, "stopped"
        return (FAILED, f"job ended at {event['time']}: {error}") if error else (INCOMPLETE, "")
    if event["host"] != socket.gethostname():
        return (
            UNCLEAR,
            f"running or died on {event['host']} since {event['time']}, last visit "
            f"{last or 'never'}",
        )
    try:
        os.kill(event["process"], 0)
    except OSError as error:
        if not isinstance(error, PermissionError):  # another user's process lives
            return (
                FAILED,
                f"job began at {event['time']} and died (killed, out of memory, or Ctrl-C twice)",
            )
    return RUNNING, ""


def main(arguments: Sequence[str]) -> int:
    """The command `status`. Returns the exit code."""
    parser = parser_of("status", __doc__)
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUNS", default=[Path("runs")], help="default: runs"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a list of objects instead of a table"
    )
    options = parser.parse_args(arguments)
    lines = status(options.runs)
    states = Counter(line.state for line in lines)
    if options.json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        headings = (
            "run",
            "state",
            Column("examples", justify="right"),
            "last visit",
            Column("", overflow="fold"),
        )
        table = Table(*headings, box=None, pad_edge=False)
        for line in lines:
            examples = f"{line.done}/{'?' if line.expected is None else line.expected}"
            table.add_row(line.run, line.state, examples, line.last or "", line.why)
        (Console() if Console().is_terminal else Console(width=160)).print(table)
        print(
            f"{counted(len(lines), 'run')}:",
            ", ".join(f"{states[state]} {state}" for state in _EXIT if states[state]),
        )
    return next(code for state, code in _EXIT.items() if states[state])
