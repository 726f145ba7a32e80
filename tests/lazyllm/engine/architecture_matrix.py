"""Architecture x method x (dtype, attention implementation): cells in which all pairs meet, and
a cell's checks.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lazyllm
from lazyllm.engine import kernels
from lazyllm.engine.checks import check_same_as_model
from lazyllm.engine.depth import Depth
from lazyllm.engine.generation import Generation, Greedy, answer
from lazyllm.methods import Method
from tests.helpers import TOLERANCE
from tests.lazyllm.methods.method_matrix import KEEPING, LISTED, ROWS
from tests.reference import (
    VARIANTS,
    ReferenceOutput,
    attention_of,
    casts_in_float64,
    random_model,
    random_variant,
)

# (dtype, attention implementation); FlashAttention supports half precision only
COLUMNS = [
    *(
        (dtype, attention)
        for dtype in ("float64", "float32", "bfloat16", "float16")
        for attention in ("sdpa", "eager")
    ),
    ("bfloat16", "flash_attention_2"),
    ("float16", "flash_attention_2"),
]
# Longer than any window; the dynamic NTK's length is crossed in decoding, and the LongRoPE's before
PROMPT = np.random.default_rng(0).integers(0, 97, 18).tolist()
STEPS = 5


@dataclass(frozen=True)
class Cell:
    """One combination."""

    architecture: str
    method: str
    dtype: str
    attention: str

    def __str__(self) -> str:
        return "; ".join([self.architecture, self.method, self.dtype, self.attention])


def cells() -> Iterator[Cell]:
    """Each architecture with each method in float64, and in another column; those take turns, so
    each meets all.
    """
    for row, architecture in enumerate(VARIANTS):
        exact = ("float64", attention_of(architecture))
        others = [
            column for column in COLUMNS if column != exact and is_offered(architecture, column[1])
        ]
        for number, method in enumerate(LISTED):
            for column in (exact, others[(row + number) % len(others)]):
                yield Cell(architecture, method, *column)


def is_offered(architecture: str, attention: str) -> bool:
    """transformers refuses to build a model whose attention is capped with SDPA, which could not
    cap it.
    """
    return not (attention == "sdpa" and architecture == "gemma2")


def check(cell: Cell) -> None:
    """Raise AssertionError if the cell does not behave as docs/architectures.md says."""
    with _opened(cell) as model:
        pruning = ROWS[cell.method].pruning
        expected_tokens, expected_logits = _by_transformers(
            cell.architecture, cell.dtype, cell.attention
        )
        found = lazyllm.generate(model, PROMPT, KEEPING[cell.method], STEPS, ())
        if rows_round_alike(getattr(torch, cell.dtype)):
            assert torch.equal(found.first_logits, expected_logits), (
                "first logits with everything kept"
            )
        else:
            torch.testing.assert_close(found.first_logits, expected_logits, rtol=0.01, atol=0.001)
        if (
            cell.dtype in ("float64", "float32")
            or cell.attention != "sdpa"
            or grouped_heads_round_as_others()
        ):
            assert found.token_ids == expected_tokens, "tokens with everything kept"
        assert found.pct_prompt_tokens_computed == 100

        found, logits = answer_of(model, pruning, PROMPT, STEPS)
        declared = pruning.tokens_per_layer(Depth.of(model.config), len(PROMPT))
        assert pruning.adaptive or found.computed[0].tolist() == declared
        assert found.first_logits.isfinite().all()
        assert found.first_logits.dtype == getattr(torch, cell.dtype)
        if cell.dtype not in ("float64", "float32"):
            return
        expected = by_reference(cell.architecture, cell.dtype, cell.method)
        tolerance = TOLERANCE
        if cell.dtype == "float32":
            if expected.margin < 1e-5:
                return  # rounding may select other tokens
            tolerance = 1e-3
        assert expected.margin > TOLERANCE, "something is decided by rounding"
        assert found.token_ids == expected.token_ids
        for ours, theirs in zip(found.selected, expected.selected, strict=False):
            assert ours == theirs
        for ours, theirs in zip(logits, expected.logits, strict=True):
            assert np.abs(ours - theirs).max() < tolerance


@lru_cache
def rows_round_alike(dtype: torch.dtype) -> bool:
    """Whether one row's product has the same bits on this CPU whatever the stride of its rows.

    transformers takes the last row of many to the head, we run it alone. Processors with
    instructions for float16 take other kernels for these.
    """
    rows = torch.randn(1, 18, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.randn(10_000, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = torch.empty(1, 1, 64, dtype=dtype).copy_(rows[:, -1:])
    return torch.equal(F.linear(rows[:, -1:], weight), F.linear(alone, weight))


@lru_cache
def grouped_heads_round_as_others() -> bool:
    """Whether SDPA on this CPU gives a step's 16-bit bits by one kernel, with `enable_gqa` and
    without.

    torch 2.7 takes its unfused kernel with `enable_gqa`, which transformers sets. Our steps put a
    group's queries side by side instead.
    """
    random = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 1, 16, generator=random).bfloat16()
    key, value = torch.randn(2, 1, 2, 40, 16, generator=random).bfloat16()
    grouped = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    folded = F.scaled_dot_product_attention(query.view(1, 2, 2, 16), key, value)
    return torch.equal(grouped, folded.view_as(query))


class Recording(Greedy):
    """Keeps the logits of each step, in float64."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.logits: list[np.ndarray] = []

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        self.logits.append(logits.double().numpy().copy())
        return super().sample(logits)


def answer_of(
    model: PreTrainedModel, method: Method, prompt: Sequence[int], steps: int
) -> tuple[lazyllm.Generation, list[np.ndarray]]:
    """The generation of a prompt alone, and the logits of each of its steps."""
    watched = Recording()
    return answer(model, Generation(model, prompt, method, steps, watched)), watched.logits


def assert_same(
    model: PreTrainedModel,
    prompt: Sequence[int],
    method: Method,
    steps: int,
    expected: ReferenceOutput,
) -> lazyllm.Generation:
    """Answer, and raise AssertionError if the answer, its counts or the bytes held are not those
    of a reference.
    """
    found, logits = answer_of(model, method, prompt, steps)
    assert expected.margin > TOLERANCE, "something is decided by rounding"
    assert found.token_ids == expected.token_ids
    assert found.selected == expected.selected
    assert found.computed.tolist() == expected.computed.tolist()
    for ours, theirs in zip(logits, expected.logits, strict=True):
        assert np.abs(ours - theirs).max() < TOLERANCE
    assert (found.kv_bytes, found.aux_bytes) == (expected.kv_bytes, expected.aux_bytes)
    return found


@lru_cache(maxsize=4)
def by_reference(architecture: str, dtype: str, method: str) -> ReferenceOutput:
    """The float64 reference's result for the method's pruning parameters."""
    reference = ROWS[method].reference
    assert reference is not None
    return reference(_model(architecture, dtype, "eager"), PROMPT, STEPS)


@lru_cache(maxsize=len(COLUMNS))
def _model(architecture: str, dtype: str, attention: str) -> PreTrainedModel:
    # which is not installed: see `flash_stand_in`
    initial = "eager" if attention == "flash_attention_2" else attention
    model = random_variant(architecture, 3, initial, getattr(torch, dtype))
    model.config._attn_implementation = attention
    return model


@contextlib.contextmanager
def _opened(cell: Cell) -> Iterator[PreTrainedModel]:
    """The cell's model, checked as at start-up; if its dtype is float64, it computes in float64
    throughout.
    """
    with contextlib.ExitStack() as stack:
        if cell.dtype == "float64":
            stack.enter_context(casts_in_float64())
        if cell.attention == "flash_attention_2":
            stack.enter_context(flash_stand_in())
        model = _model(cell.architecture, cell.dtype, cell.attention)
        if cell.method == "baseline":
            check_same_as_model(model)
        yield model


@lru_cache(maxsize=len(COLUMNS))
def _by_transformers(
    architecture: str, dtype: str, attention: str
) -> tuple[list[int], torch.Tensor]:
    """Tokens of `model.generate` and the logits of `model(...)` for the first. To be called
    within `_opened`.
    """
    model: Any = _model(architecture, dtype, attention)
    prompt = torch.tensor([PROMPT])
    with torch.inference_mode():
        tokens = model.generate(
            prompt,
            max_new_tokens=STEPS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=True,
        )
        # a second prompt starts afresh, even if the RoPE has grown with the first one
        logits = model(prompt, logits_to_keep=1).logits[0, -1]
    return tokens[0, len(PROMPT) :].tolist(), logits


@contextlib.contextmanager
def flash_stand_in() -> Iterator[None]:
    """In place of FlashAttention 2, which needs a GPU: its conventions, computed by PyTorch.

    Causal over the slots, aligned at the end; `sliding_window` counted in slots; `softcap`; no
    masks.
    """

    def flash(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> Any:
        assert attention_mask is None
        positions = kwargs.get("position_ids", torch.arange(1))
        assert (
            positions.diff() == 1
        ).all()  # transformers treats gaps in positions as packed sequences
        assert module.config._attn_implementation == "flash_attention_2"
        m, s = query.shape[2], key.shape[2]
        age = torch.arange(s - m, s)[:, None] - torch.arange(s)
        window = kwargs.get("sliding_window")
        seen = (age >= 0) & (age < (window or s))
        share = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(share, dim=1), value.repeat_interleave(share, dim=1)
        logits = query.float() @ key.float().transpose(-1, -2) * kwargs["scaling"]
        if kwargs.get("softcap") is not None:
            logits = kwargs["softcap"] * torch.tanh(logits / kwargs["softcap"])
        weights = F.softmax(logits.masked_fill(~seen, float("-inf")), dim=-1)
        return (weights @ value.float()).to(query.dtype).transpose(1, 2).contiguous(), None

    original = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = flash
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
        assert ALL_ATTENTION_FUNCTIONS["flash_attention_2"] is original


def drawn(
    architecture: str, seed: int, rng: random.Random, patch: pytest.MonkeyPatch
) -> tuple[PreTrainedModel, dict[int, float]]:
    """A model of 2 to 6 layers and a schedule; from which number of queries and size of a block
    on routes part.
    """
    patch.setattr(kernels, "SORTED_ON_CPU", rng.choice([0, 4, 96]))
    patch.setattr(kernels, "SPLIT_ON_CPU", rng.choice([1, 100, 2**22]))
    layers = rng.randint(2, 6)
    model = random_model(architecture, seed, num_layers=layers)
    pruning = sorted(rng.sample(range(1, layers + 1), rng.randint(0, layers)))
    return model, {layer: rng.choice([0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]) for layer in pruning}
