"""Where a model computes: on one device, or with its layers spread over several by accelerate (`device_map`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def device_of(module: nn.Module) -> torch.device:
    """The device that `module` computes on, wherever accelerate keeps its weights in between.

    Where weights are held on the host or on disk, the module has them for the length of its call only; accelerate's
    hook knows where that is.
    """
    for part in module.modules():
        hook: Any = getattr(part, "_hf_hook", None)
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device(device)  # accelerate numbers accelerators: 1 is the second of the machine's kind
    return next(module.parameters()).device


def home_of(model: Any) -> torch.device:
    """The device that the model's tokens are embedded on: where a generation keeps all that no layer owns."""
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
        return tuple(moved(one, device) for one in value)
    return value
