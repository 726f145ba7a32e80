"""Runs commands in one process, as a user would in one shell, because starting a process takes ten seconds.

python -m tests.play_commands < STEPS writes JSON: exit code, standard output and standard error of each step.
STEPS is JSON: {"longbench": {constant: value}, "steps": [{"command": [...], "log_in": TOKEN, "as_told": FOLDER}, ...]}.
With `as_told`, the shell commands printed by the previous step are run first, in that folder.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

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


def do_as_told(message: str, folder: str) -> None:
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in re.findall(r"hf download \S+ --local-dir FOLDER|python -c \".*?\"", message):
        shell = command.replace("FOLDER", folder)
        subprocess.run(shell, shell=True, check=True, stdout=sys.stderr, env=os.environ | {"PATH": paths})


def play_all(steps: list[dict]) -> list[dict[str, object]]:
    played: list[dict] = []
    for step in steps:
        if "as_told" in step:
            do_as_told(played[-1]["err"], step["as_told"])
        played.append(play(step))
    return played


if __name__ == "__main__":
    script = json.load(sys.stdin)
    for name, constant in script["longbench"].items():
        setattr(longbench, name, constant)
    json.dump(play_all(script["steps"]), sys.stdout)
