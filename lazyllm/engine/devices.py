"""The devices that a model computes on: which they are, their clock, and their memory.

A model computes on one device, or accelerate spreads its layers over several (`device_map`).
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def device_of(module: nn.Module) -> torch.device:
    """The device that `module` computes on, wherever accelerate keeps its weights in between.

    If weights are held on the host or on disk, the module has them during its call only; accelerate's hook knows where
    that is.
    """
    for part in module.modules():
        hook: Any = getattr(part, "_hf_hook", None)
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device(device)  # accelerate numbers accelerators: 1 is the second of the machine's kind
    return next(module.parameters()).device


def home_of(model: Any) -> torch.device:
    """The device that the model's tokens are embedded on: a generation keeps all that no layer owns there."""
    return device_of(model.model.embed_tokens) if is_spread(model) else model.device


def devices_of(model: Any) -> tuple[torch.device, ...]:
    """Every device that the model computes on, its home first."""
    parts = [*model.model.layers, model.model.norm, model.lm_head] if is_spread(model) else []
    return tuple(dict.fromkeys([home_of(model), *map(device_of, parts)]))


def is_spread(model: Any) -> bool:
    """Whether accelerate moves the model's inputs or weights."""
    return hasattr(model, "hf_device_map")


def moved(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`: a tensor, None, or a tuple of such. What is there already is not copied."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    return value


def read_clock(*devices: torch.device) -> float:
    """Seconds on a monotonic clock, read when the devices have done all their work."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return time.perf_counter()


def reset_peak(*devices: torch.device) -> None:
    """Start counting the peak memory anew. Without effect if the system cannot (CPU on other systems than Linux)."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif device.type == "cpu" and _CLEAR.exists():
            _CLEAR.write_text("5")  # resets VmHWM, see proc(5)


def read_peak(*devices: torch.device) -> int | None:
    """Bytes at the peak since `reset_peak`, each device's own, summed; None if one is unknown.

    Allocated on a GPU, resident in this process on CPU. The peaks of several GPUs need not have been at the same
    moment: the sum is what these GPUs must have had free together.
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
    """Give back the memory that a failed example left, so that the next one finds it free."""
    gc.collect()
    if any(device.type == "cuda" for device in devices):
        torch.cuda.empty_cache()  # of all GPUs
