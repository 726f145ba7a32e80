"""What every command that Hydra starts has around its work: logging, errors for the user, and an end on Ctrl-C."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from eval.run import interrupt
from lazyllm.errors import UserError


def run_job(work: Callable[[], object]) -> None:
    """Do a Hydra job's work where the command was given. What a user can mend ends it with one line.

    In a sweep the error is logged and raised: the other jobs go on, and Hydra ends the sweep with the first error.
    """
    job = HydraConfig.get()
    os.chdir(job.runtime.cwd)  # Ray's workers start elsewhere
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr, force=True
    )
    for chatty in ("absl", "httpx", "datasets", "fontTools", "matplotlib"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        work()
    except Exception as error:
        if job.mode == RunMode.MULTIRUN:
            logging.error("job failed (%s): %s: %s", " ".join(job.overrides.task), type(error).__name__, error)
            traceback.clear_frames(error.__traceback__)  # Hydra keeps the error, and it would keep the model
            raise
        if isinstance(error, UserError):
            sys.exit(f"error: {error}")
        raise
    except KeyboardInterrupt:
        interrupt.end()
