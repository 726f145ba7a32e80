"""Which of SDPA's backends runs attention on a GPU.

cuDNN is the fastest one for prefill on Hopper, 1.7 to 2.3 times as fast as FlashAttention 2 there, and slower on other
cards (pull request 48163 of transformers). It builds a plan for every new shape, which takes 36 to 41 ms on an H200. So
it never runs decoding steps, whose shapes are all new, and a prefill to be timed runs once before (`builds_plans`).
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
_HOPPER = (9, 0)  # compute capability
_AMPERE = (8, 0)
_TOO_OLD_CUDNN = 91_500  # torch too avoids this release and older ones, for their errors

# {choice: the backends of prefill}; the first one that takes the inputs runs
_ORDERS: dict[str, tuple[SDPBackend, ...]] = {
    "flash": (_FLASH, _EFFICIENT, _MATH),
    "cudnn": (_CUDNN, _FLASH, _EFFICIENT, _MATH),
    "efficient": (_EFFICIENT, _MATH),
    "math": (_MATH,),
}


def backend_of(model: Any, device: torch.device) -> str:
    """The model's `sdpa_backend` ("auto" unless `lazyllm.load_model` set it), with this GPU's fastest for "auto"."""
    chosen = getattr(model, "sdpa_backend", "auto")
    if chosen != "auto":
        return chosen
    has_cudnn = torch.backends.cudnn.is_available() and (torch.backends.cudnn.version() or 0) > _TOO_OLD_CUDNN
    return "cudnn" if torch.cuda.get_device_capability(device) == _HOPPER and has_cudnn else "flash"


def backends(model: Any, devices: Sequence[torch.device], decodes: bool) -> AbstractContextManager[Any]:
    """A context in which SDPA takes the model's backends, in their order; afterwards all is as it was.

    The order holds for the whole process: a model that runs in another thread at the same time follows it too.
    devices: that the model computes on; without a GPU among them, nothing changes. decodes: whether decoding steps run.
    """
    gpu = next((device for device in devices if device.type == "cuda"), None)
    if gpu is None:
        return nullcontext()
    _settle_order(gpu)
    order = _ORDERS[backend_of(model, gpu)]
    return sdpa_kernel([one for one in order if not (decodes and one == _CUDNN)], set_priority=True)


@cache
def _settle_order(gpu: torch.device) -> None:
    """Let torch set its own order of backends, which it does at the first attention of a process.

    Must run before `backends` replaces that order: torch would set its own inside, and lose it on exit.
    """
    some = torch.empty(1, 1, 1, 8, device=gpu)
    with sdpa_kernel([_MATH]):  # which takes any input, whatever the process has disabled
        torch.ops.aten._fused_sdp_choice(some, some, some)  # chooses as attention does, and runs nothing


def builds_plans(model: Any, device: torch.device) -> bool:
    """Whether the model's prefill runs on cuDNN, so that a shape's first run takes longer than later ones."""
    is_fast = model.config._attn_implementation == "sdpa" and device.type == "cuda"
    return is_fast and backend_of(model, device) == "cudnn"


def shares_heads(model: Any, query: Tensor) -> bool:
    """Whether a fused backend attends from several query heads to one key head.

    On a GPU only flash and cuDNN do: for 16-bit inputs, from Ampere on. Otherwise the backend without a fused kernel
    would run, whose memory grows with the square of the text.
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
    """Whether `attend_with_lse` has a kernel for these tensors: the CPU's, or on a GPU FlashAttention."""
    width = query.shape[-1]
    has_kernel = width == value.shape[-1] and width % 8 == 0 and query.device.type in ("cpu", "meta", "cuda")
    return has_kernel and shares_heads(model, query)


def attend_with_lse(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention [1, h, m, d] of m queries, and the log-sum-exp [1, h, m] of each query's logits.

    query [1, h, m, d]; key and value [1, h, s, d]. mask: [1, 1, m or 1, s], added to the logits; None for none.
    is_causal: query i attends to the keys up to i; only for as many queries as keys, without a mask. Without a mask,
        key and value may have fewer heads [1, g, s, d].
    """
    aten: Any = torch.ops.aten
    if not query.is_cuda:
        run = aten._scaled_dot_product_flash_attention_for_cpu
        return run(query, key, value, is_causal=is_causal, attn_mask=mask, scale=scaling)
    if mask is None:
        return aten._scaled_dot_product_flash_attention(query, key, value, is_causal=is_causal, scale=scaling)[:2]
    mask = mask.expand(-1, *query.shape[1:3], -1)
    attended, sums, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, scale=scaling)
    return attended, sums[:, :, : query.shape[2]]  # the kernel pads them to a multiple of 32 rows
