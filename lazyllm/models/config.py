"""A model before its weights are read: its config, dtype, device and ends of answers.

All here raise UserError. transformers' code of models is not imported: a run that lacks nothing
needs none.
"""

import logging
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.import_utils import is_accelerate_available

from lazyllm.errors import UserError, reason_of
from lazyllm.models.checkpoint import (
    CONFIGS,
    architecture_of,
    check_weights,
    folder_of,
    read_json,
)
from lazyllm.models.dtype import choose_dtype
from lazyllm.spec import AUTO, ModelSpec

log = logging.getLogger(__name__)


def with_dtype(spec: ModelSpec) -> ModelSpec:
    """Put the dtype that "auto" is on the spec's device into it, and log that."""
    if spec.dtype != AUTO:
        return spec
    dtype, reason = choose_dtype(spec, as_device(spec.device).type)
    log.info("%s loads in %s: %s", spec.name, dtype, reason)
    return replace(spec, dtype=dtype)


def check_loading(spec: ModelSpec) -> PreTrainedConfig:
    """Make all checks of `load_weights` that need no weights, and return the model's config."""
    spec.check()
    as_device(spec.device)
    config = load_config(spec)
    kind = quantised_by(config)
    if kind is not None and spec.is_dummy:
        raise UserError(
            f"{spec.name} is quantised ({kind}), but random weights are not: give another model"
        )
    if kind is not None:
        _check_quantised(spec.source, config, kind)
    if not spec.is_dummy and spec.is_local:
        check_weights(spec)
    return config


def quantised_by(config: Any) -> str | None:
    """Name the quantisation method in a checkpoint's config; None if it is not quantised."""
    settings = getattr(config, "quantization_config", None)
    return None if settings is None else str(settings.get("quant_method", "unknown"))


def _check_quantised(source: str, config: Any, kind: str) -> None:
    """Refuse a checkpoint that transformers cannot read, or would read as unquantised."""
    if not is_accelerate_available():
        raise UserError(
            f"{source}, which is quantised ({kind}), needs the package accelerate, which is not "
            f"installed, or too old for transformers {transformers.__version__}: pip install "
            "accelerate"
        )
    from transformers.quantizers.auto import AutoHfQuantizer  # not at the top: it is slow

    try:
        quantizer = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
        quantizer.validate_environment(device_map=None, weights_only=True)
    except (ImportError, ValueError, RuntimeError, TypeError, AssertionError) as error:
        raise UserError(
            f"{source} is quantised by {kind!r} and cannot be read here: {error}"
        ) from error


def load_config(spec: ModelSpec) -> PreTrainedConfig:
    """Read the model's config, without its weights."""
    if (architecture := architecture_of(spec)) is not None:
        return AutoConfig.for_model(**architecture)
    folder = folder_of(spec, CONFIGS)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each config's own checks raise errors of their own
        reason = reason_of(error)
        raise UserError(f"{spec.source}: its config.json could not be used ({reason})") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"{spec.source}: its model_type {config.model_type} is not a causal language model"
        )
    if not spec.is_local and spec.gguf is None:
        config._commit_hash = folder.name  # as in transformers for a hub id
    return config


def shape_of(spec: ModelSpec) -> PreTrainedConfig:
    """Run `load_config`, but without fetching files for a preset: its shape is enough."""
    return load_config(replace(spec, load_format="dummy"))


def _generation_config(spec: ModelSpec) -> dict[str, Any]:
    """Read the model's generation_config.json; {} without one."""
    file = None if spec.is_dummy else folder_of(spec, CONFIGS) / "generation_config.json"
    return read_json(file, spec.source) if file is not None and file.is_file() else {}


def load_end_ids(spec: ModelSpec) -> tuple[int, ...]:
    """Read the tokens that end an answer: the generation config's, else the config's."""
    default: Any = getattr(load_config(spec), "eos_token_id", None)
    end_ids = _generation_config(spec).get("eos_token_id", default)
    return (end_ids,) if isinstance(end_ids, int) else tuple(end_ids or ())


# Settings of a generation_config.json that change answers, but not those here, which are greedy
UNAPPLIED = (
    "do_sample", "num_beams", "guidance_scale", "penalty_alpha", "stop_strings",
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "min_length",
    "min_new_tokens", "exponential_decay_length_penalty", "watermarking_config",
)  # fmt: skip


def unapplied_settings(spec: ModelSpec) -> dict[str, Any]:
    """Read the generation settings that `model.generate` applies, and greedy answers ignore.

    Settings whose value changes nothing are left out.
    """
    stored = _generation_config(spec)
    given = {key: stored.get(key) for key in UNAPPLIED}
    without = (None, False, 0, 1, [], {})
    return {key: value for key, value in given.items() if value is True or value not in without}


def as_device(name: str) -> torch.device:
    """Find the torch device of that name; "auto" is the accelerator, if there is one."""
    has_one = torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator() if has_one else None
    if name == "auto":
        # never Apple's mps: it is untested here, and has silent errors in attention over views
        is_used = accelerator is not None and accelerator.type != "mps"
        return accelerator if accelerator is not None and is_used else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}: give 'auto', 'cpu' or 'cuda'") from error
    if device.type != "cpu" and (accelerator is None or accelerator.type != device.type):
        raise UserError(
            f"device {name!r}: torch {torch.__version__} sees none: give device=cpu (in a run "
            "model.device=cpu)"
        )
    return device
