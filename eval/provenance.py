"""Where a number comes from: code, versions, machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import lazyllm

PACKAGES = ("lazyllm-bench", "torch", "transformers", "tokenizers", "rouge", "rouge-score", "fuzzywuzzy")
_SAMPLE = 2**20  # bytes read from either end of a weight file


def versions() -> dict[str, str]:
    """Python's version and those of the packages that can change a number."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **found}


def code_sha256() -> str:
    """Of the method library's sources: two runs of different code are different runs."""
    digest = hashlib.sha256()
    root = Path(lazyllm.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def device_name(device: torch.device) -> str:
    """The accelerator's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def weights_sha256(source: str) -> str | None:
    """Of a local checkpoint: its config, and name, size and both ends of its weight files. None for a hub id.

    13 GB are not read whole to tell two checkpoints apart; a hub checkpoint is told by its commit.
    """
    folder = Path(source)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        size = file.stat().st_size
        with file.open("rb") as opened:
            digest.update(f"{file.name}\0{size}\0".encode() + opened.read(_SAMPLE))
            opened.seek(max(0, size - _SAMPLE))
            digest.update(opened.read())
    return digest.hexdigest()


def git_commit() -> str | None:
    """The commit of the checkout that the code runs from, with "+changes" if it is not clean; None outside one."""
    root = Path(lazyllm.__file__).parent
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changes else "")


def machine(device: torch.device) -> dict[str, Any]:
    """The machine of a run, as the summary reports it. Names no folder and no host."""
    return {
        "device": device_name(device),
        "cpu": device_name(torch.device("cpu")),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cuda": torch.version.cuda,
    }


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
