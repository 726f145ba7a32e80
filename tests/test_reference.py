"""The slow reference itself is right: against transformers' forward pass, against selections worked out by hand, and
against an altogether different formulation of the method: no cache, one attention mask per layer, transformers' layers.
"""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.reference import (
    ARCHITECTURES,
    ReferenceOutput,
    casts_in_float64,
    forward_reference,
    keep_count,
    lazy_reference,
    random_model,
)

TOLERANCE = 1e-9
VOCABULARY = 97


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def forward(model: PreTrainedModel, token_ids: list[int]) -> np.ndarray:
    """transformers' logits [N, V], computed in float64 wherever the model's code asks for float32."""
    with torch.no_grad(), casts_in_float64():
        return model(torch.tensor([token_ids])).logits[0].numpy()


def greedy_loop(model: PreTrainedModel, prompt: list[int], steps: int) -> tuple[list[int], list[np.ndarray]]:
    """Plain greedy decoding, with the whole text run again at every step."""
    text, logits = list(prompt), []
    for _ in range(steps):
        logits.append(forward(model, text)[-1])
        text.append(int(logits[-1].argmax()))
    return text[len(prompt) :], logits


# --- the forward pass ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_forward_by_hand_equals_unchanged_transformers(architecture: str, attn_implementation: str):
    with casts_in_float64():  # the table of RoPE frequencies is made in the constructor
        model = random_model(architecture, seed=1, attn_implementation=attn_implementation, float64_throughout=False)
    for length in (1, 2, 3, 7, 30):
        prompt = random_prompt(length, seed=length)
        np.testing.assert_allclose(forward_reference(model, prompt), forward(model, prompt), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float64_modules_change_rounding_only(architecture: str):
    unchanged = random_model(architecture, seed=2, float64_throughout=False)
    model = random_model(architecture, seed=2)
    prompt = random_prompt(20)
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0].numpy()
        rounded = unchanged(torch.tensor([prompt])).logits[0].numpy()
    np.testing.assert_allclose(forward_reference(model, prompt), logits, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(rounded, logits, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_forward_by_hand_with_other_settings(architecture: str, overrides: dict):
    model = random_model(architecture, seed=3, num_layers=2, **overrides)
    prompt = random_prompt(12)
    np.testing.assert_allclose(forward_reference(model, prompt), forward(model, prompt), rtol=0, atol=TOLERANCE)


def test_every_parameter_of_a_random_model_is_random_and_seeded():
    for architecture in ARCHITECTURES:
        torch.manual_seed(0)
        before = torch.random.get_rng_state()
        first, again, other = (random_model(architecture, seed=seed) for seed in (5, 5, 6))
        assert torch.equal(before, torch.random.get_rng_state())
        assert not first.training
        for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
            assert a.dtype == torch.float64, name
            assert a.std() > 0.01, name
            assert torch.equal(a, b), name
            assert not torch.equal(a, c), name


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 10000.0, "factor": 2.0}}),
        ("llama", {"hidden_act": "gelu"}),
    ],
)
def test_unknown_features_are_refused(architecture: str, overrides: dict):
    with pytest.raises(ValueError, match=r"reference knows|activation"):
        forward_reference(random_model(architecture, seed=0, **overrides), [1, 2])


def test_casts_are_restored():
    names = torch.float32, torch.float, torch.Tensor.float
    with casts_in_float64():
        assert torch.ones(1).float().dtype == torch.float32 == torch.float64
    with pytest.raises(ZeroDivisionError), casts_in_float64():
        math.fsum([1 / 0])
    assert names == (torch.float32, torch.float, torch.Tensor.float)
    assert torch.ones(1).float().dtype == torch.float32 != torch.float64


# --- no pruning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [{}, {2: 1.0}, {1: 1, 2: 1.0, 3: 1.0, 4: 1.0}])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_pruning_it_is_plain_greedy_decoding(architecture: str, schedule: dict[int, float]):
    model = random_model(architecture, seed=4)
    for length in (1, 2, 3, 15):
        prompt = random_prompt(length, seed=length)
        expected_tokens, expected_logits = greedy_loop(model, prompt, 5)
        for prune_generated in (False, True):
            out = lazy_reference(model, prompt, schedule, 5, prune_generated=prune_generated)
            assert out.token_ids == expected_tokens
            np.testing.assert_allclose(out.logits, expected_logits, rtol=0, atol=TOLERANCE)
            assert out.selected == [{layer: list(range(length + step)) for layer in schedule} for step in range(5)]
            assert out.revived == [{layer: [] for layer in schedule}] * 5
            assert (out.computed == length).all()
            assert out.computed.shape == (5, 4)
            assert all(not held for held in out.aux.values())


def test_stops_after_an_end_token():
    model = random_model("llama", seed=4)
    prompt = random_prompt(9)
    tokens = lazy_reference(model, prompt, {2: 0.5}, 6).token_ids
    for step in (0, 3):
        end = tokens[step]
        out = lazy_reference(model, prompt, {2: 0.5}, 6, eos_token_ids={end})
        assert out.token_ids == tokens[: tokens.index(end) + 1]
        assert len(out.logits) == len(out.selected) == len(out.computed) == len(out.token_ids)
        assert (1, len(prompt) + len(out.token_ids) - 1) not in out.compute_counts  # the last token is never run


# --- selections worked out by hand -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "n", "expected"),
    [(0.7, 10, 7), (0.9, 10, 9), (0.55, 20, 11), (0.07, 100, 7), (0.29, 100, 29), (0.01, 3, 1), (1, 5, 5), (0.5, 5, 3)],
)
def test_keep_count_is_decimal(ratio: float, n: int, expected: int):
    assert keep_count(ratio, n) == expected


def uniform_attention_model(num_layers: int) -> PreTrainedModel:
    """Queries are zero, so that all scores are exactly tied and the lower positions win: selections by counting."""
    model = random_model("llama", seed=7, num_layers=num_layers)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.zero_()
    return model


def test_ties_revival_and_aux_cache_by_counting():
    out = lazy_reference(uniform_attention_model(4), random_prompt(10), {1: 0.7, 3: 0.7}, 3)
    # Prefill: 7 of 10 stay, the last one (9) among them; then ceil(4.9) = 5 of the 7.
    assert out.selected[0] == {1: [0, 1, 2, 3, 4, 5, 9], 3: [0, 1, 2, 3, 9]}
    assert out.revived[0] == {1: [], 3: []}
    # Then 7 of the 10 prompt tokens and the newest, 10: token 6 is revived after layer 1 and waits again after layer 3,
    # token 4 is revived after layer 3, where it has waited since the prefill.
    assert out.selected[1] == {1: [0, 1, 2, 3, 4, 5, 6, 10], 3: [0, 1, 2, 3, 4, 10]}
    assert out.revived[1] == {1: [6], 3: [4]}
    assert out.selected[2] == {1: [0, 1, 2, 3, 4, 5, 6, 10, 11], 3: [0, 1, 2, 3, 4, 10, 11]}
    assert out.revived[2] == {1: [], 3: []}
    assert out.aux == {1: {7, 8}, 3: {5, 6}}
    assert out.computed.tolist() == [[10, 7, 7, 5], [10, 8, 8, 6], [10, 8, 8, 6]]
    assert {p for layer, p in out.compute_counts if layer == 4} == {0, 1, 2, 3, 4, 9, 10, 11}
    assert out.margin == float("inf")


def test_generated_tokens_are_candidates_when_asked():
    out = lazy_reference(uniform_attention_model(2), random_prompt(10), {1: 0.7}, 4, prune_generated=True)
    first = [0, 1, 2, 3, 4, 5, 6]
    # Candidates: 10 prompt tokens; with the earlier generated ones 11 and 12: ceil(7.7) = 8 and ceil(8.4) = 9 of them.
    assert [s[1] for s in out.selected] == [[*first[:6], 9], [*first, 10], [*first, 7, 11], [*first, 7, 8, 12]]
    assert [r[1] for r in out.revived] == [[], [6], [7], [8]]
    assert out.aux == {1: set()}


def test_first_selection_from_transformers_attentions():
    for architecture in ARCHITECTURES:
        model = random_model(architecture, seed=8, attn_implementation="eager")
        prompt = random_prompt(23, seed=1)
        with torch.no_grad():
            attentions = model(torch.tensor([prompt]), output_attentions=True).attentions
        for layer, ratio, count in ((1, 0.3, 7), (2, 0.5, 12), (4, 0.04, 1)):
            score = attentions[layer - 1][0, :, -1].mean(dim=0)  # [N]
            score[-1] = math.inf  # the last prompt token is kept and counted
            out = lazy_reference(model, prompt, {layer: ratio}, 1)
            assert out.selected == [{layer: sorted(score.topk(count).indices.tolist())}]
            score[-1] = attentions[layer - 1][0, :, -1, -1].mean()
            np.testing.assert_allclose(list(out.importance[0][layer].values()), score.numpy(), rtol=0, atol=1e-5)


# --- the whole method, in a different formulation --------------------------------------------------------------------


def dense_masked(
    model: PreTrainedModel, turns: list[list[int]], schedule: dict[int, float], steps: int, prune_generated: bool
) -> tuple[list[int], list[np.ndarray], list[dict[int, list[int]]]]:
    """LazyLLM without any cache: every step runs the whole text through transformers' layers, with one mask per layer.

    Every turn adds its tokens to the text and generates `steps` more. A token attends, in a layer, to the set of the
    step in which it first entered that layer. Rows of tokens that have not entered yet have meaningless values, which
    nobody attends to. There is no K/V cache, no Aux Cache and no revival here: a token that enters later has its hidden
    state in the dense run anyway.

    Returns:
        Tokens, logits [V] and selected positions, one per step of all turns.
    """
    prompt: set[int] = set()  # positions of all turns' tokens
    rows: list[dict[int, set[int]]] = [{} for _ in model.model.layers]
    weights: list[torch.Tensor] = []
    handles = [
        layer.self_attn.register_forward_hook(lambda module, args, output: weights.append(output[1][0]))
        for layer in model.model.layers
    ]
    text, tokens, all_logits, all_selected = [], [], [], []
    for step in range(len(turns) * steps):
        if step % steps == 0:
            prompt |= set(range(len(text), len(text) + len(turns[step // steps])))
            text += turns[step // steps]
        length = len(text)
        newest = length - 1
        active, selected = set(range(length)), {}
        hidden = model.model.embed_tokens(torch.tensor([text]))  # [1, length, D]
        positions = torch.arange(length)[None]
        with torch.no_grad(), casts_in_float64():
            cos_sin = model.model.rotary_emb(hidden, positions)
            for index, layer in enumerate(model.model.layers):
                mask = torch.full((length, length), -math.inf, dtype=torch.float64)
                mask.fill_diagonal_(0.0)
                for p in active:
                    rows[index].setdefault(p, {q for q in active if q <= p})
                for p, row in rows[index].items():
                    mask[p, sorted(row)] = 0.0
                hidden = layer(
                    hidden, attention_mask=mask[None, None], position_ids=positions, position_embeddings=cos_sin
                )
                if index + 1 in schedule:
                    score = weights[-1][:, newest].mean(dim=0)  # [length]
                    score[newest] = math.inf  # always kept
                    generated = active - prompt
                    uncounted = {newest} & generated if prune_generated else generated
                    order = sorted(active - uncounted, key=lambda p: (-float(score[p]), p))
                    active = uncounted | set(order[: math.ceil(Decimal(str(schedule[index + 1])) * len(order))])
                    selected[index + 1] = sorted(active)
            logits = model.lm_head(model.model.norm(hidden[0, newest]))
        all_logits.append(logits.numpy())
        all_selected.append(selected)
        tokens.append(int(logits.argmax()))
        text.append(tokens[-1])
    for handle in handles:
        handle.remove()
    return tokens, all_logits, all_selected


SCHEDULES = {
    "first": {1: 0.5},
    "middle": {2: 0.3},
    "last": {4: 0.4},
    "two": {1: 0.7, 3: 0.6},
    "every": {1: 0.8, 2: 0.7, 3: 0.6, 4: 0.5},
    "one token": {1: 0.01, 3: 0.01},
}


@pytest.mark.parametrize("prune_generated", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_the_dense_masked_formulation(architecture: str, schedule: dict[int, float], prune_generated: bool):
    model = random_model(architecture, seed=9, attn_implementation="eager")
    revived = 0
    for length in (1, 2, 3, 16):
        prompt = random_prompt(length, seed=length)
        out = lazy_reference(model, prompt, schedule, 6, prune_generated=prune_generated)
        tokens, logits, selected = dense_masked(model, [prompt], schedule, 6, prune_generated)
        assert out.selected == selected
        assert out.token_ids == tokens
        np.testing.assert_allclose(out.logits, logits, rtol=0, atol=TOLERANCE)
        assert out.margin > TOLERANCE  # nothing was decided by rounding
        assert set(out.compute_counts.values()) == {1}
        assert_bookkeeping(out, length, schedule)
        revived += sum(len(positions) for step in out.revived for positions in step.values())
    assert (revived > 0) == (schedule != {4: 0.4}), "the case should exercise revival"


def assert_bookkeeping(out: ReferenceOutput, num_prompt: int, schedule: dict[int, float]) -> None:
    """The relations between the fields of a ReferenceOutput, with counts from `selected`."""
    steps, num_layers = out.computed.shape
    layers = range(1, num_layers + 1)
    seen: dict[int, set[int]] = {layer: set() for layer in layers}  # tokens computed so far
    for step in range(steps):
        before = {layer: set(seen[layer]) for layer in layers}
        active = set(range(num_prompt + step))
        for layer in layers:
            seen[layer] |= active
            if layer not in schedule:
                continue
            selected = set(out.selected[step][layer])
            assert selected <= active
            assert num_prompt + step - 1 in selected
            waiting = before[layer] - before[layer + 1] if layer < num_layers else set()
            assert out.revived[step][layer] == sorted(selected & waiting)
            active = selected
        assert out.computed[step].tolist() == [sum(p < num_prompt for p in seen[layer]) for layer in layers]
    assert set(out.compute_counts) == {(layer, p) for layer in layers for p in seen[layer]}
    for layer in schedule:
        assert out.aux[layer] == (seen[layer] - seen[layer + 1] if layer < num_layers else set())
