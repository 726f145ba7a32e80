"""A checkpoint's files, looked at before any is loaded: safetensors only, whole, and all of them there."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from lazyllm.errors import UserError
from lazyllm.models.hub import hub_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def check_files(source: str, explicit: str | None = None) -> None:
    """Refuse a folder whose weights are pickled, absent, cut short or outside it. Raises UserError.

    explicit: the file that the checkpoint's config names as its weights (`transformers_weights`), None for the usual.

    Only headers are read. A pickle can run code when it is read, so none is opened, whatever names it.
    """
    folder = Path(source)
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{source} is an adapter: merge it into its model (peft's merge_and_unload), and give the result's folder"
        )
    name = explicit or next((one for one in (WEIGHTS, INDEX) if (folder / one).is_file()), None)
    if name is None:
        pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        raise UserError(
            _pickled(source, pickles) if pickles else f"{source} holds no weights: no {WEIGHTS}, no {INDEX}"
        )
    for shard in _shards(folder, name) if name.endswith(".index.json") else [name]:
        _check_shard(folder, shard)


def check_hub_files(source: str, revision: str | None = None) -> None:
    """Refuse a hub repository without safetensors, whose pickles transformers would have the hub convert for it.

    Raises UserError.
    """
    unknown = None
    for name in (WEIGHTS, INDEX):
        try:
            if hub_file(source, name, revision) is not None:
                return
        except UserError as error:
            unknown = error
    if unknown is not None:  # not known to be absent
        raise UserError(str(unknown)) from unknown
    raise UserError(_pickled(source, []))


def _shards(folder: Path, index: str) -> list[str]:
    try:
        named = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()
        if not all(isinstance(one, str) for one in named):
            raise ValueError("weight_map does not map names to files")
        return sorted(set(named))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / index} could not be used ({type(error).__name__}: {error})") from error


def _check_shard(folder: Path, name: str) -> None:
    if not name.endswith(".safetensors"):
        raise UserError(_pickled(str(folder), [name]))
    if Path(name).name != name:
        raise UserError(
            f"{folder}: its weights are to be read from {name!r}, which is not a file of the folder: refused"
        )
    file = folder / name
    if not file.is_file():
        raise UserError(f"{file} is missing: the checkpoint is not complete; download or copy it again")
    try:
        with safe_open(file, framework="pt"):
            pass  # the header, and that the file is as long as it says
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} is damaged or cut short ({error}): download or copy it again, and compare its size"
        ) from error


def _pickled(source: str, files: list[str]) -> str:
    what = f"pickles ({', '.join(files[:3])}{', ...' if len(files) > 3 else ''})" if files else "no safetensors"
    return (
        f"{source}: its weights are {what}. Pickles can run code when they are read: refused. If you trust where they "
        "are from, download them and write them as safetensors, once, into the same folder: python -c "
        '"from transformers import AutoModelForCausalLM as M; '
        "M.from_pretrained('FOLDER', use_safetensors=False, dtype='auto').save_pretrained('FOLDER')\", "
        "then model.name=FOLDER"
    )
