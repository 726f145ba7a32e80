"""The devices that a model computes on, their clock, and settings that are replaced for a while.

A model computes on one device, or accelerate spreads its layers over several (`device_map`).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def device_of(module: nn.Module) -> torch.device:
    """Find the device that `module` computes on.

    Weights that accelerate offloads are there during a call only; its hook names it.
    """
    for part in module.modules():
        hook: Any = getattr(part, "_hf_hook", None)
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device(device)  # accelerate's number 1 is the second accelerator
    return next(module.parameters()).device


def main_device(model: Any) -> torch.device:
    """Find the device of the embeddings, where a generation keeps all that no layer owns."""
    return device_of(model.model.embed_tokens) if is_spread(model) else model.device


def devices_of(model: Any) -> tuple[torch.device, ...]:
    """List every device that the model computes on, the main one first."""
    parts = [*model.model.layers, model.model.norm, model.lm_head] if is_spread(model) else []
    return tuple(dict.fromkeys([main_device(model), *map(device_of, parts)]))


def is_spread(model: Any) -> bool:
    """Say whether accelerate placed the model, and moves inputs or weights between devices."""
    return hasattr(model, "hf_device_map")


def to_device(value: Any, device: torch.device) -> Any:
    """Move a tensor, None, or a tuple of these."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(to_device(part, device) for part in value)
    return value


def concat(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Run `torch.cat`, but without a copy if there is a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


_clock = time.perf_counter


def read_clock(*devices: torch.device) -> float:
    """Read the seconds of a monotonic clock after the devices have finished all their work."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return _clock()


@contextmanager
def cpu_time(counts: bool = True) -> Iterator[None]:
    """Let `read_clock` count this process's CPU time, if `counts`."""
    global _clock
    before = _clock
    _clock = time.process_time if counts else before
    try:
        yield
    finally:
        _clock = before


def tf32_products(allowed: bool) -> AbstractContextManager[None]:
    """Let CUDA run products of float32 in TF32, on tensor cores, if `allowed`."""
    matmul: Any = torch.backends.cuda.matmul
    has_precision = hasattr(matmul, "fp32_precision")
    name, tf32 = ("fp32_precision", "tf32") if has_precision else ("allow_tf32", True)
    return replaced(matmul, name, tf32) if allowed else nullcontext()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value within this context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
