"""One generation, run over groups of layers: what every method shares.

A boundary lies between two groups of layers. All layers of a group see the same tokens in every step, so methods act
at boundaries only: they override `cross_in_prefill` and `cross_in_step`, which get the tokens that leave a group and
return those that enter the next one.

Notation:
    n  prompt tokens         p  position of the step's newest token (n, n + 1, ... in decoding)
    m  tokens computed in a group in this step               s  tokens stored in a group
    w  hidden width          v  vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lazyllm.engine.cache import GroupCache
from lazyllm.engine.declaration import NOTHING, Group
from lazyllm.engine.decoder import Decoder, Rope


@dataclass(frozen=True)
class Batch:
    """The tokens that a group computes in one step: hidden [1, m, w], positions [m] ascending, their cos and sin."""

    hidden: Tensor
    positions: Tensor
    rope: Rope

    def __getitem__(self, rows: Tensor | slice) -> Batch:
        """The batch of some of its rows."""
        return Batch(self.hidden[:, rows], self.positions[rows], tuple(part[:, rows] for part in self.rope))

    def __len__(self) -> int:
        return self.positions.shape[0]


class Session:
    """The state of one generation: without a subclass, that of the baseline.

    Call `prefill` once, then `step` with each generated token.

    decoder: the open model. groups: all layers, in order. prompt_tokens: n. max_new_tokens: the most to be generated.
    Raises ValueError for a length at which the model's RoPE would change (`Decoder.check_lengths`).
    """

    def __init__(self, decoder: Decoder, groups: Sequence[Group], prompt_tokens: int, max_new_tokens: int) -> None:
        decoder.check_lengths(prompt_tokens, max_new_tokens)
        self.decoder = decoder
        self.groups = groups
        self.prompt_tokens = prompt_tokens
        self.max_positions = prompt_tokens + max_new_tokens
        self.scoring_s = 0.0  # seconds spent on scoring the prompt before its prefill
        self.uncounted_s = 0.0  # seconds spent before the prefill that are no part of TTFT (a diagnostic's)
        self.scoring_tokens = 0  # tokens that any model ran for that, as in `Generation`
        self.length = 0  # tokens run so far, prompt and generated
        self.computed: list[list[int]] = []  # per step and layer: distinct prompt tokens computed so far
        self.caches = [
            # every generated token is computed in every layer
            GroupCache(group.layers, group.prompt_tokens + max_new_tokens, self.max_positions, decoder.device)
            for group in groups
        ]
        self._num_computed = [0] * len(groups)
        self._selected: list[dict[int, Tensor]] = []
        self._all_positions = torch.arange(self.max_positions, device=decoder.device)

    @property
    def selected(self) -> list[dict[int, Tensor]]:
        """Per step {pruning layer: the ascending positions of the tokens that enter the next layer}."""
        return self._selected

    @property
    def kv_bytes(self) -> int:
        """Bytes of all K and V stored at present."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def aux_bytes(self) -> int:
        """Bytes of hidden states held for tokens that may be revived, at present."""
        return 0

    def prefill(self, token_ids: Tensor) -> Tensor:
        """Run the prompt [n]; return the logits [v] of its last token. Never synchronises with the device."""
        return self._prefill(token_ids, self._all_positions[: token_ids.shape[0]], token_ids.shape[0])

    def _prefill(self, token_ids: Tensor, positions: Tensor, length: int) -> Tensor:
        """Run the tokens [k] at ascending `positions` [k] of a prompt of `length` tokens."""
        self._selected.append({})
        self.length = length
        batch = self._embed(token_ids, positions)
        for index in range(len(self.groups)):
            self._num_computed[index] += len(batch)
            batch = self.cross_in_prefill(index, self._run(index, batch))
        self._count()
        return self.decoder.logits(batch.hidden)

    def step(self, token_id: int) -> Tensor:
        """Run one generated token; return the logits [v] after it. Synchronises at most once per boundary."""
        return self.step_on(torch.full((1,), token_id, device=self.decoder.device))

    def step_on(self, token: Tensor) -> Tensor:
        """`step` with a token [1] that is on the model's device, of which the host knows nothing."""
        self._selected.append({})
        positions = self._all_positions[self.length : self.length + 1]
        self.length += 1
        batch = self._embed(token, positions)
        for index in range(len(self.groups)):
            self._num_computed[index] += len(batch) - 1
            batch = self.cross_in_step(index, self._run(index, batch))
        self._count()
        return self.decoder.logits(batch.hidden)

    def cross_in_prefill(self, index: int, batch: Batch) -> Batch:
        """What enters the group after group `index`, of the prompt tokens that left it."""
        return batch

    def cross_in_step(self, index: int, batch: Batch) -> Batch:
        """What group `index + 1` computes in this decoding step: the newest token, behind others or alone."""
        return batch

    def chosen(self, cache: GroupCache, batch: Batch) -> Tensor | None:
        """[s] bool: which stored tokens the batch attends to, each up to itself; None for all."""
        return None

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Batch:
        hidden = self.decoder.embed(token_ids, positions)
        return Batch(hidden, positions, self.decoder.rope(hidden, positions))

    def _run(self, index: int, batch: Batch) -> Batch:
        """Run a group's layers over the batch."""
        cache, group = self.caches[index], self.groups[index]
        cache.extend(batch.positions, self.length)
        in_prefill = cache.added == cache.length
        look = group.look if in_prefill or group.look_in_steps else NOTHING
        chosen = self.chosen(cache, batch)
        hidden = self.decoder.run(cache, batch.hidden, batch.positions, batch.rope, chosen, look, self.length)
        return Batch(hidden, batch.positions, batch.rope)

    def _count(self) -> None:
        per_layer = []
        for group, count in zip(self.groups, self._num_computed, strict=True):
            per_layer += [count] * len(group.layers)
        self.computed.append(per_layer)
