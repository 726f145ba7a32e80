"""Which stored tokens the queries of a layer attend to, and their masks, made for blocks of queries.

Notation:
    m  query tokens          s  stored tokens (slots)          g  key and value heads
    b  queries of a block    k  keys in reach of a block
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lazyllm.engine.cache import GroupCache
from lazyllm.engine.devices import to_device

# Bytes of one block's mask, with the memory that attention needs for its cells: on a CPU they fit its caches; elsewhere
# they fill a GPU, whose kernel for masks gives 64 queries of a head to one block of threads
BLOCK_ON_CPU, BLOCK = 2**23, 2**27
# Devices where one query attends to a copy of its tokens instead of to all stored ones with a mask: CUDA's kernel for
# masks reads all tokens of a head in one block of threads. In 16 bits, the copy and FlashAttention take a third of that
COPIES = frozenset({"cuda"})


Chosen = tuple[Tensor, int]  # [s] bool, which stored tokens are in the step's set; their number


class AttentionMask:
    """The tokens that layers of one window attend to in a run: those of the step's set, in the window up to the query.

    cache: of the group; the queries are in its last slots. positions: [m] of the queries, ascending.
    chosen: the stored tokens of the step's set; None for all.
    window: number of positions that a query attends to, its own included; None for all before it.
    """

    def __init__(self, cache: GroupCache, positions: Tensor, chosen: Chosen | None, window: int | None) -> None:
        self._cache = cache
        self._positions = positions
        self._chosen = None if chosen is None else chosen[0]
        self.window = window
        self._made: tuple[tuple[Any, ...], Any] = (), None  # the last block's key and mask
        self._m = positions.shape[0]
        self._s = cache.length
        # one query attends to all tokens, or to all in `slots` [k], of which it gets a copy
        self.is_everything = self._m == 1 and window is None and (chosen is None or positions.device.type in COPIES)
        self.slots: Tensor | None = None
        if self.is_everything and chosen is not None:
            self.slots = torch.nonzero_static(chosen[0], size=chosen[1])[:, 0]

    def blocks(
        self, form: Callable[[Tensor], Tensor], cell: int, device: torch.device
    ) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Blocks of queries: rows, keys in reach, and their mask on `device`; None if they attend to all these keys.

        form: turns `visible` into the mask of the attention function. cell: bytes that a (query, key) pair costs.
        """
        farthest = self._s if self.window is None else min(self._s, 2 * self.window)
        most = max(1, (BLOCK_ON_CPU if device.type == "cpu" else BLOCK) // (cell * farthest))
        if self.window is not None:  # larger blocks attend to more keys beyond the window
            most = min(most, max(64, self.window // 4))
        for first in range(0, self._m, most):
            rows = slice(first, min(first + most, self._m))
            keys = self._in_reach(rows)
            # a mask serves the same block in the next layer; in a whole text, where slots are positions, also the next
            # blocks at the same distance from their keys
            is_shared = self._cache.is_contiguous and self._chosen is None
            where = rows.start - keys.start if is_shared else rows.start
            key = (where, rows.stop - rows.start, keys.stop - keys.start, device)
            if self._made[0] != key:
                visible = self.visible(rows, keys)
                self._made = key, None if visible is None else to_device(form(visible), device)
            yield rows, keys, self._made[1]

    def visible(self, rows: slice, keys: slice) -> Tensor | None:
        """[b, k] bool: which keys the queries attend to, or [g, b, k] if heads store different tokens; None for all."""
        query = self._positions[rows, None]
        stored = self._cache.positions[..., None, keys]
        terms = []
        if self._chosen is not None:
            terms.append(self._chosen[None, keys])
        if rows.start < self._m - 1:  # the newest token alone attends to all before it
            terms.append(stored <= query)
        # of one query in a whole text, `_in_reach` is the window itself
        is_cut = self._m == 1 and self._cache.is_contiguous and keys == self._in_reach(rows)
        if self.window is not None and not is_cut:
            terms.append(stored > query - self.window)
        if not terms:
            return None
        for term in terms[1:]:
            terms[0] = terms[0] & term
        return terms[0]

    def visible_last(self, rows: slice, keys: slice) -> Tensor | None:
        """`visible` without the leading keys that all queries attend to."""
        if self._chosen is None and self.window is None and self._cache.is_ascending:
            keys = slice(max(keys.start, self._s - self._m + rows.start + 1), keys.stop)
        return self.visible(rows, keys)

    def _in_reach(self, rows: slice) -> slice:
        """The slots that any of the queries may attend to, as far as the host knows."""
        before = self._s - self._m
        if self.window is None or not self._cache.is_ascending:
            return slice(0, before + rows.stop)
        # slots ascend with positions, so a window of N positions holds at most N tokens
        return slice(max(0, before + rows.start + 1 - self.window), before + rows.stop)


class PositionSortedMask(AttentionMask):
    """A mask of queries that attend to a copy of the set's tokens, in the order of their positions.

    A revived token attends to the set's tokens up to its own position: to the first ones of this copy.

    ranks: [m] for each query, the number of the set's tokens up to itself.
    """

    def __init__(
        self, cache: GroupCache, positions: Tensor, chosen: Chosen | None, window: int | None, ranks: Sequence[int]
    ) -> None:
        super().__init__(cache, positions, chosen, window)
        far = torch.iinfo(torch.long).max
        by_position = cache.positions if chosen is None else torch.where(chosen[0], cache.positions, far)
        self.slots = by_position.argsort()[: ranks[-1]]
        self._key_positions = cache.positions[self.slots]
        self._ranks = np.array(ranks)

    def blocks_in_order(
        self, cells: int, shares_first: bool, device: torch.device
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """Blocks of queries: rows, keys, and which of these keys each attends to, [b, k] bool on `device`.

        cells: (query, key) pairs of a block, at most, if it has several queries. shares_first: leave out the keys
            before the first query's own, to which all queries of the block attend; not in a layer with a window.
        """
        start = 0
        while start < self._m:
            first = int(self._ranks[start]) - 1 if shares_first and self.window is None else 0
            areas = np.arange(1, self._m - start + 1) * (self._ranks[start:] - first)
            stop = start + max(1, int(areas.searchsorted(cells, side="right")))
            rows, keys = slice(start, stop), slice(first, int(self._ranks[stop - 1]))
            key = (start, stop, first, device)
            if self._made[0] != key:
                query, stored = self._positions[rows, None], self._key_positions[None, keys]
                visible = stored <= query
                if self.window is not None:
                    visible = visible & (stored > query - self.window)
                self._made = key, to_device(visible, device)
            yield rows, keys, self._made[1]
            start = stop
