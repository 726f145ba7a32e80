"""The slow references are right: against transformers' own forward pass and continuation, and
counts by hand.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.field_oracles import FieldOutput, gemfilter, on_the_rest
from tests.helpers import TOLERANCE, prompt_of
from tests.reference import (
    ARCHITECTURES,
    VARIANTS,
    casts_in_float64,
    keep_count,
    lazy_reference,
    random_model,
)
from tests.test_field_oracles import model_of, uniform

STEPS = 3
LENGTH_DEPENDENT = {"llama, dynamic NTK", "phi3, LongRoPE and window"}


def test_casts_in_float64_are_restored():
    names = torch.float32, torch.float, torch.Tensor.float
    with casts_in_float64():
        assert torch.ones(1).float().dtype == torch.float32 == torch.float64
    with pytest.raises(ZeroDivisionError), casts_in_float64():
        math.fsum([1 / 0])
    assert names == (torch.float32, torch.float, torch.Tensor.float)
    assert torch.ones(1).float().dtype == torch.float32 != torch.float64


def test_lazy_reference_stops_after_an_end_token():
    model = random_model("llama", seed=4)
    prompt = prompt_of(9)
    tokens = lazy_reference(model, prompt, {2: 0.5}, 6).token_ids
    for step in (0, 3):
        end = tokens[step]
        out = lazy_reference(model, prompt, {2: 0.5}, 6, eos_token_ids={end})
        assert out.token_ids == tokens[: tokens.index(end) + 1]
        assert len(out.logits) == len(out.selected) == len(out.computed) == len(out.token_ids)
        assert (
            1,
            len(prompt) + len(out.token_ids) - 1,
        ) not in out.compute_counts  # the last token is never run


@pytest.mark.parametrize(
    ("ratio", "n", "expected"),
    [
        (0.7, 10, 7),
        (0.9, 10, 9),
        (0.55, 20, 11),
        (0.07, 100, 7),
        (0.29, 100, 29),
        (0.01, 3, 1),
        (1, 5, 5),
        (0.5, 5, 3),
    ],
)
def test_keep_count_is_decimal(ratio: float, n: int, expected: int):
    assert keep_count(ratio, n) == expected


def test_an_answer_with_ties_by_counting():
    out = lazy_reference(uniform(4), prompt_of(10), {1: 0.7, 3: 0.7}, 3)
    # Prefill: 7 of 10 stay, the last one (9) among them; then ceil(4.9) = 5 of the 7.
    assert out.selected[0] == {1: [0, 1, 2, 3, 4, 5, 9], 3: [0, 1, 2, 3, 9]}
    assert out.revived[0] == {1: [], 3: []}
    # Then 7 of the 10 prompt tokens and the newest, 10: token 6 is revived after layer 1 and waits
    # again after layer 3, token 4 is revived after layer 3, where it has waited since the prefill.
    assert out.selected[1] == {1: [0, 1, 2, 3, 4, 5, 6, 10], 3: [0, 1, 2, 3, 4, 10]}
    assert out.revived[1] == {1: [6], 3: [4]}
    assert out.selected[2] == {1: [0, 1, 2, 3, 4, 5, 6, 10, 11], 3: [0, 1, 2, 3, 4, 10, 11]}
    assert out.revived[2] == {1: [], 3: []}
    assert out.aux == {1: {7, 8}, 3: {5, 6}}
    assert out.computed.tolist() == [[10, 7, 7, 5], [10, 8, 8, 6], [10, 8, 8, 6]]
    assert {p for layer, p in out.compute_counts if layer == 4} == {0, 1, 2, 3, 4, 9, 10, 11}
    assert out.margin == float("inf")
    # Stored: 12 tokens, 10, 10 and 8, with the generated ones; 2 KV heads of width 16, 8 bytes a
    # number.
    assert out.kv_bytes == (12 + 10 + 10 + 8) * 2 * 2 * 16 * 8
    assert out.aux_bytes == 4 * 64 * 8
    assert {*out.compute_counts.values()} == {1}


def test_generated_tokens_are_candidates_with_prune_generated():
    out = lazy_reference(uniform(2), prompt_of(10), {1: 0.7}, 4, prune_generated=True)
    first = [0, 1, 2, 3, 4, 5, 6]
    # Candidates: 10 prompt tokens; with the earlier generated ones 11 and 12: ceil(7.7) = 8 and
    # ceil(8.4) = 9 of them.
    assert [s[1] for s in out.selected] == [
        [*first[:6], 9],
        [*first, 10],
        [*first, 7, 11],
        [*first, 7, 8, 12],
    ]
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
            np.testing.assert_allclose(
                list(out.importance[0][layer].values()), score.numpy(), rtol=0, atol=1e-5
            )


def generated_by_transformers(
    model: PreTrainedModel, prompt: list[int]
) -> tuple[list[int], list[np.ndarray]]:
    """Greedy tokens and logits of transformers' own forward pass over its own cache."""
    cache, rows, logits = None, prompt, list[np.ndarray]()
    for _ in range(STEPS):
        with torch.no_grad(), casts_in_float64():
            out = model(torch.tensor([rows]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits[0, -1].numpy())
        rows = [int(logits[-1].argmax())]
    return [int(row.argmax()) for row in logits], logits


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [1, 14])
def test_keeping_everything_equals_transformers(variant: str, length: int):
    model, prompt = model_of(variant, 1), prompt_of(length, 1)
    tokens, logits = generated_by_transformers(model, prompt)
    for schedule, prune_generated in (
        ({}, False),
        ({1: 1.0, 3: 1.0}, False),
        ({1: 1, 2: 1.0, 3: 1.0, 4: 1.0}, True),
    ):
        out = lazy_reference(model, prompt, schedule, STEPS, (), prune_generated)
        assert out.token_ids == tokens
        np.testing.assert_allclose(out.logits, logits, rtol=0, atol=TOLERANCE)
        assert out.aux_bytes == 0
        assert (out.computed == length).all()
        assert out.revived == [{layer: [] for layer in schedule}] * STEPS


Run = Callable[[PreTrainedModel, Sequence[int]], FieldOutput]

RENUMBERING: dict[str, Run] = {
    "random drop, prompt compression": lambda model, ids: on_the_rest(
        model, ids, [0, 3, 4, 9, 13], STEPS, True
    ),
    "gemfilter": lambda model, ids: gemfilter(model, ids, 2, 6, steps=STEPS),
    "baseline": lambda model, ids: on_the_rest(model, ids, range(len(ids)), STEPS, renumber=False),
}


@pytest.mark.parametrize("method", RENUMBERING)
@pytest.mark.parametrize("variant", ["qwen3", "mistral, window", *sorted(LENGTH_DEPENDENT)])
def test_renumbered_tokens_are_a_prompt_of_their_own(variant: str, method: str):
    model, prompt = model_of(variant, 1), prompt_of(14, 1)
    out = RENUMBERING[method](model, prompt)
    [kept] = out.selected.values()
    tokens, logits = generated_by_transformers(model, [prompt[position] for position in kept])
    assert out.token_ids == tokens
    np.testing.assert_allclose(out.logits, logits, rtol=0, atol=TOLERANCE)
    assert len(out.stored[1][0]) == len(kept) + STEPS - 1
