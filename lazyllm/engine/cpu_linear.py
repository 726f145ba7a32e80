"""Faster products of a few rows with large weights on a CPU, for decoding steps: the same numbers up to rounding."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

# MKL is fast for one row and from about 32 rows on; between, oneDNN is faster. Prefill always uses MKL, with or without
# a method, so that no method owes its speedup to another library
FEW_ROWS = range(2, 32)
LARGE_MATRIX = 2**18  # elements; for smaller matrices, converting to oneDNN's tensors costs more than it saves

# {bfloat16 weight: (address and version, which change with its values; copy for FBGEMM, None if float16 is too narrow)}
_COPIES = WeakTensorKeyDictionary()


def fast_linear(rows: Tensor, largest: int, packed: bool = False) -> AbstractContextManager[Any]:
    """A context in which layers run over rows [1, m, w] in a decoding step, with faster products if there are any.

    largest: elements of the layers' largest matrix.
    packed: the rows are of several generations, and weights stay in memory. Only then are products in bfloat16 replaced
        too, on a CPU without instructions for it: there, torch takes as long as for m products of one row.
    """
    m, backends = rows.shape[1], torch.backends
    if rows.device.type != "cpu" or largest < LARGE_MATRIX:
        return nullcontext()
    if rows.dtype == torch.float32 and m in FEW_ROWS and backends.mkldnn.is_available():
        return _Products(rows.dtype, lambda rows, *weights: F.linear(rows.to_mkldnn(), *weights).to_dense())
    is_slow = rows.dtype == torch.bfloat16 and backends.cpu.get_cpu_capability() == "AVX2"
    if packed and m > 1 and is_slow and backends.quantized.engine in ("x86", "fbgemm"):
        return _Products(rows.dtype, linear_fp16)
    return nullcontext()


def linear_fp16(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of bfloat16, in float32 with the weight in float16, by FBGEMM. Reads the weight once for all rows.

    float16 holds a bfloat16 weight exactly from 2**-17 to 65504, and smaller ones to within 2**-25, far below the
    rounding of the result. A weight with larger values is left to `F.linear`. A copy of the weight lives as long as it.
    """
    state = weight.data_ptr(), None if weight.is_inference() else weight._version
    if weight not in _COPIES or _COPIES[weight][0] != state:
        fits = weight.abs().max() <= torch.finfo(torch.float16).max
        _COPIES[weight] = state, torch.ops.quantized.linear_prepack_fp16(weight.float(), None) if fits else None
    copy = _COPIES[weight][1]
    if copy is None:
        return F.linear(rows, weight, bias)
    product = torch.ops.quantized.linear_dynamic_fp16(rows.float(), copy)
    return (product if bias is None else product + bias).to(rows.dtype)


class _Products(TorchFunctionMode):
    """Within this context, `F.linear` with a large weight matrix of this dtype is `product`."""

    def __init__(self, dtype: torch.dtype, product: Callable[..., Tensor]) -> None:
        super().__init__()
        self._dtype = dtype
        self._product = product

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear and len(args) >= 2 and not kwargs:
            weight = args[1]
            # quantised weights are subclasses of Tensor with their own products
            is_plain = type(weight) in (Tensor, Parameter) and weight.layout == torch.strided
            if is_plain and weight.dtype == self._dtype and weight.numel() >= LARGE_MATRIX:
                return self._product(*args)
        return func(*args, **(kwargs or {}))
