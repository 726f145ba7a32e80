"""Facts about the machine and the code, for stored results."""

from __future__ import annotations

import platform
import runpy
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device_name(device: torch.device) -> str:
    """The accelerator's name, or the processor's."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def may_have_gpu() -> bool:
    """Whether torch, which is not imported, is built for GPUs, and this machine has a driver of one."""
    origin = getattr(find_spec("torch"), "origin", None)
    built = runpy.run_path(str(Path(origin).with_name("version.py"))) if origin else {}
    drivers = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu", "/dev/kfd")  # CUDA, in WSL, on Jetson; ROCm
    return bool(built.get("cuda") or built.get("hip")) and any(Path(driver).exists() for driver in drivers)


def git_commit() -> str | None:
    """The commit of the checkout that the code runs from, with "+changes" if it is not clean; None outside one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
