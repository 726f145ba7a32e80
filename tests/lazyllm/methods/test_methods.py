"""What holds for every method, over `method_matrix.py`; and what is particular to the simple ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lazyllm
from lazyllm.engine.attention import last_token_importance
from lazyllm.engine.decoder import open_decoder
from lazyllm.engine.method import Prompt
from lazyllm.methods import METHODS, Baseline, Lazy, Method, PromptCompression, RandomDrop, StaticPruning
from tests.lazyllm.methods.method_matrix import KEEPING, PRUNING
from tests.reference import random_model

LAYERS = 4
MODEL = random_model("qwen3", 4, num_layers=LAYERS)
PROMPT = np.random.default_rng(0).integers(0, 97, 21).tolist()


def test_the_matrix_is_complete() -> None:
    for rows in (PRUNING, KEEPING):
        assert {name.split(",")[0] for name in rows} | {"baseline"} == set(METHODS)


@pytest.mark.parametrize("method", KEEPING.values(), ids=KEEPING.keys())
@pytest.mark.parametrize("n", [1, 2, 21])
def test_keeping_everything_is_the_baseline(method: Method, n: int) -> None:
    with torch.inference_mode():
        expected = MODEL.generate(
            torch.tensor([PROMPT[:n]]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        logits = MODEL(torch.tensor([PROMPT[:n]]), logits_to_keep=1).logits[0, -1]
    out = lazyllm.generate(MODEL, PROMPT[:n], method, 6, ())
    assert out.token_ids == expected[0, n:].tolist()
    assert torch.equal(out.first_logits, logits)
    assert out.pct_prompt_tokens_computed == 100
    assert method.ideal_speedup(MODEL.config, n) == 1
    assert out.scoring_s == 0


@pytest.mark.parametrize("method", PRUNING.values(), ids=PRUNING.keys())
@pytest.mark.parametrize("n", [1, 2, 3, 21])
def test_the_claimed_share_is_the_measured_one(method: Method, n: int) -> None:
    out = lazyllm.generate(MODEL, PROMPT[:n], method, 5, ())
    assert out.computed[0].tolist() == method.tokens_per_layer(LAYERS, n)
    assert (np.diff(out.computed, axis=0) >= 0).all()
    assert out.computed.max() <= n
    if isinstance(method, PromptCompression):  # to score all tokens costs more than to drop some of them saves
        assert method.ideal_speedup(MODEL.config, n) <= 1
        assert (out.scoring_s > 0) == (out.computed[0, 0] < n)
        assert out.ttft_s > out.scoring_s
    else:
        assert method.ideal_speedup(MODEL.config, n) >= 1
        assert out.scoring_s == 0


@pytest.mark.parametrize("method", PRUNING.values(), ids=PRUNING.keys())
def test_no_state_stays_and_prompts_do_not_mix(method: Method) -> None:
    first = lazyllm.generate(MODEL, PROMPT, method, 5, ())
    lazyllm.generate(MODEL, PROMPT[::-1], method, 5, ())
    again = lazyllm.generate(MODEL, PROMPT, method, 5, ())
    assert (first.token_ids, first.selected) == (again.token_ids, again.selected)
    assert torch.equal(first.first_logits, again.first_logits)


NEVER_BACK = [
    RandomDrop(0.5, seed=3),
    PromptCompression(0.5, "token"),
    StaticPruning(2, 0.4),
    Lazy({1: 0.6, 3: 0.5}, revive=False),
]


@pytest.mark.parametrize("method", NEVER_BACK, ids=["random_drop", "compression", "static", "lazy without revival"])
def test_what_is_pruned_is_never_computed_later(method: Method) -> None:
    out = lazyllm.generate(MODEL, PROMPT, method, 8, ())
    assert (out.computed == out.computed[0]).all()
    assert out.aux_bytes == 0


def test_without_revival_decoding_sees_what_prefill_selected() -> None:
    method, alive = Lazy({1: 0.6, 3: 0.5}, revive=False), Lazy({1: 0.6, 3: 0.5})
    out, other = lazyllm.generate(MODEL, PROMPT, method, 6, ()), lazyllm.generate(MODEL, PROMPT, alive, 6, ())
    assert out.selected[0] == other.selected[0]
    for step, selected in enumerate(out.selected[1:], start=1):
        generated = list(range(21, 21 + step))
        assert selected == {layer: kept + generated for layer, kept in out.selected[0].items()}
    assert other.computed[-1].sum() > out.computed[-1].sum()  # where the same tokens are selected anew, some return
    with pytest.raises(ValueError, match="revive=False"):
        Lazy({1: 0.5}, prune_generated=True, revive=False)


def kv_bytes_of(tokens: int, layers: int) -> int:
    config = MODEL.config
    return tokens * layers * 2 * config.num_key_value_heads * config.head_dim * 8


def test_random_drop_is_the_model_on_the_rest() -> None:
    method = RandomDrop(0.5, seed=3)
    out = lazyllm.generate(MODEL, PROMPT, method, 5, ())
    kept = out.selected[0][0]
    assert len(kept) == 11  # ceil(0.5 * 21)
    assert kept == sorted(set(kept))
    assert kept[-1] == 20
    rest = lazyllm.generate(MODEL, [PROMPT[position] for position in kept], Baseline(), 5, ())
    assert (out.token_ids, out.kv_bytes) == (rest.token_ids, rest.kv_bytes)
    assert torch.equal(out.first_logits, rest.first_logits)


def test_random_drop_draws_by_seed_and_evenly() -> None:
    def kept(seed: int) -> list[int]:
        with torch.inference_mode(), open_decoder(MODEL) as decoder:
            return RandomDrop(0.3, seed).start(decoder, Prompt(torch.zeros(40, dtype=torch.long)), 1)._kept.tolist()  # type: ignore[attr-defined]

    draws = [kept(seed) for seed in range(400)]
    assert kept(0) == draws[0]
    assert len({tuple(draw) for draw in draws}) == 400
    counts = np.bincount(np.concatenate(draws), minlength=40)
    assert counts[39] == 400
    expected = 400 * 11 / 39  # 11 more of 39; six standard deviations of a binomial
    assert np.abs(counts[:39] - expected).max() < 6 * np.sqrt(expected * (1 - 11 / 39))


@pytest.mark.parametrize(("layer", "keep", "left"), [(1, 0.5, 11), (2, 0.4, 9), (3, 0.01, 1), (4, 0.4, 9)])
def test_static_pruning_against_masked_attention(layer: int, keep: float, left: int) -> None:
    """The late layers see the kept tokens only; the early ones lose the others after the prefill."""
    importance = torch.stack([_eager_importance(index) for index in range(layer)]).mean(dim=0)
    importance[-1] = torch.inf
    expected = importance.sort(descending=True, stable=True).indices[:left].sort().values.tolist()
    out = lazyllm.generate(MODEL, PROMPT, StaticPruning(layer, keep), 5, ())
    assert out.selected[0] == {layer: expected}
    assert out.kv_bytes == kv_bytes_of(left + 4, LAYERS)  # the last generated token is never run
    assert out.token_ids == _masked_generation(layer, expected, 5)


def _eager_importance(layer: int) -> torch.Tensor:
    """Mean over heads of the last token's attention, from transformers' own eager attention."""
    model = random_model("qwen3", 4, num_layers=LAYERS, attn_implementation="eager")
    with torch.inference_mode():
        attentions = model(torch.tensor([PROMPT]), output_attentions=True).attentions
    return attentions[layer][0, :, -1].mean(dim=0).double()


def _masked_generation(layer: int, kept: list[int], steps: int) -> list[int]:
    """Greedy tokens from whole forward passes without a cache, one additive mask for each layer."""
    model = random_model("qwen3", 4, num_layers=LAYERS, attn_implementation="eager")
    n, tokens = len(PROMPT), list(PROMPT)
    for _ in range(steps):
        length = len(tokens)
        causal = torch.ones(length, length).tril().bool()
        late = causal.clone()
        late[:, [position for position in range(n) if position not in kept]] = False
        late |= torch.eye(length).bool()  # rows of pruned tokens need something to attend to; nobody reads them
        early = causal.clone()
        early[n:] = late[n:]  # generated tokens find the kept ones only, in the early layers too
        masks = [early if index < layer else late for index in range(LAYERS)]
        hooks = [
            block.register_forward_pre_hook(_with_mask(mask), with_kwargs=True)
            for block, mask in zip(model.model.layers, masks, strict=True)
        ]
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        for hook in hooks:
            hook.remove()
    return tokens[n:]


def _with_mask(mask: torch.Tensor):
    additive = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))[None, None]
    return lambda module, args, kwargs: (args, kwargs | {"attention_mask": additive})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomDrop(0), r"\(0, 1\]"),
        (lambda: RandomDrop(1.5), r"\(0, 1\]"),
        (lambda: RandomDrop("half"), "number"),  # type: ignore[arg-type]
        (lambda: PromptCompression(0), r"\(0, 1\]"),
        (lambda: PromptCompression(0.5, "word"), "give one of token, sentence, phrase"),
        (lambda: PromptCompression(0.5, window=1), "2 or more"),
        (lambda: PromptCompression(0.5, scorer=3), "name of a model"),  # type: ignore[arg-type]
        (lambda: StaticPruning(0, 0.5), "1 for the first layer"),
        (lambda: StaticPruning(1.5, 0.5), "1 for the first layer"),  # type: ignore[arg-type]
        (lambda: StaticPruning(2, 0), r"\(0, 1\]"),
    ],
)
def test_bad_settings_are_refused(make, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_a_layer_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="only 4 layers"):
        lazyllm.generate(MODEL, PROMPT, StaticPruning(5, 0.5), 2, ())


def test_the_watched_layers_are_averaged() -> None:
    draw = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(1, 2, 1, 4, generator=draw), torch.randn(1, 2, 5, 4, generator=draw)) for _ in range(3)]
    with open_decoder(MODEL) as decoder:
        decoder.probe.watch(range(3))
        for query, key in pairs:
            decoder.probe.look(query, key, None, 0.5)
        found = decoder.probe.take()
    expected = sum(last_token_importance(query, key, None, 0.5) for query, key in pairs) / 3
    torch.testing.assert_close(found, expected)
