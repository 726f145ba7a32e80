"""Kills a run on `tiny` by SIGKILL many times; compares the result with the same run without kills.

python -m tests.eval.run.kill_run [KILLS] [SEED] [ROWS]      ROWS: answers that decode together

Three arms answer each example; one of them fails at some. This process imports everything once and
forks. Each fork is a job that calls `eval.run.loop.measure` and dies by SIGKILL: half of them after
a random time, the others after writing a random number of bytes (RLIMIT_FSIZE cuts a write at the
limit), which leaves incomplete lines. A job is started again until its run is done; then the next
run begins, until the number of kills is reached. Prints its counts as JSON.
"""

import gc
import json
import logging
import os
import random
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from eval.config import RunConfig
from eval.run.check import choose_data, read_rows
from eval.store.folder import read_visits
from tests.runs import failing_sometimes, measured, small_config

EXAMPLES = 8  # of each of two datasets
ARMS = [
    {"name": "lazy", "schedule": {2: 0.5}},
    {"name": "static_pruning", "label": "fails", "layer": 2, "keep": 0.5},
]
# Columns with times, current memory, or values derived from them
TIMES = re.compile(
    r"run$|(ttft|total_s|step_s|scoring_s|peak_|prefill_mfu)|(generation|equal_length|step)_speedup"
)
HANG_S = 120  # a job that takes longer hangs


@dataclass
class Counts:
    """kills: jobs that died by SIGKILL and were started again. half_lines: of these, left an
    incomplete visit. runs: finished run folders, equal to the undisturbed one."""

    kills: int = 0
    half_lines: int = 0
    runs: int = 0


def quick_run(rows: int) -> RunConfig:
    changes: Any = {"limit": EXAMPLES, "max_new_tokens": 4, "batch_size": rows, "warmup": 1}
    return small_config("run", arms=ARMS, **changes)


def job(folder: Path, rows: int, before: Callable[[], None] = lambda: None) -> int:
    """Fork a job that makes the run in `folder`/run, and return its pid. before: called first."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.chdir(folder)
        before()
        measured(quick_run(rows))
        status = 0
    finally:
        os._exit(status)


def ended_by(pid: int) -> int:
    """Wait for a job. Returns 0, or SIGKILL; raises AssertionError for another end."""
    watch = threading.Timer(HANG_S, os.kill, (pid, signal.SIGKILL))
    watch.start()
    started = time.monotonic()
    _, status = os.waitpid(pid, 0)
    watch.cancel()
    watch.join()
    assert time.monotonic() - started < HANG_S, "a job hung"
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"a job ended with {code}"
    return -code


def wait_at_most(pid: int, seconds: float) -> None:
    """Wait until the job has ended or the time is over, without reaping the job."""
    until = time.monotonic() + seconds
    unreaped = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while time.monotonic() < until and os.waitid(os.P_PID, pid, unreaped) is None:
        time.sleep(0.002)


def die_at_size(size: int) -> None:
    """Let this process die by SIGKILL as soon as it wants a file to be larger than `size` bytes."""
    signal.signal(signal.SIGXFSZ, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def lines_of(folder: Path) -> list[bytes]:
    """List the lines of the visits; the last one is empty, or incomplete."""
    file = folder / "visits.jsonl"
    return file.read_bytes().split(b"\n") if file.exists() else [b""]


def without_times(folder: Path) -> str:
    """The run's summary without times and values derived from them."""
    table = pd.read_csv(folder / "summary.csv", dtype=str, keep_default_na=False)
    return table[[name for name in table if not TIMES.match(name)]].to_csv(index=False)


def outcomes(folder: Path) -> dict[tuple[str, str, str], Any]:
    """{(dataset, id, arm): its first answer, without times}"""
    found: dict[tuple[str, str, str], Any] = {}
    for visit in read_visits(folder):
        for label, answer in visit.answers.items():
            values = (
                answer.text,
                answer.token_ids,
                answer.score,
                answer.computed,
                answer.same_answer,
            )
            about = visit.prompt_sha256, visit.gold
            found.setdefault((*visit.key, label), (about, values))
    return found


def doubled(folder: Path) -> list[tuple[str, str, str]]:
    """The (dataset, id, arm) answered more than once; the baseline may be, with a failed arm."""
    visits = read_visits(folder)
    answered = Counter((*visit.key, label) for visit in visits for label in visit.answers)
    return [key for key, number in answered.items() if number > 1 and key[2] != "baseline"]


def kill_run(folder: Path, kills: int, seed: int, rows: int) -> Counts:
    """Kill runs below `folder` N times. Raises AssertionError if something is lost or repeated."""
    rng, counts = random.Random(seed), Counts()
    undisturbed = folder / "undisturbed" / "run"
    undisturbed.parent.mkdir()
    assert ended_by(job(undisturbed.parent, rows)) == 0
    started = time.monotonic()
    (folder / "again").mkdir()
    assert ended_by(job(folder / "again", rows)) == 0
    whole_s = time.monotonic() - started
    whole, expected = without_times(undisturbed), outcomes(undisturbed)
    longest = max(map(len, lines_of(undisturbed))) + 1
    assert 4 * EXAMPLES < len(expected) < 6 * EXAMPLES  # one arm fails at some

    def next_job(parent: Path, lines: list[bytes]) -> int:
        if counts.kills == kills:
            return job(parent, rows)
        if rng.random() < 0.5:
            size = sum(len(line) + 1 for line in lines)
            return job(parent, rows, lambda: die_at_size(size + rng.randrange(3 * longest)))
        pid = job(parent, rows)
        done = len(lines) / (2 * EXAMPLES)
        wait_at_most(pid, rng.uniform(0, whole_s * (0.3 + 0.7 * (1 - min(done, 1)))))
        os.kill(pid, signal.SIGKILL)  # a job that has ended remains until it is reaped
        return pid

    while counts.kills < kills:
        out = folder / str(counts.runs) / "run"
        out.parent.mkdir()
        done = False
        while not done:
            *lines, _ = lines_of(out)
            signal_number = ended_by(next_job(out.parent, lines))
            done = signal_number == 0
            whole_s *= 0.8 if done else 1.05  # even on a busy machine, most kills come in time
            now = lines_of(out)
            assert now[: len(lines)] == lines, f"{out}: a finished visit was changed or lost"
            if not done:
                counts.kills += 1
                counts.half_lines += now[-1] != b""
        assert not doubled(out), f"{out}: {doubled(out)[0]} was answered twice"
        counts.runs += 1
        assert outcomes(out) == expected, f"{out}: other answers than the undisturbed run's"
        assert without_times(out) == whole, f"{out}: another summary than the undisturbed run's"
        assert not list(out.glob(".*.partial")), f"{out}: something half-written is left"
    return counts


def main(kills: int = 100, seed: int = 0, rows: int = 1) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    # making the rows would take most of a job's time: it is done once, before the fork
    read_rows(quick_run(rows), *choose_data(quick_run(rows)))
    gc.freeze()  # nor does a job look through all modules for garbage
    with tempfile.TemporaryDirectory() as folder, failing_sometimes():
        counts = kill_run(Path(folder), kills, seed, rows)
    print(json.dumps(asdict(counts)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
