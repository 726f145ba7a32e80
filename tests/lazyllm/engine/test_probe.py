"""The parts of attention that a method may ask for, compared with the model written by hand in
numpy.
"""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from lazyllm.engine import kernels, masks
from lazyllm.engine.cache import GroupCache
from lazyllm.engine.decoder import importance_of_layers, open_decoder, run_layers
from lazyllm.engine.inputs import ScoreSpec
from lazyllm.engine.scores import attention_scores
from tests.lazyllm.engine.architecture_matrix import flash_stand_in, is_offered
from tests.reference import HandModel, casts_in_float64, random_model, random_variant

PROMPT = np.random.default_rng(1).integers(0, 97, 23).tolist()
N = len(PROMPT)
# sliding windows (7 tokens), a softcap, a norm of queries and keys, other scalings; two query heads
# share a key head
ARCHITECTURES = ("llama", "mistral, window", "gemma2", "gemma3", "qwen3", "granite")
LOOKS = [
    ScoreSpec((0, 2, 3), queries, raw, per_head)
    for queries, raw, per_head in product((1, 5, 40), (False, True), (False, True))
]


def by_hand(model: Any) -> tuple[dict[bool, list[np.ndarray]], list[np.ndarray]]:
    """{whether raw: the scores [h, N, N] of each layer}, and the hidden states [N, D] after
    each; token by token.
    """
    hand = HandModel(model)
    hidden = {p: hand.embed(token) for p, token in enumerate(PROMPT)}
    scores: dict[bool, list[np.ndarray]] = {False: [], True: []}
    states = []
    for layer in range(1, hand.num_layers + 1):
        kv = {p: hand.key_value(layer, hidden[p], p, N) for p in hidden}
        weights, logits = (np.full((hand.num_heads, N, N), nothing) for nothing in (0.0, -np.inf))
        for p in range(N):
            seen = [other for other in range(N) if hand.sees(layer, p, other)]
            hidden[p], weights[:, p, seen], logits[:, p, seen] = hand.layer(
                layer, hidden[p], p, N, [kv[other] for other in seen]
            )
        states.append(np.stack([hidden[p] for p in range(N)]))
        scores[False].append(weights)
        scores[True].append(logits)
    return scores, states


def select_scores(scores: np.ndarray, look: ScoreSpec) -> np.ndarray:
    """The part of a layer's scores [h, N, N] that `look` describes."""
    rows = scores[:, -look.queries :]
    rows = rows if look.per_head else rows.mean(axis=0)
    return rows[..., 0, :] if look.queries == 1 else rows


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_look(architecture: str) -> None:
    model = random_variant(architecture, 2, "eager")
    with casts_in_float64(), flash_stand_in():
        scores, states = by_hand(model)
        for implementation in ("eager", "sdpa", "flash_attention_2"):
            if not is_offered(architecture, implementation):
                continue
            model.config._attn_implementation = implementation
            with torch.inference_mode(), open_decoder(model) as decoder:
                for look in LOOKS:
                    expected = [
                        select_scores(scores[look.raw][layer], look) for layer in look.layers
                    ]
                    hidden, recorded = run_layers(decoder, torch.tensor(PROMPT), scores=look)
                    for ours, theirs in zip(recorded, expected, strict=True):
                        np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-9)
                    np.testing.assert_allclose(hidden[0].numpy(), states[-1], rtol=0, atol=1e-9)


def test_first_layers_run_alone() -> None:
    model = random_model("llama", 4, num_layers=5)
    _, states = by_hand(model)
    with torch.inference_mode(), open_decoder(model) as decoder:
        calls = []
        for index, layer in enumerate(model.model.layers):
            layer.register_forward_hook(lambda *_, index=index: calls.append(index))
        for layers in (1, 3, 5):
            calls.clear()
            hidden, _ = run_layers(decoder, torch.tensor(PROMPT), layers)
            assert calls == list(range(layers))
            np.testing.assert_allclose(hidden[0].numpy(), states[layers - 1], rtol=0, atol=1e-9)
        assert decoder.tokens_run == pytest.approx(N * (1 + 3 + 5) / 5)


def test_importance_of_all_layers_is_the_last_row_of_attention() -> None:
    found = importance_of_layers(random_model("llama", 4, num_layers=5), PROMPT)
    eager = random_model("llama", 4, num_layers=5, attn_implementation="eager")
    with torch.inference_mode():
        attentions = eager(torch.tensor([PROMPT]), output_attentions=True).attentions
    expected = torch.stack([layer[0, :, -1].mean(dim=0) for layer in attentions])
    assert found.shape == (5, 23)
    # eager softmax is in float32
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=1e-6)
    assert importance_of_layers(random_model("qwen3", 4), PROMPT[:1]).eq(1).all()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("size", [1, 3 * 4 * 17, 2**22])  # of a block: one query, three, all
def test_sums_over_queries_do_not_depend_on_the_blocks(
    window: int | None, size: int, monkeypatch
) -> None:
    """4 query heads on 2 key heads: each of the last 7 of 17 tokens by itself, weighted from 1
    to 3.
    """
    draw = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(1, heads, 17, 8, dtype=torch.float64, generator=draw) for heads in (4, 2)
    )
    monkeypatch.setattr("lazyllm.engine.scores.SUMMED_ON_CPU", size)
    look = ScoreSpec((0,), 7, per_head=True, summed=(1, 3))

    def seen(rows: slice, keys: slice) -> torch.Tensor:
        behind = torch.arange(17)[rows, None] - torch.arange(17)[None, keys]
        return (behind >= 0) & (behind < (window or 17))

    found = attention_scores(query, key, seen, 0.3, None, look)
    expected = torch.zeros(4, 17, dtype=torch.float64)
    for number, position in enumerate(range(10, 17)):
        first = 0 if window is None else position - window + 1
        for head in range(4):
            keys = key[0, head // 2, first : position + 1]
            logits = torch.stack([0.3 * (query[0, head, position] * key).sum() for key in keys])
            expected[head, first : position + 1] += (
                (1 + number / 3) * logits.exp() / logits.exp().sum()
            )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def attention_in_order(
    seed: int,
    window: int | None = None,
    softcap: float | None = None,
    widths: tuple[int, int] = (8, 8),
    splits: bool = False,
    **where: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """[6, 4, d] `attend_in_order` of 6 queries, and what it should be. widths: of K and V. where:
    device and dtype.

    4 query heads on 2 key heads; 19 tokens are stored in a random order, 5 of them not chosen.
    """
    rng = np.random.default_rng(seed)
    stored = rng.permutation(19)
    chosen = np.isin(stored, rng.choice(19, 14, replace=False))
    queries = np.sort(rng.choice(stored[chosen], 6, replace=False))
    ranks = [int((stored[chosen] <= query).sum()) for query in queries]
    query, key, value = (
        torch.tensor(rng.normal(size=(1, heads, tokens, width)), **where)
        for heads, tokens, width in ((4, 6, widths[0]), (2, 19, widths[0]), (2, 19, widths[1]))
    )
    cache = GroupCache(19, 19, query.device)
    cache.advance(torch.tensor(stored, device=query.device), 19)
    cache.update(key, value, 0)
    members = torch.tensor(chosen, device=query.device), int(chosen.sum())
    mask = masks.PositionSortedMask(
        cache, torch.tensor(queries, device=query.device), members, window, ranks
    )
    sorted_key, sorted_value = cache.take(0, mask.slots_on(query.device), widths[0])
    found = kernels.attend_in_order(query, sorted_key, sorted_value, mask, 0.3, softcap, splits)
    expected = np.zeros(found.shape[1:])
    queried, keys, values = (part[0].double().cpu().numpy() for part in (query, key, value))
    for row, position in enumerate(queries):
        seen = chosen & (stored <= position) & (stored > position - (window or 19))
        for head in range(4):
            logits = 0.3 * keys[head // 2, seen] @ queried[head, row]
            weights = np.exp(logits if softcap is None else softcap * np.tanh(logits / softcap))
            expected[row, head] = weights @ values[head // 2, seen] / weights.sum()
    return found[0].double().cpu().numpy(), expected


@pytest.mark.parametrize(
    ("window", "softcap", "widths", "splits"),
    [
        (None, None, (8, 8), True),
        (None, None, (8, 6), False),
        (5, None, (8, 6), False),
        (None, 2.0, (8, 8), False),
        (5, 2.0, (8, 8), False),
    ],
)
@pytest.mark.parametrize("size", [1, 20, 2**22])  # pairs of a block
def test_queries_attend_to_the_first_tokens_in_order(
    window, softcap, widths, splits, size, monkeypatch
) -> None:
    monkeypatch.setattr(kernels, "SPLIT_ON_CPU", size)
    monkeypatch.setattr(masks, "BLOCK_ON_CPU", size * 64)  # bytes
    found, expected = attention_in_order(size, window, softcap, widths, splits, dtype=torch.float64)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
