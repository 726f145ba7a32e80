"""The field's oracles are right: against cases worked out by hand, and against the plain model
if they keep all.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.field_oracles import (
    FieldOutput,
    asl,
    claa,
    fastkv,
    gemfilter,
    pooled,
    promptdistill,
    pyramidinfer,
    rank_variance,
    specprefill,
    trianglemix,
    uniprefill,
    z_normalised,
)
from tests.helpers import TOLERANCE, prompt_of, slow
from tests.reference import HandModel, lazy_reference, random_variant

STEPS = 3
VARIANTS = ["llama", "llama, dynamic NTK", "mistral, window", "qwen2", "qwen3", "gemma2"]

model_of = cache(partial(random_variant, attn_implementation="eager"))


def draft_of(variant: str) -> PreTrainedModel:
    return model_of(variant, seed=2, num_hidden_layers=2)


@cache
def uniform(num_layers: int = 4) -> PreTrainedModel:
    """Queries are zero: all attention is uniform, so that selections follow from counting."""
    model = random_variant("llama", seed=7, num_hidden_layers=num_layers)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.zero_()
    return model


Run = Callable[[str, list[int]], FieldOutput]

KEEPS_ALL: dict[str, Run] = {
    "gemfilter": lambda name, ids: gemfilter(model_of(name, 1), ids, 2, 1.0, steps=STEPS),
    "specprefill": lambda name, ids: specprefill(
        model_of(name, 1), draft_of(name), ids, 1.0, chunk=4, steps=STEPS
    ),
    "fastkv": lambda name, ids: fastkv(model_of(name, 1), ids, 2, 1.0, 1, window=2, steps=STEPS),
    "claa": lambda name, ids: claa(model_of(name, 1), ids, 2, 1.0, layers=1, window=2, steps=STEPS),
    "asl": lambda name, ids: asl(
        model_of(name, 1), ids, 1, 1.0, 1.0, window=2, layers=2, steps=STEPS
    ),
    "pyramidinfer": lambda name, ids: pyramidinfer(model_of(name, 1), ids, decay=1.0, steps=STEPS),
    "uniprefill": lambda name, ids: uniprefill(
        model_of(name, 1), ids, {2}, 1.0, 2, 2, 1, 1, steps=STEPS
    ),
    "promptdistill": lambda name, ids: promptdistill(
        model_of(name, 1), ids, [2], [1.0], steps=STEPS
    ),
    "trianglemix": lambda name, ids: trianglemix(model_of(name, 1), ids, 1.0, 1, 1, 1, steps=STEPS),
}
# As the authors set them, but for layers: what happens to prompts shorter than their windows,
# chunks and budgets.
SHORT: dict[str, Run] = {
    "gemfilter": lambda name, ids: gemfilter(model_of(name, 1), ids, 2, 1024, steps=STEPS),
    "specprefill": lambda name, ids: specprefill(
        model_of(name, 1), draft_of(name), ids, 0.1, steps=STEPS
    ),
    "fastkv": lambda name, ids: fastkv(model_of(name, 1), ids, 2, steps=STEPS),
    "claa": lambda name, ids: claa(model_of(name, 1), ids, 2, 0.1, steps=STEPS),
    "asl": lambda name, ids: asl(model_of(name, 1), ids, 1, 0.3, 1, steps=STEPS),
    "pyramidinfer": lambda name, ids: pyramidinfer(model_of(name, 1), ids, steps=STEPS),
    "uniprefill": lambda name, ids: uniprefill(model_of(name, 1), ids, {2}, 0.1, steps=STEPS),
    "promptdistill": lambda name, ids: promptdistill(
        model_of(name, 1), ids, [2], [1024], steps=STEPS
    ),
    "trianglemix": lambda name, ids: trianglemix(model_of(name, 1), ids, steps=STEPS),
}
CASES = [(kind, method) for kind, runs in (("all", KEEPS_ALL), ("short", SHORT)) for method in runs]


@pytest.mark.parametrize(("kind", "method"), CASES)
@pytest.mark.parametrize("variant", [VARIANTS[0], *slow(*VARIANTS[1:])])
def test_keeping_all_is_the_plain_model(kind: str, method: str, variant: str):
    for n in (1, 2, 17) if kind == "all" else (1, 3):
        ids = prompt_of(n, seed=n)
        out = (KEEPS_ALL if kind == "all" else SHORT)[method](variant, ids)
        plain = lazy_reference(model_of(variant, 1), ids, {}, STEPS)
        assert out.token_ids == plain.token_ids
        np.testing.assert_allclose(out.logits, plain.logits, rtol=0, atol=TOLERANCE)
        assert out.passes == [[n] * 4]
        assert out.decode_from == n
        assert out.caches == {layer: [list(range(n))] * 2 for layer in range(1, 5)}
        assert all(kept == list(range(n)) for kept in out.selected.values())
        first = {"asl": None, "trianglemix": None, "specprefill": 0}.get(method, 2)
        # Gemma's other layers have windows, and 4 is the last
        dropping = [2] if variant == "gemma2" else [1, 2, 3]
        assert [*out.selected] == (
            dropping if method == "pyramidinfer" else [first] * (first is not None)
        )


def test_pooling_by_hand():
    assert pooled([3, 6, 9], 3) == [3, 6, 5]  # (0 + 3 + 6) / 3, (3 + 6 + 9) / 3, (6 + 9 + 0) / 3
    assert pooled([5], 5) == [1]
    assert pooled([1, 5, 2, 0, 0], 3, "max") == [5, 5, 5, 2, 0]
    assert pooled([], 7, "max") == []


def test_ranks_and_z_scores_by_hand():
    # tokens 0 and 1: ranks 0 and 1 each
    assert rank_variance([[0, 1, 2], [1, 0, 2]], count=1) == 0.25
    # tokens 0 and 2
    assert rank_variance([[0, 1, 2], [2, 0, 1]], count=1) == pytest.approx((0.25 + 1) / 2)
    assert rank_variance([[3, 1, 2]] * 4, count=2) == 0
    assert z_normalised({4: 1.0, 7: 3.0}) == {4: -1.0, 7: 1.0}
    assert z_normalised({4: 0.5, 7: 0.5}) == {4: 0.0, 7: 0.0}
    assert z_normalised({}) == {}


def test_gemfilter_by_counting():
    ids = prompt_of(10)
    # all products are 0: the lower positions
    assert gemfilter(uniform(), ids, 3, 4).selected == {3: [0, 1, 2, 3]}
    assert gemfilter(uniform(), ids, 3, 0.31).selected == {3: [0, 1, 2, 3]}  # a share is rounded up
    assert gemfilter(uniform(), ids, 3, 6, sound=True, window=3).selected == {3: [0, 1, 2, 7, 8, 9]}
    assert gemfilter(uniform(), ids, 3, 2, sound=True, window=3).selected == {3: [0, 7, 8, 9]}
    out = gemfilter(uniform(), ids, 3, 6, sound=True, window=3)
    assert out.passes == [[10, 10, 10, 0], [6] * 4]
    assert out.decode_from == 6
    assert out.caches == {layer: [[0, 1, 2, 7, 8, 9]] * 2 for layer in range(1, 5)}


@pytest.mark.parametrize(
    ("pooling", "best"), [("max", [0, 1, 2, 3, 4, 5]), ("average", [1, 2, 3, 4, 5, 6])]
)
def test_fastkv_by_counting(pooling: str, best: list[int]):
    """Average pooling counts zeros around tokens 0 to 15, so 0 and 15 are worse; max pooling
    ties all of them.
    """
    out = fastkv(uniform(), prompt_of(20), 2, 0.52, 0.25, window=4, pool=3, pooling=pooling)
    window = [16, 17, 18, 19]
    assert out.selected == {2: [*best, *window]}  # floor(10.4), the window among them
    assert out.passes == [[20, 20, 10, 10]]
    assert out.decode_from == 20
    # floor(20 / 4) = 5 of 20; then floor(10 * 0.25 / 0.52) = 4 of 10: the window
    first = [best[0], *window]
    assert out.caches == {1: [first] * 2, 2: [first] * 2, 3: [window] * 2, 4: [window] * 2}
    full = fastkv(uniform(), prompt_of(20), 2, 0.52, 1, window=4, pool=3, pooling=pooling)
    assert full.selected == out.selected
    assert [held for held, _ in full.caches.values()] == [list(range(20))] * 2 + [
        full.selected[2]
    ] * 2


def test_recent_window_stays_if_keep_is_smaller():
    for run in (partial(fastkv, keep=0.1, retain=0.05), partial(claa, keep=0.1, layers=1)):
        out = run(uniform(), prompt_of(20), 3)
        assert out.selected == {3: list(range(12, 20))}
        assert out.passes == [[20, 20, 20, 8]]
        assert out.caches[2] == out.caches[4] == [list(range(12, 20))] * 2


def test_kept_shares_are_decimal():
    kept = [
        len(fastkv(uniform(2), prompt_of(100), 1, 0.29, retain, steps=1).selected[1])
        for retain in (0.1, 1)
    ]
    assert kept == [29, 29]  # int(0.29 * 100) is 28 in binary
    # ceil(0.55 * 20): 12
    assert len(gemfilter(uniform(2), prompt_of(20), 1, 0.55, steps=1).selected[1]) == 11
    assert (
        len(specprefill(uniform(2), uniform(2), prompt_of(20), 0.55, 1, 1, steps=1).selected[0])
        == 11
    )


def test_specprefill_by_counting():
    def selected(n: int, keep: float, sound: bool = False) -> list[int]:
        out = specprefill(
            uniform(), uniform(2), prompt_of(n), keep, lookahead=3, chunk=8, sound=sound, steps=2
        )
        assert out.passes == [[len(out.selected[0])] * 4]
        assert out.decode_from == n
        assert len(out.lookahead) == 2
        # Softmax over n prompt keys; the kernel of 13 holds 7 tokens at position 0, the others are
        # zeros.
        for p, near in ((0, 7), (1, 8), (6, 13), (n - 7, 13), (n - 1, 7)):
            assert out.scores[0][p] == pytest.approx(near / 13 / n, abs=1e-15)
        return out.selected[0]

    assert selected(40, 0.4) == list(range(8, 24))  # chunks 0 and 4 are worse: zeros around them
    assert selected(40, 0.4, sound=True) == [*range(8), *range(32, 40)]
    assert selected(40, 0.41, sound=True) == [*range(16), *range(32, 40)]
    # 42 tokens: six chunks, the last of 2 tokens. The last 8 tokens are in chunks 4 and 5.
    assert selected(42, 0.3, sound=True) == [*range(8), *range(32, 42)]
    assert selected(42, 1.0) == list(range(42))


def test_sound_specprefill_keeps_a_prompt_of_one_chunk():
    for n in (1, 3, 8):
        out = specprefill(uniform(), uniform(), prompt_of(n), 0.1, chunk=8, sound=True)
        assert out.selected[0] == list(range(n))


def test_asl_by_counting():
    # Ranks never change: cut as soon as two layers are ranked. Average pooling makes 0 to 2 and 29
    # to 31 worse.
    window = list(range(32, 40))
    out = asl(uniform(5), prompt_of(40), 2, keep=10, window=8, layers=2)
    assert out.selected == {3: [*range(3, 13), *window]}
    assert out.variances == [0.0]
    assert out.passes == [[40, 40, 40, 18, 18]]
    # 10 tokens per KV head, the window among them; 6 to 9 have whole kernels among the 10 that went
    # on.
    assert [held for held, _ in out.caches.values()] == [[3, 4, *window]] * 3 + [
        [6, 7, *window]
    ] * 2
    out = asl(uniform(5), prompt_of(40), 2, keep=10, window=8, layers=2, retain=1)
    assert [len(held) for held, _ in out.caches.values()] == [40, 40, 40, 18, 18]
    # layer 5 is the last
    assert asl(uniform(5), prompt_of(40), 4, keep=5, window=8, layers=2).selected == {}
    assert asl(uniform(5), prompt_of(40), 2, keep=32, window=8, layers=2).selected == {}


def test_pyramidinfer_by_counting():
    out = pyramidinfer(uniform(), prompt_of(40))
    # 32 older tokens; shares 1, 0.985355, 0.95: 32, floor(31.53), floor(29.45). Ties: the lower
    # positions.
    assert out.passes == [[40, 40, 39, 37]]
    assert out.selected[3] == [*range(29), *range(32, 40)]
    assert out.caches == {
        layer: [[*range(older), *range(32, 40)]] * 2
        for layer, older in enumerate((32, 32, 31, 29), 1)
    }
    # 32, 27, 13 (0.5050 of 27)
    assert pyramidinfer(uniform(), prompt_of(40), decay=0.01).passes[0][-1] == 8 + 13
    # 1 recent, 8, floor(7.88), floor(6.65) older
    assert pyramidinfer(uniform(), prompt_of(9)).passes == [[9, 9, 8, 7]]
    # the first 4 stay
    assert pyramidinfer(uniform(), prompt_of(6), decay=0.01).passes == [[6, 6, 5, 5]]


def test_uniprefill_by_counting():
    parameters = {"p": 0.3, "window": 4, "block": 3, "first": 1, "last": 2}
    out = uniprefill(uniform(), prompt_of(20), {2, 3}, **parameters)
    # Queries 16 to 19: each of the blocks 0 to 4 has 3 (1/17 + 1/18 + 1/19 + 1/20) / 4 = 0.163,
    # later ones have less. Ties: 4, then 3 (0.163 before it), not 2 (0.326 before it). Tokens 0, 18
    # and 19 stay besides.
    assert out.selected[2] == [0, *range(9, 15), 18, 19]
    # Of these 9, blocks 0, 9, 10 and 11, 12, 13 have 3 (1/6 + 1/7 + 1/8 + 1/9) / 4 = 0.409: one of
    # them is enough.
    assert out.selected[3] == [0, 11, 12, 13, 18, 19]
    assert out.passes == [[20, 20, 9, 6]]
    kept = [list(range(20)), list(range(20)), out.selected[2], out.selected[3]]
    assert out.caches == {layer: [held] * 2 for layer, held in enumerate(kept, start=1)}
    assert out.decode_from == 20
    few = uniprefill(uniform(), prompt_of(20), {2}, **parameters | {"first": 9, "last": 11})
    assert few.selected == {2: list(range(20))}


def test_claa_by_counting():
    out = claa(uniform(), prompt_of(20), 3, 0.5, layers=2, window=4)
    assert out.selected == {3: [*range(6), *range(16, 20)]}
    assert [held[0] == held[1] for held in out.caches.values()] == [True] * 4
    # the first two layers hold all
    assert [len(held[0]) for held in out.caches.values()] == [20, 20, 10, 10]


def test_look_ahead_ends_with_an_end_token():
    model, ids = model_of("llama", 1), prompt_of(12)
    tokens = lazy_reference(model, ids, {}, 5).token_ids
    out = specprefill(model_of("qwen2", 1), model, ids, 0.5, lookahead=5, chunk=2)
    assert out.lookahead == tokens[:4]
    end = next(i for i, token in enumerate(tokens) if i > 0 and token not in tokens[:i])
    early = specprefill(
        model_of("qwen2", 1), model, ids, 0.5, lookahead=9, chunk=2, eos_token_ids={tokens[end]}
    )
    assert early.lookahead == tokens[:end]
    short = specprefill(model_of("qwen2", 1), model, ids, 0.5, lookahead=end + 1, chunk=2)
    assert early.scores == short.scores


def test_promptdistill_by_counting():
    # all products are 0: as many of the lower positions as asked for, and the last token
    out = promptdistill(uniform(), prompt_of(10), [1, 3], [5, 0.2])
    assert out.selected == {1: [0, 1, 2, 3, 4, 9], 3: [0, 1, 9]}
    assert out.passes == [[10, 6, 6, 3]]
    assert out.decode_from == 10
    assert out.caches == {layer: [[0, 1, 9]] * 2 for layer in range(1, 5)}
    held = promptdistill(uniform(), prompt_of(10), [1, 3], [5, 0.2], forget=False).caches
    assert [len(positions) for positions, _ in held.values()] == [10, 6, 6, 3]


def test_promptdistill_pools_zero_for_the_last_token():
    """In layer 1 a random model's logits are products of a query and keys that follow from the
    tokens alone.
    """
    model, ids = model_of("llama", 1), prompt_of(9)
    hand = HandModel(model)
    embedded = [hand.embed(token) for token in ids]
    query = hand.query(1, embedded[8], 8, 9)
    keys = [hand.key_value(1, embedded[p], p, 9)[0] for p in range(9)]
    scale = query.shape[1] ** 0.5
    logits = [sum(query[head] @ keys[p][hand.kv_head(head)] for head in range(4)) / scale
              for p in range(9)]  # fmt: skip
    assert abs(logits[8]) > 1e-3  # else 0 in its place says nothing
    scores = promptdistill(model, ids, [1], [3], pool=3).scores[1]
    assert scores[7] == pytest.approx((logits[6] + logits[7]) / 3)  # the last one's place holds 0
    assert scores[8] == pytest.approx(logits[7] / 3)
    assert scores[4] == pytest.approx(sum(logits[3:6]) / 3)


def test_trianglemix_by_counting():
    out = trianglemix(uniform(), prompt_of(10), 0.5, sinks=1, window=3, last=2)
    # queries 0 to 2 see all, 3 to 7 four keys, 8 and 9 all: 6 + 20 + 19, for each of 4 heads
    assert out.pairs == {1: 220, 2: 220, 3: 180, 4: 180}
    assert trianglemix(
        uniform(), prompt_of(10), 0, sinks=1, window=3, last=2
    ).pairs == dict.fromkeys(range(1, 5), 180)
    assert out.passes == [[10] * 4]
    assert out.caches == {layer: [list(range(10))] * 2 for layer in range(1, 5)}
