"""Facts about the machine and the code, for stored results."""

from __future__ import annotations

import math
import platform
import re
import runpy
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyllm.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Accelerator:
    """A kind of GPU, by its maker's data sheet, without sparsity.

    name: words of the driver's name for it. flops_per_s: in 16 bits, in tensor cores.
    float32_flops_per_s: outside them. gigabytes: its memory. has_bfloat16: whether its tensor cores
    take bfloat16 and TF32; else float16 alone.
    """

    name: str
    flops_per_s: float
    float32_flops_per_s: float
    bytes_per_s: float
    gigabytes: float
    has_bfloat16: bool = True

    def peak(self, dtype: str, tf32: bool = False) -> float | None:
        """Return the FLOP/s in a dtype such as "bfloat16"; None if the data sheet names none.

        tf32: whether products in float32 may use TF32, at half of the rate of 16 bits.
        """
        if dtype == "float32":
            uses_tf32 = tf32 and self.has_bfloat16
            return self.flops_per_s / 2 if uses_tf32 else self.float32_flops_per_s
        if dtype == "float16" or (dtype == "bfloat16" and self.has_bfloat16):
            return self.flops_per_s
        return None

    def share(
        self, flops_per_s: float, dtype: str = "bfloat16", tf32: bool = False
    ) -> float | None:
        """Divide by the `peak`, if there is one. Raises UserError for more than a card can do."""
        peak = self.peak(dtype, tf32)
        if peak is None:
            return None
        if flops_per_s > ABOVE_RATED * peak:
            raise UserError(
                f"impossible clock: {flops_per_s / 1e12:.4g} TFLOP/s are {flops_per_s / peak:.0%} "
                f"of the peak of {self.name}, {peak / 1e12:.4g} TFLOP/s; expected at most 105 %: "
                "wait for the device before each reading (torch.cuda.synchronize), and give the "
                "device and dtype that ran"
            )
        return flops_per_s / peak


# tokens; per cent of its peak that a good baseline reaches from there on
LONG, LEAST_MFU = 8000, 40
# seconds in which a host starts a layer's kernels, measured beside an H200 (results/gpu)
LAYER_START_S = 0.6e-3
# times what reading the weights takes: beyond, a decoding step waits for the start of kernels
SLOW_STEP = 3
FLASH_2 = "FlashAttention 2"  # as `lazyllm.measuring.attention_kernel` names it
ABOVE_RATED = 1.05  # of the peak: cards boost a little above the clock of their data sheet
# Names that contain another one come first
ACCELERATORS = {
    "b200": Accelerator("B200", 2250e12, 75e12, 8e12, 180),
    "gh200": Accelerator("GH200", 989e12, 67e12, 4e12, 96),
    "h200_nvl": Accelerator("H200 NVL", 836e12, 60e12, 4.8e12, 141),
    "h200": Accelerator("H200", 989e12, 67e12, 4.8e12, 141),
    "h100_nvl": Accelerator("H100 NVL", 835e12, 60e12, 3.9e12, 94),
    "h100_pcie": Accelerator("H100 PCIe", 756e12, 51e12, 2e12, 80),
    "h100": Accelerator("H100", 989e12, 67e12, 3.35e12, 80),
    "h800_pcie": Accelerator("H800 PCIe", 756e12, 51e12, 2e12, 80),
    "h800": Accelerator("H800", 989e12, 67e12, 3.35e12, 80),
    "a100_40gb": Accelerator("A100 40GB", 312e12, 19.5e12, 1.555e12, 40),
    "a100": Accelerator("A100", 312e12, 19.5e12, 2.04e12, 80),
    "l40s": Accelerator("L40S", 362e12, 91.6e12, 0.864e12, 48),
    "rtx4090": Accelerator("RTX 4090", 165e12, 82.6e12, 1.01e12, 24),
    "l4": Accelerator("L4", 121e12, 30.3e12, 0.3e12, 24),
    "v100_32gb": Accelerator("V100 32GB", 125e12, 15.7e12, 0.9e12, 32, has_bfloat16=False),
    "v100": Accelerator("V100", 125e12, 15.7e12, 0.9e12, 16, has_bfloat16=False),
    "t4": Accelerator("T4", 65e12, 8.1e12, 0.32e12, 16, has_bfloat16=False),
}
# Parts of a GPU (MIG), and smaller cards that share a number, such as the RTX 4090 D
_SMALLER = {"MIG", "D", "Laptop"}


def accelerator(device: str) -> Accelerator | None:
    """Find a device's data sheet by the driver's name; None for parts of a GPU and smaller ones."""
    words = {*re.split(r"[\s-]+", device)}
    if words & _SMALLER:
        return None
    return next((kind for kind in ACCELERATORS.values() if words >= {*kind.name.split()}), None)


def machine_warnings(
    device: str,
    kernels: Collection[str],
    least_mfu: float,
    dtype: str | None = None,
    step_s: float = math.nan,
    weights: float = math.nan,
) -> list[str]:
    """Write a sentence for each sign that a slow baseline distorts the speedups.

    device: the driver's name. kernels: of its attention. dtype: the model's, if known. least_mfu:
    in per cent, of its prefills of `LONG` prompts. step_s: of its decoding, in seconds. weights:
    bytes that a step reads. NaN: not known.
    """
    kind = accelerator(device)
    if kind is None:
        return []
    sentences = []
    if dtype == "bfloat16" and not kind.has_bfloat16:
        sentences.append(
            f"{device} has no units for bfloat16, which it emulates, far slower than float16: give "
            "model.dtype=float16"
        )
    if least_mfu < LEAST_MFU:
        sentences.append(
            f"At {LONG:,} prompt tokens and more, the baseline's prefill reaches {least_mfu:.0f} % "
            f"of the peak of {device}, a good one {LEAST_MFU} % or more: this flatters every "
            "speedup"
        )
    if kind.name.startswith("H") and FLASH_2 in kernels:  # Hopper, for which it was not written
        sentences.append(
            f"The baseline ran {FLASH_2} on {device}, where it reaches about 35 % of the peak and "
            "FlashAttention 3 75 % (arXiv 2407.08608): this flatters every speedup at long prompts"
        )
    if step_s > SLOW_STEP * weights / kind.bytes_per_s:
        times = step_s * kind.bytes_per_s / weights
        sentences.append(
            f"The baseline's decoding step takes {times:.0f} times as long as {device} takes to "
            "read the weights: the start of kernels limits it, so generation speedups read near "
            "1 whatever a method saves"
        )
    return sentences


def device_name(device: torch.device) -> str:
    """Read the accelerator's name, or the processor's."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return processor_name() if device.type == "cpu" else device.type


def processor_name() -> str:
    """Read the name of the CPU."""
    name = _read_cpuinfo("model name")
    return name or platform.processor() or platform.machine()


def processor_flags() -> set[str]:
    """Read the names of the CPU's sets of instructions, if the system is Linux."""
    return {*_read_cpuinfo("flags", "Features").split()}


def _read_cpuinfo(*names: str) -> str:
    """Read a line of Linux's /proc/cpuinfo; "" without one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(names))
    return next(found, "")


def torch_build() -> dict[str, Any]:
    """Read `__version__`, `cuda` and more of the installed torch, without importing it."""
    origin = getattr(find_spec("torch"), "origin", None)
    return runpy.run_path(str(Path(origin).with_name("version.py"))) if origin else {}


def version_of(package: str) -> str:
    """Read the version of a package, or "not installed", as this one in a mere checkout."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def git_commit() -> str | None:
    """Read the checkout's commit, with "+changes" if it is not clean; None outside one."""
    # by its hash, not by a tag
    described = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+changes"]
    command = ["git", "-C", str(Path(__file__).parent), *described]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
