"""The fast path against the slow reference of `tests/reference.py`, in float64, on random shapes
and schedules.
"""

import random

import pytest
import torch

import lazyllm
from lazyllm.engine import kernels
from lazyllm.methods import Baseline, Lazy
from tests.helpers import VOCABULARY, slow
from tests.lazyllm.engine.architecture_matrix import assert_same, drawn
from tests.reference import ARCHITECTURES, lazy_reference, random_model


def check(
    model, prompt: list[int], schedule: dict[int, float], steps: int, prune_generated: bool
) -> None:
    expected = lazy_reference(model, prompt, schedule, steps, (), prune_generated)
    assert max(expected.compute_counts.values()) == 1
    assert_same(model, prompt, Lazy(schedule, prune_generated), steps, expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("seed", [*range(3), *slow(*range(3, 12))])
@pytest.mark.parametrize("copies", [frozenset(), frozenset({"cpu"})], ids=["masked", "copied"])
def test_random_shapes_and_schedules(
    architecture: str, seed: int, copies: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """copies: devices on which one query attends to a copy of its tokens; as on a GPU, here too."""
    monkeypatch.setattr(kernels, "COPIES", copies)
    rng = random.Random(f"{architecture} {seed}")
    model, schedule = drawn(architecture, seed, rng, monkeypatch)
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 3, 9, 17, 30]))]
    check(model, prompt, schedule, steps=rng.randint(1, 9), prune_generated=rng.random() < 0.4)


@pytest.mark.parametrize("prompt_tokens", [1, 3, 12])
@pytest.mark.parametrize(
    ("where", "ratio"), [("first", 0.01), ("every", 0.01), ("every", 0.5), ("last", 0.5)]
)
def test_edges(prompt_tokens: int, where: str, ratio: float) -> None:
    layers = 4
    model = random_model("llama", 7, num_layers=layers)
    schedule = {
        "first": {1: ratio},
        "every": dict.fromkeys(range(1, layers + 1), ratio),
        "last": {layers: ratio},
    }
    prompt = random.Random(prompt_tokens).choices(range(VOCABULARY), k=prompt_tokens)
    check(model, prompt, schedule[where], steps=5, prune_generated=False)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("prompt_tokens", [1, 40])
def test_keeping_everything_is_the_model_itself(architecture, attention, prompt_tokens) -> None:
    model = random_model(architecture, 3, num_layers=4)
    model.set_attn_implementation(attention)
    prompt = torch.randint(
        0, VOCABULARY, (1, prompt_tokens), generator=torch.Generator().manual_seed(prompt_tokens)
    )
    with torch.inference_mode():
        expected = model.generate(
            prompt, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        first_logits = model(prompt, logits_to_keep=1).logits[0, -1]
    for method in (Lazy({1: 1.0, 2: 1.0, 4: 1.0}), Lazy({}), Baseline()):
        found = lazyllm.generate(model, prompt, method, 10, eos_token_ids=())
        assert found.token_ids == expected.sequences[0, prompt_tokens:].tolist()
        assert torch.equal(found.first_logits, first_logits)
        # which generate() gives in float32
        assert torch.equal(found.first_logits.float(), expected.logits[0][0])
        assert found.pct_prompt_tokens_computed == 100


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tied_scores_go_to_the_lower_position(architecture: str) -> None:
    model = random_model(architecture, 1, num_layers=3)
    for layer in model.model.layers:  # no queries: every token gets the same attention
        layer.self_attn.q_proj.weight.data.zero_()
        if layer.self_attn.q_proj.bias is not None:
            layer.self_attn.q_proj.bias.data.zero_()
    found = lazyllm.generate(model, list(range(10)), Lazy({1: 0.5, 2: 0.4}), 3, eos_token_ids=())
    # prefill: 5 of 10, the last token among them, then 2 of 5; decoding: 5 of 10 prompt tokens, 2
    # of 5, and the newest
    assert found.selected[0] == {1: [0, 1, 2, 3, 9], 2: [0, 9]}
    assert found.selected[1] == {1: [0, 1, 2, 3, 4, 10], 2: [0, 1, 10]}
    assert found.selected[2] == {1: [0, 1, 2, 3, 4, 10, 11], 2: [0, 1, 10, 11]}
