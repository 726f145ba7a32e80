"""What a method is: hyperparameters that can start a generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from lazyllm.decoder import Decoder
from lazyllm.flops import ideal_speedup
from lazyllm.prompt import Prompt
from lazyllm.session import Session


class Method(ABC):
    """Base of all methods: a frozen dataclass whose fields are its hyperparameters, without any state.

    Subclasses say how a generation starts and what its prefill computes; `lazyllm.generate` does the rest.
    """

    @abstractmethod
    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        """A fresh session for one prompt and at most `max_new_tokens` generated tokens."""

    @abstractmethod
    def tokens_per_layer(self, num_layers: int, n: int) -> list[int]:
        """How many of n prompt tokens enter each layer in prefill, layer 1 first.

        Raises ValueError if the method cannot run on a model of `num_layers` layers. Needs no model.
        """

    def ideal_speedup(self, config: Any, n: int) -> float:
        """FLOPs of the baseline's prefill over FLOPs of this one's, for n prompt tokens (see `lazyllm.flops`)."""
        return ideal_speedup(config, n, self.tokens_per_layer(config.num_hidden_layers, n))
