"""All methods on a real GPU, where there is one: answers as on the CPU, waits and attention as
on the virtual card.
"""

import copy
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lazyllm.engine import kernels
from lazyllm.methods import Method
from tests.lazyllm.engine import test_chunks
from tests.lazyllm.engine.test_probe import attention_in_order
from tests.reference import attention_of, random_variant
from tests.test_virtual_card import waits_and_most
from tests.virtual_card import FEW, METHODS, VARIANTS, answers_of, parts_of

if not torch.cuda.is_available():
    pytest.skip("needs a GPU of CUDA", allow_module_level=True)
CUDA: Any = "cuda"
CASES = [
    *((VARIANTS[0], name) for name in METHODS),
    *((variant, name) for variant in VARIANTS[1:] for name in FEW),
]


def parts_on_gpu(model: Any, method: Method) -> dict[str, Any]:
    """Of each part: where the host waits or copies, and operators of attention."""
    found: dict[str, Any] = {}

    @contextmanager
    def noted(part: str) -> Iterator[None]:
        torch.cuda.synchronize()
        with (
            warnings.catch_warnings(record=True) as caught,
            profile(activities=[ProfilerActivity.CPU]) as recorded,
        ):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        lines = [
            f"{warning.filename}:{warning.lineno}"
            for warning in caught
            if "called a synchronizing" in str(warning.message)
        ]
        events = {event.key: event.count for event in recorded.key_averages()}
        found[part] = {
            # transformers' own code of a RoPE that depends on the length reads it from the device
            "waits": Counter(line for line in lines if "modeling_rope_utils" not in line),
            "attention": {
                key: number for key, number in events.items() if "scaled_dot_product" in key
            },
        }

    parts_of(noted, model, method)
    return found


@pytest.mark.parametrize(("variant", "name"), CASES)
def test_answers_are_those_of_the_cpu(variant: str, name: str) -> None:
    on_cpu: Any = random_variant(variant, 3, attention_of(variant), torch.float64, hidden_size=64)
    on_gpu = copy.deepcopy(on_cpu).to(CUDA)
    pairs = zip(answers_of(on_gpu, METHODS[name]), answers_of(on_cpu, METHODS[name]), strict=True)
    for number, (answer, reference) in enumerate(pairs):
        error = (answer.first_logits.cpu() - reference.first_logits).abs().max().item()
        for field in ("token_ids", "selected", "kv_bytes", "aux_bytes"):
            assert getattr(answer, field) == getattr(reference, field), (
                f"answer {number}: {field} differs"
            )
        assert (answer.computed == reference.computed).all(), f"answer {number}: computed differs"
        assert error < 1e-4  # transformers rounds to float32 in places; logits are about 10


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("variant", "name"), CASES)
def test_waits_and_kernels_are_those_of_the_virtual_card(
    variant: str, name: str, dtype: str
) -> None:
    method = METHODS[name]
    model = random_variant(
        variant, 3, attention_of(variant), getattr(torch, dtype), hidden_size=64
    ).to(CUDA)
    found = parts_on_gpu(model, method)
    for waits, most in waits_and_most(name, found):
        assert waits <= most, found
    for label, part in found.items():
        calls = " ".join(part["attention"])
        assert "math" not in calls, part
        assert label in ("start", "prefill") or "cudnn" not in calls, part


TOLERANCES = {"bfloat16": 3e-2, "float16": 4e-3, "float32": 1e-5, "float64": 1e-12}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", [1, 20, 2**22])  # pairs of a block
def test_queries_attend_to_the_first_tokens_in_order(dtype: str, size: int, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "SPLIT", size)
    splits = dtype.endswith("float16")
    found, expected = attention_in_order(
        size, splits=splits, dtype=getattr(torch, dtype), device=CUDA
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", test_chunks.SHAPES)
@pytest.mark.parametrize("by_head", [False, True])
def test_chunks_are_attention_to_all_keys(shape: Any, dtype: torch.dtype, by_head: bool) -> None:
    query, key, value, visible = test_chunks.drawn(shape, dtype, by_head)
    expected = test_chunks.attention(query, key, value, visible)
    mask = kernels.chunked_mask(visible.to(CUDA), query.shape[1] // key.shape[1], dtype, shape[-1])
    found = kernels.attend_in_chunks(
        query.to(CUDA), key.to(CUDA), value.to(CUDA), mask, test_chunks.SCALING
    )
    torch.testing.assert_close(
        found.double().cpu(), expected, rtol=0, atol=test_chunks.TOLERANCES[dtype]
    )


@pytest.mark.parametrize("name", [name for name in METHODS if name.startswith("lazy")])
def test_answers_in_chunks_are_those_of_the_cpu(name: str, monkeypatch) -> None:
    """In float32: the kernel for masks takes no float64, and 16 bits may choose other tokens."""
    monkeypatch.setattr(kernels, "CHUNK_KEYS", 4)
    monkeypatch.setattr(
        "lazyllm.engine.attention.gives_lse", lambda model, query, value: query.shape[-1] % 8 == 0
    )
    on_cpu: Any = random_variant(VARIANTS[0], 3, "sdpa", torch.float32, hidden_size=64)
    on_gpu = copy.deepcopy(on_cpu).to(CUDA)
    for answer, reference in zip(
        answers_of(on_gpu, METHODS[name]), answers_of(on_cpu, METHODS[name]), strict=True
    ):
        assert (answer.token_ids, answer.selected) == (reference.token_ids, reference.selected)
        assert (answer.first_logits.cpu() - reference.first_logits).abs().max() < 1e-4


@pytest.mark.parametrize("name", [name for name in METHODS if name.startswith("lazy")])
def test_answers_that_sort_tokens_are_those_of_the_cpu(name: str, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "SORTED", 0)
    test_answers_are_those_of_the_cpu(VARIANTS[0], name)


def test_the_process_attends_as_if_nothing_had_run() -> None:
    """torch chooses its order of backends in a process's first attention."""
    attend = """
import torch
x = torch.zeros(1, 1, 1, 8, device="cuda")
torch.nn.functional.scaled_dot_product_attention(x, x, x)
print(torch._C._get_sdp_priority_order())
"""
    generate = """
import lazyllm
model, _ = lazyllm.load_model("tiny", dtype="bfloat16", device="cuda")
lazyllm.generate(model, [5] * 40, lazyllm.methods.Baseline(), 3)
"""
    orders = []
    for code in (attend, generate + attend):
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        orders.append(ran.stdout.splitlines()[-1])
    assert orders[0] == orders[1]
