"""The slow references are right: against transformers' own forward pass and continuation, and counts by hand."""

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
    LazyTurns,
    ReferenceOutput,
    casts_in_float64,
    keep_count,
    lazy_reference,
    random_model,
)
from tests.reference_turns import ContinuedTurns
from tests.test_field_oracles import model_of, uniform

TURNS = [prompt_of(14, 1), prompt_of(5, 2), prompt_of(1, 3), prompt_of(8, 4)]
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
        assert (1, len(prompt) + len(out.token_ids) - 1) not in out.compute_counts  # the last token is never run


@pytest.mark.parametrize(
    ("ratio", "n", "expected"),
    [(0.7, 10, 7), (0.9, 10, 9), (0.55, 20, 11), (0.07, 100, 7), (0.29, 100, 29), (0.01, 3, 1), (1, 5, 5), (0.5, 5, 3)],
)
def test_keep_count_is_decimal(ratio: float, n: int, expected: int):
    assert keep_count(ratio, n) == expected


def test_two_turns_with_ties_by_counting():
    session = LazyTurns(uniform(4), {1: 0.7, 3: 0.7})
    out = session.answer(prompt_of(10), 3)
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
    # The second turn: 10 and 11 were generated and run, 12 is pending, 13 to 16 are its own.
    second = session.answer(prompt_of(4), 2)
    # Step 0: 14 prompt tokens, ceil(9.8) = 10 of them: 16 and nine others. 7 and 8 come back, 13 to 15 wait. Then 7 of
    # these 10; 5 comes back; 7 and 8 wait again. Token 9 is stored everywhere and not attended to.
    # Step 1: 10 of the 14 without the newest, 17: 0 to 9, so 16 is left out. Then 7 of these 10: 6 comes back.
    generated = [10, 11, 12]
    assert second.selected == [
        {1: [*range(9), *generated, 16], 3: [*range(6), *generated, 16]},
        {1: [*range(10), *generated, 17], 3: [*range(7), *generated, 17]},
    ]
    assert second.revived == [{1: [7, 8], 3: [5]}, {1: [], 3: [6]}]
    assert second.computed.tolist() == [[14, 11, 11, 8], [14, 11, 11, 9]]
    assert second.aux == {1: {13, 14, 15}, 3: {7, 8}}
    # Stored: 18 tokens, 15, 15 and 13, with the generated ones; 2 KV heads of width 16, 8 bytes a number.
    assert second.kv_bytes == (18 + 15 + 15 + 13) * 2 * 2 * 16 * 8
    assert second.aux_bytes == 5 * 64 * 8
    assert set(session.counts.values()) == {1}


def test_generated_tokens_are_candidates_with_prune_generated():
    out = lazy_reference(uniform(2), prompt_of(10), {1: 0.7}, 4, prune_generated=True)
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


def answers(session: LazyTurns | ContinuedTurns, turns: list[list[int]] = TURNS) -> list[ReferenceOutput]:
    return [session.answer(turn, STEPS) for turn in turns]


def test_generated_tokens_of_all_turns_are_candidates_with_prune_generated():
    session = LazyTurns(uniform(2), {1: 0.5}, prune_generated=True)
    session.answer(prompt_of(6), 3)  # 6 and 7 are run, 8 is pending
    out = session.answer(prompt_of(2), 2)  # 9 and 10
    # 11 tokens: ceil(5.5) = 6, the newest among them. Then 11 candidates without the newest.
    assert out.selected == [{1: [0, 1, 2, 3, 4, 10]}, {1: [0, 1, 2, 3, 4, 5, 11]}]
    assert out.aux == {1: {8, 9}}  # 5 is stored since turn 1, as the newest then; 6 and 7 as well


def continuation(model: PreTrainedModel, turns: list[list[int]]) -> list[tuple[list[int], list[np.ndarray]]]:
    """transformers' own, over its own cache: tokens and logits of each turn."""
    cache, pending, outputs = None, [], []
    for turn in turns:
        rows, logits = [*pending, *turn], []
        for _ in range(STEPS):
            with torch.no_grad(), casts_in_float64():
                out = model(torch.tensor([rows]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits[0, -1].numpy())
            rows = pending = [int(logits[-1].argmax())]
        outputs.append(([int(row.argmax()) for row in logits], logits))
    return outputs


@pytest.mark.parametrize("variant", VARIANTS)
def test_keeping_everything_equals_transformers_continuation(variant: str):
    model, turns = model_of(variant, 1), [prompt_of(1, 5), *TURNS]
    expected = continuation(model, turns)
    for schedule, prune_generated in (({}, False), ({1: 1.0, 3: 1.0}, False), ({1: 1, 2: 1.0, 3: 1.0, 4: 1.0}, True)):
        outputs = answers(LazyTurns(model, schedule, prune_generated), turns)
        for out, (tokens, logits) in zip(outputs, expected, strict=True):
            assert out.token_ids == tokens
            np.testing.assert_allclose(out.logits, logits, rtol=0, atol=TOLERANCE)
            assert out.aux_bytes == 0
            assert (out.computed == out.computed[0, 0]).all()
            assert out.revived == [{layer: [] for layer in schedule}] * STEPS
        assert outputs[-1].computed[-1].tolist() == [sum(map(len, turns))] * 4


Run = Callable[[PreTrainedModel, Sequence[int]], FieldOutput]

RENUMBERING: dict[str, Run] = {
    "random drop, prompt compression": lambda model, ids: on_the_rest(model, ids, [0, 3, 4, 9, 13], STEPS, True),
    "gemfilter": lambda model, ids: gemfilter(model, ids, 2, 6, steps=STEPS),
    "baseline": lambda model, ids: on_the_rest(model, ids, range(len(ids)), STEPS, renumber=False),
}


@pytest.mark.parametrize("method", RENUMBERING)
@pytest.mark.parametrize("variant", ["qwen3", "mistral, window", *sorted(LENGTH_DEPENDENT)])
def test_continued_turns_after_renumbered_tokens_equal_the_plain_model(variant: str, method: str):
    model = model_of(variant, 1)
    first = RENUMBERING[method](model, TURNS[0])
    [kept] = first.selected.values()
    plain = answers(LazyTurns(model, {}), [[TURNS[0][p] for p in kept], *TURNS[1:]])
    assert first.token_ids == plain[0].token_ids
    for ours, theirs in zip(answers(ContinuedTurns(model, first), TURNS[1:]), plain[1:], strict=True):
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_allclose(ours.logits, theirs.logits, rtol=0, atol=TOLERANCE)
        assert ours.kv_bytes == theirs.kv_bytes
    assert first.decode_from == len(kept)  # and `first` is as it was
    assert len(first.stored[1][0]) == len(kept) + STEPS - 1
