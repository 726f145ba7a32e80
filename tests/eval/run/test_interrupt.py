"""Ctrl-C while the process is where Python does not hear of it: it ends all the same, and says how to go on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eval.run.interrupt import MESSAGE, STATUS
from eval.store.record import Record

ROOT = Path(__file__).resolve().parents[3]
HANG_S = 300  # only against a test that never ends: what blocks below would do so for longer

# A call into C that no signal ends, as one long operation of a prefill is; half an hour of it
BLOCK = """
import hashlib, sys
def block():
    try:
        print("blocked", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
    except KeyboardInterrupt:  # it came just before that began
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
ALONE = (
    BLOCK
    + """
from eval.run.interrupt import end_soon_after_ctrl_c
end_soon_after_ctrl_c()
try:
    block()
finally:
    print("went on")
"""
)
# Threads that are waited for when the interpreter ends, as those that read weights are
THREADS = (
    BLOCK
    + """
import concurrent.futures, time
from eval.run.interrupt import end_soon_after_ctrl_c
end_soon_after_ctrl_c()
with concurrent.futures.ThreadPoolExecutor(1) as threads:
    threads.submit(block)
    time.sleep(10**6)
"""
)
RUN = (
    BLOCK
    + """
import runpy
import eval.{module}
real, calls = eval.{module}.{function}, 0
def blocking(*arguments, **settings):
    global calls
    calls += 1
    if calls == {call}:
        block()
    return real(*arguments, **settings)
eval.{module}.{function} = blocking
sys.argv = ["run.py", "dataset=lookup", "limit=4", "max_new_tokens=2", "timing.warmup=0", "out=run", "threads=1",
            "model.max_prompt_tokens=96"]
runpy.run_path({path!r}, run_name="__main__")
"""
)
SHORT = ["dataset=lookup", "limit=4", "max_new_tokens=2", "timing.warmup=0", "threads=1", "model.max_prompt_tokens=96"]
TARGET = "target_speedup=1.2"
COMMANDS = {
    "run": f"sys.argv = ['run.py', *{SHORT!r}]; runpy.run_path({str(ROOT / 'run.py')!r}, run_name='__main__')",
    "eval.tune": f"sys.argv = ['', *{SHORT!r}, {TARGET!r}]; runpy.run_module('eval.tune', run_name='__main__')",
}
# A measurement that hears of Ctrl-C, where nobody ends it from beside, and what an interpreter does before it ends
HEARS = """
import atexit, runpy, sys, time
import eval.run.interrupt, eval.run.measure
def hear(*arguments, **settings):
    print("blocked", flush=True)
    time.sleep(10**6)
eval.run.measure.generate = hear
eval.run.interrupt.end_soon_after_ctrl_c = lambda: print("watched", file=sys.stderr)
atexit.register(print, "waited for", flush=True)
"""


def interrupt(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the code and send it Ctrl-C's signal once it says that it is blocked."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell has the commands that it starts in the background ignore Ctrl-C, and whatever these start
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        blocked = any(line == "blocked\n" for line in process.stdout)
        if blocked:
            process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
        process.wait()
    assert blocked, stderr
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.mark.parametrize("code", [ALONE, THREADS])
def test_what_cannot_be_interrupted_is_ended(tmp_path: Path, code: str) -> None:
    done = interrupt(code, tmp_path)
    assert done.returncode == STATUS == 130
    assert done.stderr.endswith(f"{MESSAGE}\n")
    assert "the same command goes on from there" in MESSAGE
    assert "went on" not in done.stdout


@pytest.mark.parametrize(
    ("module", "function", "call", "records"),
    [("run", "load_weights", 1, 0), ("measure", "generate", 6, 2)],  # two generations an example: method and baseline
)
def test_a_run_ends_while_it_loads_and_within_a_step(
    tmp_path: Path, module: str, function: str, call: int, records: int
) -> None:
    done = interrupt(RUN.format(module=module, function=function, call=call, path=str(ROOT / "run.py")), tmp_path)
    assert done.returncode == STATUS
    assert done.stderr.endswith(f"{MESSAGE}\n")
    assert "Traceback" not in done.stderr
    file = tmp_path / "run" / "records.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    assert len(lines) == records
    assert all(Record.from_json(line) for line in lines)
    assert (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_ends_at_once(tmp_path: Path, command: str) -> None:
    done = interrupt(HEARS + COMMANDS[command], tmp_path)
    assert done.returncode == STATUS
    assert done.stderr.endswith(f"{MESSAGE}\n")
    assert "Traceback" not in done.stderr
    assert "watched" in done.stderr.splitlines()
    assert "waited for" not in done.stdout
