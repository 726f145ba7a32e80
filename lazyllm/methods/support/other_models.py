"""The other models that methods run (`Method.models`): loaded once, opened beside the model under test."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from lazyllm.engine.architecture import check_surroundings
from lazyllm.engine.decoder import Decoder, open_decoder
from lazyllm.engine.devices import main_device
from lazyllm.engine.inputs import Prompt
from lazyllm.errors import UserError
from lazyllm.models.load import load_tokenizer_of, load_weights, shape_of
from lazyllm.spec import ModelSpec

_LOADED: dict[tuple[ModelSpec, bool], Any] = {}  # {(spec, plain): model}, until `unload`


def load_beside(spec: ModelSpec, model: PreTrainedModel, plain: bool = False) -> PreTrainedModel:
    """The model of a spec, in the dtype and on the device of `model`. It stays for later prompts, until `unload`.

    plain: a model of any architecture, run by `model(...)`; else one whose layers run one by one (`open_beside`).
    Methods have no state, so `Method.prepare` loads models here for `Method.start`. Raises UserError.
    """
    home = main_device(model)
    own = replace(spec, dtype=str(model.dtype).removeprefix("torch."), device=str(home))
    if (own, plain) not in _LOADED:
        other = load_weights(own, plain)
        if not plain:
            check_surroundings(other)  # before the clock starts
        _LOADED[own, plain] = other
    other = _LOADED[own, plain]
    if main_device(other) != home:  # `park` moved it to the host
        other.to(home)
    return other


def models_beside() -> tuple[Any, ...]:
    """The models loaded so far."""
    return tuple(_LOADED.values())


def bytes_beside(used: Collection[ModelSpec], device: torch.device) -> int:
    """Bytes that the loaded models take on a device, except those of the specs in `used`."""
    others = _unused(used)
    return sum(
        part.numel() * part.element_size()
        for model in others
        for part in (*model.parameters(), *model.buffers())
        if part.device == device
    )


def park(used: Collection[ModelSpec]) -> bool:
    """Move the loaded models to the host, except those of the specs in `used`. Returns whether any was moved."""
    moved = [model for model in _unused(used) if main_device(model).type != "cpu"]
    for model in moved:
        model.to("cpu")
    return bool(moved)


def unload() -> None:
    """Forget all loaded models."""
    _LOADED.clear()


def _unused(used: Collection[ModelSpec]) -> list[Any]:
    sources = {replace(spec, dtype="", device="") for spec in used}
    return [model for (spec, _), model in _LOADED.items() if replace(spec, dtype="", device="") not in sources]


@contextmanager
def open_beside(spec: ModelSpec, decoder: Decoder) -> Iterator[Decoder]:
    """A decoder of the model of a spec. Its tokens count in `decoder.tokens_run` too."""
    other = load_beside(spec, decoder.model)
    with open_decoder(other) as opened:
        yield opened
        decoder.tokens_run += opened.tokens_run


def read_beside(spec: ModelSpec, text: str, special_tokens: bool = True) -> Prompt:
    """The text tokenised for the model of a spec. Raises UserError if it has no tokenizer, or one without spans."""
    own = tokenizer_beside(spec)(
        text, add_special_tokens=special_tokens, return_offsets_mapping=True, truncation=False, verbose=False
    )
    return Prompt(torch.tensor(own["input_ids"], dtype=torch.long), text, tuple(own["offset_mapping"]))


config_beside = cache(shape_of)  # cached, as it is read for every prompt


@cache
def matrices_beside(spec: ModelSpec) -> int:
    """Elements of all matrices in a layer of the model of a spec, the mean over its layers.

    For any architecture; experts are counted as if all of them ran. Raises UserError.
    """
    config = config_beside(spec)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tables = [*(part for part in model.modules() if isinstance(part, nn.Embedding)), model.get_output_embeddings()]
    outside = {id(weight) for table in tables for weight in table.parameters()}
    matrices = (weight for weight in model.parameters() if weight.dim() > 1 and id(weight) not in outside)
    return sum(weight.numel() for weight in matrices) // config.num_hidden_layers


@cache
def tokenizer_beside(spec: ModelSpec) -> Any:
    """The tokenizer of the model of a spec. Raises UserError if there is none, or one without spans."""
    tokenizer = load_tokenizer_of(spec)
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"the tokenizer of {spec.name!r} gives no character offsets: give a model with a fast tokenizer"
        )
    return tokenizer
