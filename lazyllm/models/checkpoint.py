"""A checkpoint's files, fetched from the hub and checked before loading: complete, in one folder, not cut short."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lazyllm.errors import UserError
from lazyllm.models import gguf_file
from lazyllm.presets import PRESETS, fields_of, is_sizes
from lazyllm.spec import GGUF, ModelSpec

CONFIGS = ("config.json", "generation_config.json")
# What transformers looks for first, in its order; a checkpoint has one of these, and an index names more files
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
FIRST_FILES = (*SAFETENSORS, *PICKLES)
# Patterns of all files of the weights: as safetensors, as pickles
WEIGHTS = (*SAFETENSORS, "model-*-of-*.safetensors")
PICKLED_WEIGHTS = (*PICKLES, "pytorch_model-*-of-*.bin")

# (hub id, revision) -> commit, so that a process reads all files of a repository at one commit
_commits: dict[tuple[str, str | None], str] = {}


class HubError(UserError):
    """A repository's files are not available. reason: why, without the advice that the message adds."""

    def __init__(self, hub_id: str, reason: str, instead: str) -> None:
        super().__init__(f"{hub_id}: {reason}. {instead}".rstrip())
        self.reason = f"{hub_id}: {reason}"


def hub_folder(hub_id: str, files: Iterable[str], revision: str | None = None, instead: str = "") -> Path:
    """A local folder with those of these files that exist, from the Hugging Face hub or its cache.

    files: names or patterns.
    instead: what the user can do without the hub, for the message.
    The folder's name is the repository's commit. The repository's code is not run.
    Raises HubError for a name that is not a hub id, for a repository that is gated or not found, and for files that are
    not in the cache if the hub does not answer.
    """
    from huggingface_hub import constants, errors, snapshot_download

    commit = _commits.get((hub_id, revision), revision)
    try:
        folder = Path(snapshot_download(hub_id, revision=commit, allow_patterns=list(files)))
    except (OSError, errors.HFValidationError) as error:
        match error:
            case errors.HFValidationError():
                reason = f"neither a folder nor a hub id ({error})"
            case errors.GatedRepoError():
                reason = f"gated: ask for access at https://huggingface.co/{hub_id}, then log in with `hf auth login`"
            case errors.RevisionNotFoundError():
                reason = f"the repository has no revision {revision!r}"
            case errors.RepositoryNotFoundError():
                reason = "no such repository on the hub, or it is private and you are not logged in (`hf auth login`)"
            case _ if constants.HF_HUB_OFFLINE:  # the library's own message tells users to unset HF_HUB_OFFLINE
                reason = "it is not in the hub's cache"
            case _:
                reason = f"it is not in the hub's cache and could not be downloaded ({' '.join(str(error).split())})"
        raise HubError(hub_id, reason, instead) from error
    _commits[hub_id, revision] = folder.name
    return folder


def folder_of(spec: ModelSpec, files: Iterable[str]) -> Path:
    """The spec's folder, or one with these files of its hub repository, or of its GGUF file. Raises UserError."""
    if (file := gguf_of(spec)) is not None:
        return gguf_file.converted(file)
    return Path(spec.source) if spec.is_local else _on_hub(spec, files)


def gguf_of(spec: ModelSpec) -> Path | None:
    """The spec's GGUF file, fetched from the hub if necessary; None if it has none. Raises UserError."""
    source = Path(spec.source)
    if source.suffix == GGUF and source.is_file():
        known = PRESETS[spec.name].sha256 if spec.name in PRESETS else None
        if known not in (None, gguf_file.sha256_of(source)):
            raise UserError(f"{source} is not the file of {PRESETS[spec.name].package} (its SHA-256 differs)")
        return source
    if spec.gguf is None:
        return None
    file = _on_hub(spec, [spec.gguf]) / spec.gguf
    if not file.is_file():
        raise UserError(f"{spec.source} holds no {spec.gguf} on the hub")
    return file


def title_of(spec: ModelSpec) -> str:
    """The model's name in tables: a preset's, a folder's, the hub id; a GGUF file's with its quantisation behind it.

    So SmolLM2-135M-Instruct.Q4_1.gguf is "SmolLM2-135M-Instruct (Q4_1)". Raises UserError.
    """
    if (file := gguf_of(spec)) is None:
        return Path(spec.name).name if spec.is_local else spec.source
    quantisation, name = gguf_file.quantisation_of(file), spec.name if spec.name in PRESETS else file.stem
    if name.lower().endswith(quantisation.lower()):
        name = name[: -len(quantisation)].rstrip("-._") or name
    return f"{name} ({quantisation})"


def _on_hub(spec: ModelSpec, files: Iterable[str]) -> Path:
    instead = "Give a folder with the checkpoint in its place (of the model itself: model=FOLDER)"
    if spec.name in PRESETS:
        instead += ", or time random weights with model.load_format=dummy"
    return hub_folder(spec.source, files, spec.revision, instead)


def architecture_of(spec: ModelSpec) -> dict[str, Any] | None:
    """The config's fields of random weights that need no file: a preset's or sizes. None for others."""
    preset = PRESETS.get(spec.name)
    if not spec.is_dummy or not (is_sizes(spec.name) or (preset is not None and preset.architecture is not None)):
        return None
    return fields_of(spec.name)


def read_config(spec: ModelSpec) -> dict[str, Any]:
    """The content of the model's config.json, or a preset's shape, without transformers. Raises UserError."""
    return architecture_of(spec) or read_json(folder_of(spec, CONFIGS) / "config.json", spec.source)


def checkpoint_folder(spec: ModelSpec) -> Path:
    """The folder of the model's weights, fetched from the hub or read from a GGUF file if necessary, and checked.

    Raises UserError.
    """
    file = gguf_of(spec)
    return check_weights(spec) if file is None else gguf_file.dequantised(file, spec.dtype)


def check_weights(spec: ModelSpec) -> Path:
    """The folder with the model's weights, or with what a GGUF file tells besides them; checked. Raises UserError.

    From the hub, pickles are fetched only if there are no safetensors.
    """
    if (file := gguf_of(spec)) is not None:
        return gguf_file.converted(file)
    weights = read_config(spec).get("transformers_weights")
    folder = folder_of(spec, [*CONFIGS, *WEIGHTS, weights or SAFETENSORS[0]])
    if not spec.is_local and weights is None and not any((folder / name).is_file() for name in SAFETENSORS):
        folder = folder_of(spec, [*CONFIGS, *PICKLED_WEIGHTS])
    check_files(folder, spec.source, weights)
    return folder


def read_json(file: Path, source: str) -> dict[str, Any]:
    """The content of a JSON file of a checkpoint or tokenizer. source: its name in messages. Raises UserError."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"{source}: its {file.name} could not be used ({error})") from error


def check_files(folder: Path, source: str, weights_file: str | None = None) -> None:
    """Refuse a checkpoint whose weights are absent, cut short or outside its folder. Raises UserError.

    source: the checkpoint's name in messages.
    weights_file: the file that its config names (`transformers_weights`).
    Only headers of safetensors are read. No pickle is opened.
    """
    from safetensors import SafetensorError, safe_open

    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{source} is an adapter: merge it into its model (peft's merge_and_unload), and give the result's folder"
        )
    name = weights_file or next((name for name in FIRST_FILES if (folder / name).is_file()), None)
    if name is None:
        raise UserError(f"{source} has no weights: expected one of {', '.join(FIRST_FILES)}")
    shards = [name]
    if name.endswith(".index.json"):
        try:
            shards = sorted({str(Path(shard)) for shard in read_json(folder / name, source)["weight_map"].values()})
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{source}: its {name} could not be used ({type(error).__name__}: {error})") from error
    for shard in shards:
        if Path(shard).name != shard:
            raise UserError(f"{folder}: its weights are in {shard!r}, outside the folder: put them into the folder")
        if not (folder / shard).is_file():
            raise UserError(f"{folder / shard} is missing: the checkpoint is not complete; download or copy it again")
        if not shard.endswith(".safetensors"):
            continue  # a pickle, which `torch.load` checks when it reads it
        try:
            with safe_open(folder / shard, framework="pt"):
                pass  # opening compares the file's length with its header
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{folder / shard} is damaged or cut short ({error}): download or copy it again, and compare its size"
            ) from error
