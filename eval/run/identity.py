"""Provenance of a number: code, weights, versions, machine."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
import platform
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyllm.machine import device_name

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

PACKAGES = ("lazyllm-bench", "torch", "transformers", "tokenizers", "rouge-score")
# The code that can change a record
CODE = (
    "lazyllm/spec.py",
    "lazyllm/presets.py",
    "lazyllm/engine",
    "lazyllm/methods",
    "lazyllm/models",
    "eval/benchmarks",
    "eval/run/measure.py",
)
SERVED_CODE = ("eval/benchmarks", "eval/server.py", "eval/run/served.py")  # that can change a record of a server
_ROOT = Path(__file__).parents[2]
_SAMPLES, _SAMPLE_BYTES = 256, 2**14  # of a weight file, spread evenly over it


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that can change a number."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


@cache
def code_sha256(parts: tuple[str, ...] = CODE) -> str:
    """SHA-256 of sources without comments, docstrings and layout.

    parts: folders with their subfolders, and files, relative to the folder of the packages.
    """
    digest = hashlib.sha256()
    for part in parts:
        path = _ROOT / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            content = json.dumps(_meaning(ast.parse(file.read_bytes())))
            digest.update(f"{file.relative_to(_ROOT).as_posix()}\0{content}\0".encode())
    return digest.hexdigest()


def _meaning(node: Any) -> Any:
    """A syntax tree as nested lists, without positions and docstrings.

    `ast.dump` and `ast.unparse` differ between versions of Python. Here empty fields are left out, as new versions add
    some.
    """
    match node:
        case ast.Expr(value=ast.Constant(value=str())):  # only a text, like a docstring
            return None
        case ast.AST():
            filled = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
            return [type(node).__name__, *([name, _meaning(value)] for name, value in filled)]
        case list():
            return [meaning for item in node if (meaning := _meaning(item)) is not None]
    return repr(node)


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of everything that determines the token ids of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(content.encode()).hexdigest()


def weights_sha256(source: str) -> str | None:
    """SHA-256 of a local checkpoint: its config, and name, size and samples of its weight files. None for a hub id.

    Samples distinguish checkpoints without reading 13 GB; a hub checkpoint is identified by its commit.
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


def machine(device: torch.device | None) -> dict[str, Any]:
    """The machine of a run, as the summary reports it. Names no folder and no host. device: None behind a server."""
    import torch  # not at the top: the rest is known before it is imported

    return {
        "device": device_name(device) if device is not None else "server",
        "cpu": device_name(torch.device("cpu")),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cuda": torch.version.cuda,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "not installed"
