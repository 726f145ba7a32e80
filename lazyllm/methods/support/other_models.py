"""The other models that a method runs (`Method.models`): loaded once, opened beside the model under test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakSet

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

_LOADED: WeakSet[Any] = WeakSet()


def load_beside(spec: ModelSpec, model: PreTrainedModel, plain: bool = False) -> PreTrainedModel:
    """The model of a spec, in the dtype and on the device of `model`. Cached for later prompts.

    plain: of any architecture, to be run by `model(...)`; else its layers are run one by one (`open_beside`).
    Methods have no state, so `Method.prepare` loads models into this cache for `Method.start`. Raises UserError.
    """
    home = main_device(model)
    other: Any = _load(replace(spec, dtype=str(model.dtype).removeprefix("torch."), device=str(home)), plain)
    if main_device(other) != home:  # parked
        other.to(home)
    return other


def park() -> None:
    """Move all of these models to the host, so that they take no memory in the next measurement."""
    for model in _LOADED:
        model.to("cpu")


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


@lru_cache(maxsize=2)
def config_beside(spec: ModelSpec) -> Any:
    """The config of the model of a spec; every prompt asks for it. Raises UserError."""
    return shape_of(spec)


@lru_cache(maxsize=2)
def matrices_beside(spec: ModelSpec) -> int:
    """Elements of the matrices in a layer of the model of a spec, all of which each token is multiplied with.

    Counted in the model's own modules, so for any architecture. Experts are counted as if all of them ran. Raises
    UserError.
    """
    config = config_beside(spec)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tables = [*(part for part in model.modules() if isinstance(part, nn.Embedding)), model.get_output_embeddings()]
    outside = {id(weight) for table in tables for weight in table.parameters()}
    matrices = (weight for weight in model.parameters() if weight.dim() > 1 and id(weight) not in outside)
    return sum(weight.numel() for weight in matrices) // config.num_hidden_layers


@lru_cache(maxsize=2)
def tokenizer_beside(spec: ModelSpec) -> Any:
    """The tokenizer of the model of a spec. Raises UserError if there is none, or one without spans."""
    tokenizer = load_tokenizer_of(spec)
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"the tokenizer of {spec.name!r} gives no character offsets: give a model with a fast tokenizer"
        )
    return tokenizer


@lru_cache(maxsize=2)
def _load(spec: ModelSpec, plain: bool) -> PreTrainedModel:
    model = load_weights(spec, plain)
    if not plain:
        check_surroundings(model)  # before the clock starts
    _LOADED.add(model)
    return model
