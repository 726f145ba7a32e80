"""What a generation used: CPU time, memory, the attention kernel that ran, and the share of the device's peak (MFU)."""

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
    """Seconds, read after the device has finished all its work; CPU time of this process with one CPU thread."""
    is_one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if is_one_thread else read_clock(device)


def utilisation(model: Any, flops: float, seconds: float) -> float | None:
    """FLOP/s as a share of the peak of the model's device; None if the peak is not known.

    The peak is the data sheet's. On a CPU it is the rate of the fastest of four products of 1,000 tokens with an MLP
    matrix. A model that is faster runs other products (in float16, with a library of its own), so its peak is not known
    either. Raises UserError for more than the data sheet's peak.
    """
    device, dtype, shape = devices_of(model)[0], model.dtype, LayerShape.of(model.config)
    if getattr(model.config, "quantization_config", None) is not None:  # its products are faster
        return None
    if device.type == "cpu":
        share = flops / seconds / _rate(device, dtype, 1000, shape.width, shape.mlp_width, torch.get_num_threads())
        return share if share <= 1 else None
    kind = accelerator(device_name(device))
    return None if kind is None else kind.share(flops / seconds, str(dtype).removeprefix("torch."), allows_tf32())


def allows_tf32() -> bool:
    """Whether CUDA's products in float32 may use TF32."""
    matmul: Any = torch.backends.cuda.matmul  # from torch 2.9 on, `allow_tf32` may raise if `fp32_precision` was used
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


@cache
def _rate(device: torch.device, dtype: torch.dtype, tokens: int, width: int, mlp_width: int, threads: int) -> float:
    """FLOP/s of a matrix product, measured once for all calls with the same arguments."""
    seconds = []
    rows, weight = (torch.rand(size, device=device).to(dtype) for size in ((tokens, width), (width, mlp_width)))
    for _ in range(4):  # the first one is slower
        began = read_work_clock(device)
        torch.mm(rows, weight)
        seconds.append(read_work_clock(device) - began)
    return 2 * tokens * width * mlp_width / min(seconds)


def this_machine(device: torch.device, dtype: torch.dtype, config: Any, threads: int | None) -> Accelerator:
    """The device's data sheet; of a CPU or an unknown GPU, the FLOP/s and bytes per second of measured products.

    config: of the model whose shape the product has, at most 2,048 wide. threads: of a CPU; None for torch's choice.
    gigabytes: 0 for a CPU.
    """
    name, before = device_name(device), torch.get_num_threads()
    if (known := accelerator(name)) is not None:
        return known
    torch.set_num_threads(threads or before)
    try:
        shape, used = LayerShape.of(config), torch.get_num_threads()
        flops_per_s = _rate(device, dtype, 1000, min(shape.width, 2048), min(shape.mlp_width, 8192), used)
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
        if func is torch.ops.aten.scaled_dot_product_attention.default:  # inference mode does not take it apart
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attention_events(run: Callable[[], object]) -> list[str]:
    """The operators of a run that name attention, or softmax, which eager attention calls.

    PyTorch's profiler would name a GPU's kernels as well, but once used, even for the CPU alone, it slows the start of
    every later kernel: decoding by a quarter (Llama 2 7B's shape on an H200, torch 2.11; results/gpu).
    """
    words = ("attention", "attn", "sdpa", "softmax")
    with _Operators() as operators:
        run()
    return sorted(name for name in operators.names if any(word in name for word in words))


def attention_kernel(events: Sequence[str]) -> str:
    """The attention kernel that ran, by `attention_events`; the events themselves if they name no known kernel."""
    names = ", ".join(events)
    return next((kernel for part, kernel in _KERNELS.items() if part in names), names or "not told by its operators")


def reset_peak(device: torch.device) -> None:
    """Reset the peak memory. Without effect on a CPU if the system is not Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu" and _CLEAR.exists():
        _CLEAR.write_text("5")  # resets VmHWM, see proc(5)


def read_peak(device: torch.device) -> int | None:
    """Read the device's peak bytes since `reset_peak`: allocated on a GPU, resident on a CPU; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "cpu" and _CLEAR.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return None


def memory_of(device: torch.device) -> int | None:
    """Bytes of the device's memory; None unless it is CUDA's."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def release_memory(device: torch.device) -> None:
    """Return unused memory to the system, so that a later peak shows new use only."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # glibc has it, musl has not
        trim(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of all GPUs
