"""Loading checkpoints, or the same architectures with random weights."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lazyllm.engine.decoder import check_same_as_model, check_structure
from lazyllm.errors import UserError
from lazyllm.models.checkpoint import check_files, check_hub_files
from lazyllm.models.hub import hub_file
from lazyllm.models.quantisation import check_quantise, check_quantised, quantisation_config, quantised_by, require
from lazyllm.models.tokenizers import load_tokenizer

LoadFormat = Literal["auto", "dummy"]
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
ATTENTION = ("sdpa", "eager", "flash_attention_2")
DeviceMap = Literal["auto"] | Mapping[str, int | str]


@dataclass(frozen=True)
class Preset:
    """A model that has a short name.

    source: hub id or folder. architecture: the checkpoint's `config.json` as far as shapes and RoPE go, for
    `load_format="dummy"`; None where the folder is at hand.
    """

    source: str
    architecture: Mapping[str, Any] | None = field(default=None, hash=False)


# Both are Llamas of 32 layers and width 4096; the facts are those of the published config.json files.
_LLAMA2_7B = dict(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=32, max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_XGEN_7B = _LLAMA2_7B | dict(
    vocab_size=51200, max_position_embeddings=8192, rms_norm_eps=1e-6, bos_token_id=50256, eos_token_id=50256
)

PRESETS: dict[str, Preset] = {
    "llama2": Preset("meta-llama/Llama-2-7b-chat-hf", _LLAMA2_7B),
    "llama2-base": Preset("meta-llama/Llama-2-7b-hf", _LLAMA2_7B),
    "xgen": Preset("Salesforce/xgen-7b-8k-inst", _XGEN_7B),
    "tiny": Preset(str(Path(__file__).parent / "tiny")),
}


def load_model(
    name: str,
    load_format: LoadFormat = "auto",
    dtype: str = "bfloat16",
    device: str = "auto",
    *,
    revision: str | None = None,
    tokenizer: str | None = None,
    attn_implementation: str = "sdpa",
    seed: int = 0,
    quantise: str | None = None,
    device_map: DeviceMap | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A model in eval mode and its tokenizer.

    name: a preset ("llama2", "llama2-base", "xgen", "tiny"), a folder, or a hub id.
    load_format: "auto" reads the checkpoint (safetensors only, no remote code); "dummy" builds the architecture with
        random weights and downloads nothing: for timing, as time depends on shapes and not on values.
    dtype: "bfloat16", "float16", "float32" or "float64". device: "cuda", "cpu", ...; "auto" takes the accelerator
        where there is one.
    revision: branch, tag or commit of a hub id. tokenizer: folder or hub id, where it is not the model's.
    attn_implementation: "sdpa", "eager" or "flash_attention_2". seed: of the random weights.
    quantise: round a checkpoint's weights while it is read: "int8" or "int4" by torchao, "bnb_int8" (LLM.int8) or
        "bnb_nf4" by bitsandbytes. None leaves them as they are: a checkpoint that is quantised already stays so.
    device_map: "auto" spreads the layers over all accelerators, and what does not fit over the host's memory; a mapping
        {module: accelerator's number, "cpu" or "disk"} says it for each. Needs accelerate, and `device="auto"`.

    With "dummy", the tokenizer is None unless `tokenizer` names one or the model is a folder.
    Raises UserError with one clear message; UserError for other architectures.
    """
    model = load_weights(
        name,
        load_format,
        dtype,
        device,
        revision=revision,
        attn_implementation=attn_implementation,
        seed=seed,
        quantise=quantise,
        device_map=device_map,
    )
    return model, load_tokenizer_of(name, load_format, revision=revision, tokenizer=tokenizer)


def load_tokenizer_of(
    name: str, load_format: LoadFormat = "auto", *, revision: str | None = None, tokenizer: str | None = None
) -> PreTrainedTokenizerBase | None:
    """The tokenizer that `load_model` gives, without the model. Raises UserError."""
    if tokenizer is not None:
        return load_tokenizer(tokenizer)
    source = source_of(name)
    if load_format == "dummy" and not Path(source).is_dir():
        return None  # nothing is downloaded for a dummy
    return load_tokenizer(source, revision)


def load_weights(
    name: str,
    load_format: LoadFormat = "auto",
    dtype: str = "bfloat16",
    device: str = "auto",
    *,
    revision: str | None = None,
    attn_implementation: str = "sdpa",
    seed: int = 0,
    quantise: str | None = None,
    device_map: DeviceMap | None = None,
) -> PreTrainedModel:
    """The model that `load_model` gives, without its tokenizer. Same arguments, same errors."""
    config = check_loading(
        name,
        load_format,
        dtype,
        device,
        revision=revision,
        attn_implementation=attn_implementation,
        quantise=quantise,
        device_map=device_map,
    )
    torch_dtype, torch_device = as_dtype(dtype), as_device(device)
    if load_format == "dummy":
        model = random_weights(config, torch_dtype, torch_device, attn_implementation, seed)
    else:
        source, place = source_of(name), device_map
        if place is None and (quantise is not None or quantised_by(config) is not None):
            place = {"": torch_device}  # how quantised weights are packed depends on the device: they are made on it
        how: dict[str, Any] = {"dtype": torch_dtype, "attn_implementation": attn_implementation}
        if quantise is not None:
            how["quantization_config"] = quantisation_config(quantise, torch_dtype)
        if place is not None:
            how["device_map"] = place if isinstance(place, str) else dict(place)
        model = _checkpoint(source, revision, how)
        if place is None:
            model = model.to(torch_device)  # type: ignore[arg-type]
    model.eval()
    check_structure(model)
    try:
        check_same_as_model(model)
    except FloatingPointError as error:
        raise UserError(f"{name}: {error} in {dtype}; are its weights whole? Another dtype may hold them") from error
    return model


def check_loading(
    name: str,
    load_format: LoadFormat = "auto",
    dtype: str = "bfloat16",
    device: str = "auto",
    *,
    revision: str | None = None,
    attn_implementation: str = "sdpa",
    quantise: str | None = None,
    device_map: DeviceMap | None = None,
) -> PreTrainedConfig:
    """The model's config, once all is refused that `load_weights` can refuse without reading weights. Same errors."""
    check_settings(load_format, dtype, device, attn_implementation, quantise, device_map)
    config = load_config(name, load_format, revision)
    if load_format == "dummy":
        if quantised_by(config) is not None:
            raise UserError(f"{name} is quantised ({quantised_by(config)}), which random weights would not be")
        return config
    source = source_of(name)
    if quantise is not None and quantised_by(config) is not None:
        raise UserError(f"{source} is quantised already ({quantised_by(config)}): leave out quantise={quantise}")
    check_quantised(source, config, device_map)
    if Path(source).is_dir():
        check_files(source, getattr(config, "transformers_weights", None))
    return config


def check_settings(
    load_format: str,
    dtype: str,
    device: str,
    attn_implementation: str,
    quantise: str | None,
    device_map: DeviceMap | None,
) -> None:
    """Refuse settings of `load_model` that are none, contradict each other or cannot be had here. Raises UserError."""
    if load_format not in ("auto", "dummy"):
        raise UserError(f"unknown load_format {load_format!r}: give 'auto' or 'dummy'")
    torch_dtype, torch_device = as_dtype(dtype), as_device(device)
    if attn_implementation not in ATTENTION:
        raise UserError(f"unknown attn_implementation {attn_implementation!r}: give one of {', '.join(ATTENTION)}")
    if load_format == "dummy" and (quantise is not None or device_map is not None):
        raise UserError(
            "load_format=dummy makes random weights in one dtype, on one device: quantise and device_map are for "
            "checkpoints; leave them out"
        )
    if device_map is not None:
        require("accelerate", "device_map")
        if device != "auto":
            raise UserError(
                f"device_map says where every layer goes, so device={device} has nothing to say: leave it out"
            )
        devices_in_use(device, device_map)
    if quantise is not None:
        check_quantise(quantise, torch_dtype, torch_device)


def devices_in_use(device: str, device_map: DeviceMap | None = None) -> tuple[torch.device, ...]:
    """The devices that a model of these settings may compute on, known before it loads. Raises UserError.

    With `device_map="auto"`: all accelerators of this process, or the CPU where there is none.
    """
    if device_map is None:
        return (as_device(device),)
    first = as_device("auto")
    accelerators = [
        torch.device(first.type, number)
        for number in range(torch.accelerator.device_count() if first.type != "cpu" else 0)
    ]
    if isinstance(device_map, str):
        if device_map != "auto":
            raise UserError(f"unknown device_map {device_map!r}: give 'auto', or a mapping from modules to devices")
        return tuple(accelerators) or (first,)
    if not device_map:
        raise UserError("device_map is empty: give 'auto', or a mapping from modules to devices")
    named = dict.fromkeys(one for one in device_map.values() if one not in ("cpu", "disk"))
    # what is held on the host or on disk is computed on the first accelerator that the map names, or on the CPU
    return tuple(_numbered(one, accelerators) for one in named) or (torch.device("cpu"),)


def _numbered(one: int | str, accelerators: list[torch.device]) -> torch.device:
    found = [device for device in accelerators if str(one) in (str(device.index), str(device))]
    if not found:
        raise UserError(
            f"device_map names {one!r}, but torch sees {', '.join(map(str, accelerators)) or 'no accelerator'}: "
            "give an accelerator's number, 'cpu' or 'disk'"
        )
    return found[0]


def load_config(name: str, load_format: LoadFormat = "auto", revision: str | None = None) -> PreTrainedConfig:
    """The model's config, read without its weights: enough to check schedules and shapes. Raises UserError."""
    preset = PRESETS.get(name)
    if load_format == "dummy" and preset is not None and preset.architecture is not None:
        return LlamaConfig(**preset.architecture)
    source = source_of(name)
    if not Path(source).is_dir():
        try:
            found = hub_file(source, "config.json", revision)
        except UserError as error:
            raise UserError(f"{error}. {_instead(name)}") from error
        if found is None:
            raise UserError(f"{source}: the repository has no config.json: not a transformers model")
    try:
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{source}: its config.json could not be used ({error})") from error


def load_end_ids(name: str, load_format: LoadFormat = "auto", revision: str | None = None) -> tuple[int, ...]:
    """The tokens that end an answer, as `model.generate` knows them: the generation config's, else the config's.

    Raises UserError.
    """
    config = load_config(name, load_format, revision)
    own: Any = getattr(config, "eos_token_id", None)
    source = source_of(name)
    if load_format == "auto":
        try:
            folder = Path(source)
            name_of_file = "generation_config.json"
            file = folder / name_of_file if folder.is_dir() else hub_file(source, name_of_file, revision)
            if file is not None and file.is_file():
                own = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id", own)
        except ValueError as error:
            raise UserError(f"{source}: its generation_config.json could not be used ({error})") from error
    if own is None:
        return ()
    return (own,) if isinstance(own, int) else tuple(own)


def source_of(name: str) -> str:
    """The folder or hub id that a model's name stands for. Raises UserError where it can be neither."""
    if name in PRESETS:
        return PRESETS[name].source
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if "/" not in name or name.startswith((".", "/", "~")) or len(path.parts) > 2:
        raise UserError(
            f"{name!r} is no model: no such folder, no hub id (owner/name), none of the presets {', '.join(PRESETS)}"
        )
    return name


def as_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name. Raises UserError."""
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}: give one of {', '.join(DTYPES)}")
    return DTYPES[name]


def as_device(name: str) -> torch.device:
    """The torch device of that name; "auto" is the accelerator, if there is one. Raises UserError if absent."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        # Apple's mps is not tried here, and known for silent errors in attention over views: it has to be asked for
        return accelerator if accelerator is not None and accelerator.type != "mps" else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}: give 'auto', 'cpu' or 'cuda'") from error
    if device.type != "cpu" and (accelerator is None or accelerator.type != device.type):
        raise UserError(f"device {name!r} was asked for, but torch {torch.__version__} sees none: give device=cpu")
    return device


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


def _checkpoint(source: str, revision: str | None, how: Mapping[str, Any]) -> PreTrainedModel:
    """The checkpoint's model, loaded as `how` says, every one of its weights from the checkpoint. Raises UserError."""
    if not Path(source).is_dir():
        check_hub_files(source, revision)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, revision=revision, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **how
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, AssertionError, SafetensorError) as error:
        raise UserError(
            f"{source} could not be loaded: {error}\nOnly safetensors are read (pickles can run code); no remote code."
        ) from error
    model, found = loaded
    if found["missing_keys"]:  # transformers gives these random values, and a warning
        missing = sorted(found["missing_keys"])
        raise UserError(
            f"{source} lacks {len(missing)} of the model's weights, the first: {missing[0]}. The checkpoint is not "
            "complete, or another architecture's"
        )
    return model


def random_weights(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, attn_implementation: str, seed: int
) -> PreTrainedModel:
    """The architecture with seeded random weights, made on the device and in the dtype they are wanted in."""
    accelerators = [] if device.type == "cpu" else [device.index or 0]
    with torch.random.fork_rng(accelerators, device_type=device.type), torch.device(device):
        torch.manual_seed(seed)
        try:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
        except (ValueError, ImportError) as error:
            raise UserError(f"a {config.model_type} model with random weights could not be built: {error}") from error


def _instead(name: str) -> str:
    if PRESETS.get(name, Preset("")).architecture is None:
        return "Give a folder with the checkpoint: model.name=FOLDER"
    return "Give a folder with the checkpoint (model.name=FOLDER), or time random weights with model.load_format=dummy"


__all__ = [
    "ATTENTION",
    "DTYPES",
    "PRESETS",
    "DeviceMap",
    "Preset",
    "UserError",
    "as_device",
    "as_dtype",
    "check_loading",
    "check_settings",
    "device_name",
    "devices_in_use",
    "load_config",
    "load_end_ids",
    "load_model",
    "load_tokenizer_of",
    "load_weights",
    "random_weights",
    "source_of",
]
