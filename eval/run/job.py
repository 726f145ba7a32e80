"""The frame of every configured command: Hydra, logging, and the end after Ctrl-C.

Ctrl-C raises KeyboardInterrupt, which closes the run's folder on its way out. Visits are safe at
any moment (`eval.store.folder`), so a second Ctrl-C may end the process in the middle of that.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from eval.compose import (
    CONF,
    check_arguments,
    compose_config,
    names,
    one_line,
    register,
    to_settings,
)
from eval.config import Config, RunConfig
from eval.run.check import RUNS, check, check_writable
from eval.settings import Settings
from eval.store.runs import StoredRun
from lazyllm.errors import FailedExamplesError, UserError

INTERRUPTED = 130  # a shell's exit code of a program that Ctrl-C ended
MESSAGE = "stopped: every finished example is safe, and the same command goes on from there"


def main(arguments: Sequence[str]) -> int:
    """The command `run`: one run, or a sweep (-m). Returns the exit code.

    --list prints the names of models, datasets, methods and experiments instead.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--list", action="store_true")
    options, arguments = parser.parse_known_args(arguments)
    if options.list:
        print(names())
        return 0
    finished: list[StoredRun] = []  # of the jobs in this process

    def work(config: RunConfig) -> None:
        folder = _sweep_folder()
        check(config, folder)
        logging.info("loading torch and transformers")
        # not at the top: imports torch, only after the arguments are checked
        from eval.run.loop import measure
        from eval.run.prepare import prepare

        finished.append(measure(prepare(config, folder)))
        if failures := finished[-1].failures:
            raise FailedExamplesError(failures)

    try:
        start(work, arguments)
    finally:  # a job that failed does not hide the others
        if len(finished) > 1:
            from eval.run.finish import show_together  # the jobs have imported it

            show_together(finished)
    return 0


def start(
    work: Callable[[Config], object], arguments: Sequence[str], kind: type[Config] = RunConfig
) -> None:
    """Do `work` once, or as a sweep through a Hydra launcher if there is an option such as -m.

    Raises UserError; SystemExit after Ctrl-C, once all files are closed.
    """

    def job_of(config: DictConfig) -> None:
        with job():
            work(to_settings(config, kind))

    check_arguments(arguments)
    register(arguments, kind)
    try:
        _do(job_of, arguments, kind)
    except KeyboardInterrupt:
        print(MESSAGE, file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def _do(
    job_of: Callable[[DictConfig], object], arguments: Sequence[str], kind: type[Config]
) -> None:
    sweep_options = dict(
        argument.split("=", 1) for argument in arguments if argument.startswith("hydra.sweep.dir=")
    )
    runs = Path(sweep_options.get("hydra.sweep.dir", RUNS))
    if {"-m", "--multirun"} & set(arguments):
        check_writable(runs)
    if not any(argument.startswith("-") for argument in arguments):
        job_of(compose_config(arguments, kind))
        return
    # a launcher's processes import this package from the same place
    paths = [str(CONF.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        _through_hydra(job_of, arguments, kind)
    finally:
        # Hydra's; each run has its settings in run.json
        (runs / "multirun.yaml").unlink(missing_ok=True)


def jobs_of(arguments: Sequence[str]) -> list[RunConfig]:
    """The settings of each job of a run or a sweep, as Hydra makes them. Raises UserError for
    what Hydra refuses.
    """
    jobs: list[DictConfig] = []
    overrides = [
        word
        for word in arguments
        if not word.startswith(("hydra/", "hydra.")) and word not in ("-m", "--multirun")
    ]
    if options := [
        word for word in overrides if word.startswith("-")
    ]:  # --cfg, for one, is Hydra's of a run
        raise UserError(f"{options[0]}: expected KEY=VALUE, such as limit=3, or -m")
    check_arguments(overrides)
    register(overrides)
    with TemporaryDirectory() as folder:  # Hydra writes the sweep's settings there
        quiet = ["hydra/hydra_logging=none", f"hydra.sweep.dir={folder}"]
        _through_hydra(jobs.append, ["-m", *overrides, *quiet])
    # not in Hydra's jobs, which print a line before an error
    return [to_settings(config) for config in jobs]


def _through_hydra(
    work: Callable[[DictConfig], object], arguments: Sequence[str], kind: type[Settings] = RunConfig
) -> None:
    """Do `work` for each job that Hydra makes of the arguments, which it reads from `sys.argv`."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise errors instead of exiting
    # joblib starts a worker anew once its memory has grown, as by loading a model
    warnings.filterwarnings("ignore", message="A worker stopped while some jobs")
    before = sys.argv
    # Hydra refuses -m among the settings
    sys.argv = ["run.py", *sorted(arguments, key=lambda word: word not in ("-m", "--multirun"))]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(work)()
    except (HydraException, OmegaConfBaseException) as error:
        raise one_line(error, kind) from error
    finally:
        sys.argv = before


def _sweep_folder() -> Path:
    """The folder of this job's run, unless it has an own one: `hydra.sweep.dir` in a sweep."""
    is_sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    return Path(HydraConfig.get().sweep.dir) if is_sweep else RUNS


_CHATTY = ["hydra", "absl", "httpx", "httpx2", "datasets", "fontTools", "matplotlib", "filelock"]


class _Stderr:
    """Writes to what `sys.stderr` is at the time, as a progress bar takes its place for a while."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


@contextmanager
def job() -> Iterator[None]:
    """The context of a job. In a sweep an error is logged, the other jobs go on, and the sweep
    fails at its end.
    """
    sweep = (
        HydraConfig.get()
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
        else None
    )
    if sweep is not None:
        os.chdir(sweep.runtime.cwd)  # Ray's workers start in another folder
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        stream=_Stderr(),
        force=True,
    )
    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        yield
    except Exception as error:
        if sweep is not None:
            logging.error(
                "job failed (%s): %s: %s",
                " ".join(sweep.overrides.task),
                type(error).__name__,
                error,
            )
            # Hydra keeps the error, whose frames hold the model
            traceback.clear_frames(error.__traceback__)
        raise
