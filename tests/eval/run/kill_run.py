"""Kills a run on `tiny` by SIGKILL many times, and compares the result with the same run without kills.

python -m tests.eval.run.kill_run [KILLS] [SEED] [ROWS]      ROWS: answers that decode together

This process imports everything once and forks. Each fork is a job that calls `eval.run.loop.run` and dies by SIGKILL:
half of them after a random time, the others after writing a random number of bytes (RLIMIT_FSIZE cuts a write at the
limit), which leaves incomplete lines. A job is started again until its run is done; then the next run begins, until the
number of kills is reached. Prints its counts as JSON.
"""

from __future__ import annotations

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
from eval.run.resolved import Resolved
from eval.store.record import Measurement, Record

import eval.run.loop
from eval.benchmarks.datasets import load
from eval.run.config import AnswersConfig, TimingConfig
from eval.store.folder import read_records
from tests.runs import small_run

EXAMPLES = 10  # of each of two datasets
# Columns with times, current memory, or values derived from them
TIMES = re.compile(r"(baseline_)?(ttft|total_s|step_s|scoring_s|peak_memory|prefill_mfu)|(generation|step)_speedup")
HANG_S = 120  # a job that takes longer hangs


@dataclass
class Counts:
    """Counts of what happened.

    kills: jobs that died by SIGKILL and were started again. half_lines: of these, left an incomplete record.
    examples_redone: examples with an incomplete line whose record was there in the end. runs: finished run folders,
    equal to the undisturbed one.
    """

    kills: int = 0
    half_lines: int = 0
    examples_redone: int = 0
    runs: int = 0


def quick_run(rows: int) -> Resolved:
    answers = AnswersConfig(rows=rows)
    return small_run("run", timing=TimingConfig(warmup=1), limit=EXAMPLES, max_new_tokens=4, answers=answers)


def job(folder: Path, rows: int, before: Callable[[], None] = lambda: None) -> int:
    """Fork a job that makes the run in `folder`/run, and return its pid. before: called first in the job."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.chdir(folder)
        before()
        eval.run.loop.run(quick_run(rows), show=False)
        status = 0
    finally:
        os._exit(status)


def ended_by(pid: int) -> int:
    """Wait for a job. Returns 0, or the signal that killed it; raises AssertionError for any other end."""
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
    while time.monotonic() < until and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.002)


def die_at_size(size: int) -> None:
    """Let this process die by SIGKILL as soon as it wants a file to be larger than `size` bytes."""
    signal.signal(signal.SIGXFSZ, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def tail_of(file: Path) -> bytes:
    """What follows the last whole line."""
    data = file.read_bytes() if file.exists() else b""
    return data[data.rfind(b"\n") + 1 :]


def whole_lines(file: Path) -> list[bytes]:
    return file.read_bytes().split(b"\n")[:-1] if file.exists() else []


def without_times(folder: Path) -> str:
    """The run's summary without times and values derived from them."""
    table = pd.read_csv(folder / "summary.csv", dtype=str, keep_default_na=False)
    return table[[name for name in table if not TIMES.match(name)]].to_csv(index=False)


def outcomes(folder: Path) -> list[tuple[Any, ...]]:
    """The run's records, by their keys, without times."""
    return sorted(
        (record.key, record.prompt_sha256, record.answers, _outcome(record.method), _outcome(record.baseline))
        for record in read_records(folder)
    )


def _outcome(side: Measurement | None) -> tuple[Any, ...] | None:
    return None if side is None else (side.text, side.token_ids, side.score, side.computed)


def kill_run(folder: Path, kills: int, seed: int, rows: int) -> Counts:
    """Kill runs below `folder` N times. Raises AssertionError if something is lost, repeated or changed."""
    rng, counts = random.Random(seed), Counts()
    undisturbed = folder / "undisturbed" / "run"
    undisturbed.parent.mkdir()
    assert ended_by(job(undisturbed.parent, rows)) == 0
    started = time.monotonic()
    (folder / "again").mkdir()
    assert ended_by(job(folder / "again", rows)) == 0
    whole_s = time.monotonic() - started
    whole, expected = without_times(undisturbed), outcomes(undisturbed)
    longest = max(map(len, whole_lines(undisturbed / "records.jsonl"))) + 1
    assert len(expected) == 2 * EXAMPLES

    def next_job(parent: Path, lines: list[bytes]) -> int:
        if counts.kills == kills:
            return job(parent, rows)
        if rng.random() < 0.5:
            size = sum(len(line) + 1 for line in lines) + rng.randrange(3 * longest)
            return job(parent, rows, lambda: die_at_size(size))
        pid = job(parent, rows)
        wait_at_most(pid, rng.uniform(0, whole_s * (0.3 + 0.7 * (1 - len(lines) / len(expected)))))
        os.kill(pid, signal.SIGKILL)  # a job that has ended remains until it is reaped
        return pid

    while counts.kills < kills:
        out = folder / str(counts.runs) / "run"
        out.parent.mkdir()
        file = out / "records.jsonl"
        done, halves = False, set[int]()  # the numbers of incomplete lines
        while not done:
            lines = whole_lines(file)
            signal_number = ended_by(next_job(out.parent, lines))
            done = signal_number == 0
            whole_s *= 0.8 if done else 1.05  # even on a busy machine, most kills come in time
            now = whole_lines(file)
            assert now[: len(lines)] == lines, f"{file}: a finished example was changed or lost"
            keys = Counter(Record.from_json(line.decode()).key for line in now)
            assert set(keys.values()) <= {1}, f"{file}: an example is there twice"
            if not done:
                counts.kills += 1
                if tail_of(file):
                    counts.half_lines += 1
                    halves.add(len(now))
        counts.examples_redone += len(halves)
        counts.runs += 1
        assert outcomes(out) == expected, f"{out}: other records than the undisturbed run's"
        assert without_times(out) == whole, f"{out}: another summary than the undisturbed run's"
        assert not list(out.glob(".*.partial")), f"{out}: something half-written is left"
    return counts


def main(kills: int = 100, seed: int = 0, rows: int = 1) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    quick = quick_run(rows)
    for dataset in quick.datasets:  # making the rows would take most of a job's time: it is done once, before the fork
        load(dataset, quick.data)
    gc.freeze()  # nor does a job look through all modules for garbage
    with tempfile.TemporaryDirectory() as folder:
        counts = kill_run(Path(folder), kills, seed, rows)
    print(json.dumps(asdict(counts)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
