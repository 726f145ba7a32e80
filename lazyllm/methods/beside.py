"""The other models that a method runs (`Method.models`): loaded once, opened beside the model under test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from transformers import PreTrainedModel

from lazyllm.engine.architecture import Layout, find_layout
from lazyllm.engine.decoder import Decoder, open_decoder
from lazyllm.engine.devices import home_of
from lazyllm.models.load import load_tokenizer_of, load_weights
from lazyllm.models.spec import ModelSpec


@dataclass(frozen=True)
class Beside:
    """Another model with its tokenizer, None if it was not asked for. layout: found before the clock starts."""

    model: PreTrainedModel
    tokenizer: Any
    layout: Layout


def load_beside(spec: ModelSpec, model: PreTrainedModel, tokenizer: bool = True) -> Beside:
    """The model of that spec, but in the dtype and on the device of `model`. Kept for the prompts that follow.

    tokenizer: load that too.

    Methods have no state, so this is where `Method.prepare` leaves what `Method.start` needs. Raises UserError.
    """
    own = replace(spec, dtype=str(model.dtype).removeprefix("torch."), device=str(home_of(model)))
    return _load(own, tokenizer)


@contextmanager
def open_beside(spec: ModelSpec, decoder: Decoder, tokenizer: bool = True) -> Iterator[tuple[Decoder, Any]]:
    """(decoder, tokenizer) of the model of that spec. What it runs counts in `decoder.tokens_run` too."""
    other = load_beside(spec, decoder.model, tokenizer)
    with open_decoder(other.model, other.layout, counted_by=decoder) as opened:
        yield opened, other.tokenizer


@lru_cache(maxsize=2)
def _load(spec: ModelSpec, tokenizer: bool) -> Beside:
    model = load_weights(spec)
    return Beside(model, load_tokenizer_of(spec) if tokenizer else None, find_layout(model))
