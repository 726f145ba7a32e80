"""What a method is: hyperparameters that can start a generation."""

from __future__ import annotations

from abc import ABC, abstractmethod

from lazyllm.decoder import Decoder
from lazyllm.session import Session


class Method(ABC):
    """Base of all methods: a frozen dataclass whose fields are its hyperparameters, without any state.

    Subclasses say how a generation starts; `lazyllm.generate` does the rest: the clock, the tokens, the end tokens.
    """

    @abstractmethod
    def start(self, decoder: Decoder, prompt_tokens: int, max_new_tokens: int) -> Session:
        """A fresh session for one prompt of `prompt_tokens` tokens and at most `max_new_tokens` generated ones."""

    def check(self, num_layers: int) -> None:  # noqa: B027 - most methods suit any depth
        """Raise ValueError if the method cannot run on a model of `num_layers` layers. Needs no model."""
