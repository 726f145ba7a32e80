"""The session of LazyLLM: prune in every step, and revive from the Aux Cache (arXiv 2407.14057).

Notation:
    n  prompt tokens                          m  tokens that a step computes in a group
    s  stored tokens (slots) of a group       w  hidden width
    p  positions up to the step's newest token
    d  width of a RoPE's cos and sin
"""

from dataclasses import dataclass, replace
from typing import Any

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
    """LazyLLM's generation: in every step, each group gets some of the tokens that entered the group before it.

    A step revives the selected tokens that the next group has not computed yet: they enter it with their hidden states
    at the boundary, from the Aux Cache. So no token is computed twice in a layer (sections 3.1 to 3.3). The Aux Cache
    has a row for each token: its hidden state at the last boundary that it reached.

    Candidates are the prompt tokens; with `prune_generated`, all tokens but the newest. The best of them go on, and so
    do all tokens that are no candidates.

    method: the `lazyllm.methods.Lazy` (untyped, as its module imports this one).
    """

    _set: StepSet
    _aux: Tensor  # [max_positions, w] the Aux Cache
    _rope: Tensor  # [1, max_positions, d] cos and sin of all positions so far, the parts of `Tokens.rope` side by side

    def __init__(self, decoder: Decoder, method: Any, prompt_tokens: int, max_new_tokens: int) -> None:
        groups = method.groups(decoder.depth, prompt_tokens)
        super().__init__(decoder, groups, prompt_tokens, max_new_tokens, method)
        self._schedule = Schedule.parse(method.schedule, decoder.depth)
        self._everything = torch.ones(self.max_positions, dtype=torch.bool, device=decoder.device)
        self._stays = self._all_positions >= prompt_tokens  # as in `StepSet`, while generated tokens stay
        self._lowest: Tensor | None = None  # [max_positions] -1: lower than any importance
        self._selected_in_prefill: dict[int, Tensor] = {}

    @property
    def aux_bytes(self) -> int:
        waiting = self.length - self.caches[-1].length if self._method.revive else 0
        return waiting * self.decoder.shape.width * self.decoder.dtype.itemsize

    @property
    def allocated_bytes(self) -> int:
        held = [self._aux, self._rope] if self._revives_after(0) else []
        return super().allocated_bytes + sum(part.nbytes for part in held)

    def prefill(self, token_ids: Tensor) -> Tensor:
        self._set = StepSet(self._everything[: self.prompt_tokens], self.prompt_tokens, self._stays)
        return super().prefill(token_ids)

    def begin_step(self) -> Tensor:
        positions = super().begin_step()
        stays = self._all_positions >= self._num_candidates if self._method.prune_generated else self._stays
        self._set = StepSet(self._everything[: self.length], self.length, stays)
        return positions

    def enter(self, index: int, tokens: Tokens) -> None:
        super().enter(index, tokens)
        if index == 0 and self._revives_after(0) and not self._in_prefill:
            torch.cat(tokens.rope, dim=2, out=self._rope[:, self.length - len(tokens) : self.length])

    def _revives_after(self, index: int) -> bool:
        """Whether group `index` ends at a boundary where tokens are revived."""
        return self._method.revive and index < len(self.groups) - 1

    @property
    def _num_candidates(self) -> int:
        """Tokens at positions below this number are ranked at each boundary of a decoding step."""
        return self.length - 1 if self._method.prune_generated else self.prompt_tokens

    def choose(self, index: int) -> None:
        for layer in self.groups[index].layers:
            if self._schedule.keep.get(layer + 1) == 1:  # a pruning layer that keeps all, so no group ends at it
                self.note_selection(layer + 1, self._set.mask)
        if self._in_prefill or self.groups[index].scores is None:
            return
        layer = self.groups[index].layers.stop
        others = self.length - self._num_candidates  # tokens without a rank, which go on
        keep = keep_count(self._schedule.keep[layer], self._set.count - others)
        if self._method.revive:
            best = rank(self._importance_of_candidates(index))[:keep]
            mask = self._set.stays[: self.length].index_fill(0, best, True)
        else:
            mask = torch.cat([self._selected_in_prefill[layer], self._everything[:others]])
        self._set = replace(self._set, mask=mask, count=keep + others)
        self.note_selection(layer, mask)

    def missing(self, index: int) -> Tensor | None:
        if self._in_prefill or not self._revives_after(index) or self.caches[index + 1].length == self.length - 1:
            return None  # the next group has computed all earlier tokens
        return self._set.mask.index_fill(0, self.caches[index + 1].positions, False)

    def leave(self, index: int, tokens: Tokens, positions: Tensor | None) -> Tokens:
        if self._in_prefill:
            return self._prune_prompt(index, tokens)
        return self._revive(index, tokens, positions) if self._revives_after(index) else tokens

    def _prune_prompt(self, index: int, tokens: Tokens) -> Tokens:
        """The tokens of the prompt that go on."""
        if self.groups[index].scores is None:
            return tokens
        if index == 0 and self._revives_after(0):
            more = 0, 0, 0, self.max_positions - len(tokens)
            self._aux, self._rope = F.pad(tokens.hidden[0], more), F.pad(torch.cat(tokens.rope, dim=2), more)
        elif self._revives_after(index):
            self._aux.index_copy_(0, tokens.positions, tokens.hidden[0])
        layer = self.groups[index].layers.stop
        tokens = tokens[best_of_prompt(self.importance(index), keep_count(self._schedule.keep[layer], len(tokens)))]
        mask = torch.zeros_like(self._set.mask).index_fill_(0, tokens.positions, True)
        self._set = replace(self._set, mask=mask, count=len(tokens))
        self._selected_in_prefill[layer] = mask
        self.note_selection(layer, mask)
        return tokens

    def _revive(self, index: int, tokens: Tokens, positions: Tensor | None) -> Tokens:
        """The tokens of the set that the next group has not computed, the newest last."""
        goes_alone = positions is None or len(positions) < 2
        if len(tokens) > 1 or not goes_alone:
            self._aux.index_copy_(0, tokens.positions, tokens.hidden[0])
        newest = tokens if len(tokens) == 1 else replace(tokens[-1:], is_newest=True)
        if positions is None or len(positions) < 2:
            return newest
        self._num_revived[index + 1] = self._num_revived[index + 1] + len(positions) - 1
        hidden = self._aux[positions][None]
        rope = self._rope[:, positions].split([part.shape[2] for part in newest.rope], dim=2)
        heads, dtype = self.decoder.shape, self.decoder.dtype
        way = way_to_attend(
            len(positions), heads.heads, heads.kv_heads, self.length, dtype.itemsize, self.decoder.device
        )
        ranks = self._set.mask.cumsum(0)[positions].tolist() if way == "sort" else None
        return Tokens(hidden, positions, rope, is_newest=False, ranks=ranks)

    def importance(self, index: int) -> Tensor:
        """[s] importance (Eq. 1) of the tokens stored in the group whose layers have just run."""
        return self.context.take_each()[0]

    def _importance_of_candidates(self, index: int) -> Tensor:
        """[candidates] importance by position; below any importance for tokens outside the set."""
        importance, cache, end = self.importance(index), self.caches[index], self._num_candidates
        if self._lowest is None:
            self._lowest = importance.new_full((self.max_positions,), -1.0)
        if not cache.is_contiguous:
            importance = self._lowest[: self.length].index_copy(0, cache.positions, importance)
        importance = importance[:end]
        if self._set.count < self.length:
            importance = torch.where(self._set.mask[:end], importance, self._lowest[:end])
        return importance

    def chosen(self, cache: GroupCache) -> Chosen | None:
        if self._in_prefill or cache.length == self._set.count:
            return None
        return self._set.mask[cache.positions], self._set.count
