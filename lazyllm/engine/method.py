"""The contract of a method: it holds hyperparameters, declares what a prefill computes, and starts a generation.

Nothing here imports torch: methods are made, checked and counted before anything heavy loads.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, cast

from lazyllm.engine.depth import Depth
from lazyllm.engine.flops import nearest_ratio, prefill_flops
from lazyllm.engine.inputs import Boundary, Group, Prompt, Selection
from lazyllm.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from lazyllm.engine.decoder import Decoder
    from lazyllm.engine.session import Session


_LONG = 2**20  # tokens of a prompt that every method cuts
_warn_once = cache(logging.getLogger(__name__).warning)


class _NameOfClass:
    """The label of a method without one of its own: the name of its class."""

    def __get__(self, method: object, kind: type) -> str:
        return kind.__name__


class Method(ABC):
    """Base of all methods: a frozen dataclass whose fields are its hyperparameters, without state.

    A method declares its `groups`; tokens per layer, FLOPs and a session follow from them. Two bases do most of the
    work: `lazyllm.methods.Prune` scores tokens between two layers and keeps the best, `lazyllm.methods.Select` chooses
    prompt tokens before the prefill. Their docstrings hold an example each. A method that decodes in another way starts
    a subclass of `lazyllm.engine.session.Session`. Methods of other packages: `lazyllm.methods.support.plugins`.
    """

    label: ClassVar[str] = cast(str, _NameOfClass())  # the method's name in tables and legends
    order: ClassVar[int] = 100  # place in tables and legends: lower first, ties by label
    colour: ClassVar[str | None] = None  # in every picture, as #RRGGBB; None takes a spare one
    marker: ClassVar[str | None] = None  # in every picture, a matplotlib marker; None takes a spare one
    # the one that a target speedup ("2.0x") is solved for; None: the speed is measured, never set
    target_parameter: ClassVar[str | None] = None
    shown_parameters: ClassVar[tuple[str, ...]] = ()  # tables name these, and `target_parameter`, even at their default
    keep_all: ClassVar[Mapping[str, Any]] = {}  # hyperparameters that keep every token; {}: `target_parameter` at 1.0
    adaptive: ClassVar[bool] = False  # the number of tokens depends on the prompt: those declared are estimates
    can_batch: ClassVar[bool] = True  # several generations can decode together; False if its session runs its own steps
    table1: ClassVar[Mapping[str, Any]] = {}  # hyperparameters that `speedup=table1` sets without solving

    def __post_init__(self) -> None:
        """Refuse bad hyperparameters (`support.hyperparameters.checked`). Raises TypeError or ValueError."""
        for field in fields(self):  # type: ignore[arg-type]  # a method is a dataclass
            check, value = field.metadata.get("check"), getattr(self, field.name)
            if check is not None and not (value is None and field.default is None):
                check(field.name, value)

    @classmethod
    def resolve(cls, settings: Mapping[str, Any], depth: Depth) -> dict[str, Any]:
        """The hyperparameters as records and tables show them: with numbers for defaults that depend on the model."""
        return dict(settings)

    @abstractmethod
    def groups(self, depth: Depth, n: int) -> list[Group]:
        """The layers of a model, in order, in groups whose layers see the same of n prompt tokens.

        Raises ValueError if the method cannot run on a model of this depth. Needs no model.
        """

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        """A new session for one prompt and at most `max_new_tokens` generated tokens."""
        from lazyllm.engine.session import Session

        groups = self.groups(decoder.depth, len(prompt))
        return Session(decoder, groups, len(prompt), max_new_tokens, self)

    def prune(self, at: Boundary, recorded: list[Tensor]) -> Selection:
        """Choose tokens in prefill, at the end of a group that declares `scores`; by default all go on.

        recorded: the scores that the group declares, a tensor for each layer. The choice must not wait for the device,
            unless the method is `adaptive`.
        """
        return Selection()

    def pruning_layers(self, depth: Depth) -> Collection[int]:
        """The layers, from 1, that `Generation.selected` names even if all their tokens go on."""
        return ()

    def scoring_layers(self, depth: Depth) -> Collection[int]:
        """The layers, from 1, whose attention decides which tokens go on; `check` warns of those with a window.

        By default those whose scores the `groups` of a long prompt declare.
        """
        groups = self.groups(depth, _LONG)
        return [index + 1 for group in groups if group.scores for index in group.scores.layers]

    def tokens_per_layer(self, depth: Depth, n: int) -> list[int]:
        """How many of n prompt tokens enter each layer in prefill, layer 1 first. Raises ValueError as `groups`."""
        return [group.prompt_tokens for group in self.groups(depth, n) for _ in group.layers]

    def stored_per_layer(self, depth: Depth, n: int) -> list[int]:
        """How many of n prompt tokens each layer's K and V hold after the prefill; by default all that entered it."""
        return self.tokens_per_layer(depth, n)

    def aux_rows(self, depth: Depth, max_positions: int) -> int:
        """Rows of the Aux Cache, each a hidden state, for a text of at most `max_positions` tokens."""
        return 0

    def models(self) -> tuple[ModelSpec, ...]:
        """The other models that the method runs (`lazyllm.methods.support.other_models`), part of a run's identity."""
        return ()

    def check(self, config: Any) -> None:
        """Refuse a model by its transformers config, before it loads; log once if layers with a window score tokens.

        Raises ValueError if the method cannot run on such a model, or if a package or file that it needs is missing.
        """
        self.tokens_per_layer(Depth.of(config), 1)
        self.warn_of_windows(config)

    def warn_of_windows(self, config: Any) -> None:
        """Log once, for this method and the model of this config, if `scoring_layers` have sliding windows."""
        depth = Depth.of(config)
        if not depth.windows:  # every generation asks, and declaring the groups of a long prompt takes a while
            return
        blind = [layer for layer in self.scoring_layers(depth) if depth.window(layer) is not None]
        if not blind:
            return
        who, instead = "every layer", ""
        if depth.window(depth.full[0]) is None:
            who = f"layer {blind[0]}" if len(blind) == 1 else f"each of layers {', '.join(map(str, blind))}"
            instead = f"; full-attention layers are {', '.join(map(str, depth.full))}"
        reach = f"sees {depth.window(blind[0])} tokens, so its scores say nothing of what lies outside"
        _warn_once(f"{self.label}: {who} of {config.model_type} {reach}{instead}")

    def check_prompt(self, prompt: Prompt) -> None:  # noqa: B027 - most methods take every prompt
        """Raise ValueError if the method cannot run on this prompt. Needs no model."""

    def prepare(self, model: PreTrainedModel) -> None:  # noqa: B027 - most methods need no more than the model
        """Load what the method needs besides the model, once, before the clock starts."""

    def scoring_flops(self, config: Any, n: int) -> int:
        """FLOPs that choosing among n prompt tokens adds to the prefill, in this model and in others that score."""
        return 0

    def first_token_flops(self, config: Any, n: int, computed: Sequence[int] | None = None) -> int:
        """FLOPs up to the first token on n prompt tokens. computed: as in `ideal_speedup`."""
        tokens = self.tokens_per_layer(Depth.of(config), n) if computed is None else computed
        return self.scoring_flops(config, n) + prefill_flops(config, tokens)

    def ideal_speedup(self, config: Any, n: int, computed: Sequence[int] | None = None) -> float:
        """FLOPs of the baseline's prefill of n tokens over those of this method's, scoring included.

        computed: prompt tokens that a prefill computed in each layer (`Generation.computed[0]`); None takes
            `tokens_per_layer`, which are estimates for an `adaptive` method.
        """
        return prefill_flops(config, [n] * config.num_hidden_layers) / self.first_token_flops(config, n, computed)

    @classmethod
    def solve(cls, settings: Mapping[str, Any], config: Any, n: int, target: float) -> Any:
        """The value of `target_parameter` whose ideal speedup on n prompt tokens is nearest to `target`.

        settings: the other hyperparameters.
        Returns None if no value reaches it. By default the parameter is a keep ratio: lower is faster.
        """
        others = {key: value for key, value in settings.items() if key != cls.target_parameter}
        return nearest_ratio(
            lambda ratio: cls(**others, **{str(cls.target_parameter): ratio}).ideal_speedup(config, n), target
        )
