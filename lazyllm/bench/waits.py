"""Counting what makes the host wait for a device, on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Waits(TorchFunctionMode):
    """Within it, `found` gets the name of each call that needs values, or shapes that depend on values.

    On a GPU the host cannot go on before the device has finished what such a call depends on.
    """

    CALLS = frozenset(
        {"tolist", "item", "cpu", "numpy", "nonzero", "masked_select", "unique", "argwhere", "repeat_interleave"}
        | {"equal", "allclose", "is_nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.__name__
        by_mask = False
        if name in ("__getitem__", "__setitem__"):
            keys = args[1] if isinstance(args[1], tuple | list) else (args[1],)
            by_mask = any(torch.is_tensor(key) and key.dtype == torch.bool for key in keys)
        if by_mask or name in self.CALLS:
            self.found.append(name)
        return func(*args, **(kwargs or {}))
