"""XAttention: blocks of keys by the sums of antidiagonals (Xu et al. 2025, arXiv 2503.16428)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any

from lazyllm.engine.depth import Depth
from lazyllm.engine.flops import LayerShape, causal_pairs, windows_of
from lazyllm.engine.inputs import KeyBlocks
from lazyllm.methods.support.bases import Sparse
from lazyllm.methods.support.hyperparameters import check_int, check_ratio, checked

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class XAttention(Sparse):
    """Skip attention, not tokens: in every layer and head, each block of queries attends to its best blocks of keys.

    threshold: a block of queries sees its own and the first block of keys, and the best others while those before hold
        less than this share of the probability. 1: everything.
    stride: width of the tiles whose antidiagonals are summed. block: tokens of a block, a multiple of `stride`.

    A tile's logit is the mean of the products on its antidiagonal. Its probability comes from a softmax over the tiles
    up to the query's own; a block scores the sum of its tiles. A layer's own sliding window also holds. A prompt of at
    most two blocks is dense.

    How many blocks stay depends on the prompt: `attended` assumes even attention, which needs the most blocks;
    `Generation.attended` counts them. No kernel here skips blocks: dense attention runs under the blocks' mask, so
    answers are the method's and times are not (`timed`).

    Source: the paper, and a description of its port in microsoft/MInference (`modules/xattention.py`, commit 91a0506,
    MIT; the authors' mit-han-lab/x-attention has no licence). Written from scratch.
    Ours: one threshold for all heads, as in the port; ties go to the lower block.
    """

    label = "XAttention"
    order = 15
    colour = "#50A0C8"
    marker = "x"
    target_parameter = "threshold"
    adaptive = True
    timed = False

    threshold: float = checked(check_ratio, 0.9)
    stride: int = checked(check_int, 8)
    block: int = checked(check_int, 128)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block % self.stride:
            raise ValueError(f"block={self.block}, stride={self.stride}: give a block that is a multiple of stride")

    def _is_dense(self, n: int) -> bool:
        """Whether all blocks stay: of two, the first and a query's own are all."""
        return self.threshold == 1 or n <= 2 * self.block

    def sees(self, layer: int, query: Tensor, key: Tensor, scaling: float, depth: Depth) -> KeyBlocks | None:
        if self._is_dense(query.shape[2]):
            return None
        return KeyBlocks(self.block, best_blocks(query, key, self.stride, self.block, self.threshold, scaling))

    def attended(self, config: Any, n: int) -> dict[int, int]:
        if self._is_dense(n):
            return {}
        pairs = 0
        for row, start in enumerate(range(0, n, self.block)):
            queries = min(self.block, n - start)
            others = ceil(Fraction(str(self.threshold)) * Fraction(2 * row + 1, 2) - Fraction(3, 2))
            pairs += causal_pairs(queries, None) + queries * self.block * min(row, 1 + max(0, others))
        heads, windows = LayerShape.of(config).heads, enumerate(windows_of(config), start=1)
        return {layer: heads * min(pairs, causal_pairs(n, window)) for layer, window in windows}

    def scoring_flops(self, config: Any, n: int) -> int:
        if self._is_dense(n):
            return 0
        tiles = causal_pairs(-(-n // self.stride), None)
        return config.num_hidden_layers * tiles * self.stride * LayerShape.of(config).pair_flops // 2


def best_blocks(query: Tensor, key: Tensor, stride: int, block: int, threshold: float, scaling: float) -> Tensor:
    """[h, blocks, blocks] bool: the blocks of keys that each block of queries sees, by query head.

    query [1, h, n, d] and key [1, g, n, d]. Products are in at least float32, sums in float64.
    """
    import torch
    import torch.nn.functional as F

    (_, heads, n, _), kv_heads, in_block = query.shape, key.shape[1], block // stride
    exact = torch.promote_types(query.dtype, torch.float32)
    tiles = [F.pad(part[0].to(exact), (0, 0, 0, -n % block)).unflatten(1, (-1, stride)) for part in (query, key)]
    queries = tiles[0].flip(2).flatten(2).unflatten(0, (kv_heads, -1))  # [g, h/g, tiles, stride * d]
    keys = tiles[1].flatten(2)[:, None].mT  # [g, 1, stride * d, tiles]
    blocks = keys.shape[-1] // in_block
    seen = torch.zeros(heads, blocks, blocks, dtype=torch.bool, device=query.device)
    for row in range(blocks):
        first, end = row * in_block, (row + 1) * in_block
        real = min(end, -(-n // stride))  # the last block may have fewer tiles
        logits = queries[:, :, first:real] @ keys[..., :end] * (scaling / stride)  # [g, h/g, tiles, keys]
        later = torch.ones(real - first, end, dtype=torch.bool, device=query.device).triu(first + 1)
        probabilities = logits.masked_fill(later, float("-inf")).softmax(dim=-1, dtype=torch.float64)
        masses = probabilities.sum(dim=-2).unflatten(-1, (row + 1, in_block)).sum(dim=-1).flatten(0, 1)  # [h, blocks]
        seen[:, row, 0] = seen[:, row, row] = True
        if row < 2:
            continue
        order = masses[:, 1:row].argsort(dim=-1, descending=True, stable=True)
        ranked = masses[:, 1:row].gather(-1, order)
        before = masses[:, :1] + masses[:, row:] + ranked.cumsum(dim=-1) - ranked
        stays = before < threshold * masses.sum(dim=-1, keepdim=True)
        seen[:, row, 1:row].scatter_(-1, order, stays)
    return seen
