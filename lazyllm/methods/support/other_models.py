"""The other models that methods run (`Method.models`): loaded once, opened beside the main one."""

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
from lazyllm.models.config import shape_of
from lazyllm.models.load import load_weights
from lazyllm.models.tokenizers import load_tokenizer_of
from lazyllm.spec import ModelSpec


class HelperModels:
    """The other models of a process's methods. Methods have no state, so all share `HELPERS`.

    loaded: {(spec, plain): model}, until `unload`.
    """

    def __init__(self) -> None:
        self.loaded: dict[tuple[ModelSpec, bool], Any] = {}

    def load(self, spec: ModelSpec, model: PreTrainedModel, plain: bool = False) -> PreTrainedModel:
        """Load the model of a spec in the dtype and on the device of `model`, and keep it.

        plain: a model of any architecture, run by `model(...)`; else one whose layers run one by
            one. `Method.prepare` loads models here for `Method.start`. Raises UserError.
        """
        dtype = str(model.dtype).removeprefix("torch.")
        key = replace(spec, dtype=dtype, device=str(main_device(model))), plain
        if key not in self.loaded:
            other = load_weights(*key)
            if not plain:
                check_surroundings(other)  # before the clock starts
            self.loaded[key] = other
        return self.loaded[key]

    @contextmanager
    def open(self, spec: ModelSpec, decoder: Decoder) -> Iterator[Decoder]:
        """Open a decoder of the model of a spec. Its tokens count in `decoder.tokens_run` too."""
        other = self.load(spec, decoder.model)
        with open_decoder(other) as opened:
            yield opened
            decoder.tokens_run += opened.tokens_run

    def nbytes(self, used: Collection[ModelSpec], device: torch.device) -> int:
        """Count the bytes of loaded models on a device, without those of the specs in `used`."""
        sources = {replace(spec, dtype="", device="") for spec in used}
        return sum(
            part.numel() * part.element_size()
            for (spec, _), model in self.loaded.items()
            if replace(spec, dtype="", device="") not in sources
            for part in (*model.parameters(), *model.buffers())
            if part.device == device
        )

    def unload(self) -> None:
        """Forget all loaded models."""
        self.loaded.clear()


HELPERS = HelperModels()


def read_for(spec: ModelSpec, text: str, special_tokens: bool = True) -> Prompt:
    """Tokenise a text for the model of a spec. Raises UserError as `tokenizer_of`."""
    read = tokenizer_of(spec)(
        text,
        add_special_tokens=special_tokens,
        return_offsets_mapping=True,
        truncation=False,
        verbose=False,
    )
    ids = torch.tensor(read["input_ids"], dtype=torch.long)
    return Prompt(ids, text, tuple(read["offset_mapping"]))


@cache  # as it is read for every prompt
def config_of(spec: ModelSpec) -> PreTrainedConfig:
    """Read the config of the model of a spec."""
    return shape_of(spec)


@cache
def matrices_of(spec: ModelSpec) -> int:
    """Count the elements of all matrices in a layer of a spec's model, the mean over its layers.

    For any architecture; experts count as if all of them ran. Raises UserError.
    """
    config = config_of(spec)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embeddings = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    tables = [*embeddings, model.get_output_embeddings()]
    outside = {id(weight) for table in tables for weight in table.parameters()}
    matrices = [part for part in model.parameters() if part.dim() > 1 and id(part) not in outside]
    return sum(weight.numel() for weight in matrices) // config.num_hidden_layers


@cache
def tokenizer_of(spec: ModelSpec) -> Any:
    """Load the tokenizer of a spec's model. Raises UserError without one, or one without spans."""
    tokenizer = load_tokenizer_of(spec)
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"the tokenizer of {spec.name!r} gives no character offsets: give a model with a fast "
            "tokenizer"
        )
    return tokenizer
