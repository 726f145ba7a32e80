"""Batched generations against the same alone, and against the slow reference of `tests/reference.py`, in float64."""

import random
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import lazyllm
from lazyllm.engine import kernels
from lazyllm.engine.checks import check_same_as_model
from lazyllm.engine.decoder import open_decoder
from lazyllm.engine.generation import Batch, Generation, Greedy, answer, answer_many, step
from lazyllm.errors import UserError
from lazyllm.methods import Baseline, Lazy, Method
from tests.helpers import TOLERANCE, Waits, prompt_of, prompt_tensor
from tests.lazyllm.engine.architecture_matrix import Recording, flash_stand_in, is_offered
from tests.lazyllm.engine.test_counts import Held, Seen, small_llama
from tests.lazyllm.methods.method_matrix import ROWS
from tests.reference import VARIANTS, casts_in_float64, lazy_reference, random_model, random_variant


def drawn(model: Any, draw: random.Random, count: int, methods: list[Method]) -> list[Generation]:
    """Prompts of mixed lengths, with answers of mixed lengths: 1 to 9 tokens, or up to an end token."""
    return [
        Generation(
            model,
            prompt_of(draw.choice([1, 2, 5, 17, 30, 41]), draw.randrange(99)),
            draw.choice(methods),
            draw.randint(1, 9),
            Recording(draw.sample(range(97), 20)),
        )
        for _ in range(count)
    ]


def check(model: Any, generations: list[Generation], batch_size: int) -> None:
    """Assert that each gives in a batch what it gives alone."""
    assert sorted(index for index, _ in answer_many(model, generations, batch_size)) == [*range(len(generations))]
    for batched in generations:
        sampler = batched.sampler
        assert isinstance(sampler, Recording)
        again = Recording(sampler._end_ids)
        alone = answer(model, Generation(model, batched.prompt, batched.method, batched.max_new_tokens, again))
        assert (batched.token_ids, batched.selected) == (alone.token_ids, alone.selected)
        assert batched.computed.tolist() == alone.computed.tolist()
        assert batched.revived.tolist() == alone.revived.tolist()
        assert (batched.kv_bytes, batched.aux_bytes) == (alone.kv_bytes, alone.aux_bytes)
        assert (batched.prompt_tokens, batched.scoring_tokens) == (alone.prompt_tokens, alone.scoring_tokens)
        assert len(batched.decode_step_s) == len(batched.token_ids) - 1
        assert torch.equal(batched.first_logits, alone.first_logits)
        for ours, theirs in zip(sampler.logits, again.logits, strict=True):
            assert np.abs(ours - theirs).max() < TOLERANCE


@pytest.mark.parametrize("name", ROWS)
def test_a_generation_in_a_batch_is_the_one_alone(name: str) -> None:
    draw, model = random.Random(name), random_model("llama", 5, num_layers=4)
    check(model, drawn(model, draw, 4, [ROWS[name].pruning]), batch_size=draw.randint(2, 3))


@pytest.mark.parametrize("seed", range(4))
def test_different_methods_share_a_batch(seed: int) -> None:
    """Their groups of layers end at different layers."""
    draw, model = random.Random(seed), random_model("qwen3", seed, num_layers=4)
    check(model, drawn(model, draw, 9, [row.pruning for row in ROWS.values()]), batch_size=draw.randint(2, 9))


QUICK = {
    ("mistral, window", "sdpa"),
    ("gemma2", "eager"),
    ("llama, dynamic NTK", "sdpa"),
    ("gemma3", "flash_attention_2"),
}


@pytest.mark.parametrize(
    ("architecture", "attention"),
    [
        pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow)
        for cell in product(VARIANTS, ("sdpa", "eager", "flash_attention_2"))
        if is_offered(*cell)
    ],
)
def test_a_batch_on_every_architecture(architecture: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, softcaps, RoPEs that grow with the text."""
    draw = random.Random(architecture)
    monkeypatch.setattr(kernels, "SORTED_ON_CPU", draw.choice([0, 96]))
    with casts_in_float64(), flash_stand_in():
        model = random_variant(architecture, 3, "eager" if attention == "flash_attention_2" else attention)
        check_same_as_model(model)  # by its own attention: the stand-in is for ours
        model.config._attn_implementation = attention
        check(model, drawn(model, draw, 5, [Baseline(), Lazy({1: 0.6, 3: 0.5})]), batch_size=3)


@pytest.mark.parametrize("seed", range(6))
def test_batched_lazyllm_against_the_slow_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(kernels, "SORTED_ON_CPU", draw.choice([0, 4]))
    model, rows = random_model("mistral", seed, num_layers=5), draw.randint(2, 9)
    schedule = {layer: draw.choice([0.1, 0.4, 0.7, 1.0]) for layer in sorted(draw.sample(range(1, 6), 3))}
    prune_generated, steps = draw.random() < 0.4, draw.randint(2, 7)
    prompts = [prompt_of(draw.choice([1, 3, 9, 23]), draw.randrange(99)) for _ in range(rows)]
    method = Lazy(schedule, prune_generated)
    for index, found in lazyllm.generate_many(model, prompts, method, steps, (), batch_size=rows):
        expected = lazy_reference(model, prompts[index], schedule, steps, (), prune_generated)
        assert (found.token_ids, found.selected) == (expected.token_ids, expected.selected)
        assert found.computed.tolist() == np.array(expected.computed).tolist()
        assert np.abs(found.first_logits.numpy() - expected.logits[0]).max() < TOLERANCE


def batch_of(model: Any, method: Method, lengths: list[int], steps: int) -> Batch:
    """A batch after its prefills, whose answers all end after `steps` more tokens."""
    batch = Batch(model, len(lengths))
    for length in lengths:
        batch.add(Generation(model, prompt_tensor(length), method, steps + 1, Greedy()))
    return batch


@pytest.mark.parametrize("method", [Baseline(), Lazy({2: 0.3, 5: 0.5})], ids=str)
def test_work_and_waits_of_a_step_do_not_grow_with_the_rows(method: Method) -> None:
    model, products, waits = small_llama(), {}, {}
    for rows in (1, 2, 7):
        batch = batch_of(model, method, [50 + 7 * row for row in range(rows)], 2)
        with torch.inference_mode(), open_decoder(model, batch._decoder), Seen() as seen, Waits() as found:
            step(batch.running)
        products[rows], waits[rows] = seen.names["linear"], found.found
        assert seen.names["embedding"] == seen.names["cos"] == 1
    assert {*products.values()} == {7 * len(model.model.layers) + 1}  # q, k, v, o, gate, up, down; the head
    assert waits[2] == waits[7] == ["tolist"] * (3 if isinstance(method, Lazy) else 1)  # two boundaries, and the choice
    assert waits[1] == ["nonzero"] * (len(waits[2]) - 1) + ["tolist"]


@pytest.mark.parametrize("method", [Baseline(), Lazy({2: 0.3, 5: 0.5})], ids=str)
def test_memory_of_a_batch_is_that_of_its_rows(method: Method) -> None:
    """One long prompt and many short ones: no tensor is as wide as all rows would be if padded."""
    model, lengths, steps = small_llama(dtype=torch.float32), [200] + [10] * 6, 2
    with Held() as alone:
        lazyllm.generate(model, prompt_tensor(200), method, steps + 1, ())
    batch = batch_of(model, method, lengths, steps)
    stored = sum(answer.session.kv_bytes + answer.session.aux_bytes for answer in batch.running)
    with Held() as batched, Seen() as seen:
        batch.run()
    assert seen.largest < alone.peak
    assert batched.peak < stored + alone.peak


def test_generate_many_leaves_the_model_as_it_was_between_results() -> None:
    model, prompts = random_model("llama", 5, num_layers=4), [prompt_of(length) for length in (5, 30, 9)]
    expected = [lazyllm.generate(model, prompt, Baseline(), 4, ()).token_ids for prompt in prompts]
    for index, found in lazyllm.generate_many(model, prompts, Baseline(), 4, (), batch_size=2):
        assert model.config._attn_implementation == "sdpa"
        again = lazyllm.generate(model, prompts[index], Baseline(), 4, ())
        assert found.token_ids == again.token_ids == expected[index]


def test_generate_many_admits_the_longest_prompt_first() -> None:
    model, prompts = random_model("llama", 5, num_layers=4), [prompt_of(length) for length in (5, 30, 9, 40)]
    many = lazyllm.generate_many(model, prompts, Baseline(), 3, (), batch_size=2)
    assert [index for index, _ in many] == [3, 1, 2, 0]


class Unbatchable(Baseline):
    can_batch = False
    label = "unbatchable"


@pytest.mark.parametrize(
    ("prompts", "method", "options", "error"),
    [
        ([[1]], Baseline(), {"batch_size": 0}, ValueError),
        ([[1]], Baseline(), {"batch_size": True}, ValueError),
        ([[1]], Baseline(), {"max_new_tokens": 0}, ValueError),
        ([[1]], "lazy", {}, TypeError),
        ([[1], [2] * 5000], Baseline(), {}, UserError),
    ],
    ids=str,
)
def test_generate_many_refuses(prompts: Any, method: Any, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):  # before anything runs
        lazyllm.generate_many(random_model("llama", 5, num_layers=4), prompts, method, **options)


def test_a_method_that_cannot_be_batched_says_so() -> None:
    model = random_model("llama", 5, num_layers=4)
    with pytest.raises(UserError, match="batch_size=1"):
        list(lazyllm.generate_many(model, [[1]], Unbatchable()))
    assert len(list(lazyllm.generate_many(model, [[1], [2]], Unbatchable(), batch_size=1))) == 2
