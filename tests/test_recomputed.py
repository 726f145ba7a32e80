"""LazyLLM's selections with every K and V computed anew: held to a computation by hand."""

import numpy as np
import pytest
import torch

from lazyllm.methods import Baseline, Lazy
from tests.recomputed import force, kl, recompute
from tests.reference import HandModel, forward_reference, lazy_reference, random_model

PROMPT = [5, 17, 3, 80, 41, 9, 22, 64, 31, 7]
ANSWER = [12, 55, 8, 70]
SCHEDULE = {1: 0.6, 3: 0.5}
MODEL = random_model("llama", 2, num_layers=4).double()


def by_hand(text: list[int], selected: dict[int, list[int]]) -> np.ndarray:
    """Logits [v] of the text's last token, if after these layers only these tokens go on."""
    hand, reach = HandModel(MODEL), len(text)
    hidden = {position: hand.embed(token) for position, token in enumerate(text)}
    for layer in range(1, hand.num_layers + 1):
        kv = {p: hand.key_value(layer, hidden[p], p, reach) for p in hidden}
        hidden = {
            p: hand.layer(layer, hidden[p], p, reach, [kv[o] for o in kv if o <= p])[0]
            for p in hidden
        }
        if layer in selected:
            hidden = {p: hidden[p] for p in selected[layer]}
    return hand.logits(hidden[reach - 1])


def test_each_step_is_a_prefill_of_its_own_selection() -> None:
    expected = lazy_reference(MODEL, PROMPT, SCHEDULE, len(ANSWER), forced=ANSWER)
    assert any(any(step.values()) for step in expected.revived)  # else nothing would be reused
    reused, forced = force(MODEL, PROMPT, Lazy(SCHEDULE), ANSWER)
    assert forced.selected == expected.selected
    np.testing.assert_allclose(reused, np.stack(expected.logits), atol=1e-9)
    anew = recompute(MODEL, PROMPT, ANSWER, forced.selected)
    for step, logits in enumerate(anew):
        wanted = by_hand([*PROMPT, *ANSWER[:step]], expected.selected[step])
        np.testing.assert_allclose(logits, wanted, atol=1e-9)
    torch.testing.assert_close(anew[0], reused[0])  # a prefill reuses nothing
    assert kl(anew, reused) > 1e-6


def test_without_pruning_reuse_changes_nothing() -> None:
    reused, _ = force(MODEL, PROMPT, Baseline(), ANSWER)
    whole = forward_reference(MODEL, [*PROMPT, *ANSWER])[len(PROMPT) - 1 : -1]
    np.testing.assert_allclose(reused, whole, atol=1e-9)
    none = [dict[int, list[int]]() for _ in ANSWER]
    assert kl(recompute(MODEL, PROMPT, ANSWER, none), reused) == pytest.approx(0, abs=1e-12)
