"""Several devices on a machine with one: tensors that know their device, and refuse operations
across devices.

The CPU does all arithmetic, so that results can be compared bit for bit; only the bookkeeping has
several devices. Kernels and streams of a real accelerator are not simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")
_COPIES = ("_to_copy", "copy_")  # what may have tensors of two devices


class Placed(torch.Tensor):
    """A tensor on the CPU that passes for one on `place`."""

    place: torch.device
    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, place: torch.device) -> Placed:
        out: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=CPU,
        )
        out.held, out.place = held, place
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"Placed({self.held}, {self.place})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()


def place_of(tensor: torch.Tensor) -> torch.device:
    return tensor.place if isinstance(tensor, Placed) else CPU


def placed(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    held = tensor.held if isinstance(tensor, Placed) else tensor
    return held if place == CPU else Placed(held, place)


@contextmanager
def pretending() -> Iterator[Counter[tuple[str, str]]]:
    """Within it, a device with a number is a pretended one. Yields the counts of copies from
    device to device.
    """
    above = _Above()
    with _Below(), above:
        yield above.moves


class _Above(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.moves: Counter[tuple[str, str]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # a new object at every look, so not `is`
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return place_of(args[0])
        if func is torch.Tensor.cpu:
            return self._moved(args[0], CPU)
        if func is torch.Tensor.numpy:
            return func(_held(args[0]), **kwargs)
        if func is torch.Tensor.to:
            devices = [
                arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, torch.device)
            ]
            others = [arg for arg in args[1:] if not isinstance(arg, torch.device)]
            kwargs.pop("device", None)
            kwargs.pop("non_blocking", None)
            out = func(args[0], *others, **kwargs) if others or kwargs else args[0]
            return self._moved(out, devices[0]) if devices else out
        place = kwargs.pop("device", None)
        if place is None:
            return func(*args, **kwargs)
        out = func(*args, **kwargs, device=CPU)
        return placed(out, torch.device(place))

    def _moved(self, tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
        if place == place_of(tensor):
            return tensor
        self.moves[str(place_of(tensor)), str(place)] += 1
        return placed(tensor.clone(), place)


class _Below(TorchDispatchMode):
    """Also checks operations on plain tensors, so that a host tensor cannot be combined with a
    device's.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the operation on the wrapped tensors; its result is on their device. RuntimeError for
    two devices.
    """
    name = func.overloadpacket.__name__
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    # numbers are everywhere
    places = {place_of(leaf) for leaf in given if leaf.ndim or isinstance(leaf, Placed)}
    if len(places) > 1 and name not in _COPIES:
        raise RuntimeError(f"{name}: tensors on {' and '.join(sorted(map(str, places)))} met")
    home = place_of(args[0]) if name == "copy_" else next(iter(places), CPU)
    out = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    if given and any(out is _held(leaf) for leaf in given):  # in place
        return next(leaf for leaf in given if _held(leaf) is out)
    return tree_map(
        lambda leaf: placed(leaf, home) if isinstance(leaf, torch.Tensor) else leaf, out
    )


def _held(tensor: Any) -> Any:
    return tensor.held if isinstance(tensor, Placed) else tensor
