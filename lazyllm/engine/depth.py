"""A model's layers as methods see them: how many there are, and which see the whole prompt."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from lazyllm.engine.flops import windows_of


@dataclass(frozen=True)
class Depth:
    """A model's layers, counted from 1: `Depth(8)` is a model of 8 layers without sliding windows.

    windows: per layer, the number of positions that a token attends to, itself included, and None
        for all before it; () if no layer has a window.

    Outside its window a layer scores every token 0, whatever it is worth. So methods score tokens
    in the `full` layers, which see the whole prompt, unless the user names another layer.
    """

    count: int
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a model of {self.count} layers: give 1 or more")
        if self.windows and len(self.windows) != self.count:
            raise ValueError(
                f"{len(self.windows)} windows of {self.count} layers: give one for each, or none"
            )

    @classmethod
    def of(cls, config: Any) -> Depth:
        """Read the layers from a transformers config. Raises UserError for other kinds of layers.

        A window as long as the model's positions hides nothing, and counts as none.
        """
        limit = getattr(config, "max_position_embeddings", None) or float("inf")
        windows = [window if window and window < limit else None for window in windows_of(config)]
        return cls(len(windows), tuple(windows) if any(windows) else ())

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer; None if it sees the whole prompt."""
        return self.windows[layer - 1] if self.windows else None

    @cached_property
    def full(self) -> Sequence[int]:
        """The layers that see the whole prompt, ascending; all layers if none does."""
        full = [layer for layer, window in enumerate(self.windows, start=1) if window is None]
        return full or range(1, self.count + 1)

    def nearest(self, layer: int) -> int:
        """Find the last of the `full` layers up to `layer`; the first one if all come later.

        A layer beyond the model is returned as it is, to be refused by who uses it.
        """
        if layer > self.count:
            return layer
        return self.full[max(0, bisect_right(self.full, layer) - 1)]

    def at_share(self, share: Fraction) -> int:
        """Find the layer `nearest` to a share of the depth, rounded down; 0 before layer 1."""
        layer = int(share * self.count)
        return self.nearest(layer) if layer else 0

    def among(self, layers: Collection[int]) -> list[int]:
        """Pick those of `layers` that see the whole prompt; all of them if none does."""
        return [layer for layer in layers if layer in self.full] or [*layers]
