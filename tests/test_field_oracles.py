"""The field's oracles are right: against cases worked out by hand, against the plain model if they keep all, and
against transformers' layers with one attention mask for each layer and head, PyTorch's pooling and stable sorting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from tests.field_oracles import (
    FieldOutput,
    asl,
    claa,
    fastkv,
    gemfilter,
    oracle,
    pooled,
    pyramidinfer,
    rank_variance,
    specprefill,
    z_normalised,
)
from tests.reference import HandModel, casts_in_float64, lazy_reference, random_variant

TOLERANCE = 1e-9
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


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


Run = Callable[[str, list[int]], FieldOutput]

KEEPS_ALL: dict[str, Run] = {
    "gemfilter": lambda name, ids: gemfilter(model_of(name, 1), ids, 2, 1.0, steps=STEPS),
    "specprefill": lambda name, ids: specprefill(model_of(name, 1), draft_of(name), ids, 1.0, chunk=4, steps=STEPS),
    "oracle": lambda name, ids: oracle(model_of(name, 1), ids, 1.0, steps=STEPS),
    "fastkv": lambda name, ids: fastkv(model_of(name, 1), ids, 2, 1.0, 1, window=2, steps=STEPS),
    "claa": lambda name, ids: claa(model_of(name, 1), ids, 2, 1.0, layers=1, window=2, steps=STEPS),
    "asl": lambda name, ids: asl(model_of(name, 1), ids, 1, 1.0, 1.0, window=2, layers=2, steps=STEPS),
    "pyramidinfer": lambda name, ids: pyramidinfer(model_of(name, 1), ids, decay=1.0, steps=STEPS),
}
# As the authors set them, but for layers: what happens to prompts shorter than their windows, chunks and budgets.
SHORT: dict[str, Run] = {
    "gemfilter": lambda name, ids: gemfilter(model_of(name, 1), ids, 2, 1024, steps=STEPS),
    "specprefill": lambda name, ids: specprefill(model_of(name, 1), draft_of(name), ids, 0.1, steps=STEPS),
    "fastkv": lambda name, ids: fastkv(model_of(name, 1), ids, 2, steps=STEPS),
    "claa": lambda name, ids: claa(model_of(name, 1), ids, 2, 0.1, steps=STEPS),
    "asl": lambda name, ids: asl(model_of(name, 1), ids, 1, 0.3, 1, steps=STEPS),
    "pyramidinfer": lambda name, ids: pyramidinfer(model_of(name, 1), ids, steps=STEPS),
}
CASES = [(kind, method) for kind, runs in (("all", KEEPS_ALL), ("short", SHORT)) for method in runs]


@pytest.mark.parametrize(("kind", "method"), CASES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_keeps_all_is_the_plain_model(kind: str, method: str, variant: str):
    for n in (1, 2, 3, 5, 17) if kind == "all" else (1, 2, 3, 5):
        ids = prompt_of(n, seed=n)
        out = (KEEPS_ALL if kind == "all" else SHORT)[method](variant, ids)
        plain = lazy_reference(model_of(variant, 1), ids, {}, STEPS)
        assert out.token_ids == plain.token_ids
        np.testing.assert_allclose(out.logits, plain.logits, rtol=0, atol=TOLERANCE)
        assert out.passes == [[n] * 4]
        assert out.decode_from == n
        assert out.caches == {layer: [list(range(n))] * 2 for layer in range(1, 5)}
        assert all(kept == list(range(n)) for kept in out.selected.values())
        assert set(out.selected) == {"asl": set(), "pyramidinfer": {1, 2, 3}}.get(
            method, {0} if method in ("specprefill", "oracle") else {2}
        )


# --- by hand ---


def test_pooling_by_hand():
    assert pooled([3, 6, 9], 3) == [3, 6, 5]  # (0 + 3 + 6) / 3, (3 + 6 + 9) / 3, (6 + 9 + 0) / 3
    assert pooled([5], 5) == [1]
    assert pooled([1, 5, 2, 0, 0], 3, "max") == [5, 5, 5, 2, 0]
    assert pooled([], 7, "max") == []


def test_ranks_and_z_scores_by_hand():
    assert rank_variance([[0, 1, 2], [1, 0, 2]], count=1) == 0.25  # tokens 0 and 1: ranks 0 and 1 each
    assert rank_variance([[0, 1, 2], [2, 0, 1]], count=1) == pytest.approx((0.25 + 1) / 2)  # tokens 0 and 2
    assert rank_variance([[3, 1, 2]] * 4, count=2) == 0
    assert z_normalised({4: 1.0, 7: 3.0}) == {4: -1.0, 7: 1.0}
    assert z_normalised({4: 0.5, 7: 0.5}) == {4: 0.0, 7: 0.0}
    assert z_normalised({}) == {}


def test_gemfilter_by_counting():
    ids = prompt_of(10)
    assert gemfilter(uniform(), ids, 3, 4).selected == {3: [0, 1, 2, 3]}  # all products are 0: the lower positions
    assert gemfilter(uniform(), ids, 3, 0.31).selected == {3: [0, 1, 2, 3]}  # a share is rounded up
    assert gemfilter(uniform(), ids, 3, 6, sound=True, window=3).selected == {3: [0, 1, 2, 7, 8, 9]}
    assert gemfilter(uniform(), ids, 3, 2, sound=True, window=3).selected == {3: [0, 7, 8, 9]}
    out = gemfilter(uniform(), ids, 3, 6, sound=True, window=3)
    assert out.passes == [[10, 10, 10, 0], [6] * 4]
    assert out.decode_from == 6
    assert out.caches == {layer: [[0, 1, 2, 7, 8, 9]] * 2 for layer in range(1, 5)}


@pytest.mark.parametrize(("pooling", "best"), [("max", [0, 1, 2, 3, 4, 5]), ("average", [1, 2, 3, 4, 5, 6])])
def test_fastkv_by_counting(pooling: str, best: list[int]):
    """Average pooling counts zeros around tokens 0 to 15, so 0 and 15 are worse; max pooling ties all of them."""
    out = fastkv(uniform(), prompt_of(20), 2, 0.52, 0.25, window=4, pool=3, pooling=pooling)
    window = [16, 17, 18, 19]
    assert out.selected == {2: [*best, *window]}  # floor(10.4), the window among them
    assert out.passes == [[20, 20, 10, 10]]
    assert out.decode_from == 20
    first = [best[0], *window]  # floor(20 / 4) = 5 of 20; then floor(10 * 0.25 / 0.52) = 4 of 10: the window
    assert out.caches == {1: [first] * 2, 2: [first] * 2, 3: [window] * 2, 4: [window] * 2}
    full = fastkv(uniform(), prompt_of(20), 2, 0.52, 1, window=4, pool=3, pooling=pooling)
    assert full.selected == out.selected
    assert [held for held, _ in full.caches.values()] == [list(range(20))] * 2 + [full.selected[2]] * 2


def test_window_stays_if_keep_is_smaller():
    for run in (partial(fastkv, keep=0.1, retain=0.05), partial(claa, keep=0.1, layers=1)):
        out = run(uniform(), prompt_of(20), 3)
        assert out.selected == {3: list(range(12, 20))}
        assert out.passes == [[20, 20, 20, 8]]
        assert out.caches[2] == out.caches[4] == [list(range(12, 20))] * 2


def test_shares_are_decimal():
    kept = [len(fastkv(uniform(2), prompt_of(100), 1, 0.29, retain, steps=1).selected[1]) for retain in (0.1, 1)]
    assert kept == [29, 29]  # int(0.29 * 100) is 28 in binary
    assert len(gemfilter(uniform(2), prompt_of(20), 1, 0.55, steps=1).selected[1]) == 11  # ceil(0.55 * 20): 12
    assert len(specprefill(uniform(2), uniform(2), prompt_of(20), 0.55, 1, 1, steps=1).selected[0]) == 11


def test_specprefill_by_counting():
    def selected(n: int, keep: float, sound: bool = False) -> list[int]:
        out = specprefill(uniform(), uniform(2), prompt_of(n), keep, lookahead=3, chunk=8, sound=sound, steps=2)
        assert out.passes == [[len(out.selected[0])] * 4]
        assert out.decode_from == n
        assert len(out.lookahead) == 2
        # Softmax over n prompt keys; the kernel of 13 holds 7 tokens at position 0, the others are zeros.
        for p, near in ((0, 7), (1, 8), (6, 13), (n - 7, 13), (n - 1, 7)):
            assert out.scores[0][p] == pytest.approx(near / 13 / n, abs=1e-15)
        return out.selected[0]

    assert selected(40, 0.4) == list(range(8, 24))  # chunks 0 and 4 are worse: zeros around them
    assert selected(40, 0.4, sound=True) == [*range(8), *range(32, 40)]
    assert selected(40, 0.41, sound=True) == [*range(16), *range(32, 40)]
    # 42 tokens: six chunks, the last of 2 tokens. The last 8 tokens are in chunks 4 and 5.
    assert selected(42, 0.3, sound=True) == [*range(8), *range(32, 42)]
    assert selected(42, 1.0) == list(range(42))


def test_sound_keeps_a_prompt_of_one_chunk():
    for n in (1, 3, 8):
        out = specprefill(uniform(), uniform(), prompt_of(n), 0.1, chunk=8, sound=True)
        assert out.selected[0] == list(range(n))


def test_asl_by_counting():
    # Ranks never change: cut as soon as two layers are ranked. Average pooling makes 0 to 2 and 29 to 31 worse.
    window = list(range(32, 40))
    out = asl(uniform(5), prompt_of(40), 2, keep=10, window=8, layers=2)
    assert out.selected == {3: [*range(3, 13), *window]}
    assert out.variances == [0.0]
    assert out.passes == [[40, 40, 40, 18, 18]]
    # 10 tokens per KV head, the window among them; 6 to 9 have whole kernels among the 10 that went on.
    assert [held for held, _ in out.caches.values()] == [[3, 4, *window]] * 3 + [[6, 7, *window]] * 2
    out = asl(uniform(5), prompt_of(40), 2, keep=10, window=8, layers=2, retain=1)
    assert [len(held) for held, _ in out.caches.values()] == [40, 40, 40, 18, 18]
    assert asl(uniform(5), prompt_of(40), 4, keep=5, window=8, layers=2).selected == {}  # layer 5 is the last
    assert asl(uniform(5), prompt_of(40), 2, keep=32, window=8, layers=2).selected == {}


def test_pyramidinfer_by_counting():
    out = pyramidinfer(uniform(), prompt_of(40))
    # 32 older tokens; shares 1, 0.985355, 0.95: 32, floor(31.53), floor(29.45). Ties: the lower positions.
    assert out.passes == [[40, 40, 39, 37]]
    assert out.selected[3] == [*range(29), *range(32, 40)]
    assert out.caches == {
        layer: [[*range(older), *range(32, 40)]] * 2 for layer, older in enumerate((32, 32, 31, 29), 1)
    }
    assert pyramidinfer(uniform(), prompt_of(40), decay=0.01).passes[0][-1] == 8 + 13  # 32, 27, 13 (0.5050 of 27)
    assert pyramidinfer(uniform(), prompt_of(9)).passes == [[9, 9, 8, 7]]  # 1 recent, 8, floor(7.88), floor(6.65) older
    assert pyramidinfer(uniform(), prompt_of(6), decay=0.01).passes == [[6, 6, 5, 5]]  # the first 4 stay


def test_oracle_by_counting():
    out = oracle(uniform(), prompt_of(20), 3)
    assert out.selected == {0: [6, 7, 19]}  # 6 to 13 have whole kernels; the last token stays
    assert len(out.lookahead) == 4
    assert out.scores[0][0] == pytest.approx(7 / 13 / 20, abs=1e-15)
    assert oracle(uniform(), prompt_of(20), 1).selected == {0: [19]}


def test_claa_by_counting():
    out = claa(uniform(), prompt_of(20), 3, 0.5, layers=2, window=4)
    assert out.selected == {3: [*range(6), *range(16, 20)]}
    assert [held[0] == held[1] for held in out.caches.values()] == [True] * 4
    assert [len(held[0]) for held in out.caches.values()] == [20, 20, 10, 10]  # the first two layers hold all


# --- how parts go together ---


def test_look_ahead_ends_with_an_end_token():
    model, ids = model_of("llama", 1), prompt_of(12)
    tokens = lazy_reference(model, ids, {}, 5).token_ids
    out = specprefill(model_of("qwen2", 1), model, ids, 0.5, lookahead=5, chunk=2)
    assert out.lookahead == tokens[:4]
    assert oracle(model, ids, 0.5, steps=5).lookahead == tokens
    assert oracle(model, ids, 0.5, answer=2, steps=5).lookahead == tokens[:2]
    end = next(i for i, token in enumerate(tokens) if i > 0 and token not in tokens[:i])
    early = specprefill(model_of("qwen2", 1), model, ids, 0.5, lookahead=9, chunk=2, eos_token_ids={tokens[end]})
    assert early.lookahead == tokens[:end]
    short = specprefill(model_of("qwen2", 1), model, ids, 0.5, lookahead=end + 1, chunk=2)
    assert early.scores == short.scores
    assert oracle(model, ids, 0.5, eos_token_ids={tokens[0]}).lookahead == []


def test_oracle_is_specprefill_with_itself_as_draft():
    model, ids = model_of("qwen3", 1), prompt_of(25)
    ahead = specprefill(model, model, ids, 0.2, lookahead=6, chunk=1)
    assert ahead.scores == oracle(model, ids, 0.2, answer=5).scores


def test_gemfilters_second_pass_is_the_plain_model_on_the_kept_ids():
    for variant in VARIANTS:
        model, ids = model_of(variant, 1), prompt_of(30)
        out = gemfilter(model, ids, 2, 11, steps=STEPS)
        plain = lazy_reference(model, [ids[p] for p in out.selected[2]], {}, STEPS)
        assert out.token_ids == plain.token_ids
        np.testing.assert_allclose(out.logits, plain.logits, rtol=0, atol=TOLERANCE)


def test_bad_arguments_are_refused():
    model, ids = uniform(), prompt_of(5)
    for run in (
        lambda: gemfilter(model, ids, 5, 2),
        lambda: gemfilter(model, ids, 2, 0),
        lambda: gemfilter(model, [], 2, 2),
        lambda: gemfilter(model, ids, 2, 2, pool=4),
        lambda: fastkv(model, ids, 0),
        lambda: fastkv(model, ids, 2, 1.5),
        lambda: fastkv(model, ids, 2, pooling="sum"),
        lambda: claa(model, ids, 2, 0.5, retain=0.2),
        lambda: specprefill(model, model, ids, 0.0),
        lambda: oracle(model, ids, 0.5, steps=0),
    ):
        with pytest.raises(ValueError, match=r"not|tokens"):
            run()


# --- transformers' layers with masks, PyTorch's pooling and sorting ---


def dense(
    model: PreTrainedModel, ids: Sequence[int], out: FieldOutput, entering: list[list[int]]
) -> tuple[np.ndarray, list[torch.Tensor]]:
    """Prompt and generated tokens in one run without a cache: logits of each step and attention [H, t, t] by layer.

    ``entering``: prompt positions that enter each layer. They attend to each other; generated tokens attend to what
    ``out.caches`` holds for the head. Rows of other tokens have meaningless values, which no token attends to.
    """
    hand, text, n = HandModel(model), [*ids, *out.token_ids[:-1]], len(ids)
    generated, t, group = range(n, len(text)), len(text), hand.num_heads // hand.num_kv_heads
    hidden = torch.tensor(np.stack([hand.embed(token) for token in text]))[None]
    weights: list[torch.Tensor] = []
    handles = [
        layer.self_attn.register_forward_hook(lambda module, args, output: weights.append(output[1][0]))
        for layer in model.model.layers
    ]
    with torch.no_grad(), casts_in_float64():
        positions = torch.arange(t)[None]
        cos_sin = model.model.rotary_emb(hidden, positions)
        for index, layer in enumerate(model.model.layers):
            mask = torch.full((1, hand.num_heads, t, t), -math.inf, dtype=torch.float64)
            for head in range(hand.num_heads):
                mask[0, head].fill_diagonal_(0.0)
                cached = out.caches[index + 1][head // group]
                for p in (*entering[index], *generated):
                    others = entering[index] if p < n else [*cached, *generated]
                    mask[0, head, p, [other for other in others if hand.sees(index + 1, p, other)]] = 0.0
            hidden = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=cos_sin)
    for handle in handles:
        handle.remove()
    rows = [max(entering[-1]), *generated]
    return np.stack([hand.logits(hidden[0, p].numpy()) for p in rows]), weights


def check(model: PreTrainedModel, ids: Sequence[int], out: FieldOutput) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The run agrees with :func:`dense`. Returns what entered each layer, and the attention [H, t, t] of each."""
    entering, current = [], list(range(len(ids)))
    for layer in range(model.config.num_hidden_layers):
        current = out.selected.get(layer, current)
        entering.append(current)
    assert out.passes == [[len(positions) for positions in entering]]
    logits, weights = dense(model, ids, out, entering)
    np.testing.assert_allclose(out.logits, logits, rtol=0, atol=TOLERANCE)
    assert out.token_ids == logits.argmax(-1).tolist()
    assert out.margin > TOLERANCE  # nothing was decided by rounding
    return entering, weights


def top(scores: torch.Tensor, positions: Sequence[int], count: int) -> list[int]:
    """The best positions. Scores are rounded, so that ties of one order of summation are ties of the other."""
    order = torch.argsort((scores * 1e10).round(), descending=True, stable=True)
    return sorted(positions[i] for i in order[: max(count, 0)].tolist())


def by_window(weights: torch.Tensor, entered: list[int], window: int, pool: int, pooling: str) -> torch.Tensor:
    """Scores [G, m - window] of the tokens outside the window, for two query heads a KV head."""
    rows = weights[:, entered[-window:]][:, :, entered[:-window]].sum(dim=1)  # [H, m - window]
    if pooling == "max":
        rows = F.max_pool1d(rows[None], pool, stride=1, padding=pool // 2)[0]
    else:
        rows = F.avg_pool1d(rows[None], pool, stride=1, padding=pool // 2)[0]
    return rows[0::2] + rows[1::2]


MASKED = ["llama", "mistral, window", "qwen2", "qwen3", "gemma2"]


@pytest.mark.parametrize("pooling", ["max", "average"])
@pytest.mark.parametrize("variant", MASKED)
def test_fastkv_with_masks(variant: str, pooling: str):
    model, ids, window = model_of(variant, 3), prompt_of(40), 4
    out = fastkv(model, ids, 2, 0.5, 0.3, window, 5, pooling, steps=STEPS)
    entering, weights = check(model, ids, out)
    assert out.passes == [[40, 40, 20, 20]]
    for index, (entered, attention) in enumerate(zip(entering, weights, strict=True)):
        scores = by_window(attention, entered, window, 5, pooling)
        older, recent = entered[:-window], entered[-window:]
        assert out.caches[index + 1] == [[*top(row, older, 12 - window), *recent] for row in scores]
        if index == 1:
            assert out.selected == {2: [*top(scores.sum(dim=0), older, 20 - window), *recent]}
    if variant != "mistral, window":  # the window hides most tokens from all heads
        assert any(first != second for first, second in out.caches.values())


@pytest.mark.parametrize("variant", MASKED)
def test_claa_with_masks(variant: str):
    model, ids, window = model_of(variant, 3), prompt_of(40), 4
    out = claa(model, ids, 3, 0.4, layers=2, window=window, pool=5, steps=STEPS)
    entering, weights = check(model, ids, out)
    rows = [by_window(weights[index], entering[index], window, 5, "max") for index in range(3)]
    z = [(row - row.mean(-1, keepdim=True)) / row.std(-1, keepdim=True) for row in rows[1:]]
    assert out.selected == {3: [*top(torch.cat(z).amax(dim=0), range(36), 12), *range(36, 40)]}
    assert out.caches[3] == [[*top(row, range(36), 12), *range(36, 40)] for row in rows[2]]
    assert out.caches[1] == out.caches[2] == [list(range(40))] * 2
    assert out.caches[4] == [out.selected[3]] * 2


@pytest.mark.parametrize("threshold", [0.05, 0.9, 1.0])
def test_asl_with_masks(threshold: float):
    model, ids, window, count = model_of("llama", 3, num_hidden_layers=8), prompt_of(50), 6, 10
    out = asl(model, ids, 2, threshold, count, window, layers=3, pool=5, retain=1, steps=STEPS)
    _, weights = check(model, ids, out)
    scores = [by_window(attention, list(range(50)), window, 5, "average").sum(dim=0) for attention in weights[:7]]
    ranks = torch.stack([(-row).argsort(stable=True).argsort() for row in scores]).double()  # valid up to the cut
    variances = []
    for last in range(3, 7):  # layers 2 to 4, as indices 1 to 3, are the first three
        recent = ranks[last - 2 : last + 1]
        union = (recent < count).any(dim=0)
        variances.append(recent[:, union].var(dim=0, unbiased=False).mean().item())
        if variances[-1] < threshold * variances[0]:
            assert out.selected == {last + 1: [*top(scores[last], range(44), count), *range(44, 50)]}
            break
    else:
        assert out.selected == {}
    assert out.variances == pytest.approx(variances)


@pytest.mark.parametrize("variant", MASKED)
def test_pyramidinfer_with_masks(variant: str):
    model, ids = model_of(variant, 3), prompt_of(40)
    out = pyramidinfer(model, ids, decay=0.5, steps=STEPS)
    entering, weights = check(model, ids, out)
    assert out.passes == [[40, 40, 8 + 29, 8 + 21]]  # shares 1, 0.9268, 0.75 of 32, 32, 29
    weight = torch.linspace(1.0, 1.2, 8, dtype=torch.float64)
    for index, (entered, following) in enumerate(pairwise(entering)):
        older = entered[:-8]
        score = torch.einsum("q,hqk->k", weight, weights[index][:, 32:40][:, :, older])
        score[: sum(p < 4 for p in older)] = math.inf
        assert following == [*top(score, older, len(following) - 8), *range(32, 40)]


@pytest.mark.parametrize("variant", MASKED)
def test_look_ahead_with_masks(variant: str):
    n = 37  # the last of 10 chunks has one token
    model, draft, ids = model_of(variant, 3), draft_of(variant), prompt_of(n)
    out = specprefill(model, draft, ids, 0.3, lookahead=9, chunk=4, steps=STEPS)
    check(model, ids, out)
    # The draft in one run over prompt and look-ahead; probabilities over the prompt alone are those over all, rescaled.
    full = lazy_reference(draft, ids, {}, 9)
    assert out.lookahead == full.token_ids[:8]
    plain = FieldOutput(token_ids=full.token_ids, caches={layer: [list(range(n))] * 2 for layer in (1, 2)})
    _, weights = dense(draft, ids, plain, [list(range(n))] * 2)
    rows = torch.stack(weights)[:, :, n - 1 :, :n]  # [L, H, 9, n]
    mass = rows.sum(dim=-1, keepdim=True)
    rows = torch.where(mass > 0, rows / mass, 0.0)
    smooth = F.avg_pool1d(rows.reshape(-1, 1, n), 13, stride=1, padding=6).reshape(-1, 9, n)
    scores = smooth.amax(dim=0).mean(dim=0)  # over layers and heads, then over queries
    np.testing.assert_allclose(list(out.scores[0].values()), scores.numpy(), rtol=0, atol=1e-12)
    chunks = top(torch.stack([chunk.mean() for chunk in scores.split(4)]), range(10), 3)
    assert out.selected == {0: [p for p in range(n) if p // 4 in chunks]}


@pytest.mark.parametrize("variant", ["llama", "mistral, window", "gemma2"])
def test_oracle_with_masks(variant: str):
    model, ids = model_of(variant, 3), prompt_of(30)
    out = oracle(model, ids, 0.3, steps=STEPS)
    check(model, ids, out)
    assert len(out.selected[0]) == 9
    assert 29 in out.selected[0]


@pytest.mark.parametrize("variant", MASKED)
def test_gemfilters_scores_from_transformers_modules(variant: str):
    model, ids = model_of(variant, 3), prompt_of(30)
    out = gemfilter(model, ids, 3, 9, steps=1)
    caught: dict[str, torch.Tensor] = {}
    attention = model.model.layers[2].self_attn
    rotary = model.model.rotary_emb
    handles = [
        getattr(attention, f"{name}_norm" if variant == "qwen3" else f"{name}_proj").register_forward_hook(
            lambda module, args, output, name=name: caught.__setitem__(name, output[0].reshape(30, -1, 16))
        )
        for name in "qk"
    ]
    with torch.no_grad(), casts_in_float64():
        model(torch.tensor([ids]))
        cos, sin = rotary(caught["q"], torch.arange(30)[None])
    for handle in handles:
        handle.remove()
    turned = {}
    for name, x in caught.items():  # [n, heads, d], rotated in halves
        half = torch.cat((-x[..., 8:], x[..., :8]), dim=-1)
        turned[name] = x * cos[0][:, None] + half * sin[0][:, None]
    raw = torch.einsum("hd,nhd->n", turned["q"][-1], turned["k"].repeat_interleave(2, dim=1))
    scores = F.avg_pool1d(raw[None, None], 5, stride=1, padding=2)[0, 0]
    np.testing.assert_allclose(list(out.scores[3].values()), scores.numpy(), rtol=0, atol=TOLERANCE)
    assert out.selected == {3: top(scores, range(30), 9)}
