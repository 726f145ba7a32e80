"""LazyLLM with planned revivals, for timing: on random weights, LazyLLM revives in nearly every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lazyllm.engine.decoder import Decoder
from lazyllm.engine.inputs import Prompt
from lazyllm.methods import Lazy
from lazyllm.methods.support.lazy_session import LazySession
from lazyllm.methods.support.schedule import Schedule


@dataclass(frozen=True)
class SteeredLazy(Lazy):
    """LazyLLM that computes its importance, but selects by a random one.

    drift: share of positions whose importance is redrawn in the first decoding step and in every `every`-th after it.
        The other steps revive nothing, as their selection is that of the step before.
    seed: of the random importance.

    A boundary costs two operations on [s] numbers more than LazyLLM's (s stored tokens).
    """

    drift: float = 0.02
    every: int = 8
    seed: int = 0

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> SteeredSession:
        return SteeredSession(self, decoder, prompt, max_new_tokens)


class SteeredSession(LazySession):
    """The session of `SteeredLazy`."""

    def __init__(self, method: SteeredLazy, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> None:
        layers, n = len(decoder.layers), len(prompt)
        schedule = Schedule.parse(method.schedule, layers)
        super().__init__(decoder, method.groups(layers, n), n, max_new_tokens, schedule)
        self._method = method
        self._draw = torch.Generator().manual_seed(method.seed)
        self._wanted = torch.rand(self.max_positions, generator=self._draw).to(decoder.device)

    def step(self, token_id: int) -> Tensor:
        steps = len(self.computed) - 1  # decoding steps so far
        if steps % self._method.every == 0:
            fresh, chance = torch.rand(2, self.max_positions, generator=self._draw).to(self.decoder.device)
            self._wanted = torch.where(chance < self._method.drift, fresh, self._wanted)
        return super().step(token_id)

    def importance(self, index: int) -> Tensor:
        found = super().importance(index)
        return self._wanted[self.caches[index].positions].add_(found, alpha=0)
