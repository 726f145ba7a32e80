"""LazyLLM with revivals by plan, for timing: random weights attend to everything alike and so revive in every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lazyllm.engine.declaration import Prompt
from lazyllm.engine.decoder import Decoder
from lazyllm.methods import Lazy
from lazyllm.methods.lazy_session import LazySession


@dataclass(frozen=True)
class SteeredLazy(Lazy):
    """LazyLLM that does all its work, but selects by an importance that is drawn and not by the one it found.

    drift: share of the prompt's positions whose importance is drawn anew in each of the steps that may revive: the
        first decoding step, and every `every`-th after it. In the other steps nothing is revived, as nothing has
        changed since the step before, and the tokens stored are more than those attended to.
    seed: of the draw.

    A boundary costs two operations more than LazyLLM's own, on as many numbers as tokens are stored.
    """

    drift: float = 0.02
    every: int = 8
    seed: int = 0

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> SteeredSession:
        return SteeredSession(self, decoder, prompt, max_new_tokens)


class SteeredSession(LazySession):
    """The session of `SteeredLazy`."""

    def __init__(self, method: SteeredLazy, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> None:
        super().__init__(method, decoder, prompt, max_new_tokens)
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
