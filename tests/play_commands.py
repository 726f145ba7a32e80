"""Plays commands in one process, as a user gives them in one shell: starting a process costs ten seconds.

python -m tests.play_commands < STEPS writes JSON: of each step the exit code, standard output and standard error.
STEPS is JSON: {"longbench": {constant: value}, "steps": [{"command": [...], "log_in": TOKEN}, ...]}.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

from eval.benchmarks import longbench
from eval.cli import main


def play(step: dict) -> dict[str, object]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        if "log_in" in step:
            from huggingface_hub import login

            login(step["log_in"])
        code = main(step["command"])
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    script = json.load(sys.stdin)
    for name, constant in script["longbench"].items():
        setattr(longbench, name, constant)
    json.dump([play(step) for step in script["steps"]], sys.stdout)
