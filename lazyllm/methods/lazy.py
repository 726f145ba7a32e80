"""LazyLLM: dynamic token pruning in prefill and decoding (arXiv 2407.14057).

Notation:
    n  prompt tokens         p  position of the step's newest token
    m  tokens computed in a group in this step               s  tokens stored in a group
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lazyllm.cache import AuxCache, GroupCache
from lazyllm.decoder import Decoder, Rope
from lazyllm.methods.base import Method
from lazyllm.prompt import Prompt
from lazyllm.schedule import Schedule
from lazyllm.selection import select, split_prompt
from lazyllm.session import Batch, Group, Session


@dataclass(frozen=True)
class Lazy(Method):
    """Prune progressively by the newest token's attention (Eq. 1), anew in every step; revive from the Aux Cache.

    schedule: pruning layers and keep ratios (section 3.2); "paper" for Figure 4's at the model's depth, or a mapping.
    prune_generated: make earlier generated tokens candidates too. The paper does not say; by default they are kept.
    revive: select anew in every decoding step (section 3.3). False is an ablation: decoding stays with the prefill's
        selection, and nothing is revived.

    Ours: keep ratios instead of percentiles, ties to the lower position, the newest token always kept.
    """

    schedule: Schedule | Mapping[int, float] | str = "paper"
    prune_generated: bool = False
    revive: bool = True

    def __post_init__(self) -> None:
        if self.prune_generated and not self.revive:
            raise ValueError("prune_generated selects in every decoding step, which revive=False does not")

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        schedule = Schedule.parse(self.schedule, len(decoder.layers))
        return LazySession(decoder, schedule, len(prompt), max_new_tokens, self.prune_generated, self.revive)

    def tokens_per_layer(self, num_layers: int, n: int) -> list[int]:
        return Schedule.parse(self.schedule, num_layers).tokens_per_layer(num_layers, n)


class LazySession(Session):
    """Sections 3.1 to 3.3. In every step the tokens that enter a group are among those that entered the one before.

    A token that a step selects and that the next group has not computed yet is revived: it enters with its hidden
    state at the boundary, from the Aux Cache. So no token is computed twice in any layer.
    """

    def __init__(
        self,
        decoder: Decoder,
        schedule: Schedule,
        prompt_tokens: int,
        max_new_tokens: int,
        prune_generated: bool,
        revive: bool,
    ) -> None:
        layers = len(decoder.layers)
        # a layer that keeps everything is no boundary: the tokens on both sides of it are always the same
        self._cuts = [layer for layer, ratio in schedule.keep.items() if ratio < 1]
        ends = [*self._cuts, layers] if not self._cuts or self._cuts[-1] < layers else self._cuts
        tokens = schedule.tokens_per_layer(layers, prompt_tokens)
        groups = [
            Group(range(start, end), tokens[start], range(end - 1, end) if end in self._cuts else range(0), revive)
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        super().__init__(decoder, groups, prompt_tokens, max_new_tokens)
        self._schedule = schedule
        self._prune_generated = prune_generated
        self._revives = revive
        # behind the last layer there is nothing to be revived into
        boundaries = groups[:-1] if revive else []
        self._aux = [AuxCache(self.max_positions, decoder.width, decoder.dtype, decoder.device) for _ in boundaries]
        self._prompt_rope: Rope | None = None
        self._present = torch.empty(0)  # positions of the tokens in this step's set, ascending
        self._num_candidates = 0  # how many of them, from the first, the next boundary chooses among

    @property
    def aux_bytes(self) -> int:
        return sum(aux.nbytes for aux in self._aux)

    def prefill(self, token_ids: Tensor) -> Tensor:
        self._present = torch.arange(self.prompt_tokens, device=self.decoder.device)
        return super().prefill(token_ids)

    def step(self, token_id: int) -> Tensor:
        # all tokens are candidates again in the first group; the newest one is never pruned
        self._present = torch.arange(self.length + 1, device=self.decoder.device)
        self._num_candidates = self.length if self._prune_generated else self.prompt_tokens
        return super().step(token_id)

    def cross_in_prefill(self, index: int, batch: Batch) -> Batch:
        if index == 0:
            self._prompt_rope = batch.rope
        self._note_layers_that_keep_all(index)
        if not self.groups[index].watched:
            return batch
        layer = self._cuts[index]
        kept, pruned = split_prompt(self.decoder.probe.take(), self._schedule.kept(layer, len(batch)))
        if index < len(self._aux):
            self._aux[index].put(batch.positions[pruned], batch.hidden[0, pruned])
        batch = batch[kept]
        self._present = self.selected[-1][layer] = batch.positions
        return batch

    def cross_in_step(self, index: int, batch: Batch) -> Batch:
        self._note_layers_that_keep_all(index)
        if not self.groups[index].watched:
            return batch
        layer = self._cuts[index]
        candidates, always = self._present[: self._num_candidates], self._present[self._num_candidates :]
        if self._revives:
            importance = self.decoder.probe.take()[self.caches[index].slot_of[candidates]]
            kept = candidates[select(importance, self._schedule.kept(layer, self._num_candidates))]
        else:
            kept = self.selected[0][layer]
        self._num_candidates = kept.shape[0]
        self._present = self.selected[-1][layer] = torch.cat([kept, always])
        return self._revive(index, batch, kept) if index < len(self._aux) else batch

    def chosen(self, cache: GroupCache, batch: Batch) -> Tensor | None:
        """The stored tokens that are in this step's set and not after the query; None where that is all of them."""
        if cache.added == cache.length:
            return None  # prefill: causal attention over the batch
        if len(batch) == 1 and cache.length == self._present.shape[0]:
            return None  # everything stored is in the set, and the newest token comes after all of it
        is_present = torch.zeros(self.max_positions, dtype=torch.bool, device=self.decoder.device)
        is_present[self._present] = True
        stored = cache.positions
        return is_present[stored] & (stored <= batch.positions[:, None])

    def _revive(self, index: int, batch: Batch, kept: Tensor) -> Batch:
        """The batch for the next group: those of the kept tokens that it has not computed, and the newest token.

        Tokens that were revived into group `index` and stop at its end go back into its Aux Cache.
        """
        aux, newest = self._aux[index], batch[-1:]
        if len(batch) > 1:
            aux.put(batch.positions[:-1], batch.hidden[0, :-1])
        revived = kept[self.caches[index + 1].slot_of[kept] < 0]  # the only wait for the device at this boundary
        if revived.shape[0] == 0:
            return newest
        assert self._prompt_rope is not None
        cos, sin = (
            torch.cat([of_prompt[:, revived], of_newest], dim=1)
            for of_prompt, of_newest in zip(self._prompt_rope, newest.rope, strict=True)
        )
        hidden = torch.cat([aux.take(revived)[None], newest.hidden], dim=1)
        return Batch(hidden, torch.cat([revived, newest.positions]), (cos, sin))

    def _note_layers_that_keep_all(self, index: int) -> None:
        inside = self.groups[index].layers
        keep_all = [layer for layer in self._schedule.keep if layer - 1 in inside and layer not in self._cuts]
        self.selected[-1] |= dict.fromkeys(keep_all, self._present)
