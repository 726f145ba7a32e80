"""Fast products of a few rows with a large matrix, in float32 on a CPU.

A decoding step that revives some tokens multiplies a few rows with every weight matrix. It should cost what one row
costs: reading the weights. PyTorch's default library (MKL) reads them once per row for 2 or 3 rows, and repacks them in
each product of more rows. oneDNN, which comes with PyTorch, does neither.
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

# MKL is fast for one row, and from about 32 rows on. Prefill always uses MKL, for the baseline and for methods, so that
# no method looks fast by a faster library.
FEW_ROWS = range(2, 32)
LARGE_MATRIX = 2**18  # elements; for smaller matrices, converting to oneDNN's tensors costs more than it saves


def products_of(rows: Tensor, largest: int) -> AbstractContextManager[Any]:
    """A context for running layers over rows [1, m, w] in a decoding step: uses oneDNN's products if they are faster.

    largest: elements of the layers' largest matrix.
    """
    is_slow = rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.shape[1] in FEW_ROWS
    pays = is_slow and largest >= LARGE_MATRIX and torch.backends.mkldnn.is_available()
    return _ProductsByOneDNN() if pays else nullcontext()


class _ProductsByOneDNN(TorchFunctionMode):
    """Within this context, `F.linear` with a large weight matrix is oneDNN's."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and len(args) >= 2 and not kwargs:
            rows, weight = args[:2]
            # quantised weights are subclasses of Tensor with their own products
            is_plain = type(weight) in (Tensor, Parameter) and weight.layout == torch.strided
            if is_plain and weight.numel() >= LARGE_MATRIX:
                return F.linear(rows.to_mkldnn(), *args[1:]).to_dense()
        return func(*args, **(kwargs or {}))
