"""The standard model: every prompt token in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lazyllm.engine.decoder import Decoder
from lazyllm.engine.method import Method
from lazyllm.engine.prompt import Prompt
from lazyllm.engine.session import Group, Session


@dataclass(frozen=True)
class Baseline(Method):
    """No pruning. It runs through the same loop and cache as the methods, so that a speedup is the method's own."""

    label: ClassVar[str] = "baseline"
    order: ClassVar[int] = 0
    colour: ClassVar[str | None] = "#000000"
    marker: ClassVar[str | None] = "X"

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        n = len(prompt)
        return Session(decoder, [Group(range(len(decoder.layers)), n)], n, max_new_tokens)

    def tokens_per_layer(self, num_layers: int, n: int) -> list[int]:
        return [n] * num_layers
