"""The work and the memory of one prompt, and how many answers fit into memory together. Nothing
runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from lazyllm.engine.depth import Depth
from lazyllm.engine.flops import LayerShape, prefill_flops
from lazyllm.errors import UserError
from lazyllm.methods import Method, Select
from lazyllm.spec import ModelSpec

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of a number
WARMUP_TOKENS = 4  # for a prefill, a decoding step that revives, and a step after it
LARGEST_BATCH = 8  # the most answers that decode together, unless the settings give a number
# of a layer's start, for each further answer of a batch: 0.09 to 0.23 on an H200 (results/gpu)
FURTHER = 1 / 8
USABLE = 0.9  # share of a device's memory


@dataclass(frozen=True)
class Work:
    """FLOPs, bytes of weights, K and V that are read, and the host's starts of layers, shared by
    a batch's answers.
    """

    flops: int
    read: int
    layer_starts: float

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops, self.read + other.read, self.layer_starts + other.layer_starts
        )

    def __mul__(self, count: int) -> Work:
        return Work(self.flops * count, self.read * count, self.layer_starts * count)


@dataclass(frozen=True)
class Model:
    """A model's shapes (a transformers config), and bytes of its weights, of an activation, of K
    and V of one token.
    """

    spec: ModelSpec
    config: Any
    weights: int
    size: int
    kv_bytes: int  # in one layer

    @classmethod
    @cache
    def of(cls, spec: ModelSpec) -> Model:
        """The shapes of a preset need no files. spec: with a dtype, not "auto"."""
        # this and others not at the top: planning refuses arguments before it imports torch
        import torch
        from transformers import AutoModelForCausalLM

        from lazyllm.models.config import shape_of

        config = shape_of(spec)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shape, size = LayerShape.of(config), _BYTES[spec.dtype]
        return cls(
            spec,
            config,
            model.num_parameters() * size,
            size,
            2 * shape.kv_heads * shape.head_dim * size,
        )

    def work(self, method: Method, n: int, new_tokens: int, batch_size: int = 1) -> list[Work]:
        """Prefill and decoding of an answer; of other models that score a prompt, their FLOPs
        alone.

        n: tokens of the prompt. batch_size: answers that decode together; they read the weights
            once.
        """
        prefill = Work(
            method.first_token_flops(self.config, n), self.weights, self.config.num_hidden_layers
        )
        stored = method.stored_per_layer(Depth.of(self.config), n)
        return [prefill, self._decoding(stored, new_tokens - 1, batch_size)]

    def _decoding(self, stored: Sequence[int], steps: int, batch_size: int) -> Work:
        """The work of steps that attend to the tokens stored in each layer, and to those
        generated since.
        """
        shape = LayerShape.of(self.config)
        after = [tokens + steps for tokens in stored]
        flops = prefill_flops(self.config, after, steps) - prefill_flops(self.config, stored, 0)
        linear = (
            len(stored) * steps * shape.linear_flops
            + steps * 2 * shape.width * self.config.vocab_size
        )
        attended = (
            flops - linear
        ) // shape.pair_flops  # each step reads K and V of every token that it attends to
        read = steps * self.weights // batch_size + attended * self.kv_bytes
        return Work(
            flops, read, steps * len(stored) * (1 + FURTHER * (batch_size - 1)) / batch_size
        )

    def memory(
        self, method: Method, n: int, new_tokens: int, batch_size: int = 1
    ) -> dict[str, int]:
        """Bytes of each part at a batch's peak; "working" is one layer of a prefill besides its
        input.

        K and V have room for the first revived tokens. Further ones depend on the prompt and are
        not counted.
        """
        shape, depth = LayerShape.of(self.config), Depth.of(self.config)
        tokens, most = method.tokens_per_layer(depth, n), n + new_tokens
        slots = sum(
            len(group.layers) * group.slots(new_tokens, most) for group in method.groups(depth, n)
        )
        if isinstance(method, Select) and method.scoring_flops(self.config, n):
            # the model itself may select, by a run of the whole prompt
            tokens, slots = [n] * depth.count, depth.count * most
        scores = 2 * shape.heads * tokens[0] ** 2 if self.spec.attn_implementation == "eager" else 0
        others = [Model.of(replace(other, dtype=self.spec.dtype)) for other in method.models()]
        return {
            "weights": self.weights,
            "other models": sum(
                model.weights + n * model.config.num_hidden_layers * model.kv_bytes
                for model in others
            ),
            "K and V": batch_size * slots * self.kv_bytes,
            "Aux Cache": batch_size * method.aux_rows(depth, most) * shape.width * self.size,
            "working": self.size * max(3 * tokens[0] * (shape.width + shape.mlp_width), scores),
        }


def fitting_batch(
    batch_size: int | None,
    spec: ModelSpec,
    methods: Collection[Method],
    n: int,
    new_tokens: int,
    memory: float | None,
) -> int:
    """The number of answers that decode together. Raises UserError if those of a method cannot.

    batch_size: the setting. methods: all that answer. n: tokens of the longest prompt.
    memory: bytes of the accelerators; None for a CPU, or if it is not known.
    """
    alone = [method.label for method in methods if not method.can_batch]
    if alone and (batch_size or 1) > 1:
        raise UserError(
            f"batch_size={batch_size}: {alone[0]} decodes in a way of its own: give batch_size=1"
        )
    if batch_size is not None:
        return batch_size
    if alone or memory is None:
        return 1
    model, size = Model.of(spec), LARGEST_BATCH
    while size > 1 and any(
        sum(model.memory(method, n, new_tokens, size).values()) > USABLE * memory
        for method in methods
    ):
        size -= 1
    return size
