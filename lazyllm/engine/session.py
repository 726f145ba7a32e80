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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from lazyllm.engine.cache import GroupCache
from lazyllm.engine.decoder import Batch, Decoder, check_lengths, joined
from lazyllm.engine.inputs import NOTHING, Group, Look
from lazyllm.errors import UserError


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
    generated tokens. cross: `cross_in_prefill`, for a method that does no more. scoring: spent on the prompt before.
    Raises ValueError for a length at which the model's RoPE would change (`check_lengths`).
    """

    def __init__(
        self,
        decoder: Decoder,
        groups: Sequence[Group],
        prompt_tokens: int,
        max_new_tokens: int,
        cross: Callable[[Session, int, Batch], Batch] | None = None,
        scoring: Scoring = Scoring(),
    ) -> None:
        check_lengths(decoder.model, prompt_tokens, max_new_tokens)
        self.decoder = decoder
        self.groups = groups
        self.prompt_tokens = prompt_tokens
        self.max_positions = prompt_tokens + max_new_tokens
        self.notes: dict[str, Any] = {}  # what a method remembers from one boundary of the prefill to the next
        self.scoring = scoring
        self.scored_before = 0  # `Scoring.tokens` of earlier turns
        self.length = 0  # tokens run so far, prompt and generated
        self.chunk: int | None = None  # maximum number of new tokens that run through a group's layers at once
        self.computed: list[list[int | Tensor]] = []  # per step and layer: distinct prompt tokens computed so far
        self.caches = [
            # every generated token is computed in every layer
            GroupCache(group.prompt_tokens + max_new_tokens, self.max_positions, decoder.device)
            for group in groups
        ]
        self._cross = cross
        self._unread: list[tuple[str, Tensor, int, bool]] = []  # selections that `read_selections` checks
        self._num_computed: list[int | Tensor] = [0] * len(groups)  # tensors if the host does not know the numbers
        self._selected: list[dict[int, Tensor]] = []
        self._in_prefill = False
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
        return self._prefill(self.decoder.batch(token_ids, self._all_positions[:n]), n)

    def _prefill(self, batch: Batch, length: int) -> Tensor:
        """Run these tokens of a prompt of `length` tokens."""
        self._selected.append({})
        self.length = length
        self._in_prefill = True
        logits = self._run_groups(batch)
        self._in_prefill = False
        return logits

    def turn(self, token_ids: Tensor, max_new_tokens: int) -> Tensor:
        """Run the last generated token and a turn's m new ones [1 + m]; return the logits [v] after them.

        max_new_tokens: of this turn. `computed` and `selected` are reset.
        """
        self.computed, self._selected = [], []
        self.scored_before += self.scoring.tokens
        self.scoring = Scoring()
        self._lengthen(max(self.max_positions, self.length + token_ids.shape[0] + max_new_tokens - 1))
        return self.step_on(token_ids)

    def _lengthen(self, max_positions: int) -> None:
        """Let the text grow to `max_positions` tokens."""
        self.max_positions = max_positions
        self._all_positions = torch.arange(max_positions, device=self.decoder.device)
        for cache in self.caches:
            cache.max_length = max_positions

    def fork(self) -> Self:
        """An independent copy of the state."""
        other = copy.copy(self)
        other.caches = [cache.fork() for cache in self.caches]
        other._num_computed, other.computed = [*self._num_computed], [*self.computed]
        other._selected = [dict(step) for step in self._selected]
        return other

    def step(self, token_id: int) -> Tensor:
        """Run one generated token; return the logits [v] after it. Synchronises at most once per boundary."""
        return self.step_on(torch.full((1,), token_id, device=self.decoder.device))

    def step_on(self, token_ids: Tensor) -> Tensor:
        """`step` with a token [1] on the model's device, unknown to the host; in a `turn`, also the tokens after it."""
        return self._run_groups(self.begin_step(token_ids))

    def begin_step(self, token_ids: Tensor) -> Batch:
        """The batch for the first group in a step with these tokens [m].

        For each group in order, a step then prepares its run (`enter`), runs it, and crosses to the next one: `ask`,
        then `cross_in_step`; `end_step` ends it. So a step can also be run from outside, packed with those of other
        sessions (`lazyllm.engine.pack`), whose questions at a boundary are answered together.
        """
        self._selected.append({})
        start, self.length = self.length, self.length + token_ids.shape[0]
        return self.decoder.batch(token_ids, self._all_positions[start : self.length])

    def enter(self, index: int, batch: Batch, is_whole: bool = True) -> None:
        """Prepare the run of group `index` over a batch: the cache's slots, and the probe.

        is_whole: whether no other chunk of the batch follows; scores are recorded in its last chunk only.
        """
        cache, look = self.caches[index], self._look(index) if is_whole else NOTHING
        cache.advance(batch.positions, self.length, batch.is_newest)
        self.decoder.probe.begin(cache, batch.positions, self.length, look, self.chosen(cache), batch.ranks)

    def ask(self, index: int, batch: Batch) -> Tensor | None:
        """[p] bool, True at the positions that `cross_in_step` needs as numbers; None if it needs none.

        batch: computed by group `index` in a decoding step, and counted here: all but the last generated token are
        prompt tokens. Never waits for the device.
        """
        self._num_computed[index] = self._num_computed[index] + len(batch) - 1  # not `+=`: `computed` holds this tensor
        return None

    def read(self, question: Tensor) -> Tensor:
        """The ascending positions at which `question` is True: a wait for the device."""
        return positions_of([question])[0]

    def end_step(self) -> None:
        """Note the counts of a step whose groups have all run."""
        self.computed.append(self.by_layer(self._num_computed))

    def by_layer(self, values: Sequence[Any]) -> list[Any]:
        """A value for each group -> one for each layer."""
        return [value for group, value in zip(self.groups, values, strict=True) for _ in group.layers]

    def check_selection(self, label: str, kept: Tensor, m: int, count: int | None, newest: bool = True) -> None:
        """Refuse indices `kept` of m tokens that break a rule; their values only in `read_selections`.

        label: the method's. count: how many it declares; None if that depends on the prompt. newest: whether the last
        token must be kept. Raises UserError.
        """
        k = kept.numel()
        if k == 0 or k != (count or k):
            raise UserError(
                f"{label}: selected {k} of {m} tokens: expected {count or 'at least one'}, as it declares (adaptive = "
                "True if the number depends on the prompt)"
            )
        if kept.ndim != 1 or kept.dtype == torch.bool or kept.is_floating_point():
            raise UserError(f"{label}: selected {list(kept.shape)} of {kept.dtype}: expected indices [k]")
        self._unread.append((label, kept, m, newest))

    def read_selections(self) -> None:
        """Check the values of all selections so far. Waits for the device. Raises UserError."""
        unread, self._unread = self._unread, []
        for label, kept, m, newest in unread:
            indices = kept.numpy(force=True)
            if indices.min() < 0 or indices.max() >= m:
                raise UserError(f"{label}: selected {indices.min()} to {indices.max()}: expected indices of {m} tokens")
            falls = np.flatnonzero(np.diff(indices) <= 0)
            if len(falls):
                before, after = indices[falls[0] : falls[0] + 2]
                raise UserError(f"{label}: selected {before} before {after}: expected ascending indices, each once")
            if newest and indices[-1] != m - 1:
                raise UserError(f"{label}: dropped the newest of {m} tokens: expected it to be kept")

    def cross_in_prefill(self, index: int, batch: Batch) -> Batch:
        """The prompt tokens that enter the next group, of those that left group `index`."""
        return batch if self._cross is None else self._cross(self, index, batch)

    def cross_in_step(self, index: int, batch: Batch, answer: Tensor | None) -> Batch:
        """The tokens that group `index + 1` computes in this decoding step; the newest token is the last of them.

        answer: the ascending positions that `ask` asked for.
        """
        return batch

    def chosen(self, cache: GroupCache) -> Tensor | None:
        """[s] bool: which stored tokens the step's tokens attend to, up to their own positions; None for all."""
        return None

    def _look(self, index: int) -> Look:
        """The attention scores to record in this step."""
        group = self.groups[index]
        return group.look if self._in_prefill or group.look_in_steps else NOTHING

    def _run_groups(self, batch: Batch) -> Tensor:
        """Run a step's batch through all groups: the logits [v] of its last token."""
        for index, group in enumerate(self.groups):
            chunks, done = self._chunks(index, batch), list[Batch]()
            for chunk in chunks:
                self.enter(index, chunk, is_whole=chunk is chunks[-1])
                done.append(self.decoder.run(chunk, group.layers))
            batch = done[0] if len(done) == 1 else replace(batch, hidden=joined([part.hidden for part in done]))
            if self._in_prefill:
                self._num_computed[index] += len(batch)
                batch = self.cross_in_prefill(index, batch)
            else:
                question = self.ask(index, batch)
                batch = self.cross_in_step(index, batch, None if question is None else self.read(question))
        self.end_step()
        return self.decoder.last_logits([batch.hidden])[0]

    def _chunks(self, index: int, batch: Batch) -> list[Batch]:
        """The batch in pieces of `chunk` tokens. All queries that the group's `look` records are in the last one.

        Revived tokens run in one piece: later tokens may already be stored in their layers.
        """
        m, chunk = len(batch), self.chunk
        if chunk is None or m <= chunk or not batch.is_newest:
            return [batch]
        last = max(0, m - max(chunk, self._look(index).queries))
        starts = [*range(0, last, chunk), last]
        return [batch[start:stop] for start, stop in pairwise([*starts, m])]


def positions_of(masks: Sequence[Tensor]) -> list[Tensor]:
    """The ascending positions at which each mask [p] is True, in one wait for the device."""
    if len(masks) == 1:
        return [masks[0].nonzero()[:, 0]]
    counts = torch.stack([mask.sum() for mask in masks]).tolist() if masks else []
    return [first_true(mask, count) for mask, count in zip(masks, counts, strict=True)]


def first_true(mask: Tensor, count: int) -> Tensor:
    """The first `count` positions at which mask [p] is True, ascending, without a wait for the device."""
    return mask.byte().argsort(descending=True, stable=True)[:count]
