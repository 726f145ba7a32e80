"""The KV cache of a group of layers, which see the same tokens and so share one slot index.

Notation:
    s  stored tokens (slots)        m  tokens that a step adds
    g  key and value heads          d  head width
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lazyllm.engine.inputs import with_spare


class GroupCache:
    """K and V of the tokens that a group of layers has computed, in the order of computation.

    Before each run, `advance` gives its tokens the next slots. In each layer, the attention
    function calls `update`. Later, `retain` may forget tokens.

    capacity: slots made at the first step; grows if more are needed, up to `max_length`.
    length: stored tokens, those of the current run, `added`, included.
    is_ascending: whether slots are in the order of positions.
    """

    def __init__(self, capacity: int, max_length: int, device: torch.device) -> None:
        self.max_length = max_length
        self.length = 0
        self.added = 0
        self.is_ascending = True
        self._capacity = capacity
        self._text_length = 0
        # a piece for each run; joined when read
        self._positions = [torch.empty(0, dtype=torch.long, device=device)]
        # {layer: K and V in one tensor, so that one operation stores both}: [2, g, capacity, d];
        # side by side in [1, g, capacity, sum of the widths] if their widths differ
        self._stored: dict[int, Tensor] = {}

    @property
    def positions(self) -> Tensor:
        """[s] the position of each slot's token; [g, s] if key heads store different tokens."""
        if len(self._positions) > 1:
            first, *later = self._positions
            pieces = (piece.expand(*first.shape[:-1], -1) for piece in later)
            self._positions = [torch.cat([first, *pieces], dim=-1)]
        return self._positions[0]

    @property
    def is_contiguous(self) -> bool:
        """Whether all tokens of the text are stored, each in the slot of its position."""
        return self.is_ascending and self.length == self._text_length

    @property
    def nbytes(self) -> int:
        """Bytes of K and V of the stored tokens, without spare slots."""
        return self.allocated_bytes // self._capacity * self.length

    @property
    def allocated_bytes(self) -> int:
        """Bytes of K and V with the spare slots."""
        return sum(stored.nbytes for stored in self._stored.values())

    def advance(self, positions: Tensor, text_length: int, is_newest: bool = True) -> None:
        """Give slots to the tokens at `positions` [m], which the next run computes in every layer.

        text_length: tokens of the text so far. is_newest: whether these come after all stored ones.
        """
        self.is_ascending &= self.length == 0 or is_newest
        self.added, self._text_length = positions.shape[0], text_length
        used, self.length = self.length, self.length + self.added
        self._positions.append(positions)
        if self.length > self._capacity:
            self._rebuild(with_spare(self.length, self.max_length), lambda old: old[:, :, :used])

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store K and V [1, g, m, d] of the step's tokens; return those to attend to."""
        start = self.length - self.added
        dim = 0 if key.shape == value.shape else 3
        sizes = [key.shape[dim], value.shape[dim]]
        if layer_idx not in self._stored:
            shape = [*key.shape[:2], self._capacity, key.shape[3]]
            shape[dim] = sum(sizes)
            self._stored[layer_idx] = key.new_empty(shape)
        stored = self._stored[layer_idx]
        torch.cat([key, value], dim=dim, out=stored[:, :, start : self.length])
        if start == 0:
            return key, value  # kernels read these faster than the stored ones
        keys, values = stored[:, :, : self.length].split_with_sizes(sizes, dim=dim)
        return keys, values

    def take(self, layer_idx: int, slots: Tensor, key_width: int) -> Sequence[Tensor]:
        """Copy K and V [1, g, k, d] of the tokens in `slots` [k]. key_width: of K."""
        taken = self._stored[layer_idx].index_select(2, slots)
        if taken.shape[0] == 2:
            return taken.chunk(2)
        return taken.split_with_sizes([key_width, taken.shape[3] - key_width], dim=3)

    def retain(self, slots: Tensor) -> None:
        """Forget all tokens but those in `slots` (ascending), and free their memory.

        slots: [k], or [g, k] if key heads keep different tokens; only newer ones may then follow.
        """

        def kept(old: Tensor) -> Tensor:
            here = slots.to(old.device)
            if here.ndim == 1:
                return old[:, :, here]
            return old.gather(2, here[None, :, :, None].expand(old.shape[0], -1, -1, old.shape[3]))

        self._positions = [self.positions[slots]]
        self._rebuild(slots.shape[-1] + self._capacity - self.length, kept)
        self.length = slots.shape[-1]

    def _rebuild(self, capacity: int, kept: Callable[[Tensor], Tensor]) -> None:
        """Replace each layer's K and V by `kept` of them, with room for `capacity` tokens."""
        for layer, old in self._stored.items():
            stays = kept(old)
            self._stored[layer] = old.new_empty((*old.shape[:2], capacity, old.shape[3]))
            self._stored[layer][:, :, : stays.shape[2]] = stays
        self._capacity = capacity
