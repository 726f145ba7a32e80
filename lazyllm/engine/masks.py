"""Which stored tokens the queries of a layer attend to, and their masks, in blocks of queries.

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

# Bytes that a block may take: its mask, and what attention holds for each (query, key) pair. On a
# CPU they fit the caches; elsewhere they occupy a whole GPU, whose kernel for masks runs 64 queries
# of a head in one block of threads
BLOCK_ON_CPU, BLOCK = 2**23, 2**27


def block_bytes(device: torch.device) -> int:
    return BLOCK_ON_CPU if device.type == "cpu" else BLOCK


# which stored tokens take part in the step (the step's set), [s] bool, and their number
Chosen = tuple[Tensor, int]


class AttentionMask:
    """The tokens that queries attend to in layers of one window: in the step's set, up to a query.

    cache: the group's; the queries are in its last slots. positions: [m] of the queries, ascending.
    chosen: the stored tokens of the step's set; None for all.
    window: number of positions that a query attends to, itself included; None for all.
    """

    def __init__(
        self, cache: GroupCache, positions: Tensor, chosen: Chosen | None, window: int | None
    ) -> None:
        self._cache = cache
        self._positions = positions
        self._chosen, self._count = (None, 0) if chosen is None else chosen
        self.window = window
        # what identifies the last block, and its mask
        self._made: tuple[tuple[Any, ...], Any] = (), None
        self._m = positions.shape[0]
        self._s = cache.length
        self.sees_all = self._m == 1 and window is None and chosen is None
        self._slots: Tensor | None = None

    def slots_on(self, device: torch.device) -> Tensor:
        """Find the slots [k] of the step's set, once for all layers, moved once for all."""
        if self._slots is None:
            assert self._chosen is not None  # else no slots are used
            self._slots = torch.nonzero_static(self._chosen, size=self._count)[:, 0]
        self._slots = self._slots.to(device)
        return self._slots

    def blocks(
        self, form: Callable[[Tensor], Tensor], cell: int, device: torch.device
    ) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Yield blocks of queries: rows, keys in reach, mask; None if all attend to all these keys.

        form: turns `visible` into an attention's mask. cell: bytes of a (query, key) pair.
        """
        farthest = self._s if self.window is None else min(self._s, 2 * self.window)
        most = max(1, block_bytes(device) // (cell * farthest))
        if self.window is not None:  # larger blocks have more keys outside a query's window
            most = min(most, max(64, self.window // 4))
        for first in range(0, self._m, most):
            rows = slice(first, min(first + most, self._m))
            keys = self._in_reach(rows)
            # the last mask serves the next layer too if there is a single block; if slots are
            # positions, it also serves all blocks at the same distance from their keys
            is_shared = self._cache.is_contiguous and self._chosen is None
            where = rows.start - keys.start if is_shared else rows.start
            key = (where, rows.stop - rows.start, keys.stop - keys.start, device)
            if self._made[0] != key:
                visible = self.visible(rows, keys)
                self._made = key, None if visible is None else to_device(form(visible), device)
            yield rows, keys, self._made[1]

    def visible(self, rows: slice, keys: slice) -> Tensor | None:
        """Mark [b, k] the keys that each query attends to, [g, b, k] if heads differ; None: all."""
        terms, query = [], self._positions[rows, None]
        if self._chosen is not None:
            terms.append(self._chosen[None, keys])
        if rows.start < self._m - 1:  # no stored token comes after the newest one
            terms.append(self._cache.positions[..., None, keys] <= query)
        # if all tokens are stored, the keys in reach of a single query are its window
        is_cut = self._m == 1 and self._cache.is_contiguous and keys == self._in_reach(rows)
        if self.window is not None and not is_cut:
            terms.append(self._cache.positions[..., None, keys] > query - self.window)
        if not terms:
            return None
        for term in terms[1:]:
            terms[0] = terms[0] & term
        return terms[0]

    def visible_last(self, rows: slice, keys: slice) -> Tensor | None:
        """Run `visible` without the first keys, to which all queries of the block attend."""
        if self._chosen is None and self.window is None and self._cache.is_ascending:
            first = max(keys.start, self._s - self._m + rows.start + 1)
            keys = slice(first, keys.stop)
        return self.visible(rows, keys)

    def _in_reach(self, rows: slice) -> slice:
        """Find the slots that a block may attend to; more if the host does not know positions."""
        before = self._s - self._m
        if self.window is None or not self._cache.is_ascending:
            return slice(0, before + rows.stop)
        # slots ascend with positions, so a window of N positions holds at most N tokens
        return slice(max(0, before + rows.start + 1 - self.window), before + rows.stop)


class PositionSortedMask(AttentionMask):
    """A mask of queries that attend to a copy of the set's tokens, sorted by position.

    ranks: [m] for each query, how many of the first ones it attends to, up to itself.
    """

    def __init__(
        self,
        cache: GroupCache,
        positions: Tensor,
        chosen: Chosen | None,
        window: int | None,
        ranks: Sequence[int],
    ) -> None:
        super().__init__(cache, positions, chosen, window)
        far = torch.iinfo(torch.long).max
        places = cache.positions
        by_position = places if chosen is None else torch.where(chosen[0], places, far)
        self._slots = by_position.argsort()[: ranks[-1]]
        self._key_positions = places[self._slots]
        self._ranks = np.array(ranks)

    def blocks_in_order(
        self, form: Callable[[Tensor], Tensor], pairs: int, splits: bool, device: torch.device
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield blocks of queries: rows, keys, and their mask on `device`.

        pairs: the most (query, key) pairs of a block of several queries. splits: leave out the keys
            before the first query's, to which all of the block attend. No window may hide these.
        """
        start = 0
        while start < self._m:
            rank = int(self._ranks[start])
            # a window of N positions holds at most N tokens
            first = rank - 1 if splits else max(0, rank - (self.window or rank))
            areas = np.arange(1, self._m - start + 1) * (self._ranks[start:] - first)
            stop = start + max(1, int(areas.searchsorted(pairs, side="right")))
            rows, keys = slice(start, stop), slice(first, int(self._ranks[stop - 1]))
            key = (start, stop, first, device)
            if self._made[0] != key:
                query, stored = self._positions[rows, None], self._key_positions[None, keys]
                visible = stored <= query
                if self.window is not None:
                    visible = visible & (stored > query - self.window)
                self._made = key, to_device(form(visible), device)
            yield rows, keys, self._made[1]
            start = stop
