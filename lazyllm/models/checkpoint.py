"""A checkpoint's files, fetched from the hub and checked before loading: complete, in one folder.

All functions here raise UserError.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lazyllm.errors import UserError
from lazyllm.models import gguf_file
from lazyllm.presets import PRESETS, fields_of, is_sizes
from lazyllm.spec import GGUF, ModelSpec

CONFIGS = ("config.json", "generation_config.json")
# What transformers looks for first, in its order; a checkpoint has one of these, and an index names
# more files
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
FIRST_FILES = (*SAFETENSORS, *PICKLES)
# Patterns of all files of the weights: as safetensors, as pickles
WEIGHTS = (*SAFETENSORS, "model-*-of-*.safetensors")
PICKLED_WEIGHTS = (*PICKLES, "pytorch_model-*-of-*.bin")

# (hub id, revision) -> commit, so that a process reads all files of a repository at one commit
_commits: dict[tuple[str, str | None], str] = {}


class HubError(UserError):
    """A repository's files are not available. reason: why, without the advice of the message."""

    def __init__(self, hub_id: str, reason: str, instead: str) -> None:
        super().__init__(f"{hub_id}: {reason}. {instead}".rstrip())
        self.reason = f"{hub_id}: {reason}"


def hub_folder(
    hub_id: str, files: Iterable[str], revision: str | None = None, instead: str = ""
) -> Path:
    """Fetch those of these files that exist from the Hugging Face hub or its cache, to a folder.

    files: names or patterns.
    instead: what the user can do without the hub, for the message.
    The folder's name is the repository's commit. The repository's code is not run.
    Raises HubError for a name that is not a hub id, for a repository that is gated or not found,
    and for files that are not in the cache if the hub does not answer.
    """
    from huggingface_hub import constants, errors, snapshot_download

    commit = _commits.get((hub_id, revision), revision)
    try:
        folder = Path(snapshot_download(hub_id, revision=commit, allow_patterns=list(files)))
    except (OSError, errors.HFValidationError) as error:
        login = "`hf auth login`"
        match error:
            case errors.HFValidationError():
                reason = f"neither a folder nor a hub id ({error})"
            case errors.GatedRepoError():
                page = f"https://huggingface.co/{hub_id}"
                reason = f"gated: ask for access at {page}, then log in with {login}"
            case errors.RevisionNotFoundError():
                reason = f"the repository has no revision {revision!r}"
            case errors.RepositoryNotFoundError():
                private = f"it is private and you are not logged in ({login})"
                reason = f"no such repository on the hub, or {private}"
            case _ if constants.HF_HUB_OFFLINE:  # the library tells users to unset HF_HUB_OFFLINE
                reason = "it is not in the hub's cache"
            case _:
                why = " ".join(str(error).split())
                reason = f"it is not in the hub's cache and could not be downloaded ({why})"
        raise HubError(hub_id, reason, instead) from error
    _commits[hub_id, revision] = folder.name
    return folder


def folder_of(spec: ModelSpec, files: Iterable[str]) -> Path:
    """Find the spec's folder, or one with these files of its hub repository or its GGUF file."""
    if (file := gguf_of(spec)) is not None:
        return gguf_file.converted(file)
    return Path(spec.source) if spec.is_local else _on_hub(spec, files)


def gguf_of(spec: ModelSpec) -> Path | None:
    """Find the spec's GGUF file, fetched from the hub if necessary; None if it has none."""
    source = Path(spec.source)
    if source.suffix == GGUF and source.is_file():
        preset = PRESETS.get(spec.name)
        if preset is not None and preset.sha256 not in (None, gguf_file.sha256_of(source)):
            raise UserError(f"{source} is not the file of {preset.package} (its SHA-256 differs)")
        return source
    if spec.gguf is None:
        return None
    file = _on_hub(spec, [spec.gguf]) / spec.gguf
    if not file.is_file():
        raise UserError(f"{spec.source} holds no {spec.gguf} on the hub")
    return file


def title_of(spec: ModelSpec) -> str:
    """Name the model in tables: a preset, a folder, the hub id; a GGUF file with its quantisation.

    So SmolLM2-135M-Instruct.Q4_1.gguf is "SmolLM2-135M-Instruct (Q4_1)".
    """
    if (file := gguf_of(spec)) is None:
        return Path(spec.name).name if spec.is_local else spec.source
    quantisation = gguf_file.quantisation_of(file)
    name = spec.name if spec.name in PRESETS else file.stem
    if name.lower().endswith(quantisation.lower()):
        name = name[: -len(quantisation)].rstrip("-._") or name
    return f"{name} ({quantisation})"


def _on_hub(spec: ModelSpec, files: Iterable[str]) -> Path:
    instead = "Give a folder with the checkpoint in its place (of the model itself: model=FOLDER)"
    if spec.name in PRESETS:
        instead += ", or time random weights with model.load_format=dummy"
    return hub_folder(spec.source, files, spec.revision, instead)


def architecture_of(spec: ModelSpec) -> dict[str, Any] | None:
    """Make the config's fields of random weights that need no file; None for others."""
    preset = PRESETS.get(spec.name)
    has_shape = is_sizes(spec.name) or (preset is not None and preset.architecture is not None)
    return fields_of(spec.name) if spec.is_dummy and has_shape else None


def read_config(spec: ModelSpec) -> dict[str, Any]:
    """Read the model's config.json, or a preset's shape, without transformers."""
    if shape := architecture_of(spec):
        return shape
    file = folder_of(spec, CONFIGS) / "config.json"
    if not file.is_file():
        raise UserError(f"{spec.source} holds no config.json, and no GGUF file")
    return read_json(file, spec.source)


def checkpoint_folder(spec: ModelSpec) -> Path:
    """Find the folder of the model's weights, checked, from the hub or a GGUF file if necessary."""
    file = gguf_of(spec)
    return check_weights(spec) if file is None else gguf_file.dequantised(file, spec.dtype)


def check_weights(spec: ModelSpec) -> Path:
    """Find the folder with the model's weights, or with the rest of a GGUF file; checked.

    From the hub, pickles are fetched only if there are no safetensors.
    """
    if (file := gguf_of(spec)) is not None:
        return gguf_file.converted(file)
    weights = read_config(spec).get("transformers_weights")
    folder = folder_of(spec, [*CONFIGS, *WEIGHTS, weights or SAFETENSORS[0]])
    has_safetensors = any((folder / name).is_file() for name in SAFETENSORS)
    if not spec.is_local and weights is None and not has_safetensors:
        folder = folder_of(spec, [*CONFIGS, *PICKLED_WEIGHTS])
    check_files(folder, spec.source, weights)
    return folder


def read_json(file: Path, source: str) -> dict[str, Any]:
    """Read a JSON file of a checkpoint or tokenizer. source: its name in messages."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"{source}: its {file.name} could not be used ({error})") from error


def check_files(folder: Path, source: str, weights_file: str | None = None) -> None:
    """Refuse a checkpoint whose weights are absent, cut short or outside its folder.

    source: the checkpoint's name in messages.
    weights_file: the file that its config names (`transformers_weights`).
    Only headers of safetensors are read. No pickle is opened.
    """
    from safetensors import SafetensorError, safe_open

    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{source} is an adapter: merge it into its model (peft's merge_and_unload), and give "
            "the result's folder"
        )
    first = next((name for name in FIRST_FILES if (folder / name).is_file()), None)
    name = weights_file or first
    if name is None:
        raise UserError(f"{source} has no weights: expected one of {', '.join(FIRST_FILES)}")
    shards = [name]
    if name.endswith(".index.json"):
        try:
            files = read_json(folder / name, source)["weight_map"].values()
            shards = sorted({str(Path(shard)) for shard in files})
        except (KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{source}: its {name} could not be used ({reason})") from error
    for shard in shards:
        if Path(shard).name != shard:
            raise UserError(
                f"{folder}: its weights are in {shard!r}, outside the folder: put them into the "
                "folder"
            )
        if not (folder / shard).is_file():
            raise UserError(
                f"{folder / shard} is missing: the checkpoint is not complete; download or copy it "
                "again"
            )
        if not shard.endswith(".safetensors"):
            continue  # a pickle, which `torch.load` checks when it reads it
        try:
            with safe_open(folder / shard, framework="pt"):
                pass  # opening compares the file's length with its header
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{folder / shard} is damaged or cut short ({error}): download or copy it again, "
                "and compare its size"
            ) from error
