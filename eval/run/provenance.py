"""Where a number comes from: code, versions, machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import lazyllm
from lazyllm.models.load import device_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKAGES = ("lazyllm-bench", "torch", "transformers", "tokenizers", "rouge", "rouge-score", "fuzzywuzzy")
# What decides a record, apart from the method library
EVAL_FILES = (
    "benchmarks/longbench.py",
    "run/measure.py",
    "benchmarks/metrics.py",
    "run/speedup_targets.py",
    "benchmarks/prompts.py",
    "benchmarks/datasets.py",
    "benchmarks/embedded.py",
    "benchmarks/rows.py",
    "benchmarks/suite.py",
)
# Interfaces of the library that no run goes through
_NOT_RUN = frozenset({"bench", "integrations"})
_SAMPLES, _SAMPLE_BYTES = 256, 2**14  # of a weight file, spread evenly over it


def versions() -> dict[str, str]:
    """Python's version and those of the packages that can change a number."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def code_sha256() -> str:
    """Of the sources that decide a record: two runs of different code are different runs."""
    digest = hashlib.sha256()
    library, harness = Path(lazyllm.__file__).parent, Path(__file__).parents[1]
    files = [file for file in sorted(library.rglob("*.py")) if file.parent.name not in _NOT_RUN]
    for file in [*files, *(harness / name for name in EVAL_FILES)]:
        digest.update(f"{file.parent.name}/{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of everything that decides which ids a text gets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(content.encode()).hexdigest()


def weights_sha256(source: str) -> str | None:
    """Of a local checkpoint: its config, and name, size and samples of its weight files. None for a hub id.

    13 GB are not read whole to tell two checkpoints apart; a hub checkpoint is told by its commit.
    """
    folder = Path(source)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        size = file.stat().st_size
        with file.open("rb") as opened:
            digest.update(f"{file.name}\0{size}\0".encode())
            if size <= _SAMPLES * _SAMPLE_BYTES:
                digest.update(opened.read())
                continue
            for sample in range(_SAMPLES):
                opened.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def now() -> str:
    """The time in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


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


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return "not installed"


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
