"""Loading checkpoints, or the same architectures with random weights. All here raise UserError."""

import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lazyllm.engine.checks import check_same_as_model
from lazyllm.errors import UserError, reason_of
from lazyllm.models.checkpoint import checkpoint_folder
from lazyllm.models.config import as_device, check_loading, quantised_by, with_dtype
from lazyllm.models.tokenizers import check_fits, load_tokenizer_of
from lazyllm.spec import AUTO, ModelSpec


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
