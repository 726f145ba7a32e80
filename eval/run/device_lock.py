"""The device of a timed run: held by one run at a time, and what else went on while it was measured."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from eval.benchmarks.disk_cache import cache_folder

log = logging.getLogger(__name__)

NVIDIA_SMI_TIMEOUT_S = 20.0


@contextmanager
def held(device: torch.device, holder: str) -> Iterator[None]:
    """Hold an accelerator until the block ends, so that no two runs of this user are timed on it at once.

    holder: told to those who wait. A run that finds the device held waits, and says for whom. The lock is a file in the
    cache folder, named by the device's own id: it holds between containers and jobs that share that folder. The CPU is
    not held: runs on cores of their own hardly disturb each other, and `load` tells whether there were enough of them.
    """
    if device.type == "cpu":
        yield
        return
    file = cache_folder() / "locks" / f"{_device_id(device)}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+") as lock:  # not emptied: until it is ours, it says whose it is
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            log.info("%s is in use by %s: waiting until it is free", device, lock.read() or "another run")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # some cluster file systems know no locks
            log.warning("%s: cannot be locked (%s); see to it that one run at a time uses %s", file, error, device)
        lock.truncate(0)
        lock.write(holder)
        lock.flush()
        yield


@contextmanager
def all_held(devices: Sequence[torch.device], holder: str) -> Iterator[None]:
    """Hold all of these devices (see `held`), taken in one order by every run: no two wait for each other."""
    with ExitStack() as stack:
        for device in sorted(devices, key=_device_id):
            stack.enter_context(held(device, holder))
        yield


def load(*devices: torch.device) -> dict[str, Any]:
    """What the machine does at this moment.

    average: processes that ran or wanted to, mean over the last 1, 5 and 15 minutes (`os.getloadavg`). cpu_count: the
    cores that they share. gpu_processes: how many use the GPU, by nvidia-smi, this one included once its model is
    loaded (of several GPUs: the busiest); None on CPU or where it cannot be asked.
    """
    counts = [_gpu_processes(device) for device in devices]
    return {
        "average": [round(one, 2) for one in os.getloadavg()],
        "cpu_count": os.cpu_count(),
        "gpu_processes": max((one for one in counts if one is not None), default=None),
    }


def _gpu_processes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader", f"--id=GPU-{_device_id(device)}"]
    try:
        listed = subprocess.run(query, check=True, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError):  # no nvidia-smi (ROCm, a bare container), or one that does not answer
        return None
    return len(listed.split())


def _device_id(device: torch.device) -> str:
    """The same for all processes that see the device, whatever number they see it under."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return f"{device.type}-{device.index or 0}"
