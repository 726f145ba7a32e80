"""The other models that methods run (`Method.models`): loaded once, opened beside the model under test."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lazyllm.engine.architecture import check_surroundings
from lazyllm.engine.decoder import Decoder, open_decoder
from lazyllm.engine.devices import main_device
from lazyllm.engine.inputs import Prompt
from lazyllm.errors import UserError
from lazyllm.models.load import load_tokenizer_of, load_weights, shape_of
from lazyllm.spec import ModelSpec


class HelperModels:
    """The other models of a process's methods. Methods have no state, so all share one (`HELPERS`).

    loaded: {(spec, plain): model}, until `unload`.
    """

    def __init__(self) -> None:
        self.loaded: dict[tuple[ModelSpec, bool], Any] = {}

    def load(self, spec: ModelSpec, model: PreTrainedModel, plain: bool = False) -> PreTrainedModel:
        """The model of a spec, in the dtype and on the device of `model`. It stays for later prompts, until `unload`.

        plain: a model of any architecture, run by `model(...)`; else one whose layers run one by one (`open`).
        `Method.prepare` loads models here for `Method.start`. Raises UserError.
        """
        home = main_device(model)
        own = replace(spec, dtype=str(model.dtype).removeprefix("torch."), device=str(home))
        if (own, plain) not in self.loaded:
            other = load_weights(own, plain)
            if not plain:
                check_surroundings(other)  # before the clock starts
            self.loaded[own, plain] = other
        return self.loaded[own, plain]

    @contextmanager
    def open(self, spec: ModelSpec, decoder: Decoder) -> Iterator[Decoder]:
        """A decoder of the model of a spec. Its tokens count in `decoder.tokens_run` too."""
        other = self.load(spec, decoder.model)
        with open_decoder(other) as opened:
            yield opened
            decoder.tokens_run += opened.tokens_run

    def nbytes(self, used: Collection[ModelSpec], device: torch.device) -> int:
        """Bytes that the loaded models take on a device, except those of the specs in `used`."""
        sources = {replace(spec, dtype="", device="") for spec in used}
        unused = [
            model for (spec, _), model in self.loaded.items() if replace(spec, dtype="", device="") not in sources
        ]
        return sum(
            part.numel() * part.element_size()
            for model in unused
            for part in (*model.parameters(), *model.buffers())
            if part.device == device
        )

    def unload(self) -> None:
        """Forget all loaded models."""
        self.loaded.clear()


HELPERS = HelperModels()


def read_for(spec: ModelSpec, text: str, special_tokens: bool = True) -> Prompt:
    """The text tokenised for the model of a spec. Raises UserError if it has no tokenizer, or one without spans."""
    own = tokenizer_of(spec)(
        text, add_special_tokens=special_tokens, return_offsets_mapping=True, truncation=False, verbose=False
    )
    return Prompt(torch.tensor(own["input_ids"], dtype=torch.long), text, tuple(own["offset_mapping"]))


@cache  # as it is read for every prompt
def config_of(spec: ModelSpec) -> PreTrainedConfig:
    """The config of the model of a spec."""
    return shape_of(spec)


@cache
def matrices_of(spec: ModelSpec) -> int:
    """Elements of all matrices in a layer of the model of a spec, the mean over its layers.

    For any architecture; experts are counted as if all of them ran. Raises UserError.
    """
    config = config_of(spec)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tables = [*(part for part in model.modules() if isinstance(part, nn.Embedding)), model.get_output_embeddings()]
    outside = {id(weight) for table in tables for weight in table.parameters()}
    matrices = (weight for weight in model.parameters() if weight.dim() > 1 and id(weight) not in outside)
    return sum(weight.numel() for weight in matrices) // config.num_hidden_layers


@cache
def tokenizer_of(spec: ModelSpec) -> Any:
    """The tokenizer of the model of a spec. Raises UserError if there is none, or one without spans."""
    tokenizer = load_tokenizer_of(spec)
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"the tokenizer of {spec.name!r} gives no character offsets: give a model with a fast tokenizer"
        )
    return tokenizer
