"""FLOPs of a prefill, for the ideal speedup that a measured one is compared with. No torch."""

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
        """Read the shape from a transformers config of a decoder with gated MLPs (no experts).

        Without an MLP width, as in GPT-2's, it is four times the model's width.
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
        """All linear maps of one token: q, k, v, o and the three matrices of the gated MLP."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.width * self.mlp_width
        return 2 * (attention + mlp)

    @property
    def projection_flops(self) -> int:
        """The linear maps before attention of one token: q, k and v."""
        return 2 * self.width * self.head_dim * (self.heads + 2 * self.kv_heads)

    @property
    def pair_flops(self) -> int:
        """Attention of one (query, key) pair: the products with K and V, all heads."""
        return 4 * self.heads * self.head_dim


def windows_of(config: Any) -> list[int | None]:
    """Read per layer how many positions a token attends to, itself included; None for all before.

    Raises UserError for other kinds of layers.
    """
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [default] * layers
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(
            f"{config.model_type} is not supported: its config has layers of type "
            f"{', '.join(unknown)}, which mix tokens in a way that pruning would change; "
            "supported are full_attention and sliding_attention"
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


def prefill_flops(
    config: Any,
    tokens_per_layer: Sequence[int],
    logits: int = 1,
    matrices: int | None = None,
    attended: Mapping[int, int] | None = None,
) -> int:
    """Count a prefill in which `tokens_per_layer[l]` tokens enter layer l.

    logits: number of positions whose logits are computed.
    matrices: elements of all matrices of a layer, for layers that `LayerShape` does not describe.
    attended: {layer, from 1: (query, key) pairs over all heads} of layers that skip some.

    A multiplication and an addition count as two. Attention counts the pairs that causality and the
    layer's window allow, as if the remaining tokens were neighbours: with a window, pruning leaves
    fewer pairs. Norms, RoPE, softmax, activations, selection (below 1 %) do not count.
    """
    shape = LayerShape.of(config)
    linear_flops = shape.linear_flops if matrices is None else 2 * matrices
    by_layer = zip(tokens_per_layer, windows_of(config), strict=True)
    pairs = {
        layer: shape.heads * causal_pairs(n, window)
        for layer, (n, window) in enumerate(by_layer, start=1)
    }
    pairs |= dict(attended or {})
    layers = sum(tokens_per_layer) * linear_flops + sum(pairs.values()) * 4 * shape.head_dim
    return layers + logits * 2 * shape.width * config.vocab_size


def first_layers_flops(config: Any, n: int, layers: int) -> int:
    """Count n tokens in the first `layers` layers, without logits (`decoder.run_layers`)."""
    unused = config.num_hidden_layers - layers
    return prefill_flops(config, [n] * layers + [0] * unused, logits=0)


def attention_ceiling(config: Any, n: int) -> float:
    """Compute the ideal speedup of a prefill of n tokens without any attention.

    No method that skips only attention has more.
    """
    layers = config.num_hidden_layers
    nothing = dict.fromkeys(range(1, layers + 1), 0)
    return prefill_flops(config, [n] * layers) / prefill_flops(
        config, [n] * layers, attended=nothing
    )


def causal_pairs(n: int, window: int | None) -> int:
    """Count pairs of n tokens whose key is the query or one of the `window` - 1 tokens before."""
    near = n if window is None else min(n, window)
    return near * (near + 1) // 2 + (n - near) * near


def nearest_ratio(speedup: Callable[[float], float], target: float) -> float | None:
    """Find the keep ratio, in steps of 1/10000, whose speedup is nearest to `target`.

    speedup: falls as the ratio grows. Returns None if no ratio of at least 1x reaches the target.
    """

    def at_step(step: int) -> float:
        return speedup(step / 10_000)

    if target < 1 or at_step(1) < target:
        return None
    # the first step whose speedup is below the target; negated, as bisect needs rising values
    slow = bisect_right(range(10_000), -target, lo=2, key=lambda step: -at_step(step))
    return min((slow, slow - 1), key=lambda step: abs(at_step(step) - target)) / 10_000
