"""Peak memory of one generation, and memory given back after a failure."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def reset_peak(*devices: torch.device) -> None:
    """Start counting anew. Without effect where the system cannot (CPU on other systems than Linux)."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif device.type == "cpu" and _CLEAR.exists():
            _CLEAR.write_text("5")  # resets VmHWM, see proc(5)


def read_peak(*devices: torch.device) -> int | None:
    """Bytes at the peak since `reset_peak`, each device's own, summed; None if one is unknown.

    Allocated on a GPU, resident in this process on CPU. Of a model over several GPUs the peaks need not have been at
    the same moment: the sum is what these GPUs must have had free together.
    """
    peaks = [_peak(device) for device in devices]
    return None if None in peaks else sum(peaks)  # type: ignore[arg-type]


def _peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "cpu" and _CLEAR.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return None


def release_memory(*devices: torch.device) -> None:
    """Give back what an example that failed has left, so that the next one finds it free."""
    gc.collect()
    if any(device.type == "cuda" for device in devices):
        torch.cuda.empty_cache()  # of all GPUs
