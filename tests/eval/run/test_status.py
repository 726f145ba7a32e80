"""The command `status` on run folders as jobs leave them."""

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eval import cli
from eval.run.status import Status, status
from eval.store.folder import PLANNED, open_store
from eval.store.record import Failure
from tests.eval.store.test_folder import ABOUT, IDENTITY
from tests.eval.store.visits import visit

BEGAN, ENDED = "2026-11-21T10:00:00Z", "2026-11-21T10:00:10Z"


def make(folder: Path, done: int, planned: int | None = None, **identity: Any) -> Path:
    with open_store(folder, IDENTITY | identity, ABOUT) as store:
        for number in range(len(store.visits), done):
            store.append(visit(number))
    if planned is not None:
        rows = [f"row-{number}" for number in range(planned)]
        (folder / PLANNED).write_text(json.dumps({"hotpotqa": rows}))
    return folder


def job(folder: Path, ended: bool = True, error: str | None = None, **begin: Any) -> None:
    """Add lines as a job leaves them. begin: changes of its first event."""
    usual = {"event": "begin", "time": BEGAN, "host": socket.gethostname(), "process": 1}
    events = [usual | begin, {"event": "end", "time": ENDED, "error": error}]
    with (folder / "jobs.jsonl").open("a") as opened:
        opened.writelines(json.dumps(event) + "\n" for event in events[: 1 + ended])


def read_status(folder: Path) -> Status:
    (line,) = status([folder])
    return line


def test_done_incomplete_and_unknown_runs(tmp_path: Path, capsys) -> None:
    job(make(tmp_path / "a", 4, 4))
    # as after a full disk
    assert read_status(tmp_path).why == "without a table: the same command makes it"
    (tmp_path / "a" / "summary.md").touch()
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "1 run: 1 done" in capsys.readouterr().out
    make(tmp_path / "b", 3, 4, seed=1)
    (tmp_path / "b" / PLANNED).write_text('{"hotpotqa": ["row-2", "row-9"]}')
    os.utime(tmp_path / "b" / "visits.jsonl", (0, 0))
    make(tmp_path / "c", 0, None, seed=2)
    (tmp_path / "c" / PLANNED).unlink(missing_ok=True)
    (tmp_path / "b" / "jobs.jsonl").write_text('{"event": "beg')  # a kill while writing
    done, missing, unknown = status([tmp_path])
    assert (done.state, done.done, done.expected, done.why) == ("done", 4, 4, "")
    found = (missing.run, missing.state, missing.done, missing.expected)
    assert found == ("b", "incomplete", 1, 2)
    assert (missing.arms, missing.last) == (["baseline", "lazy"], "1970-01-01T00:00:00Z")
    assert "1 example missing" in missing.why
    assert (unknown.state, unknown.expected, unknown.last) == ("incomplete", None, None)
    assert cli.main(["status", str(tmp_path), "--json"]) == 3
    assert [line["run"] for line in json.loads(capsys.readouterr().out)] == ["a", "b", "c"]


def test_failed_answers_say_which_arm_and_why(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", 1, 4)
    identity = json.loads((folder / "run.json").read_text())["identity"]
    with open_store(folder, identity, {}) as store:
        for number, error in enumerate(["it has an answer now", "too long", "too long", "NaN"]):
            arms = visit(number).arms | {"lazy": Failure(error=error, traceback="...")}
            store.append(visit(number, arms=arms))
    job(folder)
    line = read_status(tmp_path)
    assert (line.state, line.failed, line.done, line.expected) == ("failed", 3, 1, 4)
    assert line.why.startswith("2 of lazy failed: too long; 1 of lazy failed: NaN")
    assert cli.main(["status", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("settings", "state", "why"),
    [
        ({"error": "UserError: No space"}, "failed", f"job ended at {ENDED}: UserError: No space"),
        ({"error": "KeyboardInterrupt: "}, "incomplete", "stopped; 1 example missing; the same"),
        ({"ended": False, "process": 2**22 + 1}, "failed", f"job began at {BEGAN} and died (kil"),
        ({"ended": False, "host": "node7"}, "unclear", f"running or died on node7 since {BEGAN}"),
    ],
    ids=["error", "ctrl-c", "killed", "another machine"],
)
def test_last_job_decides_until_the_run_is_done(
    settings: dict[str, Any], state: str, why: str, tmp_path: Path
) -> None:
    folder = make(tmp_path / "a", 2, 3)
    job(folder, **settings)
    assert read_status(tmp_path).state == state
    assert why in read_status(tmp_path).why
    make(folder, 3)
    assert read_status(tmp_path).state == "done"


def test_living_process_is_running(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", 2, 4)
    with subprocess.Popen(["sleep", "1000"]) as process:
        job(folder, process=process.pid, ended=False)
        assert (read_status(tmp_path).state, read_status(tmp_path).why) == ("running", "")
        process.kill()
    assert read_status(tmp_path).why.startswith("job began at")


def test_damaged_run_hides_no_other(tmp_path: Path) -> None:
    for name in "abc":
        make(tmp_path / name, 2, 2, seed=ord(name))
    (tmp_path / "a" / "run.json").write_text("{")
    (tmp_path / "c" / "jobs.jsonl").write_text('{"event": "middle"}\n')
    lines = {line.run: line for line in status([tmp_path])}
    states = {name: line.state for name, line in lines.items()}
    assert states == {"a": "failed", "b": "done", "c": "failed"}
    assert "run.json: cannot be read" in lines["a"].why
    assert "jobs.jsonl:1: not a line of jobs" in lines["c"].why
