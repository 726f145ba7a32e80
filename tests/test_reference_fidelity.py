"""The slow fidelity reference is right: against numbers by hand, and PyTorch's own divergence on a model's logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.reference import lazy_reference, random_model
from tests.reference_fidelity import (
    baseline_logits,
    compare,
    edit_distance,
    edit_similarity,
    fidelity_reference,
    kl_divergence,
    leading_agreement,
)

PROMPT = np.random.default_rng(0).integers(0, 97, 20).tolist()
ANSWER = [5, 80, 80, 3]


def test_divergence_by_hand():
    baseline, method = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.25, 0.5]) + 7.0  # logits are free up to a constant
    assert kl_divergence(baseline, method) == pytest.approx(0.25 * math.log(2), abs=1e-15)
    assert kl_divergence(method, np.zeros(3)) == pytest.approx(math.log(3) - 1.5 * math.log(2), abs=1e-15)
    assert kl_divergence(np.array([0.0, -math.inf]), np.zeros(2)) == pytest.approx(math.log(2), abs=1e-15)
    assert kl_divergence(baseline.astype(np.float32), baseline.astype(np.float32)) == 0


def test_a_forced_answer_by_hand():
    baseline = [np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])]
    method = [np.log([0.25, 0.25, 0.5]), np.log([0.25, 0.5, 0.25])]
    out = compare(baseline, method, [0, 1])
    assert out.first_kl == pytest.approx(math.log(2) / 4, abs=1e-15)
    assert out.mean_kl == pytest.approx(math.log(2) / 8, abs=1e-15)
    assert out.log_likelihood == pytest.approx(-math.log(2) / 2, abs=1e-15)  # 1/4 instead of 1/2, then the same
    assert not out.top1
    assert compare(baseline, method, [2, 2]).log_likelihood == pytest.approx(math.log(2) / 2, abs=1e-15)
    with pytest.raises(ValueError, match="2 and 2 rows of logits for 3 tokens"):
        compare(baseline, method, [0, 1, 2])


def test_on_a_model_it_is_pytorchs_divergence_of_whole_forward_passes():
    model = random_model("llama", seed=3)

    def pruned(prompt: Sequence[int], answer: Sequence[int]) -> list[np.ndarray]:
        return lazy_reference(model, prompt, {2: 0.3}, len(answer), forced=answer).logits

    out = fidelity_reference(model, PROMPT, ANSWER, pruned)
    with torch.no_grad():
        full = model(torch.tensor([[*PROMPT, *ANSWER[:-1]]])).logits[0, len(PROMPT) - 1 :].log_softmax(-1)
    ours = torch.tensor(np.stack(pruned(PROMPT, ANSWER))).log_softmax(-1)
    divergences = F.kl_div(ours, full, reduction="none", log_target=True).sum(-1)
    assert out.mean_kl == pytest.approx(divergences.mean().item(), abs=1e-9)
    assert out.first_kl == pytest.approx(divergences[0].item(), abs=1e-9)
    assert out.top1 == (ours[0].argmax() == full[0].argmax()).item()
    rows = range(len(ANSWER))
    assert out.log_likelihood == pytest.approx((ours - full)[rows, ANSWER].mean().item(), abs=1e-9)
    assert out.mean_kl > 1e-3
    assert len({round(value, 6) for value in divergences.tolist()}) == len(ANSWER)


def test_keeping_everything_is_no_divergence():
    model = random_model("qwen2", seed=3)
    out = fidelity_reference(model, PROMPT, ANSWER, baseline_logits(model))
    assert (out.first_kl, out.top1, out.mean_kl, out.log_likelihood) == (0, True, 0, 0)


@pytest.mark.parametrize(
    ("left", "right", "distance", "similarity", "leading"),
    [
        ("kitten", "sitting", 3, 4 / 7, 0),
        ("flaw", "lawn", 2, 0.5, 0),
        ("abc", "abcde", 2, 0.6, 3),
        ("abxd", "abyd", 1, 0.75, 2),
        ("same", "same", 0, 1, 4),
        ("", "ab", 2, 0, 0),
        ("", "", 0, 1, 0),
    ],
)
def test_answers_by_hand(left: str, right: str, distance: int, similarity: float, leading: int):
    for a, b in ((left, right), (right, left)):
        ids = [ord(c) for c in a], [ord(c) for c in b]
        assert edit_distance(*ids) == distance
        assert edit_similarity(*ids) == pytest.approx(similarity)
        assert leading_agreement(*ids) == leading
