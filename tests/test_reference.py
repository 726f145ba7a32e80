"""The slow reference itself is right: against transformers' forward pass and selections worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers import prompt_of
from tests.reference import ARCHITECTURES, casts_in_float64, forward_reference, keep_count, lazy_reference, random_model

TOLERANCE = 1e-9


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


def test_random_model_parameters_are_random_and_seeded():
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
def test_reference_refuses_unknown_features(architecture: str, overrides: dict):
    with pytest.raises(ValueError, match=r"reference knows|activation"):
        forward_reference(random_model(architecture, seed=0, **overrides), [1, 2])


def test_casts_in_float64_are_restored():
    names = torch.float32, torch.float, torch.Tensor.float
    with casts_in_float64():
        assert torch.ones(1).float().dtype == torch.float32 == torch.float64
    with pytest.raises(ZeroDivisionError), casts_in_float64():
        math.fsum([1 / 0])
    assert names == (torch.float32, torch.float, torch.Tensor.float)
    assert torch.ones(1).float().dtype == torch.float32 != torch.float64


@pytest.mark.parametrize("schedule", [{}, {1: 1, 2: 1.0, 3: 1.0, 4: 1.0}])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_lazy_reference_without_pruning_is_greedy_decoding(architecture: str, schedule: dict[int, float]):
    model = random_model(architecture, seed=4)
    for length in (1, 2, 15):
        prompt = prompt_of(length, seed=length)
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


def test_lazy_reference_stops_after_an_end_token():
    model = random_model("llama", seed=4)
    prompt = prompt_of(9)
    tokens = lazy_reference(model, prompt, {2: 0.5}, 6).token_ids
    for step in (0, 3):
        end = tokens[step]
        out = lazy_reference(model, prompt, {2: 0.5}, 6, eos_token_ids={end})
        assert out.token_ids == tokens[: tokens.index(end) + 1]
        assert len(out.logits) == len(out.selected) == len(out.computed) == len(out.token_ids)
        assert (1, len(prompt) + len(out.token_ids) - 1) not in out.compute_counts  # the last token is never run


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
    out = lazy_reference(uniform_attention_model(4), prompt_of(10), {1: 0.7, 3: 0.7}, 3)
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


def test_generated_tokens_are_candidates_with_prune_generated():
    out = lazy_reference(uniform_attention_model(2), prompt_of(10), {1: 0.7}, 4, prune_generated=True)
    first = [0, 1, 2, 3, 4, 5, 6]
    # Candidates: 10 prompt tokens; with the earlier generated ones 11 and 12: ceil(7.7) = 8 and ceil(8.4) = 9 of them.
    assert [s[1] for s in out.selected] == [[*first[:6], 9], [*first, 10], [*first, 7, 11], [*first, 7, 8, 12]]
    assert [r[1] for r in out.revived] == [[], [6], [7], [8]]
    assert out.aux == {1: set()}


def test_first_selection_equals_that_of_transformers_attentions():
    for architecture in ARCHITECTURES:
        model = random_model(architecture, seed=8, attn_implementation="eager")
        prompt = prompt_of(23, seed=1)
        with torch.no_grad():
            attentions = model(torch.tensor([prompt]), output_attentions=True).attentions
        for layer, ratio, count in ((1, 0.3, 7), (2, 0.5, 12), (4, 0.04, 1)):
            score = attentions[layer - 1][0, :, -1].mean(dim=0)  # [N]
            score[-1] = math.inf  # the last prompt token is kept and counted
            out = lazy_reference(model, prompt, {layer: ratio}, 1)
            assert out.selected == [{layer: sorted(score.topk(count).indices.tolist())}]
            score[-1] = attentions[layer - 1][0, :, -1, -1].mean()
            np.testing.assert_allclose(list(out.importance[0][layer].values()), score.numpy(), rtol=0, atol=1e-5)
