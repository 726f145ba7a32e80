"""Locks on devices, so that two runs are never timed on one at once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from lazyllm.files import cache_folder

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

POLL_S = 0.5


@contextmanager
def held(device: torch.device) -> Iterator[None]:
    """Hold this accelerator until the block ends; wait while another run of this user holds it.

    A lock is a file in the cache folder, which containers and jobs may share. The CPU is not held. A thread may hold a
    device twice.
    """
    if device.type == "cpu":
        yield
        return
    lock = FileLock(cache_folder() / "locks" / f"{_device_id(device)}.lock", poll_interval=POLL_S, is_singleton=True)
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
        log.warning("%s: cannot be locked (%s); make sure that only one run at a time uses %s", file, error, device)


def _device_id(device: torch.device) -> str:
    """The device's id: the same in all processes, whatever number it has there."""
    if device.type == "cuda":
        import torch

        return str(torch.cuda.get_device_properties(device).uuid)
    return f"{device.type}-{device.index or 0}"
