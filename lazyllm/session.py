"""One generation: prefill and decoding steps over groups of layers, with progressive pruning and revival.

A pruning layer ends a group of layers. In every step the tokens that enter a group are a subset of those that entered
the one before; tokens that a step selects and that the group has not computed yet are revived from the Aux Cache of
the boundary before it. So no token is computed twice in any layer (LazyLLM, arXiv 2407.14057, sections 3.1 to 3.3).

Notation:
    n  prompt tokens         p  position of the step's newest token (n, n + 1, ... in decoding)
    m  tokens computed in a group in this step               s  tokens stored in a group
    w  hidden width          v  vocabulary                   k  candidates kept at a boundary
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lazyllm.cache import AuxCache, GroupCache
from lazyllm.decoder import Decoder, Rope
from lazyllm.schedule import Schedule
from lazyllm.selection import select_candidates, split_prompt


@dataclass(frozen=True)
class Group:
    """Layers between two boundaries, what they store, and what waits behind them.

    pruning_layer: the layer (from 1) that ends the group and prunes; None for the last group of a schedule.
    aux: states of the tokens that stopped at this group's end; None where no layer follows.
    keeps_all: layers inside the group that the schedule names with keep ratio 1: they prune nothing.
    """

    cache: GroupCache
    pruning_layer: int | None
    aux: AuxCache | None
    keeps_all: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """The tokens that a group computes in one step: hidden [1, m, w], positions [m] ascending, cos and sin."""

    hidden: Tensor
    positions: Tensor
    rope: Rope

    def __getitem__(self, rows: Tensor | slice) -> Batch:
        """The batch of some of its rows."""
        cos, sin = self.rope
        return Batch(self.hidden[:, rows], self.positions[rows], (cos[:, rows], sin[:, rows]))

    @property
    def is_single(self) -> bool:
        return self.positions.shape[0] == 1


class Session:
    """The state of one generation. Call `prefill` once, then `step` with each generated token.

    decoder: the open model. schedule: which layers prune. prompt_tokens: n. max_new_tokens: how many tokens may be
    generated at most. prune_generated: whether earlier generated tokens are candidates too, or always kept.
    """

    def __init__(
        self,
        decoder: Decoder,
        schedule: Schedule,
        prompt_tokens: int,
        max_new_tokens: int,
        prune_generated: bool = False,
    ) -> None:
        self.decoder = decoder
        self.schedule = schedule
        self.prompt_tokens = prompt_tokens
        self.prune_generated = prune_generated
        self.length = 0  # tokens run so far, prompt and generated
        self.selected: list[dict[int, Tensor]] = []  # per step: {pruning layer: positions that enter the next layer}
        self.computed: list[list[int]] = []  # per step and layer: distinct prompt tokens computed so far
        self._num_computed: list[int] = []  # the same at present, per group
        self._groups = self._make_groups(prompt_tokens, max_new_tokens)
        self._prompt_rope: Rope | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes of all K and V stored at present."""
        return sum(group.cache.nbytes for group in self._groups)

    @property
    def aux_bytes(self) -> int:
        """Bytes of all hidden states held in the Aux Caches at present."""
        return sum(group.aux.nbytes for group in self._groups if group.aux is not None)

    def prefill(self, token_ids: Tensor) -> Tensor:
        """Run the prompt [n]; return the logits [v] of its last token. Never synchronises with the device."""
        positions = torch.arange(self.prompt_tokens, device=self.decoder.device)
        hidden = self.decoder.embed(token_ids)
        batch = Batch(hidden, positions, self.decoder.rope(hidden, positions))
        self._prompt_rope = batch.rope
        self.length = self.prompt_tokens
        selected: dict[int, Tensor] = {}
        for group in self._groups:
            selected |= dict.fromkeys(group.keeps_all, batch.positions)
            self._num_computed.append(batch.positions.shape[0])
            batch = self._run(group, batch)
            if group.pruning_layer is None:
                continue
            keep = self.schedule.kept(group.pruning_layer, batch.positions.shape[0])
            kept, pruned = split_prompt(self.decoder.probe.take(), keep)
            if group.aux is not None:
                group.aux.put(batch.positions[pruned], batch.hidden[0, pruned])
            batch = batch[kept]
            selected[group.pruning_layer] = batch.positions
        self._record(selected)
        return self.decoder.logits(batch.hidden)

    def step(self, token_id: int) -> Tensor:
        """Run one generated token; return the logits [v] after it. Synchronises at most once per boundary."""
        p = self.length
        self.length += 1
        device = self.decoder.device
        positions = torch.arange(p, p + 1, device=device)
        hidden = self.decoder.embed(torch.full((1,), token_id, device=device))
        batch = Batch(hidden, positions, self.decoder.rope(hidden, positions))
        present = torch.arange(p + 1, device=device)  # positions in this step's set, ascending
        num_candidates = p if self.prune_generated else self.prompt_tokens
        selected: dict[int, Tensor] = {}
        for index, group in enumerate(self._groups):
            selected |= dict.fromkeys(group.keeps_all, present)
            batch = self._run(group, batch, present)
            if group.pruning_layer is None:
                continue
            kept = self._select(group, present, num_candidates)
            always = torch.arange(p if self.prune_generated else self.prompt_tokens, p + 1, device=device)
            present = torch.cat([kept, always])
            num_candidates = kept.shape[0]
            selected[group.pruning_layer] = present
            if group.aux is not None:
                batch = self._revive(index, batch, kept)
        self._record(selected)
        return self.decoder.logits(batch.hidden)

    def _make_groups(self, prompt_tokens: int, max_new_tokens: int) -> list[Group]:
        decoder, layers = self.decoder, len(self.decoder.layers)
        tokens = self.schedule.tokens_per_layer(layers, prompt_tokens)
        max_positions = prompt_tokens + max_new_tokens
        # a layer that keeps everything is no boundary: the tokens on both sides of it are always the same
        cuts = [layer for layer, ratio in self.schedule.keep.items() if ratio < 1]
        ends = cuts if cuts and cuts[-1] == layers else [*cuts, layers]
        groups, start = [], 0
        for end in ends:
            inside = range(start, end)
            # every generated token is computed in every layer
            cache = GroupCache(inside, tokens[start] + max_new_tokens, max_positions, decoder.device)
            aux = AuxCache(max_positions, decoder.width, decoder.dtype, decoder.device) if end < layers else None
            keeps_all = tuple(layer for layer in self.schedule.keep if layer - 1 in inside and layer not in cuts)
            groups.append(Group(cache, end if end in cuts else None, aux, keeps_all))
            start = end
        return groups

    def _run(self, group: Group, batch: Batch, present: Tensor | None = None) -> Batch:
        """Run the group's layers over the batch, which attends to itself (prefill) or to `present` as well."""
        group.cache.extend(batch.positions)
        hidden = self.decoder.run(
            group.cache,
            batch.hidden,
            batch.positions,
            batch.rope,
            chosen=None if present is None else self._chosen(group.cache, batch, present),
            watch_last=group.pruning_layer is not None,
        )
        return Batch(hidden, batch.positions, batch.rope)

    def _chosen(self, cache: GroupCache, batch: Batch, present: Tensor) -> Tensor | None:
        """[1, 1, m, s]: the stored tokens that are in this step's set and not after the query; None for all."""
        if batch.is_single and cache.length == present.shape[0]:
            return None  # everything stored is in the set, and the newest token is after all of it
        is_present = torch.zeros(self.length, dtype=torch.bool, device=present.device)
        is_present[present] = True
        slots = cache.positions
        return (is_present[slots] & (slots <= batch.positions[:, None]))[None, None]

    def _select(self, group: Group, present: Tensor, num_candidates: int) -> Tensor:
        """Positions of the candidates that go on after the group's pruning layer, ascending.

        The candidates are the first `num_candidates` of the positions `present`, which are ascending and hold the
        prompt before the generated tokens.
        """
        assert group.pruning_layer is not None
        by_slot = self.decoder.probe.take()
        by_position = by_slot.new_zeros(self.length)
        by_position[group.cache.positions] = by_slot
        candidates = present[:num_candidates]
        is_candidate = torch.zeros(self.length, dtype=torch.bool, device=present.device)
        is_candidate[candidates] = True
        return select_candidates(by_position, is_candidate, self.schedule.kept(group.pruning_layer, num_candidates))

    def _revive(self, index: int, batch: Batch, kept: Tensor) -> Batch:
        """The batch that enters the group after group `index`: the kept tokens it has not computed, and the newest.

        Tokens that were revived into group `index` and stop at its end go back into its Aux Cache.
        """
        aux, following = self._groups[index].aux, self._groups[index + 1].cache
        assert aux is not None
        assert self._prompt_rope is not None
        newest = batch[-1:]
        if not batch.is_single:
            aux.put(batch.positions[:-1], batch.hidden[0, :-1])
        revived = kept[~following.is_stored[kept]]  # the step's one synchronisation at this boundary
        count = revived.shape[0]
        self._num_computed[index + 1] += count
        if count == 0:
            return newest
        cos, sin = (
            torch.cat([of_prompt[:, revived], of_newest], dim=1)
            for of_prompt, of_newest in zip(self._prompt_rope, newest.rope, strict=True)
        )
        hidden = torch.cat([aux.take(revived)[None], newest.hidden], dim=1)
        return Batch(hidden, torch.cat([revived, newest.positions]), (cos, sin))

    def _record(self, selected: dict[int, Tensor]) -> None:
        self.selected.append(dict(sorted(selected.items())))
        per_layer = []
        for group, count in zip(self._groups, self._num_computed, strict=True):
            per_layer += [count] * len(group.cache.layers)
        self.computed.append(per_layer)
