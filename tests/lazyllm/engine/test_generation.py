"""Arguments, end tokens, clocks and refusals of `lazyllm.generate`."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import lazyllm
from lazyllm.engine.generation import Generation, Greedy, answer
from lazyllm.errors import UserError
from lazyllm.methods import Baseline, Lazy
from tests.reference import random_model, random_variant

MODEL = random_model("llama", 2, num_layers=4)
PROMPT = [5, 17, 3, 80, 41, 9]


def test_clocks_and_counts() -> None:
    out = lazyllm.generate(MODEL, PROMPT, Lazy({1: 0.5}), 5, ())
    assert len(out.token_ids) == 5
    assert len(out.decode_step_s) == 4
    assert out.total_s == pytest.approx(out.ttft_s + sum(out.decode_step_s), rel=1e-9)
    assert out.computed.shape == (5, 4)
    assert len(out.selected) == 5
    assert out.first_logits.shape == (MODEL.config.vocab_size,)
    assert out.token_ids[0] == int(out.first_logits.argmax())
    assert out.pct_prompt_tokens_computed == pytest.approx(100 * out.computed[-1].sum() / (4 * 6))
    out.scoring_tokens = 9
    assert out.pct_prompt_tokens_computed == pytest.approx(100 * (out.computed[-1].sum() / 4 + 9) / 6)


@pytest.mark.parametrize("method", [Baseline(), Lazy({1: 0.5, 2: 0.5})], ids=["baseline", "lazy"])
def test_end_tokens(method) -> None:
    free = lazyllm.generate(MODEL, PROMPT, method, 8, ()).token_ids
    first, third = free[0], free[2]
    ended = lazyllm.generate(MODEL, PROMPT, method, 8, (first,))
    assert (ended.token_ids, ended.decode_step_s) == ([first], [])
    assert ended.total_s == ended.ttft_s
    stop = free.index(third) + 1
    for ids in ((96, third), torch.tensor([96, third])):
        assert lazyllm.generate(MODEL, PROMPT, method, 8, ids).token_ids == free[:stop]  # type: ignore[arg-type]
    # as transformers' min_new_tokens: the end token is not chosen before, whatever its logit
    held = lazyllm.generate(MODEL, PROMPT, method, 8, (first,), min_new_tokens=1)
    logits = held.first_logits.clone()
    logits[first] = float("-inf")
    assert held.token_ids[0] == int(logits.argmax())
    for no_token in (-1, MODEL.config.vocab_size):  # configs may name them
        assert lazyllm.generate(MODEL, PROMPT, method, 8, (no_token,), min_new_tokens=8).token_ids == free


@pytest.mark.parametrize("end", [7, [7, 9]])
def test_end_tokens_of_the_model_are_the_default(end) -> None:
    free = lazyllm.generate(MODEL, PROMPT, Baseline(), 6, ()).token_ids
    model = random_model("llama", 2, num_layers=4)
    model.generation_config.eos_token_id = free[1] if end == 7 else [95, free[1]]
    assert lazyllm.generate(model, PROMPT, Baseline(), 6).token_ids == free[: free.index(free[1]) + 1]


def test_prompts_in_every_form() -> None:
    expected = lazyllm.generate(MODEL, PROMPT, Baseline(), 3, ()).token_ids
    for prompt in (tuple(PROMPT), torch.tensor(PROMPT), torch.tensor([PROMPT])):
        assert lazyllm.generate(MODEL, prompt, Baseline(), 3, ()).token_ids == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "no tokens: give at least one"),
        (torch.zeros(2, 3, dtype=torch.long), "Of several prompts, give a list"),
        ([1, 97], "the model knows 0 to 96"),
        ([-1], "the model knows 0 to 96"),
        ([0.5], "one prompt"),
        ("a text", r"a text: give token ids, for example tokenizer\(text\)"),
        ({"input_ids": PROMPT}, "a tokenizer's whole output: give token ids"),
        (None, "input_ids are no token ids"),
        ([[1, 2], [3]], "input_ids are no token ids"),
    ],
)
def test_generate_refuses_bad_prompts(prompt, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lazyllm.generate(MODEL, prompt, Baseline(), 3, ())


def test_generate_refuses_bad_settings() -> None:
    for bad in (0, 2.0, True, "3", None):
        with pytest.raises(ValueError, match=f"max_new_tokens={bad!r}: give 1 or more, a whole number"):
            lazyllm.generate(MODEL, PROMPT, Baseline(), bad, ())
    for ids in ("45", 45, [4.5]):
        with pytest.raises(ValueError, match=r"eos_token_ids=.* give a list of token ids"):
            lazyllm.generate(MODEL, PROMPT, Baseline(), 3, ids)
    with pytest.raises(ValueError, match="only 4 layers"):
        lazyllm.generate(MODEL, PROMPT, Lazy({5: 0.5}), 3, ())
    model: Any = random_model("llama", 2, num_layers=2)
    model.model.layers[1].train()
    with pytest.raises(UserError, match="training mode"):
        lazyllm.generate(model, PROMPT, Baseline(), 3, ())


def test_second_generation_is_refused_while_one_runs() -> None:
    method = Lazy({1: 0.5})
    expected = lazyllm.generate(MODEL, PROMPT, method, 3, ()).token_ids

    class AnsweringTwice(Greedy):
        def read(self, sampled: list[float]) -> tuple[int, bool]:
            answer_twice()
            return super().read(sampled)

    def answer_twice() -> None:
        for run in (map, ThreadPoolExecutor().map):  # in the same thread, and in another one
            with pytest.raises(UserError, match="generating already"):
                list(run(lazyllm.generate, [MODEL], [PROMPT], [method]))

    generation = Generation(MODEL, PROMPT, method, 3, AnsweringTwice())
    assert answer(MODEL, generation).token_ids == expected
    assert MODEL.config._attn_implementation == "sdpa"
    assert lazyllm.generate(MODEL, PROMPT, method, 3, ()).token_ids == expected


def test_text_beyond_the_models_positions_is_refused() -> None:
    model = random_variant("llama", 3, max_position_embeddings=32)
    assert len(lazyllm.generate(model, range(20), Baseline(), 13, ()).token_ids) == 13  # the last one has no position
    with pytest.raises(UserError, match="would have 34 tokens, but the model has 32 positions: give fewer tokens"):
        lazyllm.generate(model, range(20), Baseline(), 14, ())
    with pytest.raises(UserError, match="would have 38 tokens"):
        lazyllm.generate(model, range(36), Baseline(), 2, ())
    with pytest.raises(UserError, match="would have 34 tokens"), lazyllm.using(model, Baseline()):
        model.generate(torch.tensor([[*range(20)]]), max_new_tokens=14)  # type: ignore[operator]
    growing = random_variant("llama, dynamic NTK", 3)
    assert len(lazyllm.generate(growing, range(20), Baseline(), 13, ()).token_ids) == 13


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = random_model("llama", 2, num_layers=2)
    for message in ("the model's own logits", "^the model's logits"):  # at the check of the model, and after it
        model.lm_head.weight.data[3] = float("nan")
        with pytest.raises(FloatingPointError, match=message):
            lazyllm.generate(model, PROMPT, Baseline(), 3, ())
        model.lm_head.weight.data[3] = 0.0
        lazyllm.generate(model, PROMPT, Baseline(), 3, ())


@pytest.mark.parametrize("method", ["lazy", None, Lazy])
def test_generate_refuses_other_objects_as_methods(method: Any) -> None:
    with pytest.raises(TypeError, match=r"lazyllm\.methods\.Lazy"):
        lazyllm.generate(MODEL, PROMPT, method)
