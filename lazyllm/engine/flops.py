"""FLOPs of a prefill, for the ideal speedup that a measured one is compared with. Needs a config, no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lazyllm.errors import UserError


@dataclass(frozen=True)
class LayerShape:
    """The sizes that determine a decoder layer's FLOPs, in elements."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int

    @classmethod
    def of(cls, config: Any) -> LayerShape:
        """Read the shape from a transformers config of a decoder with gated MLPs, fused or not (no experts).

        Without an MLP width in the config, as in GPT-2's, it is four times the model's width.
        """
        heads = config.num_attention_heads
        return cls(
            width=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            mlp_width=getattr(config, "intermediate_size", 4 * config.hidden_size),
        )

    @property
    def linear_flops(self) -> int:
        """FLOPs of all linear maps for one token: q, k, v, o and the three matrices of the gated MLP."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.width * self.mlp_width
        return 2 * (attention + mlp)

    @property
    def projection_flops(self) -> int:
        """FLOPs of the linear maps before attention for one token: q, k and v."""
        return 2 * self.width * self.head_dim * (self.heads + 2 * self.kv_heads)

    @property
    def pair_flops(self) -> int:
        """FLOPs of attention for one (query, key) pair: the product with K and the one with V, all heads."""
        return 4 * self.heads * self.head_dim


def windows_of(config: Any) -> list[int | None]:
    """Per layer, the number of positions that a token attends to, its own included; None for all before it.

    Read from a transformers config. Raises UserError for other kinds of layers.
    """
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [default] * layers
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(
            f"{config.model_type} is not supported: its config has layers of type {', '.join(unknown)}, which mix "
            "tokens in a way that pruning would change; supported are full_attention and sliding_attention"
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


def prefill_flops(
    config: Any,
    tokens_per_layer: Sequence[int],
    logits: int = 1,
    matrices: int | None = None,
    attended: Mapping[int, int] | None = None,
) -> int:
    """FLOPs of a prefill in which `tokens_per_layer[l]` tokens enter layer l, with logits at `logits` positions.

    matrices: elements of all matrices of a layer, for layers of another kind than `LayerShape` describes.
    attended: {layer, from 1: (query, key) pairs over all heads} of layers whose attention skips some.
    A multiplication and an addition count as two FLOPs. Attention counts the pairs that causality and the layer's
    sliding window allow, as if the remaining tokens were neighbours: with a window, pruning leaves fewer pairs. Not
    counted, as below 1 %: norms, RoPE, softmax, activations, and the selection.
    """
    shape = LayerShape.of(config)
    linear_flops = shape.linear_flops if matrices is None else 2 * matrices
    by_layer = zip(tokens_per_layer, windows_of(config), strict=True)
    pairs = {layer: shape.heads * causal_pairs(n, window) for layer, (n, window) in enumerate(by_layer, start=1)}
    layers = sum(tokens_per_layer) * linear_flops + sum((pairs | dict(attended or {})).values()) * 4 * shape.head_dim
    return layers + logits * 2 * shape.width * config.vocab_size


def attention_ceiling(config: Any, n: int) -> float:
    """The ideal speedup of a prefill of n tokens without any attention: no method that skips only attention has more.

    Attention's share of the prefill's FLOPs is 1 - 1 / this.
    """
    layers = config.num_hidden_layers
    without = prefill_flops(config, [n] * layers, attended=dict.fromkeys(range(1, layers + 1), 0))
    return prefill_flops(config, [n] * layers) / without


def causal_pairs(n: int, window: int | None) -> int:
    """The number of (query, key) pairs of n tokens whose key is the query or one of the `window` - 1 tokens before."""
    near = n if window is None else min(n, window)
    return near * (near + 1) // 2 + (n - near) * near


def nearest_ratio(speedup: Callable[[float], float], target: float) -> float | None:
    """The keep ratio, in steps of 1/10000, whose `speedup` is nearest to `target`.

    speedup: (keep ratio) -> speedup, which falls as the ratio grows.
    Returns None if the target is below 1, or if no ratio reaches it.
    """

    def of_step(step: int) -> float:
        return speedup(step / 10_000)

    if target < 1 or of_step(1) < target:
        return None
    # the first step whose speedup is below the target, or the last one; negated, as bisect needs rising values
    slow = bisect_right(range(10_000), -target, lo=2, key=lambda step: -of_step(step))
    return min((slow, slow - 1), key=lambda step: abs(of_step(step) - target)) / 10_000


def first_layers_flops(config: Any, n: int, layers: int) -> int:
    """FLOPs of `lazyllm.engine.decoder.run_layers`: n tokens in the first `layers` layers, without logits."""
    return prefill_flops(config, [n] * layers + [0] * (config.num_hidden_layers - layers), logits=0)
