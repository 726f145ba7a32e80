"""Shared by test files: random prompts, the small model in the package, slow cases, and waits
for the device.
"""

import json
from collections.abc import Sequence
from doctest import DocTestParser
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from lazyllm.models.dtype import gain_file

VOCABULARY = 97  # of the random models of tests/reference.py
TOLERANCE = 1e-9  # of their logits in float64


def slow(*cases: Any) -> list[Any]:
    """Cases for `pytest.mark.parametrize`, tuples or single values, which only the slow tests
    run.
    """
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def keep_gain(gain: float) -> None:
    """Leave the file that an earlier measurement on this machine would have left.

    gain: how many times as fast as in float32 a product is in bfloat16.
    """
    gain_file().parent.mkdir(parents=True, exist_ok=True)
    gain_file().write_text(json.dumps({"times as fast in bfloat16": gain}))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids for the models of `tests.reference`."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def prompt_tensor(length: int) -> torch.Tensor:
    """The same as a tensor, other tokens for each length."""
    return torch.tensor(prompt_of(length, seed=length))


@cache
def tiny() -> tuple[Any, Any]:
    """The model `tiny` in float32 on the CPU, and its tokenizer. Shared: a test leaves it as it
    was.
    """
    import lazyllm

    return lazyllm.load_model("tiny", dtype="float32", device="cpu")


def byte_tokenizer(merges: Sequence[tuple[str, str]] = (), end: str | None = None) -> Any:
    """A tokenizer with a token for each byte and each merge, and one that begins and ends a
    text, if named.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *map("".join, merges),
        *([end] if end else []),
    ]
    backend: Any = Tokenizer(
        models.BPE({name: number for number, name in enumerate(names)}, [*merges])
    )
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=end, eos_token=end)


def example_source(base: type) -> str:
    """The imports and the class in the docstring of `Prune` or `Select`."""
    lines = [part.source for part in DocTestParser().get_examples(base.__doc__ or "")]
    return "".join(
        lines[: next(number for number, line in enumerate(lines) if "load_model" in line)]
    )


def example_of(base: type) -> Any:
    """That class, made anew."""
    names: dict[str, Any] = {"__name__": __name__}
    exec(example_source(base), names)
    return list(names.values())[-1]


class Waits(TorchFunctionMode):
    """Context manager; `found` lists calls that read values from the device, or whose shapes depend
    on values.

    On a GPU the host waits at such a call until the device has computed its arguments.
    """

    CALLS = frozenset(
        {
            "tolist",
            "item",
            "cpu",
            "numpy",
            "nonzero",
            "masked_select",
            "unique",
            "argwhere",
            "repeat_interleave",
        }
        | {
            "equal",
            "allclose",
            "is_nonzero",
            "__bool__",
            "__int__",
            "__float__",
            "__index__",
            "__contains__",
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, keys = func.__name__, ()
        if name in ("__getitem__", "__setitem__"):
            keys = args[1] if isinstance(args[1], tuple | list) else (args[1],)
        if name in self.CALLS or any(
            torch.is_tensor(key) and key.dtype == torch.bool for key in keys
        ):
            self.found.append(name)
        return func(*args, **(kwargs or {}))
