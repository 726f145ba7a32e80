"""What a method is: hyperparameters that can start a generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from transformers import PreTrainedModel

from lazyllm.engine.decoder import Decoder
from lazyllm.engine.flops import ideal_speedup
from lazyllm.engine.prompt import Prompt
from lazyllm.engine.session import Session


class Method(ABC):
    """Base of all methods: a frozen dataclass whose fields are its hyperparameters, without any state.

    Subclasses say how a generation starts and what its prefill computes; `lazyllm.generate` does the rest. Most start
    a `Session` of their own, which says what goes on from one group of layers to the next.

    A whole method, which keeps the last tokens of the prompt and looks at no attention at all:

    >>> from dataclasses import dataclass
    >>> import torch, lazyllm
    >>> from lazyllm.methods.schedule import check_ratio, keep_count
    >>> from lazyllm.engine.session import Batch, Group, Session
    >>>
    >>> @dataclass(frozen=True)
    ... class KeepLast(lazyllm.methods.Method):
    ...     layer: int
    ...     keep: float = 0.5
    ...
    ...     def __post_init__(self):
    ...         check_ratio("keep", self.keep)  # a bad value is refused before any model loads
    ...
    ...     def start(self, decoder, prompt, max_new_tokens):
    ...         n, layers = len(prompt), len(decoder.layers)
    ...         early = Group(range(self.layer), n)
    ...         late = Group(range(self.layer, layers), keep_count(self.keep, n))
    ...         return KeepLastSession(decoder, [early, late], n, max_new_tokens)
    ...
    ...     def tokens_per_layer(self, num_layers, n):
    ...         if not 1 <= self.layer < num_layers:
    ...             raise ValueError(f"layer lies in 1 to {num_layers - 1}, got {self.layer}")
    ...         return [n] * self.layer + [keep_count(self.keep, n)] * (num_layers - self.layer)
    >>>
    >>> class KeepLastSession(Session):
    ...     def cross_in_prefill(self, index: int, batch: Batch) -> Batch:
    ...         if index > 0:
    ...             return batch  # behind the last group nothing is left to prune
    ...         kept = torch.arange(len(batch) - self.groups[1].prompt_tokens, len(batch), device=self.decoder.device)
    ...         self.caches[0].retain(kept)  # what is pruned leaves the KV cache of the early layers too
    ...         self.selected[-1][self.groups[0].layers.stop] = batch.positions[kept]  # for pictures and traces
    ...         return batch[kept]
    >>>
    >>> model, _ = lazyllm.load_model("tiny", dtype="float32", device="cpu")
    >>> out = lazyllm.generate(model, list(range(5, 45)), KeepLast(layer=2, keep=0.25), max_new_tokens=3)
    >>> out.computed[0].tolist()  # of 40 prompt tokens, layer by layer
    [40, 40, 10, 10, 10, 10, 10, 10]
    >>> KeepLast(layer=9).check(model.config)
    Traceback (most recent call last):
    ValueError: layer lies in 1 to 7, got 9

    In a file of an installed package, an entry point gives the class a name (`lazyllm.methods.plugins`): then
    `python run.py method=keep_last method.layer=2 method.keep=0.25` works, and so does `lazyllm.methods.make`.
    """

    label: ClassVar[str]  # the method's name in tables and legends
    order: ClassVar[int] = 100  # its place there: lower first, ties by label
    colour: ClassVar[str | None] = None  # in every picture, as #RRGGBB; None takes a spare one
    marker: ClassVar[str | None] = None  # likewise, a matplotlib marker
    dial: ClassVar[str | None] = (
        None  # the hyperparameter that a target speedup ("2.0x") is solved for; None: cannot be
    )

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
        """FLOPs of the baseline's prefill over FLOPs of this one's, for n prompt tokens (`lazyllm.engine.flops`)."""
        return ideal_speedup(config, n, self.tokens_per_layer(config.num_hidden_layers, n))
