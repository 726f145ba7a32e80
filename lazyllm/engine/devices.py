"""The devices that a model computes on, their clock and their memory.

A model computes on one device, or accelerate spreads its layers over several (`device_map`).
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lazyllm.engine.flops import LayerShape
from lazyllm.machine import FLASH_2, accelerator, device_name

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


def read_work_clock(device: torch.device) -> float:
    """Seconds, read after the device has finished all its work; CPU time of this process with one CPU thread."""
    is_one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if is_one_thread else read_clock(device)


def utilisation(model: Any, flops: float, seconds: float) -> float | None:
    """The share of the peak of the model's device that some work used; None if the peak is not known.

    The peak is that of the data sheet, and on a CPU the rate of one matrix product: of 1,000 of the model's tokens, the
    best of three. Raises UserError for more than a data sheet's.
    """
    device, dtype, shape = devices_of(model)[0], model.dtype, LayerShape.of(model.config)
    if getattr(model.config, "quantization_config", None) is not None:  # its products are faster
        return None
    if device.type == "cpu":
        return flops / seconds / _cpu_rate(dtype, shape.width, shape.mlp_width, torch.get_num_threads())
    kind = accelerator(device_name(device))
    if kind is None or dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    return kind.share(flops / seconds, dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32)


@cache
def _cpu_rate(dtype: torch.dtype, width: int, mlp_width: int, threads: int) -> float:
    """FLOP/s of a product, measured once for each number of threads."""
    device, seconds = torch.device("cpu"), []
    rows, weight = (torch.rand(size).to(dtype) for size in ((1000, width), (width, mlp_width)))
    for _ in range(4):  # the first one is slower
        began = read_work_clock(device)
        torch.mm(rows, weight)
        seconds.append(read_work_clock(device) - began)
    return 2 * 1000 * width * mlp_width / min(seconds)


# {a part of an event's name in PyTorch's profiler, in lower case: the attention kernel}, the most telling first
_KERNELS = {
    "cudnn": "cuDNN",
    "sm90": "FlashAttention 3",
    "flash_attention_for_cpu": "SDPA's flash for CPUs",
    "flash_fwd": FLASH_2,
    "fmha": "memory-efficient",
    "attention_math": "SDPA without a fused kernel",
}


def attention_events(run: Callable[[], object]) -> list[str]:
    """The events of a run that name attention, by PyTorch's profiler: operators, and kernels of a GPU."""
    from torch.profiler import profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints lines of its own, when it starts and stops
    with profile() as recorded:
        run()
    words = ("flash", "fmha", "attention", "cudnn", "sdpa")
    keys = {event.key[:120] for event in recorded.key_averages()}
    return sorted(key for key in keys if any(word in key.lower() for word in words))


def attention_kernel(events: Sequence[str]) -> str:
    """The attention kernel that ran, by `attention_events`."""
    names = " ".join(events).lower()
    return next((kernel for part, kernel in _KERNELS.items() if part in names), "eager")


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
    total = 0
    for device in devices:
        if device.type == "cuda":
            total += torch.cuda.max_memory_allocated(device)
        elif device.type == "cpu" and _CLEAR.exists():
            line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
            total += int(line.split()[1]) * 1024
        else:
            return None
    return total


def memory_of(*devices: torch.device) -> int | None:
    """Bytes of memory of all these devices together; None unless all are CUDA's."""
    if any(device.type != "cuda" for device in devices):
        return None
    return sum(torch.cuda.get_device_properties(device).total_memory for device in devices)


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

# {bfloat16 weight: (what changes if its values do, its copy in FBGEMM's layout)}
_COPIES = WeakTensorKeyDictionary()


def products_of(rows: Tensor, largest: int, packed: bool = False) -> AbstractContextManager[Any]:
    """A context for running layers over rows [1, m, w] in a decoding step, with other products if they are faster.

    largest: elements of the layers' largest matrix. packed: the rows are of several generations, and weights stay in
    memory; then also bfloat16 on a CPU without instructions for it, whose own products cost as much as one row after
    the other.
    """
    m, backends = rows.shape[1], torch.backends
    if rows.device.type != "cpu" or largest < LARGE_MATRIX:
        return nullcontext()
    if rows.dtype == torch.float32 and m in FEW_ROWS and backends.mkldnn.is_available():
        return _Products(rows.dtype, lambda rows, *weights: F.linear(rows.to_mkldnn(), *weights).to_dense())
    is_slow = rows.dtype == torch.bfloat16 and backends.cpu.get_cpu_capability() == "AVX2"
    if packed and m > 1 and is_slow and backends.quantized.engine in ("x86", "fbgemm"):
        return _Products(rows.dtype, by_float16)
    return nullcontext()


def by_float16(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of bfloat16, in float32 with the weight in float16, by FBGEMM. Reads the weight once for all rows.

    float16 holds a bfloat16 weight exactly from 2**-17 to 65504, and smaller ones to within 2**-25, far below the
    rounding of the result. FBGEMM needs a copy of the weight, as large as the weight, which lives as long as it does.
    """
    state = weight.data_ptr(), None if weight.is_inference() else weight._version
    if weight not in _COPIES or _COPIES[weight][0] != state:
        fits = weight.abs().max() <= torch.finfo(torch.float16).max
        _COPIES[weight] = state, torch.ops.quantized.linear_prepack_fp16(weight.float(), None) if fits else None
    copy = _COPIES[weight][1]
    if copy is None:
        return F.linear(rows, weight, bias)
    product = torch.ops.quantized.linear_dynamic_fp16(rows.float(), copy)
    return (product if bias is None else product + bias).to(rows.dtype)


class _Products(TorchFunctionMode):
    """Within this context, `F.linear` with a large weight matrix of this dtype is `product`."""

    def __init__(self, dtype: torch.dtype, product: Callable[..., Tensor]) -> None:
        super().__init__()
        self._dtype = dtype
        self._product = product

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear and len(args) >= 2 and not kwargs:
            weight = args[1]
            # quantised weights are subclasses of Tensor with their own products
            is_plain = type(weight) in (Tensor, Parameter) and weight.layout == torch.strided
            if is_plain and weight.dtype == self._dtype and weight.numel() >= LARGE_MATRIX:
                return self._product(*args)
        return func(*args, **(kwargs or {}))
