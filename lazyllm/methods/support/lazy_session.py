"""The session of LazyLLM: prune in every step, and revive from the Aux Cache (arXiv 2407.14057).

Notation:
    n  prompt tokens                          m  tokens that a step computes in a group
    s  stored tokens (slots) of a group       w  hidden width
    p  positions up to the step's newest token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from lazyllm.engine.cache import AuxCache, GroupCache
from lazyllm.engine.decoder import Decoder, Rope, Tokens
from lazyllm.engine.inputs import Group
from lazyllm.engine.session import Session
from lazyllm.methods.support.ranking import rank, split_prompt
from lazyllm.methods.support.schedule import Schedule

# More revived tokens than these sort the K and V that they attend to in a later turn; for fewer, sorting costs more
MANY = 32


@dataclass(frozen=True)
class Turn:
    """What stays the same in all steps of an answer.

    prompt_end: position after the turn's last prompt token.
    first_new: position of the first token that the turn runs.
    generated: [positions] bool, the generated tokens of earlier turns; None in the first turn.
    always: those of them that are never pruned, though before `prompt_end`; None for none.
    num_always: their number.
    """

    prompt_end: int
    first_new: int = 0
    generated: Tensor | None = None
    always: Tensor | None = None
    num_always: int = 0


@dataclass
class Chosen:
    """The tokens that take part in a step, from its last boundary on.

    mask: [p] bool, True for a token of the set.
    count: number of these tokens.
    num_candidates: the first positions of the text, which are ranked at each boundary.
    opens_turn: whether the step runs the tokens of a later turn.
    stays: [p] bool, tokens that go on at every boundary without a rank; None before the first.
    ranks: `Tokens.ranks` of the tokens that a turn revives next, if many.
    """

    mask: Tensor
    count: int
    num_candidates: int
    opens_turn: bool = False
    stays: Tensor | None = None
    ranks: Sequence[int] | None = None


class LazySession(Session):
    """Sections 3.1 to 3.3. In every step, the tokens that enter a group are some of those that entered the one before.

    A step revives the selected tokens that the next group has not computed yet: they enter it with their hidden states
    at the boundary, from the Aux Cache. So no token is computed twice in a layer.

    In a decoding step, the first `Chosen.num_candidates` positions of the text are candidates at each boundary: the
    best go on, and without a rank those in `Turn.always`. All later tokens go on. Candidates are the tokens up to the
    last prompt's end, or with `prune_generated` all but the newest. A later turn is one step of several new tokens, all
    candidates.

    schedule, prune_generated, revive: as of `lazyllm.methods.Lazy`.
    """

    _step: Chosen
    _rope: Tensor  # [1, max_positions, d] cos and sin of all positions so far, the parts of `Tokens.rope` side by side

    def __init__(
        self,
        decoder: Decoder,
        groups: Sequence[Group],
        prompt_tokens: int,
        max_new_tokens: int,
        schedule: Schedule,
        prune_generated: bool = False,
        revive: bool = True,
    ) -> None:
        super().__init__(decoder, groups, prompt_tokens, max_new_tokens)
        self._schedule = schedule
        self._prune_generated = prune_generated
        self._revives = revive
        width, device = decoder.shape.width, decoder.device
        boundaries = self.groups[:-1] if revive else []  # none after the last group
        self._aux = [AuxCache(self.max_positions, width, decoder.dtype, device) for _ in boundaries]
        self._turn = Turn(prompt_tokens)
        self._everything = torch.ones(self.max_positions, dtype=torch.bool, device=device)
        self._lowest: Tensor | None = None  # [max_positions] -1: lower than any importance
        self._selected_in_prefill: dict[int, Tensor] = {}
        self._num_revived: list[int | Tensor] = [0] * len(self.groups)

    @property
    def revived(self) -> list[int]:
        return self.by_layer([int(count) for count in self._num_revived])

    @property
    def aux_bytes(self) -> int:
        return sum(aux.nbytes for aux in self._aux)

    def prefill(self, token_ids: Tensor) -> Tensor:
        n = self.prompt_tokens
        self._step = Chosen(self._everything[:n], n, n)
        return super().prefill(token_ids)

    def turn(self, token_ids: Tensor, max_new_tokens: int) -> Tensor:
        if not self._revives:
            return super().turn(token_ids, max_new_tokens)  # attends to what the prefill kept
        before, before_end = self._turn, self._turn.prompt_end
        answer = slice(before_end, self.length + 1)  # the turn runs its last token
        prompt_end = self.length + token_ids.shape[0]
        generated = torch.zeros(prompt_end + max_new_tokens, dtype=torch.bool, device=self.decoder.device)
        if before.generated is not None:
            generated[:before_end] = before.generated[:before_end]
        generated[answer] = True
        self._turn = Turn(prompt_end, self.length, generated)
        if not self._prune_generated:
            num_always = before.num_always + answer.stop - answer.start
            self._turn = replace(self._turn, always=generated, num_always=num_always)
        self._num_revived = [0] * len(self.groups)
        return super().turn(token_ids, max_new_tokens)

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
        self._lowest = None
        for aux in self._aux:
            aux.lengthen(max_positions)

    def begin_step(self, token_ids: Tensor) -> Tokens:
        start, end = self.length, self.length + token_ids.shape[0]
        opens_turn = self._revives and start == self._turn.first_new
        ranks_prompt_only = opens_turn or not self._prune_generated
        candidates = self._turn.prompt_end if ranks_prompt_only else start
        self._step = Chosen(self._everything[:end], end, candidates, opens_turn)  # the first group runs the whole text
        tokens = super().begin_step(token_ids)
        if self._aux:
            self._rope[:, start:end] = torch.cat(tokens.rope, dim=2)
        return tokens

    def missing_mask(self, index: int, tokens: Tokens) -> Tensor | None:
        """Choose the step's set at this boundary; [p] bool, its tokens that the next group has not computed."""
        super().missing_mask(index, tokens)
        self._note_layers_that_keep_all(index)
        if self._in_prefill or self.groups[index].scores is None:
            return None
        step, turn, layer = self._step, self._turn, self.groups[index].layers.stop
        unranked = self.length - step.num_candidates + turn.num_always  # these go on
        keep = self._schedule.kept(layer, step.count - unranked)
        if self._revives:
            best = rank(self._importance_of_candidates(index))[:keep]
            step.mask = self._stays().index_fill(0, best, True)
        else:
            step.mask = torch.cat([self._selected_in_prefill[layer], self._everything[:unranked]])
        step.count = keep + unranked
        self.note_selection(layer, step.mask)
        if index >= len(self._aux) or self.caches[index + 1].length == self.length - 1:
            return None  # the next group has computed all earlier tokens
        return step.mask.index_fill(0, self.caches[index + 1].positions, False)

    def to_indices(self, mask: Tensor) -> Tensor:
        if not self._step.opens_turn:
            return super().to_indices(mask)
        ranks = self._step.mask.cumsum(0) * mask  # 0 if not missing
        known = ranks.numpy(force=True)
        known = known[known > 0]
        self._step.ranks = known.tolist() if len(known) > MANY else None
        return torch.nonzero_static(mask, size=len(known))[:, 0]

    def prune(self, index: int, tokens: Tokens, positions: Tensor | None) -> Tokens:
        if self._in_prefill:
            return self._prune_prompt(index, tokens)
        return self._revive(index, tokens, positions) if index < len(self._aux) else tokens

    def _prune_prompt(self, index: int, tokens: Tokens) -> Tokens:
        """The tokens of the prompt that go on; the others' hidden states go to the Aux Cache."""
        if index == 0 and self._aux:
            rope = torch.cat(tokens.rope, dim=2)
            self._rope = rope.new_empty(1, self.max_positions, rope.shape[2])
            self._rope[:, : len(tokens)] = rope
        if self.groups[index].scores is None:
            return tokens
        layer = self.groups[index].layers.stop
        kept, pruned = split_prompt(self.importance(index), self._schedule.kept(layer, len(tokens)))
        if index < len(self._aux):
            self._aux[index].put(tokens.positions[pruned], tokens.hidden[0, pruned])
        tokens = tokens[kept]
        self._step.mask = torch.zeros_like(self._step.mask).index_fill_(0, tokens.positions, True)
        self._selected_in_prefill[layer] = self._step.mask
        self.note_selection(layer, self._step.mask)
        return tokens

    def _revive(self, index: int, tokens: Tokens, positions: Tensor | None) -> Tokens:
        """The tokens of the set that the next group has not computed, the newest last.

        Tokens that were revived into group `index` but not into the next one go back into its Aux Cache.
        """
        aux, step, newest = self._aux[index], self._step, tokens
        ranks, step.ranks = step.ranks, None
        if len(tokens) > 1:
            aux.put(tokens.positions[:-1], tokens.hidden[0, :-1])
            newest = replace(tokens[-1:], is_newest=True)
        if positions is None:
            return newest
        revived, turn = positions[:-1], self._turn
        if self._prune_generated and turn.generated is not None:  # counts are of prompt tokens, as a turn's newest is
            generated = turn.generated[revived].sum() - int(step.opens_turn)
            self._num_computed[index + 1] = self._num_computed[index + 1] - generated
        if not len(revived):
            return newest
        # the turn's own tokens are in `revived` too
        old = (revived < self._turn.first_new).sum() if step.opens_turn else len(revived)
        self._num_revived[index + 1] = self._num_revived[index + 1] + old
        hidden = torch.cat([aux.take(revived)[None], newest.hidden], dim=1)
        return Tokens(hidden, positions, self._rope_at(positions, newest.rope), is_newest=False, ranks=ranks)

    def _rope_at(self, positions: Tensor, like: Rope) -> Rope:
        """cos and sin of these positions, in parts as wide as those of `like`."""
        rope, widths = self._rope[:, positions], [part.shape[2] for part in like]
        return tuple(rope[..., end - width : end] for end, width in zip(accumulate(widths), widths, strict=True))

    def importance(self, index: int) -> Tensor:
        """[s] importance (Eq. 1) of the tokens stored in group `index`, whose layers have just run."""
        return self.context.take_each()[0]

    def _importance_of_candidates(self, index: int) -> Tensor:
        """[candidates] importance by position; lower than any importance for a token outside the step's set."""
        importance, cache, step, always = self.importance(index), self.caches[index], self._step, self._turn.always
        end = step.num_candidates
        if not cache.is_contiguous:
            if self._lowest is None:
                self._lowest = importance.new_full((self.max_positions,), -1.0)
            importance = self._lowest[: self.length].index_copy(0, cache.positions, importance)
        importance = importance[:end]
        if step.count < self.length or always is not None:
            ranked = step.mask[:end] if always is None else step.mask[:end] & ~always[:end]
            importance = torch.where(ranked, importance, -1.0)
        if step.opens_turn:  # the newest token is a prompt token, which goes on, as in prefill
            importance = importance.clone()
            importance[-1] = float("inf")
        return importance

    def _stays(self) -> Tensor:
        """`Chosen.stays`, made at the first boundary of a step."""
        step, always = self._step, self._turn.always
        if step.stays is None:
            later = self._all_positions[: self.length] >= step.num_candidates
            step.stays = later if always is None else later | always[: self.length]
        return step.stays

    def chosen(self, cache: GroupCache) -> Tensor | None:
        if self._in_prefill or cache.length == self._step.count:
            return None
        return self._step.mask[cache.positions]

    def _note_layers_that_keep_all(self, index: int) -> None:
        inside = self.groups[index].layers
        for layer, ratio in self._schedule.keep.items():
            if ratio == 1 and layer - 1 in inside:
                self.note_selection(layer, self._step.mask)
