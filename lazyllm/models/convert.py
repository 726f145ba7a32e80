"""Pickled weights of a hub repository, written once as safetensors into the cache.

Only tensors are read (`torch.load(weights_only=True)`), so no code in a pickle can run, and one shard at a time is in
memory. The result is `converted/OWNER--NAME/COMMIT/` in the cache. Its index is written last: a folder with an index is
complete, and one without is continued at the first missing shard.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from lazyllm.errors import UserError
from lazyllm.files import cache_folder, write_whole
from lazyllm.models.checkpoint import CONFIGS, INDEX, hub_folder, shards_of

log = logging.getLogger(__name__)

PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def is_converted(hub_id: str) -> bool:
    """Whether a commit of the repository is complete in the cache."""
    return any(_folder(hub_id, "x").parent.glob(f"*/{INDEX}"))


def converted(hub_id: str, snapshot: Path, revision: str | None = None) -> Path | None:
    """The folder with a repository's converted weights and configs; None if it holds no pickled weights.

    Downloads and converts what the cache lacks.
    snapshot: the hub client's folder of the repository; its name is the commit.
    Raises UserError as `hub_folder` does, and for a file that differs from the hub's or holds more than tensors.
    """
    folder = _folder(hub_id, snapshot.name)
    if (folder / INDEX).is_file():
        return folder
    snapshot = hub_folder(hub_id, [*CONFIGS, PICKLE_INDEX], revision)
    index = snapshot / PICKLE_INDEX
    if index.is_file():
        shards = shards_of(index)
    elif (hub_folder(hub_id, [PICKLE], revision) / PICKLE).is_file():
        shards = [PICKLE]
    else:
        return None
    from safetensors import safe_open

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):  # the jobs of a sweep start together
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            if not (folder / name).is_file():
                log.info("%s: writing %s as %s", hub_id, shard, folder / name)
                _convert(hub_folder(hub_id, [shard], revision) / shard, folder / name)
            with safe_open(folder / name, framework="pt") as opened:
                weight_map |= dict.fromkeys(opened.keys(), name)
        for config in CONFIGS:
            if (snapshot / config).is_file():
                shutil.copyfile(snapshot / config, folder / config)
        size = sum((folder / name).stat().st_size for name in set(weight_map.values()))
        write_whole(folder / INDEX, json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=1))
    return folder


def _folder(hub_id: str, commit: str) -> Path:
    return cache_folder() / "converted" / hub_id.replace("/", "--") / commit


def _convert(pickle: Path, file: Path) -> None:
    """Write a shard's tensors as safetensors, completely or not at all."""
    import torch
    from safetensors.torch import save_file

    _check_hash(pickle)
    try:
        # mapped, not read into memory; torch cannot map its format before 1.6, which is no zip file
        tensors: Any = torch.load(pickle, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(pickle))
    except Exception as error:  # pickle's and torch's errors have no common type
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{pickle} holds more than tensors, or is damaged ({reason}): nothing was read from it"
        ) from error
    if not isinstance(tensors, Mapping) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise UserError(f"{pickle}: expected a dictionary of tensors, as of a transformers checkpoint")
    partial = file.with_suffix(".partial")
    save_file(_without_shared_memory(tensors), partial, metadata={"format": "pt"})
    partial.replace(file)


def _without_shared_memory(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors, copied where two share memory (tied weights) or one is a view, which safetensors does not take."""
    copied, stored = {}, set[int]()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        is_alone = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and storage.data_ptr() not in stored
        stored.add(storage.data_ptr())
        copied[name] = tensor if is_alone else tensor.clone().contiguous()
    return copied


def _check_hash(pickle: Path) -> None:
    """Refuse a file whose content is not the hub's: the client names large files in its cache by their sha256."""
    expected = pickle.resolve().name
    if len(expected) != 64 or not pickle.is_symlink():
        return  # a cache without links, or a small file: the client has compared the size
    with pickle.open("rb") as opened:
        actual = hashlib.file_digest(opened, "sha256").hexdigest()
    if actual != expected:
        raise UserError(
            f"{pickle.resolve()} is damaged (its sha256 is {actual}): delete it, and it is downloaded again"
        )
