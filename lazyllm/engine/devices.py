"""The devices that a model computes on, their clock and their memory.

A model computes on one device, or accelerate spreads its layers over several (`device_map`).
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


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


def home_of(model: Any) -> torch.device:
    """The device of the embeddings; a generation keeps everything there that no layer owns."""
    return device_of(model.model.embed_tokens) if is_spread(model) else model.device


def devices_of(model: Any) -> tuple[torch.device, ...]:
    """Every device that the model computes on, its home first."""
    parts = [*model.model.layers, model.model.norm, model.lm_head] if is_spread(model) else []
    return tuple(dict.fromkeys([home_of(model), *map(device_of, parts)]))


def is_spread(model: Any) -> bool:
    """Whether accelerate moves the model's inputs or weights."""
    return hasattr(model, "hf_device_map")


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, None, or a tuple of these, moved to `device`; tensors that are there already are not copied."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    return value


def read_clock(*devices: torch.device) -> float:
    """Seconds on a monotonic clock, read after the devices have finished all their work."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return time.perf_counter()


def reset_peak(*devices: torch.device) -> None:
    """Reset the peak memory. Without effect on a CPU if the system is not Linux."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif device.type == "cpu" and _CLEAR.exists():
            _CLEAR.write_text("5")  # resets VmHWM, see proc(5)


def read_peak(*devices: torch.device) -> int | None:
    """The sum of all devices' peak bytes since `reset_peak`; None if a peak is unknown.

    A GPU's bytes are those allocated, a CPU's those resident in this process. Peaks of several GPUs may lie at
    different moments: the sum is the memory that these GPUs need together.
    """
    peaks = [_peak(device) for device in devices]
    return None if None in peaks else sum(peaks)  # type: ignore[arg-type]


def memory_of(*devices: torch.device) -> int | None:
    """Bytes of memory of all these devices together; None unless all are CUDA's."""
    if any(device.type != "cuda" for device in devices):
        return None
    return sum(torch.cuda.get_device_properties(device).total_memory for device in devices)


def _peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "cpu" and _CLEAR.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return None


def release_memory(*devices: torch.device) -> None:
    """Return the memory that nothing uses any more to the system, so that a peak shows new use of it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # glibc has it, musl has not
        trim(0)
    if any(device.type == "cuda" for device in devices):
        torch.cuda.empty_cache()  # of all GPUs


# MKL is fast for one row, and from about 32 rows on. Prefill always uses MKL, for the baseline and for methods, so that
# no method looks fast by a faster library.
FEW_ROWS = range(2, 32)
LARGE_MATRIX = 2**18  # elements; for smaller matrices, converting to oneDNN's tensors costs more than it saves


def products_of(rows: Tensor, largest: int) -> AbstractContextManager[Any]:
    """A context for running layers over rows [1, m, w] in a decoding step: uses oneDNN's products if they are faster.

    largest: elements of the layers' largest matrix.
    """
    is_slow = rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.shape[1] in FEW_ROWS
    pays = is_slow and largest >= LARGE_MATRIX and torch.backends.mkldnn.is_available()
    return _ProductsByOneDNN() if pays else nullcontext()


class _ProductsByOneDNN(TorchFunctionMode):
    """Within this context, `F.linear` with a large weight matrix is oneDNN's."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and len(args) >= 2 and not kwargs:
            rows, weight = args[:2]
            # quantised weights are subclasses of Tensor with their own products
            is_plain = type(weight) in (Tensor, Parameter) and weight.layout == torch.strided
            if is_plain and weight.numel() >= LARGE_MATRIX:
                return F.linear(rows.to_mkldnn(), *args[1:]).to_dense()
        return func(*args, **(kwargs or {}))
