"""Ctrl-C while the process is in code that blocks Python's signals: it still ends, and says how to resume."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eval.run.job import INTERRUPTED, MESSAGE
from eval.store.visit import Visit
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

HANG_S = 300  # only so that a failing test ends: the code below blocks for longer

# A call into C that no signal ends, like one long operation of a prefill; it takes half an hour
BLOCK = """
import hashlib, sys
def block():
    try:
        print("blocked", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
    except KeyboardInterrupt:  # it came just before that began
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
RUN = (
    BLOCK
    + """
import eval.cli
import {module}
real, calls = {module}.{function}, 0
def blocking(*arguments, **settings):
    global calls
    calls += 1
    if calls == {call}:
        try:
            block()
        finally:
            print("went on")
    return real(*arguments, **settings)
{module}.{function} = blocking
sys.exit(eval.cli.main({arguments!r}))
"""
)
SHORT = ["dataset=lookup", "limit=4", "max_new_tokens=2", "warmup=0", "threads=1", "model.max_prompt_tokens=96"]
# A measurement that Ctrl-C interrupts, without our thread, and with work at the interpreter's exit
HEARS = """
import atexit, sys, time
import eval.cli, eval.run.job, eval.run.decode

def hear(*arguments, **settings):
    print("blocked", flush=True)
    time.sleep(10**6)
eval.run.decode.generate = hear
eval.run.job._end_soon_after_ctrl_c = lambda: print("watched", file=sys.stderr)
atexit.register(print, "waited for", flush=True)
sys.exit(eval.cli.main({arguments!r}))
"""


def interrupt(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the code, and send it Ctrl-C's signal once it reports that it is blocked."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background commands, and all that they start, ignore Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        blocked = any(line == "blocked\n" for line in process.stdout)
        if blocked:
            process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
        process.wait()
    assert blocked, stderr
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.mark.parametrize(
    ("module", "function", "call", "visits"),
    [
        ("lazyllm.models.load", "load_weights", 1, 0),
        ("eval.run.decode", "generate", 6, 2),  # two arms answer each example
    ],
)
def test_run_ends_while_it_loads_and_within_a_step(tmp_path: Path, module, function, call, visits: int) -> None:
    arguments = ["run", *SHORT, "out=run"]
    done = interrupt(RUN.format(module=module, function=function, call=call, arguments=arguments), tmp_path)
    assert done.returncode == INTERRUPTED == 130
    assert done.stderr.endswith(f"{MESSAGE}\n")
    assert "the same command goes on from there" in MESSAGE
    assert "went on" not in done.stdout
    assert "Traceback" not in done.stderr
    file = tmp_path / "run" / "visits.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    assert len(lines) == visits
    assert all(Visit.from_json(line) for line in lines)
    assert (tmp_path / "run" / "run.json").exists()


def test_search_ends_at_once(tmp_path: Path) -> None:
    done = interrupt(HEARS.format(arguments=["tune", *SHORT, "target_speedup=1.2"]), tmp_path)
    assert done.returncode == INTERRUPTED
    assert done.stderr.endswith(f"{MESSAGE}\n")
    assert "Traceback" not in done.stderr
    assert "watched" in done.stderr.splitlines()
    assert "waited for" not in done.stdout
