"""The contract of a method: it has hyperparameters, declares what a prefill computes, starts it.

Nothing here imports torch: methods are made, checked and counted before anything heavy loads.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, cast, get_args, get_origin, get_type_hints

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
warn_once = cache(logging.getLogger(__name__).warning)


class _ClassName:
    """The label of a method that has none: the name of its class."""

    def __get__(self, method: object, kind: type) -> str:
        return kind.__name__


class Method(ABC):
    """Base of all methods: a frozen dataclass whose fields are its hyperparameters, without state.

    A method declares its `groups`; tokens per layer, FLOPs and a session follow from them. Two
    bases do most of the work: `lazyllm.methods.Prune` scores tokens between layers and keeps the
    best, `lazyllm.methods.Select` chooses prompt tokens before the prefill. Their docstrings hold
    an example each. A method that decodes in another way starts a subclass of
    `lazyllm.engine.session.Session`.
    """

    label: ClassVar[str] = cast(str, _ClassName())  # its name in tables and legends
    order: ClassVar[int] = 100  # its place there: lower first, ties by label
    colour: ClassVar[str | None] = None  # in every picture, as #RRGGBB; None takes a spare one
    marker: ClassVar[str | None] = None  # in every picture, of matplotlib; None takes a spare one
    # the hyperparameter whose value is solved for a speedup; None: the speed is only measured
    target_parameter: ClassVar[str | None] = None
    # tables name these, and `target_parameter`, even at their default
    shown_parameters: ClassVar[tuple[str, ...]] = ()
    # hyperparameters that keep every token; {}: `target_parameter` at 1.0
    keep_all: ClassVar[Mapping[str, Any]] = {}
    # the number of tokens depends on the prompt: those declared are estimates
    adaptive: ClassVar[bool] = False
    # whether several generations can decode together; not if its session runs steps itself
    can_batch: ClassVar[bool] = True
    # hyperparameters that `speedup=table1` sets without solving
    table1: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        """Refuse a value that its annotation does not allow, but for defaults: ValueError."""
        from pydantic import ValidationError  # not at the top: it takes longer than all the rest

        given = {
            field.name: value
            for field in fields(self)  # type: ignore[arg-type]  # a method is a dataclass
            if (value := getattr(self, field.name)) is not field.default
        }
        try:
            _validator(type(self)).validate_python(given)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            reasons = [part["msg"] for part in error.errors() if part["loc"][0] == name]
            expected = _describe(_hints(type(self))[name]) or ", or ".join(dict.fromkeys(reasons))
            expected = expected.replace("Input should be ", "").replace(*_BOOLEAN)
            raise ValueError(f"{name}={given[name]!r}: give {expected}") from None

    @classmethod
    def resolve(cls, settings: Mapping[str, Any], depth: Depth) -> dict[str, Any]:
        """Give numbers, as records and tables show them, to defaults that depend on the model."""
        return dict(settings)

    @abstractmethod
    def groups(self, depth: Depth, n: int) -> list[Group]:
        """Put a model's layers, in order, into groups that see the same of n prompt tokens.

        Raises ValueError if the method cannot run on a model of this depth. Needs no model.
        """

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        """Start a session for one prompt and at most `max_new_tokens` generated tokens."""
        from lazyllm.engine.session import Session

        groups = self.groups(decoder.depth, len(prompt))
        return Session(decoder, groups, len(prompt), max_new_tokens, self)

    def prune(self, at: Boundary, recorded: list[Tensor]) -> Selection:
        """Choose tokens in prefill, after a group that declares `scores`; by default all go on.

        recorded: the declared scores, a tensor for each layer. The choice must not wait for the
            device, unless the method is `adaptive`.
        """
        return Selection()

    def pruning_layers(self, depth: Depth) -> Collection[int]:
        """Name layers, from 1, that `Generation.selected` holds even if all their tokens go on."""
        return ()

    def scoring_layers(self, depth: Depth) -> Collection[int]:
        """Name the layers, from 1, whose attention decides which tokens go on.

        `check` warns of those with a window. By default those of the `groups` of a long prompt.
        """
        groups = self.groups(depth, _LONG)
        return [index + 1 for group in groups if group.scores for index in group.scores.layers]

    def tokens_per_layer(self, depth: Depth, n: int) -> list[int]:
        """Count how many of n prompt tokens enter each layer in prefill. Raises as `groups`."""
        return [group.prompt_tokens for group in self.groups(depth, n) for _ in group.layers]

    def stored_per_layer(self, depth: Depth, n: int) -> list[int]:
        """Count how many of n prompt tokens each layer stores after the prefill."""
        return self.tokens_per_layer(depth, n)

    def aux_rows(self, depth: Depth, max_positions: int) -> int:
        """Count the Aux Cache's rows, each a hidden state, for a text of `max_positions` tokens."""
        return 0

    def models(self) -> tuple[ModelSpec, ...]:
        """Name the other models that the method runs (`support.other_models`)."""
        return ()

    def check(self, config: Any) -> None:
        """Refuse a model by its transformers config, before it loads. Raises ValueError.

        Also refuse a missing package or file; log once if layers with a window score tokens.
        """
        self.tokens_per_layer(Depth.of(config), 1)
        self.warn_of_windows(config)

    def warn_of_windows(self, config: Any) -> None:
        """Log once, for this method and model, if `scoring_layers` have sliding windows."""
        depth = Depth.of(config)
        if not depth.windows:  # every generation asks, and a long prompt's groups take a while
            return
        blind = [layer for layer in self.scoring_layers(depth) if depth.window(layer) is not None]
        if not blind:
            return
        who, instead = "every layer", ""
        if depth.window(depth.full[0]) is None:
            who = f"each of layers {', '.join(map(str, blind))}"
            who = f"layer {blind[0]}" if len(blind) == 1 else who
            instead = f"; full-attention layers are {', '.join(map(str, depth.full))}"
        reach = f"sees {depth.window(blind[0])} tokens"
        warn_once(
            f"{self.label}: {who} of {config.model_type} {reach}, so its scores say nothing of "
            f"what lies outside{instead}"
        )

    def check_prompt(self, prompt: Prompt) -> None:  # noqa: B027 - most methods take every prompt
        """Refuse a prompt that the method cannot run on. Needs no model. Raises ValueError."""

    def prepare(self, model: PreTrainedModel) -> None:  # noqa: B027 - most methods need no more
        """Load what the method needs besides the model, once, before the clock starts."""

    def scoring_flops(self, config: Any, n: int) -> int:
        """Count what choosing among n prompt tokens adds to the prefill, in any model."""
        return 0

    def attended(self, config: Any, n: int) -> dict[int, int]:
        """Count {layer, from 1: (query, key) pairs over all heads} of layers that skip some."""
        return {}

    def first_token_flops(self, config: Any, n: int, computed: Sequence[int] | None = None) -> int:
        """Count FLOPs up to the first token on n prompt tokens. computed: as in `ideal_speedup`."""
        tokens = self.tokens_per_layer(Depth.of(config), n) if computed is None else computed
        flops = prefill_flops(config, tokens, attended=self.attended(config, n))
        return self.scoring_flops(config, n) + flops

    def ideal_speedup(self, config: Any, n: int, computed: Sequence[int] | None = None) -> float:
        """Divide the FLOPs of the baseline's prefill of n tokens by this method's, with scoring.

        computed: prompt tokens that a prefill computed in each layer (`Generation.computed[0]`);
            None takes `tokens_per_layer`, which are estimates for an `adaptive` method.
        """
        whole = prefill_flops(config, [n] * config.num_hidden_layers)
        return whole / self.first_token_flops(config, n, computed)

    @classmethod
    def solve(cls, settings: Mapping[str, Any], config: Any, n: int, target: float) -> Any:
        """Find the `target_parameter` whose ideal speedup on n tokens is nearest to `target`.

        settings: the other hyperparameters. Returns None if no value reaches it. This default
        takes the parameter for a keep ratio in (0, 1]: a lower one is faster.
        """
        key = str(cls.target_parameter)
        others = {name: value for name, value in settings.items() if name != key}
        return nearest_ratio(
            lambda ratio: cls(**others, **{key: ratio}).ideal_speedup(config, n), target
        )


_BOOLEAN = "a valid boolean", "true or false"  # pydantic's words, and ours


@cache
def _hints(kind: type[Method]) -> dict[str, Any]:
    """Read {hyperparameter: its type}; none if an annotation names what only checkers import."""
    try:
        hints = get_type_hints(kind, include_extras=True)
    except NameError:
        return {}
    return {field.name: hints[field.name] for field in fields(kind)}  # type: ignore[arg-type]


@cache
def _validator(kind: type[Method]) -> Any:
    """Make a strict validator of {hyperparameter: value}."""
    from pydantic import ConfigDict, TypeAdapter
    from typing_extensions import TypedDict

    make: Any = TypedDict  # from fields that no checker can read
    settings = make(kind.__name__, _hints(kind), total=False)
    settings.__pydantic_config__ = ConfigDict(
        strict=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )
    return TypeAdapter(settings)


def _describe(hint: Any) -> str:
    """Join the texts in a type's annotations; "" without any."""
    if texts := [text for text in getattr(hint, "__metadata__", ()) if isinstance(text, str)]:
        return texts[0]
    parts = list(filter(None, map(_describe, get_args(hint))))
    is_list = get_origin(hint) is Sequence and parts
    return f"a list, each {parts[0]}" if is_list else ", or ".join(parts)
