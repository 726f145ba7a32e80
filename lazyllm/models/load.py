"""Loading checkpoints, or the same architectures with random weights. All here raise UserError."""

import logging
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils.import_utils import is_accelerate_available

from lazyllm.engine.checks import check_same_as_model
from lazyllm.errors import UserError, reason_of
from lazyllm.models.checkpoint import (
    CONFIGS,
    architecture_of,
    check_weights,
    checkpoint_folder,
    folder_of,
    read_json,
)
from lazyllm.models.dtype import choose_dtype
from lazyllm.models.tokenizers import load_tokenizer, tokenizer_of
from lazyllm.spec import AUTO, ModelSpec

log = logging.getLogger(__name__)

LEAST_SHARE = 0.9  # of a model's tokens that its tokenizer has: models round their numbers up


def load_model(
    name: str,
    load_format: str = "auto",
    dtype: str = AUTO,
    device: str = "auto",
    *,
    revision: str | None = None,
    tokenizer: str | None = None,
    attn_implementation: str = "sdpa",
    sdpa_backend: str = "auto",
    seed: int = 0,
    gguf: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a model in eval mode and its tokenizer. Arguments: the fields of `ModelSpec`.

    With `load_format="dummy"`, the tokenizer is None unless `tokenizer` names one or the model is a
    folder. Raises UserError.
    """
    spec = ModelSpec(**locals())
    check_loading(spec)
    loaded = load_tokenizer_of(spec)
    if loaded is not None:
        check_fits(loaded, spec)
    return load_weights(spec), loaded


def load_tokenizer_of(spec: ModelSpec) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer that `load_model` gives, without the model."""
    if spec.is_dummy and spec.tokenizer is None and not spec.is_local:
        return None  # "dummy" downloads nothing
    return load_tokenizer(*tokenizer_of(spec))


def check_fits(tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> None:
    """Refuse a tokenizer with more tokens than the model; log one that may be another's."""
    known = shape_of(spec).get_text_config().vocab_size
    tokens = tokenizer.vocab_size  # without tokens that were added later
    source = spec.tokenizer or f"of {spec.name}"
    held = f"tokenizer {source}: it has {tokens:,} tokens, the model {known:,}"
    if tokens > known:
        raise UserError(f"{held}: give the model's own (in a run model.tokenizer=FOLDER)")
    if tokens < LEAST_SHARE * known:
        log.warning("%s: is it the model's own?", held)
    ends = () if spec.tokenizer is None else load_end_ids(spec)
    if ends and tokenizer.eos_token_id not in ends:
        end = tokenizer.eos_token_id
        log.warning("%s; it ends a text by token %s, the model by %s", held, end, [*ends])


def load_weights(spec: ModelSpec, plain: bool = False) -> PreTrainedModel:
    """Load the model of `load_model`. plain: of any architecture: only `model(...)` is called."""
    config = check_loading(spec)
    spec = with_dtype(spec)
    model = random_weights(config, spec) if spec.is_dummy else _checkpoint(spec, config)
    model.eval()
    model.sdpa_backend = spec.sdpa_backend  # pyright: ignore[reportArgumentType]  # for `sdpa`
    try:
        if not plain:
            check_same_as_model(model)
    except FloatingPointError as error:
        raise UserError(
            f"{spec.name}: {error} in {spec.dtype}: check that its weights are complete, or give "
            "another dtype"
        ) from error
    return model


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
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
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


def _checkpoint(spec: ModelSpec, config: PreTrainedConfig) -> PreTrainedModel:
    """Load the checkpoint's model; all of its weights are read from the checkpoint."""
    source, device = spec.source, as_device(spec.device)
    folder = checkpoint_folder(spec)
    # quantised weights are packed for a device, so they are made on it
    placement = None if quantised_by(config) is None else {"": device}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            weights_only=True,  # no code in a pickle can run
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            dtype=getattr(torch, spec.dtype),
            attn_implementation=spec.attn_implementation,
            device_map=placement,
        )
    except torch.OutOfMemoryError:
        raise
    except (pickle.UnpicklingError, EOFError) as error:
        raise UserError(
            f"{source}: its pickled weights hold more than tensors, or are damaged; they are not "
            "read"
        ) from error
    except Exception as error:  # whatever is wrong with the files
        raise UserError(f"{source} could not be loaded: {reason_of(error)}") from error
    model, info = loaded
    for what, keys in _faults(model, info, is_quantised=placement is not None):
        if keys:
            raise UserError(
                f"{source} {what.format(len(keys))}, the first: {min(keys)}. It is incomplete, or "
                "of another architecture: download it again"
            )
    return model if placement is not None else model.to(device)


def _faults(model: nn.Module, info: Any, is_quantised: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield what transformers only warns of, with the weights' names.

    It drops surplus weights of a layer, and fills missing ones with random numbers.
    """
    containers = nn.ModuleList | PreTrainedModel
    parts = [name for name, part in model.named_modules() if not isinstance(part, containers)]
    # quantised layers also hold scales
    inside = () if is_quantised else tuple(f"{name}." for name in parts)
    surplus = [key for key in info["unexpected_keys"] if key.startswith(inside)]
    other_shape = [key for key, *_ in info["mismatched_keys"]]
    yield "lacks {} of the model's weights", info["missing_keys"]
    yield "has {} weights in its layers that the model has not", surplus
    yield "has {} weights of another shape than its config.json gives", other_shape


def random_weights(config: PreTrainedConfig, spec: ModelSpec) -> PreTrainedModel:
    """Build the architecture with seeded random weights, on the spec's device, in its dtype."""
    device = as_device(spec.device)
    accelerators = [] if device.type == "cpu" else [device.index or 0]
    dtype, attention = getattr(torch, spec.dtype), spec.attn_implementation
    try:
        with torch.device("meta"):  # else every layer is filled twice: by torch and transformers
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention
            )
    except Exception as error:  # each architecture's own
        raise UserError(
            f"a random {config.model_type} model could not be built: {reason_of(error)}"
        ) from error
    model.to_empty(device=device)
    model.tie_weights()
    with torch.random.fork_rng(accelerators, device_type=device.type):
        torch.manual_seed(spec.seed)
        model.initialize_weights()
    return model
