"""What a method is: hyperparameters that can start a generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from transformers import PreTrainedModel

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

    def check(self, config: Any) -> None:
        """Refuse what can be refused before a model of this transformers config loads.

        Raises ValueError: the method cannot run on such a model, or something that it needs is missing here.
        """
        self.tokens_per_layer(config.num_hidden_layers, 1)

    def check_prompt(self, prompt: Prompt) -> None:  # noqa: B027 - most methods take every prompt
        """Raise ValueError where the method cannot run on this prompt. Needs no model."""

    def prepare(self, model: PreTrainedModel) -> None:  # noqa: B027 - most methods need nothing beside the model
        """Load what is needed beside the model, unless that has been done: before the clock starts."""

    def ideal_speedup(self, config: Any, n: int) -> float:
        """FLOPs of the baseline's prefill over FLOPs of this one's, for n prompt tokens (see `lazyllm.flops`)."""
        return ideal_speedup(config, n, self.tokens_per_layer(config.num_hidden_layers, n))
