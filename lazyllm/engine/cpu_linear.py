"""Products of a few rows with a large matrix, on processors whose usual library is slow at them.

A decoding step that revives some tokens multiplies a few rows with every weight matrix. It should cost what one row
costs, the reading of the weights. In float32 on a CPU, PyTorch's usual library (MKL) reads them once for each of two or
three rows, and packs them anew for each product of more; oneDNN, which PyTorch brings along, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

# MKL is good at one row. From about 32 rows on it reaches the rate that it has in prefill, where it is left alone: a
# method that revives must not look fast by a product that the baseline's prefill does without.
FEW_ROWS = range(2, 32)
LARGE_MATRIX = 2**18  # elements; for smaller ones the way through oneDNN's own tensors costs more than it saves


def products_of(rows: Tensor, largest: int) -> AbstractContextManager[Any]:
    """A context for running layers over rows [1, m, w] in a decoding step: with oneDNN's products, if they pay.

    largest: elements of the layers' largest matrix.
    """
    is_slow = rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.shape[1] in FEW_ROWS
    pays = is_slow and largest >= LARGE_MATRIX and torch.backends.mkldnn.is_available()
    return _ProductsByOneDNN() if pays else nullcontext()


class _ProductsByOneDNN(TorchFunctionMode):
    """Within it, `F.linear` with a large matrix of weights is oneDNN's."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and len(args) >= 2 and not kwargs:
            rows, weight = args[:2]
            # quantised weights look like others, but are a class of their own, with products of their own
            is_plain = type(weight) in (Tensor, Parameter) and weight.layout == torch.strided
            if is_plain and weight.numel() >= LARGE_MATRIX:
                return F.linear(rows.to_mkldnn(), *args[1:]).to_dense()
        return func(*args, **(kwargs or {}))
