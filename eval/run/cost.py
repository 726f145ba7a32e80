"""The cost of a generation before it runs: FLOPs, bytes, memory, and seconds on a device.

Counts follow from the shapes. Seconds need rates: assumed ones (`GPUS`), corrected by stored runs (`corrections.py`).
Decoding is counted without revivals, whose number depends on the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from lazyllm.engine.flops import LayerShape, prefill_flops, windows_of
from lazyllm.methods import Method
from lazyllm.spec import ModelSpec

_BYTES = {"float64": 8, "float32": 4}  # of a number; 2 in all other dtypes
_QUANTISED_BYTES = {"int8": 1, "bnb_int8": 1, "int4": 0.5, "bnb_nf4": 0.5}


@dataclass(frozen=True)
class Device:
    """A kind of device. name: a part of its driver's name for it.

    flops_per_s, bytes_per_s: of its data sheet, dense bfloat16. gigabytes: its memory.
    prefill, decode: assumed shares of these rates. layer_s: least seconds of a layer in a decoding step, for its
    launches.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    gigabytes: float
    prefill: float = 0.5
    decode: float = 0.6
    layer_s: float = 4e-4


GPUS = {
    "h100": Device("H100", 989e12, 3.35e12, 80),
    "a100": Device("A100", 312e12, 2.04e12, 80),
    "rtx4090": Device("RTX 4090", 165e12, 1.01e12, 24),
    "l4": Device("L4", 121e12, 0.3e12, 24),
}
CPU = Device("CPU", 1e11, 2e10, 0, layer_s=0)  # used only if corrected by a stored run


@dataclass(frozen=True)
class Work:
    """One generation: FLOPs of its prefill; FLOPs, bytes read and layers of one decoding step in its middle."""

    prefill_flops: int
    step_flops: int
    step_bytes: int
    layers: int

    def ttft_s(self, device: Device) -> float:
        """Seconds to the first token at the assumed rates."""
        return self.prefill_flops / (device.flops_per_s * device.prefill) + self.layers * device.layer_s

    def step_s(self, device: Device) -> float:
        """Seconds of a decoding step at the assumed rates."""
        reading = self.step_bytes / (device.bytes_per_s * device.decode)
        return max(reading, self.step_flops / (device.flops_per_s * device.prefill), self.layers * device.layer_s)


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a generation. working: of one layer of the prefill beside its input.

    beside: weights of the other models that the method runs, and their K and V of the prompt.
    """

    weights: int
    beside: int
    kv: int
    aux: int
    working: int

    @property
    def total(self) -> int:
        return self.weights + self.beside + self.kv + self.aux + self.working


def parameters_of(config: Any) -> tuple[int, int]:
    """(parameters of the model, parameters of its layers' linear maps), from a model without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = LayerShape.of(config).linear_flops // 2 * config.num_hidden_layers
    return sum(parameter.numel() for parameter in model.parameters()), linear


def weight_bytes(spec: ModelSpec, parameters: tuple[int, int]) -> int:
    """Bytes of the weights in the spec's dtype or quantisation. parameters: of `parameters_of`."""
    (all_of_them, linear), size = parameters, number_bytes(spec)
    return int((all_of_them - linear) * size + linear * _QUANTISED_BYTES.get(spec.quantise or "", size))


def number_bytes(spec: ModelSpec) -> int:
    """Bytes of a number in the spec's dtype."""
    return _BYTES.get(spec.dtype, 2)


def work(config: Any, spec: ModelSpec, method: Method, n: int, new_tokens: int, weights: int) -> Work:
    """The work of a method on n prompt tokens. weights: bytes; each step reads all of them."""
    layers = config.num_hidden_layers
    flops = prefill_flops(config, method.tokens_per_layer(layers, n)) + method.scoring_flops(config, n)
    return _work(config, spec, flops, method.stored_per_layer(layers, n), new_tokens, weights)


def turn_work(
    config: Any, spec: ModelSpec, method: Method, n: int, since: int, m: int, new_tokens: int, weights: int
) -> Work:
    """The work of a later turn, which runs m tokens. n: prompt tokens. since: tokens run since the prompt.

    A method that continues runs the m tokens over what it stores.
    """
    if method.turns != "continue":
        return work(config, spec, method, n + since + m, new_tokens, weights)
    layers = config.num_hidden_layers
    before, after = (method.stored_per_layer(layers, n, later) for later in (since, since + m))
    flops = prefill_flops(config, after) - prefill_flops(config, before, logits=0)
    return _work(config, spec, flops, after, new_tokens, weights)


def _work(config: Any, spec: ModelSpec, flops: int, stored: Sequence[int], new_tokens: int, weights: int) -> Work:
    """flops: up to the first token. stored: tokens per layer, before the first step."""
    layers, shape = config.num_hidden_layers, LayerShape.of(config)
    attended = _attended(config, [held + new_tokens // 2 for held in stored])
    return Work(
        prefill_flops=flops,
        step_flops=layers * shape.linear_flops + attended * shape.pair_flops + 2 * shape.width * config.vocab_size,
        step_bytes=weights + attended * _kv_numbers(shape) * number_bytes(spec),
        layers=layers,
    )


def _attended(config: Any, stored: Sequence[int]) -> int:
    pairs = zip(stored, windows_of(config), strict=True)
    return sum(held if window is None else min(held, window) for held, window in pairs)


def _kv_numbers(shape: LayerShape) -> int:
    return 2 * shape.kv_heads * shape.head_dim


def _beside(spec: ModelSpec, n: int) -> int:
    """Bytes of another model and of its K and V of n tokens."""
    config, parameters = _shape_beside(spec)
    tokens = n * config.num_hidden_layers
    return weight_bytes(spec, parameters) + tokens * _kv_numbers(LayerShape.of(config)) * number_bytes(spec)


@cache
def _shape_beside(spec: ModelSpec) -> tuple[Any, tuple[int, int]]:
    from lazyllm.models.load import shape_of

    config = shape_of(spec)
    return config, parameters_of(config)


def memory(config: Any, spec: ModelSpec, method: Method, n: int, new_tokens: int, weights: int) -> Memory:
    """The peak of a generation of n prompt tokens and up to `new_tokens` new ones. weights: bytes."""
    shape, size, layers = LayerShape.of(config), number_bytes(spec), config.num_hidden_layers
    tokens = method.tokens_per_layer(layers, n)
    one_layer = tokens[0] * (3 * shape.width + 3 * shape.mlp_width)
    if spec.attn_implementation == "eager":
        one_layer = max(one_layer, 2 * shape.heads * tokens[0] ** 2)
    return Memory(
        weights=weights,
        beside=sum(_beside(replace(other, dtype=spec.dtype), n) for other in method.models()),
        kv=(sum(tokens) + layers * new_tokens) * _kv_numbers(shape) * size,
        aux=method.hidden_stored(layers, n) * shape.width * size,
        working=one_layer * size,
    )
