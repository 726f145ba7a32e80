"""The choice among SDPA's backends; devices are named here, no GPU is needed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from lazyllm.engine import sdpa
from lazyllm.engine.sdpa import backend_of, backends, builds_plans, shares_heads
from lazyllm.errors import UserError
from lazyllm.spec import SDPA_BACKENDS, ModelSpec

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def model_with(backend: str, attention: str = "sdpa") -> Any:
    return SimpleNamespace(
        sdpa_backend=backend, config=SimpleNamespace(_attn_implementation=attention)
    )


def order_of_backends() -> list[SDPBackend]:
    """The enabled ones; torch 2.7 has no name of its own for their order."""
    enabled = _cur_sdpa_kernel_backends()
    order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
    return [backend for backend in order if backend in enabled]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the GPU's compute capability and the release of cuDNN."""

    def put(capability: tuple[int, int], cudnn: int | None = 92_000) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: cudnn is not None)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)

    return put


@pytest.mark.parametrize(
    ("capability", "cudnn", "expected"),
    [
        ((9, 0), 92_000, "cudnn"),  # Hopper
        ((9, 0), 91_500, "flash"),  # a release with errors
        ((9, 0), None, "flash"),
        ((8, 0), 92_000, "flash"),  # Ampere
        ((8, 6), 92_000, "flash"),
        ((10, 0), 92_000, "flash"),  # Blackwell
        ((7, 0), 92_000, "flash"),
    ],
)
def test_auto_is_cudnn_on_hopper_only(
    card: Any, capability: Any, cudnn: Any, expected: str
) -> None:
    card(capability, cudnn)
    assert backend_of(model_with("auto"), GPU) == expected
    assert builds_plans(model_with("auto"), GPU) == (expected == "cudnn")
    assert backend_of(model_with("efficient"), GPU) == "efficient"  # as asked, whatever the card


@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient", "math"])
def test_decoding_never_runs_on_cudnn_and_the_process_is_as_it_was(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[torch.device] = []
    # it runs on the GPU: tests/test_cuda.py
    monkeypatch.setattr(sdpa, "_settle_order", settled.append)
    before = order_of_backends()
    firsts = []
    for decodes in (False, True):
        with backends(model_with(backend), [CPU, GPU], decodes):
            order = order_of_backends()
        firsts.append(order[0])
        assert SDPBackend.MATH in order  # some backend takes any input
        assert (SDPBackend.CUDNN_ATTENTION in order) == (backend == "cudnn" and not decodes)
    assert firsts[0] == getattr(
        SDPBackend, "MATH" if backend == "math" else f"{backend.upper()}_ATTENTION"
    )
    assert order_of_backends() == before
    assert settled == [GPU, GPU]


def test_without_a_gpu_nothing_changes() -> None:
    before = order_of_backends()
    with backends(model_with("math"), [CPU], decodes=False):
        assert order_of_backends() == before
    assert not builds_plans(model_with("cudnn"), CPU)
    assert not builds_plans(model_with("cudnn", "eager"), GPU)


@pytest.mark.parametrize(
    ("dtype", "capability", "width", "backend", "shares"),
    [
        (torch.bfloat16, (8, 0), 128, "auto", True),
        (torch.float16, (9, 0), 256, "auto", True),
        (torch.float32, (9, 0), 128, "auto", False),  # no flash for 32 bits
        (torch.float16, (7, 5), 128, "auto", False),  # T4: no flash
        (torch.bfloat16, (8, 0), 288, "auto", False),
        # takes groups only since pull request 191085 of pytorch
        (torch.bfloat16, (8, 0), 128, "efficient", False),
        (torch.bfloat16, (8, 0), 128, "cudnn", True),
    ],
)
def test_heads_are_expanded_where_no_fused_backend_takes_groups(
    card: Any, dtype: torch.dtype, capability: Any, width: int, backend: str, shares: bool
) -> None:
    card(capability)
    query: Any = SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 8, 5, width), device=GPU)
    assert shares_heads(model_with(backend), query) == shares
    assert shares_heads(model_with(backend), torch.zeros(1, 8, 5, 64))  # a CPU's flash takes groups


def test_a_backend_belongs_to_sdpa() -> None:
    with pytest.raises(UserError, match="unknown sdpa_backend 'fast'"):
        ModelSpec("tiny", sdpa_backend="fast").check()
    with pytest.raises(UserError, match="leave one of them out"):
        ModelSpec("tiny", sdpa_backend="flash", attn_implementation="eager").check()
    assert {"auto", *sdpa._ORDERS} == {*SDPA_BACKENDS}
