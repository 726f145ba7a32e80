"""Ctrl-C in a run and in a sweep: finished visits are safe, and the same command goes on."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eval.cli import main
from eval.run.job import INTERRUPTED, MESSAGE
from eval.store.folder import read_jobs, read_visits
from tests.conftest import ROOT

HANG_S = 300  # only so that a failing test ends: the code below waits for longer
SHORT = ["dataset=lookup", "limit=4", "max_new_tokens=2", "warmup=0", "model.max_prompt_tokens=96"]
# The sixth answer of two arms, the second one of the third example, takes for ever
RUN = """
import sys, time
import eval.cli, eval.run.bench

generate, calls = eval.run.bench.generate, 0
def waiting(*arguments, **settings):
    global calls
    calls += 1
    if calls == 6:
        print("waiting", flush=True)
        time.sleep(10**6)
    return generate(*arguments, **settings)
eval.run.bench.generate = waiting
sys.exit(eval.cli.main({arguments!r}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["-m"]], ids=["run", "sweep"])
def test_finished_visits_are_safe_and_the_same_command_goes_on(tmp_path, options) -> None:
    folder: Path = tmp_path / "run"
    arguments = ["run", *options, *SHORT, f"out={folder}"]
    process = subprocess.Popen(
        [sys.executable, "-c", RUN.format(arguments=arguments)],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background commands, and all that they start, ignore Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert any(line == "waiting\n" for line in process.stdout), process.stderr.read()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == INTERRUPTED == 130
    assert stderr.endswith(f"{MESSAGE}\n")
    assert "the same command goes on from there" in MESSAGE
    assert "Traceback" not in stderr
    finished = read_visits(folder)
    assert [sorted(visit.answers) for visit in finished] == [["baseline", "lazy"]] * 2
    _, end = read_jobs(folder)
    assert end["error"].startswith("KeyboardInterrupt")
    assert main(arguments) == 0
    assert read_visits(folder)[:2] == finished
    assert len(read_visits(folder)) == 4
