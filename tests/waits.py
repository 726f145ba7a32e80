"""Calls that wait for the device, seen without one."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Waits(TorchFunctionMode):
    """Context manager; `found` lists calls that read values from the device, or whose shapes depend on values.

    On a GPU the host waits at such a call until the device has computed its arguments.
    """

    CALLS = frozenset(
        {"tolist", "item", "cpu", "numpy", "nonzero", "masked_select", "unique", "argwhere", "repeat_interleave"}
        | {"equal", "allclose", "is_nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, keys = func.__name__, ()
        if name in ("__getitem__", "__setitem__"):
            keys = args[1] if isinstance(args[1], tuple | list) else (args[1],)
        if name in self.CALLS or any(torch.is_tensor(key) and key.dtype == torch.bool for key in keys):
            self.found.append(name)
        return func(*args, **(kwargs or {}))
