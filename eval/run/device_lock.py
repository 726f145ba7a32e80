"""Locks on the devices of timed runs, and the machine's load during a measurement."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from lazyllm.files import cache_folder

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

NVIDIA_SMI_TIMEOUT_S = 20.0
POLL_S = 0.5


@contextmanager
def held(devices: Sequence[torch.device], holder: str) -> Iterator[None]:
    """Hold these accelerators until the block ends, so that two runs of this user are never timed on one at once.

    holder: shown to runs that wait. A lock is a file in the cache folder, which containers and jobs may share. All runs
    take devices in the same order, so no two wait for each other. The CPU is not held; `load` shows whether there were
    enough cores. A thread may hold a device twice.
    """
    with ExitStack() as stack:
        for device in sorted((device for device in devices if device.type != "cpu"), key=_device_id):
            file = cache_folder() / "locks" / f"{_device_id(device)}.lock"
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.callback(_acquire(file, device, holder).release)
        yield


def _acquire(file: Path, device: torch.device, holder: str) -> FileLock:
    lock, note = FileLock(file, poll_interval=POLL_S, is_singleton=True), file.with_suffix(".holder")
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            other = note.read_text(encoding="utf-8") if note.exists() else "another run"
            log.info("%s is in use by %s: waiting until it is free", device, other)
            lock.acquire()
    except OSError as error:  # some cluster file systems have no locks
        log.warning("%s: cannot be locked (%s); make sure that only one run at a time uses %s", file, error, device)
    note.write_text(holder, encoding="utf-8")
    return lock


def load(*devices: torch.device) -> dict[str, Any]:
    """The machine's load now.

    average: of `os.getloadavg`. cpu_count: cores. gpu_processes: on the busiest of the GPUs, by nvidia-smi, this one
    included once its model is loaded; None on CPU or if nvidia-smi does not answer.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    listed = [nvidia_smi("--query-compute-apps=pid", f"--id=GPU-{_device_id(device)}") for device in gpus]
    return {
        "average": [round(average, 2) for average in os.getloadavg()],
        "cpu_count": os.cpu_count(),
        "gpu_processes": max((len(lines) for lines in listed if lines is not None), default=None),
    }


def nvidia_smi(*query: str) -> list[str] | None:
    """The lines that nvidia-smi answers; None if it is absent (ROCm, a bare container), fails or hangs."""
    command = ["nvidia-smi", *query, "--format=csv,noheader"]
    try:
        run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.splitlines()


def _device_id(device: torch.device) -> str:
    """The device's id: the same in all processes, whatever number it has there."""
    if device.type == "cuda":
        import torch  # not at the top: `doctor` asks nvidia-smi without it

        return str(torch.cuda.get_device_properties(device).uuid)
    return f"{device.type}-{device.index or 0}"
