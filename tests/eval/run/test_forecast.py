"""The longest prompt that fits: the arithmetic of memory, against a device of a known size."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from eval.run import forecast
from eval.run.cost import memory
from eval.run.forecast import first_example, is_out_of_memory, what_fits
from eval.run.measure import Case
from lazyllm.methods import Baseline, StaticPruning
from lazyllm.models.load import load_weights
from lazyllm.spec import ModelSpec
from tests.eval.run.test_measure import case
from tests.eval.store.made import record, with_turns

SPEC = ModelSpec("tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def model():
    return load_weights(SPEC)


def long_case() -> Case:
    given = replace(case("qasper"), method=StaticPruning(2, 0.3))
    return replace(given, prompt=replace(given.prompt, token_ids=tuple(range(3, 3003))))


@pytest.mark.parametrize("tokens", [100, 1000])
def test_the_longest_prompt_that_a_device_holds(model, monkeypatch, tokens: int) -> None:
    weights = sum(parameter.nbytes for parameter in model.parameters())
    needs = memory(model.config, SPEC, Baseline(), tokens, 40, weights).total * forecast.MARGIN
    monkeypatch.setattr(forecast, "_memory_of", lambda device: int(needs) + 1)
    text = what_fits(model, SPEC, long_case(), paired=True)
    assert text.startswith(f"out of memory at 3000 prompt tokens; prompts of about {tokens} tokens would fit (0.0 GB)")
    assert f"model.max_prompt_tokens={tokens}." in text
    alone = re.search(r"model.max_prompt_tokens=(\d+)", what_fits(model, SPEC, long_case(), paired=False))
    assert alone is not None
    assert int(alone[1]) > tokens  # pruned prompts hold fewer K and V


def test_a_device_that_holds_nothing_or_should_hold_all(model, monkeypatch) -> None:
    monkeypatch.setattr(forecast, "_memory_of", lambda device: 10**6)
    assert "GB with 0.0 GB of weights" in what_fits(model, SPEC, long_case(), paired=True)
    monkeypatch.setattr(forecast, "_memory_of", lambda device: 10**12)
    assert "1000.0 GB should be enough: check whether" in what_fits(model, SPEC, long_case(), paired=True)


def test_what_the_first_example_took_and_the_rest_will_takes_all_turns() -> None:
    rest = [replace(long_case(), prompt=replace(long_case().prompt, token_ids=tuple(range(210))))] * 2
    assert first_example(record(0), rest) == (
        "first example: 100 prompt tokens, 2 new ones, 0.30 s, 0.30 s by the baseline; 2 are left, about 2.52 s"
    )
    # 100 + 2 + 3 tokens; 0.3 s for each of three turns, and of two baselines
    assert first_example(with_turns(), rest) == (
        "first example: 105 prompt tokens in 3 turns, 6 new ones, 0.90 s, 0.60 s by the baseline; 2 are left, about 6 s"
    )


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
