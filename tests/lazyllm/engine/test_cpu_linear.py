"""Products of a few rows: the same numbers by another library, and only if they are faster."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import lazyllm
from lazyllm.engine import cpu_linear
from lazyllm.methods import Lazy
from tests.lazyllm.engine.test_counts import Seen
from tests.reference import random_model

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize(("m", "bias"), [(2, False), (31, True)])
def test_products_of_a_few_rows_are_products(m: int, bias: bool) -> None:
    draw = torch.Generator().manual_seed(m)
    rows, weight = torch.randn(1, m, 700, generator=draw), torch.randn(500, 700, generator=draw)
    offset = torch.randn(500, generator=draw) if bias else None
    exact = rows.double() @ weight.double().T + (offset.double() if offset is not None else 0)
    with torch.inference_mode(), cpu_linear.fast_linear(rows, rows.shape[2] * 500), Seen() as seen:
        found = F.linear(rows, weight, offset)
    assert "to_mkldnn" in seen.names
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-3)
    assert found.layout == torch.strided


needs_fbgemm = pytest.mark.skipif(torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="no FBGEMM here")


def packed_product(rows: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> tuple[torch.Tensor, Counter[str]]:
    """The product of packed rows, and the operators that ran."""
    with torch.inference_mode(), cpu_linear.fast_linear(rows, weight.numel(), packed=True), Seen() as seen:
        return F.linear(rows, weight, *bias), seen.names


@needs_fbgemm
@pytest.mark.parametrize(("m", "bias"), [(2, True), (8, False), (40, False)])
def test_packed_bfloat16_products_are_products(m: int, bias: bool, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    draw = torch.Generator().manual_seed(m)
    rows, weight = (torch.randn(*shape, 700, generator=draw).bfloat16() for shape in ((1, m), (500,)))
    weight[:250] *= 1e-5  # in float16 not all of these are exact
    offset = [torch.randn(500, generator=draw).bfloat16()] if bias else []
    for factor in (1, 1, 2, 1e6):  # from the first product's copy; a changed weight; one beyond float16
        weight *= factor
        exact = rows.double() @ weight.double().T + (offset[0].double() if bias else 0)
        found, operators = packed_product(rows, weight, *offset)
        assert operators["linear_dynamic_fp16"] == (factor != 1e6)
        assert found.dtype == torch.bfloat16
        sums = rows.double().abs() @ weight.double().abs().T  # which float32 adds up
        assert ((found - exact).abs() <= 2**-8 * exact.abs() + 2**-22 * sums + 2**-25 * 700).all()  # rounded once


@pytest.mark.parametrize(
    ("m", "run", "weights", "size"),
    [
        (1, torch.float32, torch.float32, 600),
        (32, torch.float32, torch.float32, 600),
        (3, torch.float64, torch.float64, 600),
        (3, torch.float32, torch.float32, 60),
        (3, torch.bfloat16, torch.float32, 600),  # some models keep a layer in float32
    ],
)
def test_other_products_are_left_alone(
    m: int, run: torch.dtype, weights: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    rows, weight = torch.ones(1, m, size, dtype=weights), torch.ones(size, size, dtype=weights)
    with torch.inference_mode(), cpu_linear.fast_linear(rows.to(run), size * size, packed=True), Seen() as seen:
        F.linear(rows, weight)
    assert not {"to_mkldnn", "linear_dynamic_fp16"} & set(seen.names)


@needs_onednn
def test_only_steps_that_revive_use_the_other_library(monkeypatch) -> None:
    monkeypatch.setattr(cpu_linear, "LARGE_MATRIX", 1)
    model = random_model("llama", 2, num_layers=4).float()
    prompt = torch.randint(0, 97, (30,), generator=torch.Generator().manual_seed(0))
    expected = lazyllm.generate(random_model("llama", 2, num_layers=4), prompt, Lazy({1: 0.6, 2: 0.6}), 6, ())
    with Seen() as seen:
        found = lazyllm.generate(model, prompt, Lazy({1: 0.6, 2: 0.6}), 6, ())
    revived = [int(count) for count in (expected.computed[1:] - expected.computed[:-1]).sum(axis=1)]
    assert any(revived)
    assert "to_mkldnn" in seen.names
    assert (found.token_ids, found.computed.tolist()) == (expected.token_ids, expected.computed.tolist())
    with Seen() as seen:
        lazyllm.generate(model, prompt, Lazy({1: 0.6, 2: 0.6}), 1, ())
        lazyllm.generate(model, prompt, Lazy({1: 0.6, 2: 0.6}, revive=False), 6, ())
    assert "to_mkldnn" not in seen.names
