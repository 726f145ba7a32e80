"""The session of LazyLLM: prune in every step, and revive from the Aux Cache (arXiv 2407.14057).

Notation:
    n  prompt tokens                          m  tokens that a step computes in a group
    s  stored tokens (slots) of a group       w  hidden width
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from lazyllm.engine.cache import AuxCache, GroupCache
from lazyllm.engine.decoder import Batch, Decoder
from lazyllm.engine.inputs import Group
from lazyllm.engine.session import Session, first_true
from lazyllm.methods.support.ranking import rank, split_prompt
from lazyllm.methods.support.schedule import Schedule

# From this number of revived tokens on, a turn sorts the K and V that they attend to; for fewer, sorting costs more
MANY = 32


class LazySession(Session):
    """Sections 3.1 to 3.3. In every step, the tokens that enter a group are some of those that entered the one before.

    A step revives the selected tokens that the next group has not computed yet: they enter it with their hidden states
    at the boundary, from the Aux Cache. So no token is computed twice in a layer.

    In a decoding step, the first `_num_candidates` positions of the text are candidates at each boundary: the best go
    on, and without a rank those in `_always`. All later tokens go on. Candidates are the tokens up to the last prompt's
    end, or with `prune_generated` all but the newest. A later turn is one step of several new tokens, all candidates.

    schedule, prune_generated, revive, aux_device: as of `lazyllm.methods.Lazy`.
    """

    _rope: Tensor  # [1, max_positions, d] cos and sin of all positions so far, the parts of `Batch.rope` side by side

    def __init__(
        self,
        decoder: Decoder,
        groups: Sequence[Group],
        prompt_tokens: int,
        max_new_tokens: int,
        schedule: Schedule,
        prune_generated: bool = False,
        revive: bool = True,
        aux_device: str | None = None,
    ) -> None:
        super().__init__(decoder, groups, prompt_tokens, max_new_tokens)
        self._schedule = schedule
        self._prune_generated = prune_generated
        self._revives = revive
        boundaries = self.groups[:-1] if revive else []  # none after the last group
        home = None if aux_device is None else torch.device(aux_device)
        self._aux = [
            AuxCache(self.max_positions, decoder.width, decoder.dtype, decoder.device, home) for _ in boundaries
        ]
        self._first_selected: dict[int, Tensor] = {}  # the prefill's selection
        self._everything = torch.ones(self.max_positions, dtype=torch.bool, device=decoder.device)
        self._present = self._everything  # [length] bool: which positions are in this step's set
        self._num_present = 0
        self._num_candidates = 0
        self._prompt_end = self.prompt_tokens  # the position after this turn's last prompt token
        self._below: Tensor | None = None  # [max_positions] -1, as of `_lowest`
        self._stays: Tensor | None = None  # [length] bool: tokens that go on at each boundary of this step
        self._generated: Tensor | None = None  # [max_positions] bool: generated tokens of earlier turns, if any
        self._num_always = 0
        self._starts_turn = False
        self._first_new = 0  # position of the first token that this turn runs
        self._ranks: Sequence[int] | None = None  # `Batch.ranks` of the tokens that a turn revives next, if many
        self._num_revived: list[int | Tensor] = [0] * len(self.groups)

    @property
    def revived(self) -> list[int]:
        return self.by_layer([int(count) for count in self._num_revived])

    @property
    def _always(self) -> Tensor | None:
        """[max_positions] bool: candidates that are never pruned, `_num_always` of them; None for none."""
        return None if self._prune_generated else self._generated

    @property
    def aux_bytes(self) -> int:
        return sum(aux.nbytes for aux in self._aux)

    @property
    def selected(self) -> list[dict[int, Tensor]]:
        return [{layer: present.nonzero()[:, 0] for layer, present in step.items()} for step in self._selected]

    def prefill(self, token_ids: Tensor) -> Tensor:
        self._present = self._everything[: self.prompt_tokens]
        return super().prefill(token_ids)

    def turn(self, token_ids: Tensor, max_new_tokens: int) -> Tensor:
        if not self._revives:
            return super().turn(token_ids, max_new_tokens)  # attends to what the prefill kept
        self._num_revived = [0] * len(self.groups)
        generated = slice(self._prompt_end, self.length + 1)
        self._prompt_end = self.length + token_ids.shape[0]
        mask = torch.zeros(self._prompt_end + max_new_tokens, dtype=torch.bool, device=self.decoder.device)
        if self._generated is not None:
            mask[: generated.start] = self._generated[: generated.start]
        mask[generated] = True
        self._generated = mask
        if not self._prune_generated:
            self._num_always += generated.stop - generated.start
        self._starts_turn, self._first_new = True, self.length
        logits = super().turn(token_ids, max_new_tokens)
        self._starts_turn = False
        return logits

    def fork(self) -> Self:
        other = super().fork()
        other._aux = [aux.fork() for aux in self._aux]
        other._num_revived = [*self._num_revived]
        return other

    def _lengthen(self, max_positions: int) -> None:
        if self._aux:
            more = self._rope.new_empty(1, max_positions - self.max_positions, self._rope.shape[2])
            self._rope = torch.cat([self._rope, more], dim=1)
        super()._lengthen(max_positions)
        self._everything = torch.ones(max_positions, dtype=torch.bool, device=self.decoder.device)
        for aux in self._aux:
            aux.lengthen(max_positions)

    def begin_step(self, token_ids: Tensor) -> Batch:
        m = token_ids.shape[0]
        prompt_only = self._starts_turn or not self._prune_generated
        self._num_candidates = self._prompt_end if prompt_only else self.length
        self._num_present = self.length + m  # the first group runs on the whole text
        self._present = self._everything[: self._num_present]
        self._stays = None
        batch = super().begin_step(token_ids)
        if self._aux:
            self._rope[:, self.length - m : self.length] = torch.cat(batch.rope, dim=2)
        return batch

    def cross_in_prefill(self, index: int, batch: Batch) -> Batch:
        if index == 0 and self._aux:
            rope = torch.cat(batch.rope, dim=2)
            self._rope = rope.new_empty(1, self.max_positions, rope.shape[2])
            self._rope[:, : len(batch)] = rope
        self._note_layers_that_keep_all(index)
        if not self.groups[index].look.layers:
            return batch
        layer = self.groups[index].layers.stop
        kept, pruned = split_prompt(self.importance(index), self._schedule.kept(layer, len(batch)))
        if index < len(self._aux):
            self._aux[index].put(batch.positions[pruned], batch.hidden[0, pruned])
        batch = batch[kept]
        self._present = torch.zeros_like(self._present).index_fill_(0, batch.positions, True)
        self._selected[-1][layer] = self._first_selected[layer] = self._present
        return batch

    def ask(self, index: int, batch: Batch) -> Tensor | None:
        """Select the step's set at this boundary; [p] bool, its tokens that the next group has not computed.

        The newest token is one of them.
        """
        super().ask(index, batch)
        self._note_layers_that_keep_all(index)
        if not self.groups[index].look.layers:
            return None
        layer, end = self.groups[index].layers.stop, self._num_candidates
        unranked = self.length - end + self._num_always  # these go on
        keep = self._schedule.kept(layer, self._num_present - unranked)
        if self._revives:
            best = rank(self._importance_of_candidates(index))[:keep]
            if self._stays is None:
                later = self._all_positions[: self.length] >= end
                self._stays = later if self._always is None else later | self._always[: self.length]
            self._present = self._stays.index_fill(0, best, True)
        else:
            self._present = torch.cat([self._first_selected[layer], self._everything[:unranked]])
        self._num_present = keep + unranked
        self._selected[-1][layer] = self._present
        if index >= len(self._aux) or self.caches[index + 1].length == self.length - 1:
            return None  # the next group has computed all earlier tokens
        return self._present.index_fill(0, self.caches[index + 1].positions, False)

    def importance(self, index: int) -> Tensor:
        """[s] importance (Eq. 1) of the tokens stored in group `index`, whose layers have just run."""
        return self.decoder.probe.take()

    def _importance_of_candidates(self, index: int) -> Tensor:
        """[candidates] importance by position; lower than any importance for a token outside the step's set."""
        importance, cache, end = self.importance(index), self.caches[index], self._num_candidates
        if not cache.is_contiguous:
            importance = self._lowest(importance.dtype).index_copy(0, cache.positions, importance)
        importance = importance[:end]
        if self._num_present < self.length or self._always is not None:
            chosen = self._present[:end] if self._always is None else self._present[:end] & ~self._always[:end]
            importance = torch.where(chosen, importance, -1.0)
        if self._starts_turn:  # the newest token is a prompt token, which goes on, as in prefill
            importance = importance.clone()
            importance[-1] = float("inf")
        return importance

    def _lowest(self, dtype: torch.dtype) -> Tensor:
        """[length] lower than any importance. Made once: an operation less at each boundary."""
        if self._below is None or len(self._below) < self.max_positions:
            self._below = torch.full((self.max_positions,), -1.0, dtype=dtype, device=self.decoder.device)
        return self._below[: self.length]

    def chosen(self, cache: GroupCache) -> Tensor | None:
        """[s] bool: the stored tokens in this step's set; None for all, as in prefill."""
        if self._in_prefill or cache.length == self._num_present:
            return None
        return self._present[cache.positions]

    def cross_in_step(self, index: int, batch: Batch, answer: Tensor | None) -> Batch:
        """The tokens of the set that the next group has not computed, the newest last.

        Tokens that were revived into group `index` but not into the next one go back into its Aux Cache.
        """
        if index >= len(self._aux):
            return batch
        aux, newest, ranks = self._aux[index], batch, self._ranks
        self._ranks = None
        if len(batch) > 1:
            aux.put(batch.positions[:-1], batch.hidden[0, :-1])
            newest = replace(batch[-1:], is_newest=True)
        if answer is None or answer.shape[0] <= 1:
            return newest
        revived = answer[:-1]
        if self._prune_generated and self._generated is not None:  # counts are of prompt tokens, as a turn's newest is
            generated = self._generated[revived].sum() - int(self._starts_turn)
            self._num_computed[index + 1] = self._num_computed[index + 1] - generated
        # the turn's own tokens are in `revived` too
        old = (revived < self._first_new).sum() if self._starts_turn else revived.shape[0]
        self._num_revived[index + 1] = self._num_revived[index + 1] + old
        rope, widths = self._rope[:, answer], [part.shape[2] for part in newest.rope]
        ends = [*accumulate(widths)]
        parts = tuple(rope[..., end - width : end] for end, width in zip(ends, widths, strict=True))
        hidden = torch.cat([aux.take(revived)[None], newest.hidden], dim=1)
        return Batch(hidden, answer, parts, is_newest=False, ranks=ranks)

    def read(self, question: Tensor) -> Tensor:
        if not self._starts_turn:
            return super().read(question)
        ranks = self._present.cumsum(0) * question  # 0 if not revived
        known = ranks.numpy(force=True)
        known = known[known > 0]
        self._ranks = known.tolist() if len(known) > MANY else None
        return first_true(question, len(known))

    def _note_layers_that_keep_all(self, index: int) -> None:
        inside = self.groups[index].layers
        keep_all = (layer for layer, ratio in self._schedule.keep.items() if ratio == 1 and layer - 1 in inside)
        self._selected[-1] |= dict.fromkeys(keep_all, self._present)
