"""Counting the arithmetic of a prefill, so that a measured speedup has an ideal to be held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lazyllm.engine.architecture import windows_of


@dataclass(frozen=True)
class LayerShape:
    """The sizes that decide a decoder layer's FLOPs, all in elements."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int

    @classmethod
    def of(cls, config: Any) -> LayerShape:
        """Read the shape from a transformers config of a decoder with gated MLPs, fused or not (no experts)."""
        heads = config.num_attention_heads
        return cls(
            width=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            mlp_width=config.intermediate_size,
        )

    @property
    def linear_flops(self) -> int:
        """FLOPs of all linear maps for one token: q, k, v, o and the three matrices of the gated MLP."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.width * self.mlp_width
        return 2 * (attention + mlp)

    @property
    def pair_flops(self) -> int:
        """FLOPs of attention for one (query, key) pair: the product with K and the one with V, all heads."""
        return 4 * self.heads * self.head_dim


def prefill_flops(config: Any, tokens_per_layer: Sequence[int], logits: int = 1) -> int:
    """FLOPs of a prefill in which `tokens_per_layer[l]` tokens enter layer l, with logits at so many positions.

    A multiplication and an addition count as two. Attention counts the pairs that causality and the layer's sliding
    window leave. Of tokens that are not all of the text there may be fewer within a window: it is counted as if they
    were next to each other, and so at most too much.
    Left out, as below 1 %: norms, RoPE, softmax, activations, and the selection itself (one row of attention per
    pruning layer, which the layer computes anyway).
    """
    shape = LayerShape.of(config)
    layers = sum(
        n * shape.linear_flops + _pairs(n, window) * shape.pair_flops
        for n, window in zip(tokens_per_layer, windows_of(config), strict=True)
    )
    return layers + logits * 2 * shape.width * config.vocab_size


def _pairs(n: int, window: int | None) -> int:
    """How many (query, key) pairs n tokens have of which the key is the query or one of the `window` - 1 before it."""
    near = n if window is None else min(n, window)
    return near * (near + 1) // 2 + (n - near) * near


def ideal_speedup(config: Any, n: int, tokens_per_layer: Sequence[int]) -> float:
    """FLOPs of the baseline's prefill of n tokens over those of one in which fewer enter the layers."""
    return prefill_flops(config, [n] * len(tokens_per_layer)) / prefill_flops(config, tokens_per_layer)
