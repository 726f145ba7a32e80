"""The frame of every configured command: Hydra, logging, and a quick end after Ctrl-C.

Python handles Ctrl-C between two of its instructions. An operation of a long prefill, weights being read, or threads
joined at the end delay that. Records are safe at any moment (`eval.store.folder`), so a thread ends the process.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from eval.run.config import (
    CONF,
    RunConfig,
    check_arguments,
    compose_config,
    jobs_of,
    one_line,
    register_schema,
    to_run_config,
)
from eval.run.resolved import RUNS, check_early, check_writable, resolve
from lazyllm.errors import FailedExamplesError, UserError

if TYPE_CHECKING:
    from eval.run.loop import RunResult

GRACE_S = 0.5  # for the regular end, which frees the device and writes down when the job ended
INTERRUPTED = 130  # a shell's exit code of a program that Ctrl-C ended
_BOUND = re.compile(r"(score|ttft)>=([+-]?\d+(?:\.\d+)?)")  # of a gate
_finished: list[RunResult] = []  # of this process's jobs; other launchers run theirs in other processes
_told: set[str] = set()  # errors of this process's jobs
MESSAGE = "stopped: every finished example is safe, and the same command goes on from there"


def main(arguments: Sequence[str]) -> int:
    """The verb `run`: one run, a comparison, or a sweep (-m). Returns the exit code. Raises UserError.

    --gate 'score>=-1 ttft>=1.2' makes it 1 unless the intervals of every method's score difference and TTFT speedup lie
    above these bounds.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gate")
    options, arguments = parser.parse_known_args(arguments)
    bounds = None if options.gate is None else parse_gate(options.gate)
    in_others = any(argument.startswith("hydra/launcher=") for argument in arguments)  # processes
    jobs = [] if bounds is None else [resolve(to_run_config(compose_config(job))) for job in jobs_of(arguments)]
    if (bounds and in_others) or not all(run.paired for job in jobs for run in job.runs.values()):
        raise UserError("--gate: expected a method beside its baseline in each job (timing.paired), and no launcher")
    _finished.clear()
    if in_others:
        with suppress(UserError):  # the first job tells what is left out here, once for the launcher's processes
            resolve(to_run_config(compose_config(jobs_of(arguments)[0])))
    try:
        start(run_job, arguments)
    finally:  # a job that failed does not hide the others
        if len(_finished) > 1 and any(argument.startswith("-") for argument in arguments):
            from eval.run.loop import show_together  # the jobs have imported it

            show_together(_finished)
    whole = [result.results for result in _finished if result.results is not None]
    if bounds is None or (_finished and not whole):  # the last shard decides
        return 0
    from eval.analysis.run_table import difference, passes  # the jobs have imported it

    passed = passes([difference(results) for results in whole], bounds)
    print(f"gate {options.gate}: {'passed' if passed else 'FAILED'}")
    return 0 if passed else 1


def parse_gate(text: str) -> dict[str, float]:
    """{"score": -1.0, "ttft": 1.2} of `score>=-1 ttft>=1.2`. Raises UserError."""
    bounds = [_BOUND.fullmatch(word) for word in text.split()]
    if not bounds or None in bounds:
        raise UserError(f"--gate {text!r}: expected bounds such as 'score>=-1 ttft>=1.2'")
    return {bound[1]: float(bound[2]) for bound in bounds if bound is not None}


def run_job(config: DictConfig) -> None:
    """One job: the run or the comparison that a composed config describes. Raises UserError."""
    with job():
        resolved = resolve(to_run_config(config))
        check_early(resolved)
        logging.info("loading torch and transformers")
        from eval.run.loop import compare, run  # not at the top: imports torch, only after the arguments are checked

        results = compare(resolved) if resolved.config.compare else [run(resolved)]
        _finished.extend(results)
        if failed := [result.failed for result in results if result.failed]:
            raise FailedExamplesError("; ".join(failed))


def start(work: Callable[[DictConfig], None], arguments: Sequence[str], schema: type[RunConfig] = RunConfig) -> None:
    """Do `work` once, or as a sweep through a Hydra launcher if the arguments hold an option such as -m.

    work: a function of a module that other processes can import. Raises UserError.
    """
    register_schema(schema)
    check_arguments(arguments, schema)
    if {"-m", "--multirun"} & set(arguments):
        check_writable(RUNS)
    _end_soon_after_ctrl_c()
    if not any(argument.startswith("-") for argument in arguments):
        return work(compose_config(arguments))
    # a launcher's processes import this package from the same place
    paths = [str(CONF.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "HYDRA_FULL_ERROR": "1"}  # raise errors instead of exiting
    # Hydra refuses -m among the settings
    sys.argv = ["run.py", *sorted(arguments, key=lambda word: word not in ("-m", "--multirun"))]
    try:
        return hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(work)()
    except (HydraException, OmegaConfBaseException) as error:
        raise one_line(error) from error
    except KeyboardInterrupt:
        end()


@contextmanager
def job() -> Iterator[None]:
    """The context of a job. In a sweep an error is logged, the other jobs go on, and the sweep fails at its end."""
    sweep = HydraConfig.get() if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN else None
    if sweep is not None:
        os.chdir(sweep.runtime.cwd)  # Ray's workers start in another folder
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr, force=True
    )
    for chatty in ("absl", "httpx", "httpx2", "datasets", "fontTools", "matplotlib", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        yield
    except Exception as error:
        if sweep is not None:
            told = f"{type(error).__name__}: {error}"
            again = told in _told
            _told.add(told)
            logging.error("job failed (%s): %s", " ".join(sweep.overrides.task), "as above" if again else told)
            traceback.clear_frames(error.__traceback__)  # Hydra keeps the error, whose frames hold the model
        raise
    except KeyboardInterrupt:
        end()


def end() -> NoReturn:
    """After Ctrl-C, when all files are closed: print `MESSAGE` and end this process with `INTERRUPTED`.

    It does not wait for torch's threads, which would take seconds.
    """
    with suppress(OSError, ValueError):  # the reader has ended too, or the stream is closed
        sys.stdout.flush()
    _end()


def _end() -> NoReturn:
    with suppress(OSError, ValueError):
        print(MESSAGE, file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def _end_soon_after_ctrl_c() -> None:
    """From now on, end this process at most `GRACE_S` after Ctrl-C. The signal's handler stays."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # set_wakeup_fd requires it
    signal.set_wakeup_fd(writer)

    def watch() -> None:
        while os.read(reader, 1) != bytes([signal.SIGINT]):
            pass
        time.sleep(GRACE_S)
        _end()  # without standard output, whose reader may block

    threading.Thread(target=watch, name="ctrl-c", daemon=True).start()
