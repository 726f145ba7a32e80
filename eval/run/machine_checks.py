"""Checks of this machine: Python, torch and its driver, GPU, memory, disk, FlashAttention, a scheduler."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from eval.run.finding import MISSING, NOT_NEEDED, OK, Finding

PROCESS_GB, DATA_GB = 2, 2  # memory of Python, torch and a run; disk for LongBench and runs
WHEELS = "https://download.pytorch.org/whl"
# The oldest driver for a wheel's CUDA, by its major version (NVIDIA's release notes)
DRIVERS = {11: 450, 12: 525, 13: 580}
# The torch and the index for it; 2.7.1 is the last torch for CUDA 11
_TORCH = {11: ("torch==2.7.1", "cu118"), 12: ("torch", "cu126"), 13: ("torch", "cu130")}


@dataclass(frozen=True)
class Gpu:
    """The first NVIDIA GPU, as its driver describes it."""

    name: str
    driver: str
    memory: str


def find_gpu() -> Gpu | None:
    """The first GPU in nvidia-smi's output; None without nvidia-smi or a GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout.splitlines()
        return Gpu(*(field.strip() for field in lines[0].split(",")))
    except (OSError, subprocess.SubprocessError, IndexError, TypeError):
        return None


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built for; None for a CPU wheel. Raises PackageNotFoundError."""
    version("torch")
    spec = find_spec("torch")
    file = Path((spec.origin if spec else None) or "").with_name("version.py")
    found = re.search(r"^cuda[^=\n]*= *'([\d.]+)'", file.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def check_python() -> Finding:
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    says = platform.python_version() + ("" if fits else ": 3.11 to 3.13 are supported; uv venv --python 3.12 makes one")
    return Finding("Python", OK if fits else MISSING, says)


def check_torch(gpu: Gpu | None) -> Finding:
    try:
        cuda, own = torch_cuda(), version("torch")
    except PackageNotFoundError:
        return Finding("torch", MISSING, "pip install --editable . (in the repository's folder)")
    if gpu is None:
        return Finding("torch", OK, f"{own}, {f'for CUDA {cuda}' if cuda else 'for the CPU'}")
    if cuda is None:
        return Finding("torch", MISSING, f"{own} is a CPU wheel, but there is {gpu.name}: {_install_for(gpu)}")
    least = DRIVERS.get(int(cuda.split(".")[0]), 0)
    if _driver(gpu) < least:
        says = f"CUDA {cuda} needs driver {least} or later, found {gpu.driver}: {_install_for(gpu)}"
        return Finding("torch", MISSING, says)
    return Finding("torch", OK, f"{own}, for CUDA {cuda}, driver {gpu.driver}")


def _driver(gpu: Gpu) -> int:
    return int(gpu.driver.split(".")[0])


def _install_for(gpu: Gpu) -> str:
    """The command that installs a torch for the GPU's driver."""
    for cuda, least in sorted(DRIVERS.items(), reverse=True):
        if _driver(gpu) >= least:
            return f"pip install --force-reinstall {_TORCH[cuda][0]} --index-url {WHEELS}/{_TORCH[cuda][1]}"
    return "update the driver"


def check_gpu(gpu: Gpu | None, gigabytes: float) -> Finding:
    """gigabytes: of the model's weights."""
    if gpu is None:
        return Finding("GPU", NOT_NEEDED, "no NVIDIA GPU: runs use the CPU, which is enough for model=tiny")
    has = int(gpu.memory.split()[0]) * 1.049e-3
    if has < gigabytes:
        return Finding("GPU", MISSING, f"{gpu.name}, {has:.0f} GB: less than {gigabytes:.0f}: try model.quantise=int8")
    return Finding("GPU", OK, f"{gpu.name}, {has:.0f} GB")


def check_memory(gpu: Gpu | None, gigabytes: float) -> Finding:
    """gigabytes: of the model's weights, which are in the host's memory if there is no GPU."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    info = Path("/proc/meminfo")
    if info.exists():  # counts the page cache as free
        free = int(re.findall(r"MemAvailable: +(\d+)", info.read_text())[0]) / 1e6
    need = PROCESS_GB + (0 if gpu else gigabytes)
    if free < need:
        return Finding("memory", MISSING, f"{free:.0f} GB free, {need:.0f} GB needed: try a smaller model=NAME")
    return Finding("memory", OK, f"{free:.0f} GB free")


def check_disk(gigabytes: float) -> Finding:
    """gigabytes: of the files to download."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free / 1e9
    if free < gigabytes + DATA_GB:
        says = f"{free:.1f} GB free in {existing}, {gigabytes + DATA_GB:.0f} GB needed"
        return Finding("disk", MISSING, f"{says}: export HF_HOME=FOLDER_ON_A_LARGER_DISK")
    return Finding("disk", OK, f"{free:.0f} GB free in {existing}")


def check_flash_attention(gpu: Gpu | None) -> Finding:
    if find_spec("flash_attn"):
        return Finding("FlashAttention", OK, f"{version('flash_attn')}: model.attn_implementation=flash_attention_2")
    says = "PyTorch's attention is the default" + ("; pip install flash-attn adds FlashAttention" if gpu else "")
    return Finding("FlashAttention", NOT_NEEDED, says)


def check_scheduler() -> Finding:
    if shutil.which("sbatch") is None:
        return Finding("scheduler", NOT_NEEDED, "no Slurm here: hydra/launcher=joblib runs jobs side by side")
    if find_spec("hydra_plugins") and find_spec("hydra_plugins.hydra_submitit_launcher"):
        return Finding("scheduler", OK, "Slurm: hydra/launcher=submitit_slurm")
    return Finding("scheduler", NOT_NEEDED, "Slurm without its launcher: pip install --editable '.[slurm]'")
