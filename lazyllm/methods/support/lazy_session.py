"""The session of LazyLLM: prune in every step, and revive from the Aux Cache (arXiv 2407.14057).

Notation:
    n  prompt tokens                          m  tokens that a step computes in a group
    s  stored tokens (slots) of a group       p  positions up to the step's newest token
    w  hidden width                           d  width of a RoPE's cos and sin
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lazyllm.engine.cache import GroupCache
from lazyllm.engine.decoder import Decoder, Tokens
from lazyllm.engine.kernels import way_to_attend
from lazyllm.engine.masks import Chosen
from lazyllm.engine.session import Session
from lazyllm.methods.support.hyperparameters import keep_count
from lazyllm.methods.support.ranking import best_of_prompt, rank
from lazyllm.methods.support.schedule import Schedule

if TYPE_CHECKING:
    from lazyllm.methods.lazy import Lazy


@dataclass(frozen=True)
class StepSet:
    """The tokens that take part in a step from its last boundary on.

    mask: [p] bool. count: their number.
    stays: [max_positions] bool, the tokens that go on without a rank.
    """

    mask: Tensor
    count: int
    stays: Tensor


class LazySession(Session):
    """LazyLLM's generation: in every step, a group sees some of the tokens of the group before it.

    A step revives the selected tokens that the next group has not computed yet: they enter it with
    their hidden states at the boundary, from the Aux Cache. So no token is computed twice in a
    layer (sections 3.1 to 3.3). The Aux Cache has a row for each token: its hidden state at the
    last boundary that it reached.

    Candidates are the prompt tokens; with `prune_generated`, all tokens but the newest. The best of
    them go on, and so do all tokens that are no candidates.
    """

    _set: StepSet
    _aux: Tensor  # [max_positions, w] the Aux Cache
    # [1, max_positions, d] cos and sin of all positions so far, the parts of `Tokens.rope` together
    _rope: Tensor

    def __init__(
        self, decoder: Decoder, method: Lazy, prompt_tokens: int, max_new_tokens: int
    ) -> None:
        groups = method.groups(decoder.depth, prompt_tokens)
        super().__init__(decoder, groups, prompt_tokens, max_new_tokens, method)
        self._lazy = method
        self._keep = Schedule.parse(method.schedule, decoder.depth).keep
        self._everything = torch.ones(self.max_positions, dtype=torch.bool, device=decoder.device)
        # as in `StepSet`, while generated tokens stay
        self._stays = self._all_positions >= prompt_tokens
        self._lowest: Tensor | None = None  # [max_positions] -1: lower than any importance
        self._selected_in_prefill: dict[int, Tensor] = {}

    @property
    def aux_bytes(self) -> int:
        waiting = self.length - self.caches[-1].length if self._lazy.revive else 0
        return waiting * self.decoder.shape.width * self.decoder.dtype.itemsize

    @property
    def allocated_bytes(self) -> int:
        held = [self._aux, self._rope] if self._revives_after(0) else []
        return super().allocated_bytes + sum(part.nbytes for part in held)

    def prefill(self, token_ids: Tensor) -> Tensor:
        n = self.prompt_tokens
        self._set = StepSet(self._everything[:n], n, self._stays)
        return super().prefill(token_ids)

    def begin_step(self) -> Tensor:
        positions = super().begin_step()
        stays = self._stays
        if self._lazy.prune_generated:
            stays = self._all_positions >= self._num_candidates
        self._set = StepSet(self._everything[: self.length], self.length, stays)
        return positions

    def enter(self, index: int, tokens: Tokens) -> None:
        super().enter(index, tokens)
        if index == 0 and self._revives_after(0) and not self._in_prefill:
            newest = slice(self.length - len(tokens), self.length)
            torch.cat(tokens.rope, dim=2, out=self._rope[:, newest])

    def _revives_after(self, index: int) -> bool:
        """Say whether group `index` ends at a boundary where tokens are revived."""
        return self._lazy.revive and index < len(self.groups) - 1

    @property
    def _num_candidates(self) -> int:
        """Tokens at positions below this number are ranked at each boundary of a decoding step."""
        return self.length - 1 if self._lazy.prune_generated else self.prompt_tokens

    def choose(self, index: int) -> None:
        for layer in self.groups[index].layers:
            if self._keep.get(layer + 1) == 1:  # a layer that keeps all, so no group ends at it
                self.note_selection(layer + 1, self._set.mask)
        if self._in_prefill or self.groups[index].scores is None:
            return
        layer = self.groups[index].layers.stop
        others = self.length - self._num_candidates  # tokens without a rank, which go on
        keep = keep_count(self._keep[layer], self._set.count - others)
        if self._lazy.revive:
            best = rank(self._importance_of_candidates(index))[:keep]
            mask = self._set.stays[: self.length].index_fill(0, best, True)
        else:
            mask = torch.cat([self._selected_in_prefill[layer], self._everything[:others]])
        self._set = replace(self._set, mask=mask, count=keep + others)
        self.note_selection(layer, mask)

    def missing(self, index: int) -> Tensor | None:
        if self._in_prefill or not self._revives_after(index):
            return None
        cache = self.caches[index + 1]
        if cache.length == self.length - 1:
            return None  # the next group has computed all earlier tokens
        return self._set.mask.index_fill(0, cache.positions, False)

    def leave(self, index: int, tokens: Tokens, positions: Tensor | None) -> Tokens:
        if self._in_prefill:
            return self._prune_prompt(index, tokens)
        return self._revive(index, tokens, positions) if self._revives_after(index) else tokens

    def _prune_prompt(self, index: int, tokens: Tokens) -> Tokens:
        """Return the tokens of the prompt that go on."""
        if self.groups[index].scores is None:
            return tokens
        if index == 0 and self._revives_after(0):
            more = 0, 0, 0, self.max_positions - len(tokens)
            self._aux = F.pad(tokens.hidden[0], more)
            self._rope = F.pad(torch.cat(tokens.rope, dim=2), more)
        elif self._revives_after(index):
            self._aux.index_copy_(0, tokens.positions, tokens.hidden[0])
        layer = self.groups[index].layers.stop
        keep = keep_count(self._keep[layer], len(tokens))
        tokens = tokens[best_of_prompt(self.importance(index), keep)]
        mask = torch.zeros_like(self._set.mask).index_fill_(0, tokens.positions, True)
        self._set = replace(self._set, mask=mask, count=len(tokens))
        self._selected_in_prefill[layer] = mask
        self.note_selection(layer, mask)
        return tokens

    def _revive(self, index: int, tokens: Tokens, positions: Tensor | None) -> Tokens:
        """Return the tokens of the set that the next group has not computed, the newest last."""
        goes_alone = positions is None or len(positions) < 2
        if len(tokens) > 1 or not goes_alone:
            self._aux.index_copy_(0, tokens.positions, tokens.hidden[0])
        newest = tokens if len(tokens) == 1 else replace(tokens[-1:], is_newest=True)
        if positions is None or goes_alone:
            return newest
        self._num_revived[index + 1] = self._num_revived[index + 1] + len(positions) - 1
        rope = self._rope[:, positions].split([part.shape[2] for part in newest.rope], dim=2)
        shape, decoder = self.decoder.shape, self.decoder
        heads, itemsize = (shape.heads, shape.kv_heads), decoder.dtype.itemsize
        way = way_to_attend(len(positions), *heads, self.length, itemsize, decoder.device)
        ranks = self._set.mask.cumsum(0)[positions].tolist() if way == "sort" else None
        hidden = self._aux[positions][None]
        return Tokens(hidden, positions, rope, is_newest=False, ranks=ranks)

    def importance(self, index: int) -> Tensor:
        """Take the importance [s] (Eq. 1) of the tokens stored in the group that has just run."""
        return self.context.take_each()[0]

    def _importance_of_candidates(self, index: int) -> Tensor:
        """Take importance by position; below any importance for tokens outside the set."""
        importance, cache, end = self.importance(index), self.caches[index], self._num_candidates
        if self._lowest is None:
            self._lowest = importance.new_full((self.max_positions,), -1.0)
        if not cache.is_contiguous:
            lowest = self._lowest[: self.length]
            importance = lowest.index_copy(0, cache.positions, importance)
        importance = importance[:end]
        if self._set.count < self.length:
            importance = torch.where(self._set.mask[:end], importance, self._lowest[:end])
        return importance

    def chosen(self, cache: GroupCache) -> Chosen | None:
        if self._in_prefill or cache.length == self._set.count:
            return None
        return self._set.mask[cache.positions], self._set.count
