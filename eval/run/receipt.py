"""The receipt of a complete run: the same command, given again, is answered from its folder at once.

A run's identity takes torch, the tokenizer and the rows to know, which is seconds. A receipt takes none: it hashes the
settings, all sources, versions, the machine, and names, sizes and times of the files that the run reads. It is written
once every arm has answered every example. If anything differs, the run is prepared as usual, and its identity decides.
"""

import hashlib
import json
import logging
import os
import platform
import socket
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eval.benchmarks.rows import sha256_of
from eval.run.asked import Asked
from eval.store.folder import PLANNED, read_about
from eval.store.runs import StoredRun, counted
from lazyllm.files import cache_folder, write_whole
from lazyllm.machine import version_of

log = logging.getLogger(__name__)

FILE = "receipt.json"
SUMMARY = "summary.md"
_ROOT = Path(__file__).parents[2]
_SOURCES = ("lazyllm", "eval", "conf")
_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "rouge-score", "fuzzywuzzy", "gguf")
_VARIABLES = ("CUDA", "HIP", "HF_", "LAZYLLM", "MKL", "OMP", "PYTORCH", "TORCH")  # the begins of names that count


def receipt_of(asked: Asked) -> str | None:
    """A hash of all that can change the run's identity, or its table; None for a run in W&B."""
    config = asked.config
    if config.tracker.name != "none":
        return None
    names = sorted(name for name in os.environ if name.startswith(_VARIABLES))
    about: dict[str, Any] = {
        "config": json.loads(json.dumps(asdict(config), default=str)),
        "code": _code(),
        "versions": [platform.python_version(), *map(version_of, _PACKAGES)],
        "machine": [socket.gethostname(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None],
        "environment": {name: os.environ[name] for name in names},
        "files": sorted(set(_files(asked))),
    }
    return sha256_of(about)


def complete_run(asked: Asked, receipt: str | None) -> StoredRun | None:
    """The run of this receipt, if its folder holds it, complete and unchanged."""
    own = asked.folder.glob(f"*/{FILE}") if asked.config.out is None else [asked.folder / FILE]
    for file in own if receipt is not None else ():
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if content == {"receipt": receipt, "folder": _of_folder(file.parent)}:
            return StoredRun(file.parent, read_about(file.parent / "run.json"))
    return None


def leave(receipt: str | None, stored: StoredRun) -> None:
    """Leave the receipt in the folder of a run whose summary is written, if it is complete."""
    if receipt is not None and not stored.failed and not stored.unfinished:
        content = {"receipt": receipt, "folder": _of_folder(stored.folder)}
        write_whole(stored.folder / FILE, json.dumps(content) + "\n")


def show(stored: StoredRun) -> None:
    """Print a complete run's table, as its folder has it."""
    planned = counted(len(stored.planned or ()), "example")
    log.info("%s: %s, all of them already measured with this command", stored.folder, planned)
    print((stored.folder / SUMMARY).read_text(encoding="utf-8"), end="")
    print(f"Files:\n  {stored.folder / SUMMARY}")


def _code() -> str:
    digest = hashlib.sha256()
    for part in _SOURCES:
        for file in sorted((_ROOT / part).rglob("*")):
            if file.suffix in (".py", ".yaml", ".csv"):
                digest.update(f"{file.relative_to(_ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _files(asked: Asked) -> Iterator[tuple[str, ...]]:
    """Name, size and time of each file of the models and the rows; of the hub's, which commit is the newest here."""
    from huggingface_hub import constants

    places = [*_texts(asdict(replace(asked.config, out=None))), *_texts(asked.arms), str(cache_folder())]
    places += [model.source for model in asked.subject.models]
    for place in {Path(text).expanduser() for text in places if 0 < len(text) < 1000}:
        for file in [*place.rglob("*"), place] if place.is_dir() and place != Path() else [place]:
            if file.is_file() and file.suffix != ".lock":
                status = file.stat()
                yield str(file), str(status.st_size), str(status.st_mtime_ns)
    for file in Path(constants.HF_HUB_CACHE).glob("*/refs/*"):
        yield str(file), file.read_text(encoding="utf-8")


def _texts(value: Any) -> Iterator[str]:
    """All texts in nested mappings and lists: some are paths of what a run reads."""
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value


def _of_folder(folder: Path) -> str:
    """A hash of the run's own files, by name, size and time."""
    files = [*folder.glob("visits*"), *(folder / name for name in ("run.json", PLANNED, SUMMARY, "summary.json"))]
    return sha256_of([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)])
