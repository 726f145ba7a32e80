"""The session of LazyLLM: prefill prunes, every decoding step selects anew and revives from the Aux Cache.

Notation:
    n  prompt tokens         p  position of the step's newest token
    m  tokens computed in a group in this step               s  tokens stored in a group
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lazyllm.engine.cache import AuxCache, GroupCache
from lazyllm.engine.declaration import Prompt
from lazyllm.engine.decoder import Decoder, Rope
from lazyllm.engine.session import Batch, Session
from lazyllm.methods.schedule import Schedule
from lazyllm.methods.sessions import rank, split_prompt

if TYPE_CHECKING:
    from lazyllm.methods.lazy import Lazy


class LazySession(Session):
    """Sections 3.1 to 3.3. In every step the tokens that enter a group are among those that entered the one before.

    A token that a step selects and that the next group has not computed yet is revived: it enters with its hidden
    state at the boundary, from the Aux Cache. So no token is computed twice in any layer.
    """

    def __init__(self, method: Lazy, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> None:
        layers, n = len(decoder.layers), len(prompt)
        super().__init__(decoder, method.groups(layers, n), n, max_new_tokens)
        self._schedule = Schedule.parse(method.schedule, layers)
        self._cuts = [group.layers.stop for group in self.groups if group.look.layers]
        self._prune_generated = method.prune_generated
        self._revives = method.revive
        # behind the last layer there is nothing to be revived into
        boundaries = self.groups[:-1] if method.revive else []
        home = None if method.aux_device is None else torch.device(method.aux_device)
        self._aux = [
            AuxCache(self.max_positions, decoder.width, decoder.dtype, decoder.device, home) for _ in boundaries
        ]
        self._prompt_rope: Rope | None = None
        self._everything = torch.ones(self.max_positions, dtype=torch.bool, device=decoder.device)
        self._present = self._everything  # [length] bool: which positions are in this step's set
        self._num_present = 0
        self._num_candidates = (
            0  # boundaries choose among the first `_num_candidates` positions; later ones always go on
        )

    @property
    def aux_bytes(self) -> int:
        return sum(aux.nbytes for aux in self._aux)

    @property
    def selected(self) -> list[dict[int, Tensor]]:
        return [{layer: present.nonzero()[:, 0] for layer, present in step.items()} for step in self._selected]

    def prefill(self, token_ids: Tensor) -> Tensor:
        self._present = self._everything[: self.prompt_tokens]
        return super().prefill(token_ids)

    def step(self, token_id: int) -> Tensor:
        # all tokens are candidates again in the first group; the newest one is never pruned
        self._num_candidates = self.length if self._prune_generated else self.prompt_tokens
        self._num_present = self.length + 1
        self._present = self._everything[: self._num_present]
        return super().step(token_id)

    def cross_in_prefill(self, index: int, batch: Batch) -> Batch:
        if index == 0:
            self._prompt_rope = batch.rope
        self._note_layers_that_keep_all(index)
        if not self.groups[index].look.layers:
            return batch
        layer = self._cuts[index]
        kept, pruned = split_prompt(self.importance(index), self._schedule.kept(layer, len(batch)))
        if index < len(self._aux):
            self._aux[index].put(batch.positions[pruned], batch.hidden[0, pruned])
        batch = batch[kept]
        self._present = torch.zeros_like(self._present).index_fill_(0, batch.positions, True)
        self._selected[-1][layer] = self._present
        return batch

    def cross_in_step(self, index: int, batch: Batch) -> Batch:
        self._note_layers_that_keep_all(index)
        if not self.groups[index].look.layers:
            return batch
        layer, end = self._cuts[index], self._num_candidates
        always = self.length - end
        keep = self._schedule.kept(layer, self._num_present - always)
        if self._revives:
            best = rank(self._importance_of_candidates(index))[:keep]
            self._present = (self._all_positions[: self.length] >= end).index_fill_(0, best, True)
        else:
            self._present = torch.cat([self._selected[0][layer], self._everything[:always]])
        self._num_present = keep + always
        self._selected[-1][layer] = self._present
        return self._revive(index, batch) if index < len(self._aux) else batch

    def importance(self, index: int) -> Tensor:
        """[s] Eq. 1's importance of the tokens stored in group `index`, whose layers have just run."""
        return self.decoder.probe.take()

    def _importance_of_candidates(self, index: int) -> Tensor:
        """[candidates] by position; less than any importance if a token is not in the set."""
        importance, cache, end = self.importance(index), self.caches[index], self._num_candidates
        # of a position that is not stored the lookup finds some other token's, but such a token is not in the set
        importance = importance[:end] if cache.is_whole else importance[cache.slot_of[:end]]
        if self._num_present == self.length:
            return importance
        return torch.where(self._present[:end], importance, -1.0)

    def chosen(self, cache: GroupCache, batch: Batch) -> Tensor | None:
        """The stored tokens that are in this step's set; None if all are, as in prefill."""
        if cache.added == cache.length or cache.length == self._num_present:
            return None
        return self._present[cache.positions]

    def _revive(self, index: int, batch: Batch) -> Batch:
        """The batch for the next group: those of the tokens in the set that it has not computed, the newest last.

        Tokens that were revived into group `index` and stop at its end go back into its Aux Cache.
        """
        aux, into, newest = self._aux[index], self.caches[index + 1], batch
        if len(batch) > 1:
            aux.put(batch.positions[:-1], batch.hidden[0, :-1])
            newest = batch[-1:]
        if into.length == self.length - 1:
            return newest  # the next group has computed all that came before
        # the only wait for the device at this boundary
        revived = (self._present & into.absent[: self.length]).nonzero()[:, 0]
        if revived.shape[0] == 0:
            return newest
        assert self._prompt_rope is not None
        rope = tuple(
            torch.cat([of_prompt[:, revived], of_newest], dim=1)
            for of_prompt, of_newest in zip(self._prompt_rope, newest.rope, strict=True)
        )
        hidden = torch.cat([aux.take(revived)[None], newest.hidden], dim=1)
        return Batch(hidden, torch.cat([revived, newest.positions]), rope)

    def _note_layers_that_keep_all(self, index: int) -> None:
        inside = self.groups[index].layers
        keep_all = [layer for layer in self._schedule.keep if layer - 1 in inside and layer not in self._cuts]
        self._selected[-1] |= dict.fromkeys(keep_all, self._present)
