"""One generation, run over groups of layers: the part that all methods share.

A boundary lies between two groups of layers. All layers of a group see the same tokens in every step, so methods act
at boundaries only: `cross_in_prefill` and `cross_in_step` get the tokens that leave a group, and return those that
enter the next one.

Notation:
    n  prompt tokens         p  position of the step's newest token (n, n + 1, ... in decoding)
    m  tokens computed in a group in this step               s  tokens stored in a group
    w  hidden width          v  vocabulary
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lazyllm.engine.cache import GroupCache
from lazyllm.engine.decoder import Decoder, Rope, check_lengths
from lazyllm.engine.inputs import NOTHING, Group, Look


@dataclass(frozen=True)
class Batch:
    """The tokens that a group computes in one step: hidden [1, m, w], positions [m] ascending, their cos and sin.

    ranks: [m] for each token, the number of tokens in the step's set up to itself; None if the host does not know them.
    """

    hidden: Tensor
    positions: Tensor
    rope: Rope
    ranks: Sequence[int] | None = None

    def __getitem__(self, rows: Tensor | slice) -> Batch:
        """The batch of some of its rows."""
        return Batch(self.hidden[:, rows], self.positions[rows], tuple(part[:, rows] for part in self.rope))

    def __len__(self) -> int:
        return self.positions.shape[0]


@dataclass(frozen=True)
class Scoring:
    """What was spent on scoring a prompt before its prefill.

    seconds: part of TTFT. uncounted_s: seconds that are not (of a diagnostic). tokens: as `Generation.scoring_tokens`.
    """

    seconds: float = 0.0
    uncounted_s: float = 0.0
    tokens: int = 0


class Session:
    """The state of one generation; this class is the baseline's, methods subclass it.

    Call `prefill` once, then `step` with each generated token; a later turn begins with `turn`.

    decoder: the open model. groups: all layers, in order. prompt_tokens: n. max_new_tokens: the maximum number of
    generated tokens. scoring: what was spent on the prompt before.
    Raises ValueError for a length at which the model's RoPE would change (`check_lengths`).
    """

    def __init__(
        self,
        decoder: Decoder,
        groups: Sequence[Group],
        prompt_tokens: int,
        max_new_tokens: int,
        scoring: Scoring = Scoring(),
    ) -> None:
        check_lengths(decoder.model, prompt_tokens, max_new_tokens)
        self.decoder = decoder
        self.groups = groups
        self.prompt_tokens = prompt_tokens
        self.max_positions = prompt_tokens + max_new_tokens
        self.scoring = scoring
        self.scored_before = 0  # `Scoring.tokens` of earlier turns
        self.length = 0  # tokens run so far, prompt and generated
        self.chunk: int | None = None  # greatest number of new tokens that run through a group's layers at once
        self.computed: list[list[int | Tensor]] = []  # per step and layer: distinct prompt tokens computed so far
        self.caches = [
            # every generated token is computed in every layer
            GroupCache(group.layers, group.prompt_tokens + max_new_tokens, self.max_positions, decoder.device)
            for group in groups
        ]
        self._num_computed = [0] * len(groups)
        self._selected: list[dict[int, Tensor]] = []
        self._in_prefill = False
        self._newest: Tensor | None = None  # positions of all tokens that this run adds to the text
        self._all_positions = torch.arange(self.max_positions, device=decoder.device)

    @property
    def selected(self) -> list[dict[int, Tensor]]:
        """Per step {pruning layer: the ascending positions of the tokens that enter the next layer}."""
        return self._selected

    @property
    def revived(self) -> list[int]:
        """Per layer: tokens of earlier steps that it computed in this turn."""
        return [0] * len(self.decoder.layers)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all stored K and V."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def aux_bytes(self) -> int:
        """Bytes of hidden states of tokens that may be revived."""
        return 0

    def prefill(self, token_ids: Tensor) -> Tensor:
        """Run the prompt [n]; return the logits [v] of its last token. Never synchronises with the device."""
        n = token_ids.shape[0]
        return self._prefill(self._embed(token_ids, self._all_positions[:n]), n)

    def _prefill(self, batch: Batch, length: int) -> Tensor:
        """Run these tokens of a prompt of `length` tokens."""
        self._selected.append({})
        self.length = length
        self._in_prefill = True
        for index in range(len(self.groups)):
            self._num_computed[index] += len(batch)
            batch = self.cross_in_prefill(index, self._run(index, batch))
        self._in_prefill = False
        self._count()
        return self.decoder.logits(batch.hidden)

    def turn(self, token_ids: Tensor, max_new_tokens: int) -> Tensor:
        """Run the last generated token and a turn's m new ones [1 + m]; return the logits [v] after them.

        max_new_tokens: of this turn. `computed` and `selected` are reset.
        """
        self.computed, self._selected = [], []
        self.scored_before += self.scoring.tokens
        self.scoring = Scoring()
        length = self.length + token_ids.shape[0]
        self._lengthen(length, max(self.max_positions, length + max_new_tokens - 1))
        return self.step_on(token_ids)

    def _lengthen(self, length: int, max_positions: int) -> None:
        """Lengthen everything that is indexed by position. length: tokens of the text now."""
        self.max_positions = max_positions
        self._all_positions = torch.arange(max_positions, device=self.decoder.device)
        for cache in self.caches:
            cache.announce(length, max_positions)

    def fork(self) -> Session:
        """An independent copy of the state."""
        other = copy.copy(self)
        other.caches = [cache.fork() for cache in self.caches]
        other._num_computed = [*self._num_computed]
        return other

    def step(self, token_id: int) -> Tensor:
        """Run one generated token; return the logits [v] after it. Synchronises at most once per boundary."""
        return self.step_on(torch.full((1,), token_id, device=self.decoder.device))

    def step_on(self, token_ids: Tensor) -> Tensor:
        """`step` with a token [1] on the model's device, unknown to the host; in a `turn`, also the tokens after it."""
        self._selected.append({})
        m = token_ids.shape[0]
        positions = self._newest = self._all_positions[self.length : self.length + m]
        self.length += m
        batch = self._embed(token_ids, positions)
        for index in range(len(self.groups)):
            self._num_computed[index] += len(batch) - 1
            batch = self.cross_in_step(index, self._run(index, batch))
        self._count()
        return self.decoder.logits(batch.hidden)

    def cross_in_prefill(self, index: int, batch: Batch) -> Batch:
        """The prompt tokens that enter the next group, of those that left group `index`."""
        return batch

    def cross_in_step(self, index: int, batch: Batch) -> Batch:
        """The tokens that group `index + 1` computes in this decoding step; the newest token is the last of them."""
        return batch

    def chosen(self, cache: GroupCache) -> Tensor | None:
        """[s] bool: which stored tokens the step's tokens attend to, up to their own positions; None for all."""
        return None

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Batch:
        hidden = self.decoder.embed(token_ids, positions)
        return Batch(hidden, positions, self.decoder.rope(hidden, positions))

    def _run(self, index: int, batch: Batch) -> Batch:
        """Run a group's layers over the batch, a chunk at a time."""
        cache, group = self.caches[index], self.groups[index]
        look = group.look if self._in_prefill or group.look_in_steps else NOTHING
        is_new = self._in_prefill or batch.positions is self._newest
        parts = []
        # revived tokens run in one piece: later tokens may already be stored in their layers
        for rows in self._chunks(len(batch), look) if is_new else [slice(0, len(batch))]:
            part = batch[rows] if rows.stop - rows.start < len(batch) else batch
            cache.extend(part.positions, self.length, is_new)
            seen = look if rows.stop == len(batch) else NOTHING
            chosen = self.chosen(cache)
            args = (part.hidden, part.positions, part.rope, chosen, seen, self.length, part.ranks)
            parts.append(self.decoder.run(cache, *args))
        return Batch(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), batch.positions, batch.rope)

    def _chunks(self, m: int, look: Look) -> list[slice]:
        """The rows of each chunk. All queries that `look` records are in the last chunk."""
        if self.chunk is None or m <= self.chunk:
            return [slice(0, m)]
        last = max(0, m - max(self.chunk, look.queries))
        starts = [*range(0, last, self.chunk), last]
        return [slice(start, stop) for start, stop in pairwise([*starts, m])]

    def _count(self) -> None:
        per_layer = []
        for group, count in zip(self.groups, self._num_computed, strict=True):
            per_layer += [count] * len(group.layers)
        self.computed.append(per_layer)
