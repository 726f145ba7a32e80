"""Shared by test files: random prompts, the small model in the package, and slow cases."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

VOCABULARY = 97  # of the random models of tests/reference.py


def slow(*cases: Any) -> list[Any]:
    """Cases for `pytest.mark.parametrize`, tuples or single values, which only the slow tests run."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids for the models of `tests.reference`."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def prompt_tensor(length: int) -> torch.Tensor:
    """The same as a tensor, other tokens for each length."""
    return torch.tensor(prompt_of(length, seed=length))


@cache
def tiny() -> tuple[Any, Any]:
    """The model `tiny` in float32 on the CPU, and its tokenizer. Shared: a test leaves it as it was."""
    import lazyllm

    return lazyllm.load_model("tiny", dtype="float32", device="cpu")
