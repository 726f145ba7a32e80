"""What a generation used: CPU time, memory, attention kernel, share of the device's peak (MFU)."""

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lazyllm.engine.devices import devices_of, read_clock
from lazyllm.engine.flops import LayerShape
from lazyllm.machine import FLASH_2, Accelerator, accelerator, device_name

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def read_work_clock(device: torch.device) -> float:
    """Read the clock after the device's work; with one CPU thread, the CPU time of this process."""
    is_one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if is_one_thread else read_clock(device)


def utilisation(model: Any, flops: float, seconds: float) -> float | None:
    """Compute the share of the peak of the model's device; None if the peak is not known.

    The peak is the data sheet's, on a CPU the `_rate` of a product of 1,000 tokens with an MLP
    matrix. A model that is faster runs other products (in float16, with a library of its own), so
    its peak is not known either. Raises UserError for more than the data sheet's peak.
    """
    device, dtype, shape = devices_of(model)[0], model.dtype, LayerShape.of(model.config)
    if getattr(model.config, "quantization_config", None) is not None:  # its products are faster
        return None
    if device.type == "cpu":
        threads = torch.get_num_threads()
        rate = _rate(device, dtype, 1000, shape.width, shape.mlp_width, threads)
        share = flops / seconds / rate
        return share if share <= 1 else None
    kind = accelerator(device_name(device))
    name = str(dtype).removeprefix("torch.")
    return None if kind is None else kind.share(flops / seconds, name, allows_tf32())


def allows_tf32() -> bool:
    """Say whether CUDA's products in float32 may use TF32."""
    matmul: Any = torch.backends.cuda.matmul
    # from torch 2.9 on, `allow_tf32` may raise if `fp32_precision` was used
    has_precision = hasattr(matmul, "fp32_precision")
    return matmul.fp32_precision == "tf32" if has_precision else matmul.allow_tf32


@cache
def _rate(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    width: int,
    mlp_width: int,
    threads: int,
) -> float:
    """Measure the FLOP/s of a product once: the fastest of four, of fewer if they are slow."""
    sizes = (tokens, width), (width, mlp_width)
    rows, weight = (torch.rand(size, device=device).to(dtype) for size in sizes)
    seconds = []
    while len(seconds) < 4 and sum(seconds) < 0.5:  # the first one is slower
        began = read_work_clock(device)
        torch.mm(rows, weight)
        seconds.append(read_work_clock(device) - began)
    return 2 * tokens * width * mlp_width / min(seconds)


def this_machine(
    device: torch.device, dtype: torch.dtype, config: Any, threads: int | None
) -> Accelerator:
    """Read the device's data sheet; measure products on a CPU or an unknown GPU.

    config: of the model whose shape the product has, at most 2,048 wide. threads: of a CPU; None
    for torch's choice. gigabytes: 0 for a CPU.
    """
    name, before = device_name(device), torch.get_num_threads()
    if (known := accelerator(name)) is not None:
        return known
    torch.set_num_threads(threads or before)
    try:
        shape, used = LayerShape.of(config), torch.get_num_threads()
        width, mlp_width = min(shape.width, 2048), min(shape.mlp_width, 8192)
        flops_per_s = _rate(device, dtype, 1000, width, mlp_width, used)
        wide = 8192  # a matrix beyond a CPU's caches, as all weights together are
        bytes_per_s = _rate(device, dtype, 1, wide, wide, used) / 2 * dtype.itemsize
    finally:
        torch.set_num_threads(before)
    size = 0 if device.type == "cpu" else (memory_of(device) or 0) / 1e9
    return Accelerator(f"{name}, measured", flops_per_s, flops_per_s, bytes_per_s, size)


# {a part of an operator's name: the attention kernel behind it}, the most telling first
_KERNELS = {
    "cudnn": "cuDNN",
    "flash_attn_3": "FlashAttention 3",
    "flash_attention_for_cpu": "SDPA's flash for CPUs",
    "product_flash_attention": FLASH_2,  # as PyTorch's own is on NVIDIA's cards
    "flash_attn": FLASH_2,
    "efficient_attention": "memory-efficient",
    "attention_math": "SDPA without a fused kernel",
    "softmax": "eager",
}


class _Operators(TorchDispatchMode):
    """Notes the names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            with self:  # inference mode does not take it apart
                return func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attention_events(run: Callable[[], object]) -> list[str]:
    """Name the operators of a run that are about attention; eager attention calls softmax.

    PyTorch's profiler would name a GPU's kernels as well, but once used, even for the CPU alone, it
    slows the start of every later kernel: decoding by a quarter (Llama 2 7B's shape on an H200,
    torch 2.11; results/gpu).
    """
    words = ("attention", "attn", "sdpa", "softmax")
    with _Operators() as operators:
        run()
    return sorted(name for name in operators.names if any(word in name for word in words))


def attention_kernel(events: Sequence[str]) -> str:
    """Name the attention kernel that ran, by `attention_events`; if unknown, the events."""
    names = ", ".join(events)
    known = (kernel for part, kernel in _KERNELS.items() if part in names)
    return next(known, names or "unknown")


def reset_peak(device: torch.device) -> None:
    """Reset the peak memory. Without effect on a CPU if the system is not Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu" and _CLEAR.exists():
        _CLEAR.write_text("5")  # resets VmHWM, see proc(5)


def read_peak(device: torch.device) -> int | None:
    """Read the peak bytes since `reset_peak`: of a GPU's allocator, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "cpu" and _CLEAR.exists():
        lines = _STATUS.read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    return None


def memory_of(device: torch.device) -> int | None:
    """Read the bytes of the device's memory; None unless it is CUDA's."""
    is_cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).total_memory if is_cuda else None


def release_memory(device: torch.device) -> None:
    """Return unused memory to the system, so that a later peak shows new use only."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # glibc has it, musl has not
        trim(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of all GPUs
