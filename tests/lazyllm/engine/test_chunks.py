"""Attention to chunks of keys that run side by side, against a softmax over all keys in float64."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import lazyllm
from lazyllm.engine import kernels
from lazyllm.engine.kernels import attend_in_chunks, chunked_mask, join, num_chunks, way_to_attend
from lazyllm.engine.sdpa import attend_with_lse
from lazyllm.methods import Lazy
from tests.helpers import VOCABULARY
from tests.lazyllm.engine.architecture_matrix import assert_same
from tests.reference import casts_in_float64, lazy_reference, random_variant

SCALING = 0.3
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# heads, key heads, queries, keys, chunks: 1, 3, 4 and 8 query heads to a key head; keys that chunks
# divide, and not
SHAPES = [
    (4, 4, 9, 64, 4),
    (6, 2, 5, 101, 5),
    (8, 2, 1, 77, 16),
    (8, 1, 33, 130, 7),
    (4, 1, 1, 16, 16),
    (3, 3, 2, 31, 16),
]


def drawn(
    shape: tuple[int, ...], dtype: torch.dtype, by_head: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query [1, h, m, d], key and value [1, g, s, d] as views of a larger cache, and which keys
    each query sees.

    The first query sees keys of one chunk only, and no query sees one of the chunks.
    """
    heads, kv_heads, m, s, chunks = shape
    draw = torch.Generator().manual_seed(sum(shape))
    query = torch.randn(1, m, heads, 16, generator=draw).to(dtype).transpose(1, 2)
    key, value = (
        torch.randn(2, 1, kv_heads, s + 9, 16, generator=draw).to(dtype)[:, :, :, :s].unbind(0)
    )
    visible = torch.rand(*([kv_heads] if by_head else []), m, s, generator=draw) < 0.4
    step = s // chunks
    visible[..., 0, :] = False
    visible[..., step : 2 * step] = False
    visible[..., s - 1] = True
    return query, key, value, visible


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """[1, m, h, d] in float64: a softmax over all keys of each query and head."""
    _, heads, m, _ = query.shape
    out = torch.zeros(1, m, heads, value.shape[-1], dtype=torch.float64)
    for head in range(heads):
        of = head // (heads // key.shape[1])
        sees = visible[of] if visible.ndim == 3 else visible
        for row in range(m):
            keys, values = (part[0, of, sees[row]].double() for part in (key, value))
            out[0, row, head] = (SCALING * keys @ query[0, head, row].double()).softmax(
                dim=0
            ) @ values
    return out


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("by_head", [False, True])
def test_chunks_are_attention_to_all_keys(shape: Any, dtype: torch.dtype, by_head: bool) -> None:
    query, key, value, visible = drawn(shape, dtype, by_head)
    mask = chunked_mask(visible, query.shape[1] // key.shape[1], dtype, shape[-1])
    found = attend_in_chunks(query, key, value, mask, SCALING)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), attention(query, key, value, visible), rtol=0, atol=TOLERANCES[dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pieces_of_any_size_join_to_attention_to_all_keys(dtype: torch.dtype) -> None:
    query, key, value, _ = drawn((3, 3, 4, 31, 4), dtype)
    visible = torch.ones(4, 31, dtype=torch.bool)
    visible[1, :7] = visible[2, 7:30] = False
    pieces = []
    for keys in (slice(0, 7), slice(7, 8), slice(8, 31)):
        mask = torch.where(visible[:, keys], 0.0, -1e30).to(dtype)[None, None]
        pieces.append(attend_with_lse(query, key[:, :, keys], value[:, :, keys], mask, SCALING))
    found, _ = join([join(pieces[:2]), pieces[2]])  # what is joined is a piece
    expected = attention(query, key, value, visible).transpose(1, 2)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCES[dtype])


def test_few_queries_over_many_keys_run_in_chunks_on_a_gpu_only() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")

    def ways(m: int, keys: int, device: torch.device = gpu, kv_heads: int = 8) -> str:
        return way_to_attend(m, 32, kv_heads, keys, 2, device)

    assert [ways(1, 32_000), ways(33, 4_000), ways(33, 32_000), ways(1_024, 32_000)] == [
        "copy",
        "mask",
        "chunks",
        "sort",
    ]
    assert [ways(1, 32_000, cpu), ways(20, 32_000, cpu), ways(33, 32_000, cpu)] == [
        "mask",
        "mask",
        "sort",
    ]
    assert ways(33, 32_000, kv_heads=32) == "chunks"
    assert ways(512, 32_000, kv_heads=32) == "mask"  # which fills a GPU
    # by keys, by heads, at most; a chunk of 2,048 keys or more
    assert [
        num_chunks(8, 132, 16_000),
        num_chunks(32, 33, 128_000),
        num_chunks(1, 33, 128_000),
    ] == [7, 8, 16]
    assert num_chunks(8, 132, 8_000) == 1


@pytest.mark.parametrize("variant", ["llama", "qwen2", "gemma3"])
def test_steps_in_chunks_are_those_of_the_slow_reference(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that revive, and a batch of two, as on a GPU."""
    monkeypatch.setattr(kernels, "COPIES", frozenset({"cpu"}))
    monkeypatch.setattr(kernels, "CHUNK_KEYS", 2)
    calls = list[int]()

    def noted(query: Tensor, *others: Any, **kwargs: Any) -> Tensor:
        calls.append(query.shape[2])
        return attend_in_chunks(query, *others, **kwargs)

    monkeypatch.setattr("lazyllm.engine.attention.attend_in_chunks", noted)
    schedule, rng = {1: 0.6, 2: 0.5, 3: 0.5}, random.Random(variant)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in (60, 41)]
    with casts_in_float64():
        model = random_variant(variant, 3, "sdpa")
        expected = [lazy_reference(model, prompt, schedule, 7, ()) for prompt in prompts]
        assert_same(model, prompts[0], Lazy(schedule), 7, expected[0])
        for index, found in lazyllm.generate_many(
            model, prompts, Lazy(schedule), 7, (), batch_size=2
        ):
            assert found.token_ids == expected[index].token_ids
            assert found.computed.tolist() == expected[index].computed.tolist()
    assert min(calls) > 1
