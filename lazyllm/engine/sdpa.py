"""Which of SDPA's backends runs attention on a GPU.

cuDNN is the fastest one for prefill on Hopper, 1.7 to 2.3 times as fast as FlashAttention 2 there,
and slower on other cards (pull request 48163 of transformers). It builds a plan for every new
shape, which takes 36 to 41 ms on an H200. So it never runs decoding steps, whose shapes are all
new, and a prefill to be timed runs once before (`builds_plans`).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_FLASH, _EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
_CUDNN, _MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
_HOPPER, _AMPERE = (9, 0), (8, 0)  # compute capabilities
_TOO_OLD_CUDNN = 91_500  # torch too avoids this release and older ones, for their errors

# {choice: the backends of prefill}; the first one that takes the inputs runs
_ORDERS: dict[str, tuple[SDPBackend, ...]] = {
    "flash": (_FLASH, _EFFICIENT, _MATH),
    "cudnn": (_CUDNN, _FLASH, _EFFICIENT, _MATH),
    "efficient": (_EFFICIENT, _MATH),
    "math": (_MATH,),
}


def backend_of(model: Any, device: torch.device) -> str:
    """Read the model's `sdpa_backend`, with this GPU's fastest for "auto"."""
    chosen = getattr(model, "sdpa_backend", "auto")
    if chosen != "auto":
        return chosen
    cudnn = torch.backends.cudnn
    has_cudnn = cudnn.is_available() and (cudnn.version() or 0) > _TOO_OLD_CUDNN
    is_hopper = torch.cuda.get_device_capability(device) == _HOPPER
    return "cudnn" if is_hopper and has_cudnn else "flash"


def backends(
    model: Any, devices: Sequence[torch.device], decodes: bool
) -> AbstractContextManager[Any]:
    """Let SDPA take the model's backends, in their order; afterwards all is as it was.

    The order holds for the whole process: a model in another thread follows it too.
    devices: of the model; without a GPU, nothing changes. decodes: whether decoding steps run.
    """
    gpu = next((device for device in devices if device.type == "cuda"), None)
    if gpu is None:
        return nullcontext()
    _settle_order(gpu)
    order = _ORDERS[backend_of(model, gpu)]
    allowed = [backend for backend in order if not (decodes and backend == _CUDNN)]
    return sdpa_kernel(allowed, set_priority=True)


@cache
def _settle_order(gpu: torch.device) -> None:
    """Let torch set its order of backends, which it does at the first attention of a process.

    Else it would set it inside of `backends`, and lose it on exit.
    """
    some = torch.empty(1, 1, 1, 8, device=gpu)
    with sdpa_kernel([_MATH]):  # which takes any input, whatever the process has disabled
        # chooses as attention does, and runs nothing
        torch.ops.aten._fused_sdp_choice(some, some, some)


def builds_plans(model: Any, device: torch.device) -> bool:
    """Say whether the model's prefill runs on cuDNN, so that a shape's first run takes longer."""
    is_fast = model.config._attn_implementation == "sdpa" and device.type == "cuda"
    return is_fast and backend_of(model, device) == "cudnn"


def shares_heads(model: Any, query: Tensor) -> bool:
    """Say whether a fused backend attends from several query heads to one key head.

    On a GPU only flash and cuDNN do: for 16-bit inputs, from Ampere on. Otherwise the backend
    without a fused kernel would run, whose memory grows with the square of the text.
    """
    if not query.is_cuda:
        return True
    is_fused = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256
    return (
        is_fused
        and torch.cuda.get_device_capability(query.device) >= _AMPERE
        and backend_of(model, query.device) in ("flash", "cudnn")
    )


def gives_lse(model: Any, query: Tensor, value: Tensor) -> bool:
    """Say whether `attend_with_lse` has a kernel: the CPU's, or on a GPU FlashAttention."""
    width = query.shape[-1]
    is_even = width == value.shape[-1] and width % 8 == 0
    return is_even and query.device.type in ("cpu", "meta", "cuda") and shares_heads(model, query)


def attend_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute attention [1, h, m, d], and the log-sum-exp [1, h, m] of each query's logits.

    query [1, h, m, d]; key and value [1, h, s, d], or without a mask [1, g, s, d].
    mask: [1, 1, m or 1, s], added to the logits; None for none.
    is_causal: query i attends to the keys up to i; for as many queries as keys, without a mask.
    """
    aten: Any = torch.ops.aten
    tensors = query, key, value
    if not query.is_cuda:
        run = aten._scaled_dot_product_flash_attention_for_cpu
        return run(*tensors, is_causal=is_causal, attn_mask=mask, scale=scaling)
    if mask is None:
        run = aten._scaled_dot_product_flash_attention
        return run(*tensors, is_causal=is_causal, scale=scaling)[:2]
    run = aten._scaled_dot_product_efficient_attention
    mask = mask.expand(-1, *query.shape[1:3], -1)
    attended, sums, *_ = run(*tensors, mask, True, scale=scaling)
    return attended, sums[:, :, : query.shape[2]]  # the kernel pads to a multiple of 32 rows
