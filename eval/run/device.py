"""The device of a run: a lock, so that two runs are never timed on it at once, and what failures
leave on it.
"""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from eval.store.record import Failure
from lazyllm.engine.devices import read_clock
from lazyllm.errors import UserError, place_of, reason_of
from lazyllm.files import cache_folder
from lazyllm.measuring import release_memory
from lazyllm.methods.support.other_models import HELPERS

log = logging.getLogger(__name__)

POLL_S = 0.5


@contextmanager
def held(device: torch.device) -> Iterator[None]:
    """Hold this accelerator until the block ends; wait while another run of this user holds it.

    A lock is a file in the cache folder, which containers and jobs may share. The CPU is not held.
    A thread may hold a device twice.
    """
    if device.type == "cpu":
        yield
        return
    lock = FileLock(
        cache_folder() / "locks" / f"{_device_id(device)}.lock",
        poll_interval=POLL_S,
        is_singleton=True,
    )
    _acquire(lock, device)
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: FileLock, device: torch.device) -> None:
    file = lock.lock_file
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        log.info("%s is in use by another run: waiting until it is free (%s)", device, file)
        lock.acquire()
    except OSError as error:  # some cluster file systems have no locks
        log.warning(
            "%s: cannot be locked (%s); make sure that only one run at a time uses %s",
            file,
            error,
            device,
        )


def _device_id(device: torch.device) -> str:
    """The device's id: the same in all processes, whatever number it has there."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return f"{device.type}-{device.index or 0}"


@contextmanager
def held_and_released(device: torch.device) -> Iterator[None]:
    """Hold the device until the block ends, and then free its memory, before another run gets
    it.
    """
    with held(device):
        try:
            yield
        finally:
            HELPERS.unload()
            try:
                release_memory(device)
            except RuntimeError as error:  # only logged: the run's own error is raised
                log.warning("%s: its memory could not be freed (%s)", device, error)


def recover(device: torch.device) -> None:
    """Free the memory that a failed example left. Raises UserError if the device has failed."""
    try:
        release_memory(device)
        read_clock(device)  # waits for it
    except RuntimeError as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"{device} does not recover from the last failure ({why}). Finished examples are safe: "
            "give the same command again"
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the host lacks memory. cuBLAS has its own words for it."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in ("allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )


def failure_of(error: Exception, prompt_tokens: int) -> Failure:
    """The error that is being handled, as a visit stores it."""
    advice = f" ({place_of(error)})"
    if is_out_of_memory(error):
        advice = (
            f"; out of memory at {prompt_tokens} prompt tokens: lower model.max_prompt_tokens, or "
            "give a smaller model"
        )
    return Failure(error=reason_of(error) + advice, traceback=traceback.format_exc())
