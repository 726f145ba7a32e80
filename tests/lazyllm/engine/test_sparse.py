"""Attention that skips keys: pieces against the mask, pairs against counting."""

import random

import pytest
import torch
import torch.nn.functional as F

from lazyllm.engine.cache import GroupCache
from lazyllm.engine.flops import attention_ceiling, causal_pairs, prefill_flops
from lazyllm.engine.inputs import Triangle
from lazyllm.engine.masks import AttentionMask
from lazyllm.engine.sparse import attend_in_triangle, attend_under_mask
from lazyllm.models.config import shape_of
from lazyllm.spec import ModelSpec
from tests.helpers import slow


def sees(pattern: Triangle, n: int, query: int, key: int) -> bool:
    is_near = query - key < pattern.window
    return key <= query and (key < pattern.sinks or is_near or query >= n - pattern.last)


def drawn(rng: random.Random) -> tuple[int, Triangle]:
    return rng.randint(1, 70), Triangle(rng.randint(0, 5), rng.randint(1, 20), rng.randint(1, 9))


@pytest.mark.parametrize("seed", range(200))
def test_pairs_by_counting(seed: int) -> None:
    rng = random.Random(seed)
    n, pattern = drawn(rng)
    for window in (None, rng.randint(1, 40)):
        counted = sum(
            sees(pattern, n, query, key) and (window is None or query - key < window)
            for query in range(n)
            for key in range(query + 1)
        )
        assert pattern.pairs(n, window) == counted
    assert not pattern.is_dense(n) or pattern.pairs(n) == causal_pairs(n, None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [*range(20), *slow(*range(20, 100))])
def test_pieces_and_mask_are_dense_attention_under_the_expanded_mask(seed: int, dtype: torch.dtype) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n, pattern = drawn(rng)
    while pattern.is_dense(n):
        n, pattern = drawn(rng)
    kv_heads, share = rng.choice([1, 2]), rng.choice([1, 2, 3])
    shapes = [(1, n, heads, 8) for heads in (kv_heads * share, kv_heads, kv_heads)]
    query, key, value = (torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes)
    visible = torch.tensor([[sees(pattern, n, i, j) for j in range(n)] for i in range(n)])
    exact = [part.double().repeat_interleave(heads, 1) for part, heads in ((query, 1), (key, share), (value, share))]
    expected = F.scaled_dot_product_attention(*exact, attn_mask=visible[None, None], scale=0.4).transpose(1, 2)

    cache = GroupCache(n, n, torch.device("cpu"))
    cache.advance(torch.arange(n), n)
    mask = AttentionMask(cache, torch.arange(n), None, None)
    masked = attend_under_mask(query, key, value, pattern, mask, 0.4, None)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.04}[dtype]
    for found in (attend_in_triangle(query, key, value, pattern, 0.4), masked):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


def test_ceiling_by_hand() -> None:
    """Llama 2 7B: a token's linear maps and its attention to (n + 1) / 2 keys, in each of 32 layers; logits once."""
    config = shape_of(ModelSpec("llama2", "dummy"))
    linear, pair = 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008), 4 * 4096
    logits = 2 * 4096 * 32000
    for n, ceiling in ((4000, 1.080), (8000, 1.162)):
        without = 32 * n * linear + logits
        whole = without + 32 * pair * n * (n + 1) // 2
        assert prefill_flops(config, [n] * 32) == whole
        assert attention_ceiling(config, n) == whole / without
        assert attention_ceiling(config, n) == pytest.approx(ceiling, abs=0.001)
