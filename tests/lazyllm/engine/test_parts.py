"""Importance and the two caches, each against an obvious version."""

import random
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lazyllm.engine.attention import installed_attention
from lazyllm.engine.cache import GroupCache
from lazyllm.engine.devices import tf32_products
from lazyllm.engine.scores import attention_scores
from lazyllm.measuring import allows_tf32
from tests.reference import random_model

CPU = torch.device("cpu")


def everything_seen(rows: slice, keys: slice) -> None:
    """A `Visible` of queries that attend to all keys."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_importance_is_at_least_float32(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(1, *shape, 8, generator=draw).to(dtype) for shape in ((4, 1), (2, 30))
    )
    importance = attention_scores(query, key, everything_seen, 0.35)
    assert importance.dtype == torch.float32
    assert importance.sum() == pytest.approx(1, abs=1e-5)


def test_installed_attention_is_removed_even_after_an_error() -> None:
    model = random_model("llama", 0, num_layers=2)
    before = dict(ALL_ATTENTION_FUNCTIONS)
    with pytest.raises(KeyboardInterrupt), installed_attention(model):
        assert model.config._attn_implementation in set(ALL_ATTENTION_FUNCTIONS) - set(before)
        raise KeyboardInterrupt
    assert model.config._attn_implementation == "sdpa"
    assert dict(ALL_ATTENTION_FUNCTIONS) == before


@pytest.mark.parametrize("seed", range(8))
def test_group_cache_against_lists(seed: int) -> None:
    """A part of a prompt, then steps with the newest token alone or after earlier ones, compared
    with a plain list.
    """
    rng = random.Random(seed)
    prompt_tokens, steps = rng.randint(1, 200), 60
    cache = GroupCache(capacity=4, max_length=prompt_tokens + steps, device=CPU)
    stored: list[int] = []
    rows: dict[int, list[torch.Tensor]] = {3: [], 4: []}
    for step in range(steps + 1):
        text = prompt_tokens + step
        absent = [position for position in range(text - 1) if position not in stored]
        most = len(absent) // 2 if step == 0 else rng.choice([0, 0, 3, 20])
        positions = [*sorted(rng.sample(absent, min(most, len(absent)))), text - 1]
        cache.advance(torch.tensor(positions), text, is_newest=len(positions) == 1)
        stored += positions
        for layer in (3, 4):
            key = torch.randn(1, 2, len(positions), 3)
            rows[layer].append(key)
            width = 3 if layer == 3 else 2  # of V; K's is 3
            found_key, found_value = cache.update(key, -key[..., :width], layer)
            expected = torch.cat(rows[layer], dim=2)
            assert torch.equal(found_key, expected)
            assert torch.equal(found_value, -expected[..., :width])
        if rng.random() < 0.7:  # else joined with those of later runs
            assert cache.positions.tolist() == stored
        assert cache.is_contiguous == (stored == list(range(text)))
        assert cache.is_ascending == (stored == sorted(stored))
        # tokens, heads, width of K and V, bytes
        assert cache.nbytes == len(stored) * 2 * (3 + 3 + 3 + 2) * 4


@pytest.mark.parametrize(
    "kept", [[1, 4, 5], [[0, 2, 5], [1, 4, 5]]], ids=["in all heads", "by head"]
)
def test_group_cache_forgets_for_good(kept: list[Any]) -> None:
    cache, slots = GroupCache(capacity=9, max_length=12, device=CPU), torch.tensor(kept)
    key, newest = torch.randn(1, 2, 6, 3), torch.randn(1, 2, 1, 3)
    cache.advance(torch.arange(6), 6)
    for layer in range(2):
        cache.update(key, -key, layer)
    before = cache.nbytes
    cache.retain(slots)
    assert cache.nbytes == before // 2
    assert cache.positions.tolist() == kept
    assert not cache.is_contiguous
    cache.advance(torch.tensor([6]), 7)
    found, values = cache.update(newest, -newest, 1)
    slots_by_head = slots.expand(2, -1)
    assert cache.positions.expand(2, -1).tolist() == [
        [*head_slots, 6] for head_slots in slots_by_head.tolist()
    ]
    for head in range(2):
        assert torch.equal(
            found[0, head], torch.cat([key[0, head, slots_by_head[head]], newest[0, head]])
        )
    assert torch.equal(values, -found)
    assert cache.nbytes == before // 2 // 3 * 4


def test_importance_survives_what_attention_survives() -> None:
    """In float16, the unscaled product overflows but the scaled one does not."""
    query = torch.full((1, 1, 1, 128), 25.0, dtype=torch.float16)
    key = torch.stack([torch.full((128,), 25.0), torch.full((128,), 24.9), torch.zeros(128)])[
        None, None
    ].half()
    importance = attention_scores(query, key, everything_seen, 128**-0.5)
    assert importance.isfinite().all()
    assert importance[0] > importance[1] > importance[2]


def test_tf32_is_allowed_for_a_block_only() -> None:
    legacy = torch.get_float32_matmul_precision()
    with pytest.raises(KeyError), tf32_products(True):
        assert allows_tf32()
        with tf32_products(False):
            assert allows_tf32()  # as a user's own setting is
        raise KeyError
    assert not allows_tf32()
    # which raises after a setting that is not taken back
    assert torch.get_float32_matmul_precision() == legacy
