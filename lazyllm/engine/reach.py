"""Which stored tokens the queries of a layer attend to, and the masks that say so: made for a block of queries at once.

Notation:
    m  query tokens          s  stored tokens (slots)          g  key and value heads
    b  queries of a block    k  keys in reach of a block
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lazyllm.engine.devices import moved

if TYPE_CHECKING:
    from lazyllm.engine.cache import GroupCache

# Bytes of one block's mask, and of what attention itself holds for each of its cells
BLOCK = 2**23


class Reach:
    """What the layers of one window attend to in one run: tokens of the step's set, up to the query, in the window.

    group: the stored tokens, extended by the queries, which are in the last slots. positions: [m] the queries',
        ascending. chosen: [s] bool, which stored tokens are in the step's set; None for all.
    window: how many positions a query attends to, its own included; None for all before it.
    """

    def __init__(
        self,
        group: GroupCache,
        positions: Tensor,
        chosen: Tensor | None,
        window: int | None,
    ) -> None:
        self._group = group
        self._positions = positions
        self._chosen = chosen
        self.window = window
        self._made: tuple[tuple[Any, ...], Tensor | None] = (), None
        self._m = positions.shape[0]
        self._s = group.length

    @property
    def is_everything(self) -> bool:
        """Whether a single query attends to everything stored."""
        return self._m == 1 and self._chosen is None and self.window is None

    @property
    def is_whole(self) -> bool:
        """Whether all tokens of the text are stored, in their order."""
        return self._group.is_whole

    def blocks(
        self, form: Callable[[Tensor], Tensor], cell: int, device: torch.device
    ) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Blocks of queries: rows, keys in reach, and the mask of them on `device`; None for all these keys.

        form: makes the mask that the attention function takes of `seen`. cell: bytes that a (query, key) pair costs.
        """
        farthest = self._s if self.window is None else min(self._s, 2 * self.window)
        most = max(1, BLOCK // (cell * farthest))
        if self.window is not None:  # larger blocks attend to more keys beyond the window
            most = min(most, max(64, self.window // 4))
        for first in range(0, self._m, most):
            rows = slice(first, min(first + most, self._m))
            keys = self._in_reach(rows)
            # in a whole text, blocks that lie alike have the same mask; layers that have one block share it in any case
            alike = self._group.is_whole and self._chosen is None
            where = rows.start - keys.start if alike else rows.start
            key = (where, rows.stop - rows.start, keys.stop - keys.start, device)
            if self._made[0] != key:
                seen = self.seen(rows, keys)
                self._made = key, None if seen is None else moved(form(seen), device)
            yield rows, keys, self._made[1]

    def seen(self, rows: slice, keys: slice) -> Tensor | None:
        """[b, k] bool: which keys the queries attend to, or [g, b, k] if heads store different tokens; None for all."""
        query = self._positions[rows, None]
        stored = self._group.positions[..., None, keys]
        terms = []
        if self._chosen is not None:
            terms.append(self._chosen[None, keys])
        if rows.start < self._m - 1:  # else it is the newest token alone
            terms.append(stored <= query)
        is_exact = self._m == 1 and self._group.is_whole and keys == self._in_reach(rows)
        if self.window is not None and not is_exact:
            terms.append(stored > query - self.window)
        if not terms:
            return None
        for term in terms[1:]:
            terms[0] = terms[0] & term
        return terms[0]

    def seen_last(self, rows: slice, keys: slice) -> Tensor | None:
        """`seen` without the keys in front that all of the queries attend to."""
        if self._chosen is None and self.window is None and self._group.is_ascending:
            keys = slice(max(keys.start, self._s - self._m + rows.start + 1), keys.stop)
        return self.seen(rows, keys)

    def _in_reach(self, rows: slice) -> slice:
        """The slots that some of the queries attend to, as far as the host knows."""
        before = self._s - self._m
        if self.window is None or not self._group.is_ascending:
            return slice(0, before + rows.stop)
        # positions in ascending slots: a window of positions holds as many tokens at most
        return slice(max(0, before + rows.start + 1 - self.window), before + rows.stop)
