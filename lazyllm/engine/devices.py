"""The devices that a model computes on, their clock, and settings that are replaced for a while.

A model computes on one device, or accelerate spreads its layers over several (`device_map`).
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def device_of(module: nn.Module) -> torch.device:
    """The device that `module` computes on.

    If accelerate holds its weights on the host or on disk, they are on this device only during a call, and
    accelerate's hook names it.
    """
    for part in module.modules():
        hook: Any = getattr(part, "_hf_hook", None)
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device(device)  # accelerate's number 1 is the second accelerator
    return next(module.parameters()).device


def main_device(model: Any) -> torch.device:
    """The device of the embeddings; a generation keeps everything there that no layer owns."""
    return device_of(model.model.embed_tokens) if is_spread(model) else model.device


def devices_of(model: Any) -> tuple[torch.device, ...]:
    """Every device that the model computes on, the main one first."""
    parts = [*model.model.layers, model.model.norm, model.lm_head] if is_spread(model) else []
    return tuple(dict.fromkeys([main_device(model), *map(device_of, parts)]))


def is_spread(model: Any) -> bool:
    """Whether accelerate placed the model, and moves inputs or weights between devices."""
    return hasattr(model, "hf_device_map")


def to_device(value: Any, device: torch.device) -> Any:
    """A tensor, None, or a tuple of these, moved to `device`; tensors that are there already are not copied."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(to_device(part, device) for part in value)
    return value


_clock = time.perf_counter


def read_clock(*devices: torch.device) -> float:
    """Seconds on a monotonic clock, read after the devices have finished all their work; CPU time in `cpu_time`."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return _clock()


@contextmanager
def cpu_time(counts: bool = True) -> Iterator[None]:
    """Within this context, if `counts`, the clock is this process's CPU time, which other work does not lengthen."""
    global _clock
    own = _clock
    _clock = time.process_time if counts else own
    try:
        yield
    finally:
        _clock = own


def tf32_products(allowed: bool) -> AbstractContextManager[None]:
    """A context that lets CUDA run products of float32 in TF32, on tensor cores, if `allowed`; else changes nothing."""
    matmul: Any = torch.backends.cuda.matmul
    name, tf32 = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    return replaced(matmul, name, tf32) if allowed else nullcontext()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within this context, an attribute has another value."""
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)
