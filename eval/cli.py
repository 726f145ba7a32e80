"""The entry point of every command: `lazyllm-bench COMMAND ...`; `lazyllm-bench COMMAND --help`
describes it.
"""

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path

from lazyllm.errors import UserError
from lazyllm.machine import version_of

# Command -> (module whose `main(arguments)` returns the exit code, summary)
COMMANDS = {
    "run": (
        "eval.run.job",
        "measure methods and the baseline: model=tiny method=lazy dataset=hotpotqa ...",
    ),
    "plan": (
        "eval.run.plan",
        "show the cost of a run or a sweep: tokens, FLOPs, memory, hours; nothing runs",
    ),
    "doctor": (
        "eval.run.doctor",
        "check whether this machine is ready, with the command that fixes each problem",
    ),
    "fetch": (
        "eval.run.fetch",
        "download what a run needs, for machines without a network: model=... dataset=...",
    ),
    "rows": ("eval.run.rows", "show the prompts of a run, and their gold answers"),
    "status": (
        "eval.run.status",
        "show which runs in a folder are done, missing or failed, and why",
    ),
    "results": (
        "eval.analysis.screen",
        "show results on one screen: a row for each model, suite and method",
    ),
    "paper": (
        "eval.report.write",
        "make all tables and figures, and a page of them, from stored runs, without a model",
    ),
    "wandb-report": (
        "eval.report.wandb_report",
        "make a W&B Report of stored runs, with tables, figures and panels",
    ),
    "methods": (
        "lazyllm.methods.__main__",
        "list all methods with their hyperparameters and defaults",
    ),
    "check": (
        "lazyllm.check.__main__",
        "check one method against the invariants of all methods: check my_method keep=0.5",
    ),
    "tune": (
        "eval.tune",
        "search for the schedule whose answers have the least KL at a TTFT speedup",
    ),
    "lm-eval": (
        "lazyllm.integrations.lm_eval",
        "run lm-evaluation-harness' own command line with the model `lazyllm`",
    ),
}


def usage() -> str:
    """List all commands with their summaries."""
    lines = [f"  {command:<14}{what}" for command, (_, what) in COMMANDS.items()]
    return "\n".join(
        ["usage: lazyllm-bench COMMAND ...", "", *lines, "", "More: lazyllm-bench COMMAND --help"]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Call a command and return its exit code.

    A `UserError` becomes one line on stderr and its own exit code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    for closed in ("stdout", "stderr"):  # by the caller, as with >&-
        if getattr(sys, closed) is None:
            setattr(sys, closed, Path(os.devnull).open("w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not what replaces them in a notebook or a test
            stream.reconfigure(errors="replace")  # a terminal that has no ± shows a question mark
    try:
        command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
        if command in ("-h", "--help"):
            print(usage())
            return 0
        if "--version" in arguments:
            print(f"lazyllm-bench {version_of('lazyllm-bench')}")
            return 0
        if command not in COMMANDS:
            near = difflib.get_close_matches(command, COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else "lazyllm-bench --help lists all"
            raise UserError(f"no such command: {command}; {hint}")
        code = import_module(COMMANDS[command][0]).main(rest) or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe, such as head, has ended
        # so that Python's last flush is silent
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
