"""Two bases that carry most methods: score tokens between layers and keep the best, or choose before the prefill.

Nothing here imports torch; `lazyllm.methods.sessions` holds what runs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from lazyllm.engine.declaration import Group, Look, Prompt
from lazyllm.engine.method import Method

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel

    from lazyllm.engine.decoder import Decoder
    from lazyllm.engine.session import Batch, Session


class _Turns:
    """The field `turns`: a bad value is refused whatever `__post_init__` a method has."""

    def __get__(self, method: Any, kind: type[Any] | None = None) -> str:
        return "continue" if method is None else vars(method)["turns"]  # dataclasses ask the class for the default

    def __set__(self, method: Any, value: str) -> None:
        if value not in ("continue", "again"):
            raise ValueError(f"turns is 'continue' or 'again', got {value!r}")
        vars(method)["turns"] = value


@dataclass(frozen=True)
class Dropping(Method):
    """Base of methods that drop prompt tokens for good.

    turns: what later turns of a session do: "continue" behind what the method has kept, of which nothing more is
        dropped, or run the whole text "again", chosen for the new question.
    """

    _: KW_ONLY
    turns: _Turns = _Turns()


@dataclass(frozen=True)
class Prune(Dropping):
    """Base of methods that score the prompt's tokens between two layers of the prefill and keep the best.

    A subclass declares how many tokens are `kept` after which layer. It may say what to `look` at (default: the newest
    token's attention in the layer before, Eq. 1) and how to `score` tokens by it. A whole method, which keeps the last
    tokens and looks at no attention at all:

    >>> from dataclasses import dataclass
    >>> import lazyllm
    >>> from lazyllm.methods import Look, Prune
    >>> from lazyllm.methods.schedule import check_ratio, keep_count
    >>>
    >>> @dataclass(frozen=True)
    ... class KeepLast(Prune):
    ...     layer: int
    ...     keep: float = 0.5
    ...     label = "keep last"
    ...
    ...     def __post_init__(self):
    ...         check_ratio("keep", self.keep)  # a bad value is refused before any model loads
    ...     def kept(self, num_layers, n):
    ...         return {self.layer: keep_count(self.keep, n)}
    ...     def look(self, layers):
    ...         return Look()
    ...     def score(self, seen, batch):
    ...         return batch.positions.double()
    >>>
    >>> model, _ = lazyllm.load_model("tiny", dtype="float32", device="cpu")
    >>> out = lazyllm.generate(model, list(range(5, 45)), KeepLast(layer=2, keep=0.25), max_new_tokens=3)
    >>> out.computed[0].tolist()  # of 40 prompt tokens, layer by layer
    [40, 40, 10, 10, 10, 10, 10, 10]
    >>> KeepLast(layer=9).check(model.config)
    Traceback (most recent call last):
    ValueError: keep last prunes after layer 9, but the model has only 8 layers

    forget: pruned tokens leave the KV cache of the earlier layers too, so that decoding sees them nowhere. If False,
    each layer keeps the tokens that it computed.
    """

    forget: ClassVar[bool] = True

    @abstractmethod
    def kept(self, num_layers: int, n: int) -> Mapping[int, int]:
        """{layer, from 1: how many of n prompt tokens go on after it}, the newest token among them."""

    def look(self, layers: range) -> Look:
        """What to see of a group's layers, at whose end tokens are pruned."""
        return Look(layers[-1:])

    def score(self, seen: list[Tensor], batch: Batch) -> Tensor:
        """[m] how much each token of the batch is worth. seen: what `look` asked for, layer by layer.

        The default takes the mean over layers. Must not wait for the device.
        """
        import torch

        return seen[0] if len(seen) == 1 else torch.stack(seen).mean(dim=0)

    def choose(self, scores: Tensor, keep: int) -> Tensor:
        """Ascending indices of the tokens that go on: the `keep` best, the newest among them, ties to the lower.

        A method whose number depends on the prompt may return fewer or more.
        """
        from lazyllm.methods.sessions import split_prompt

        return split_prompt(scores, keep)[0]

    def groups(self, num_layers: int, n: int) -> list[Group]:
        kept = self.kept(num_layers, n)
        beyond = [layer for layer in kept if layer > num_layers]
        if beyond:
            raise ValueError(f"{self.label} prunes after layer {beyond[0]}, but the model has only {num_layers} layers")
        groups, start = [], 0
        for end in sorted({*kept, num_layers}):
            layers = range(start, end)
            groups.append(Group(layers, n, self.look(layers) if end in kept else Look()))
            start, n = end, kept.get(end, n)
        return groups

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        from lazyllm.methods.sessions import PruneSession

        return PruneSession(self, decoder, prompt, max_new_tokens)


@dataclass(frozen=True)
class Select(Dropping):
    """Base of methods that choose prompt tokens first and then run the model on these alone.

    A subclass declares how many tokens are `kept` and selects them. Whatever it runs for that, through `decoder` or
    through a model that `lazyllm.methods.beside` opened, is timed and counted as scoring. A whole method, which asks
    the first layers for the tokens that the newest one attends to:

    >>> from dataclasses import dataclass
    >>> import lazyllm
    >>> from lazyllm.methods import Look, Select
    >>> from lazyllm.methods.schedule import keep_count
    >>>
    >>> @dataclass(frozen=True)
    ... class AskFirst(Select):
    ...     layers: int
    ...     keep: float = 0.5
    ...     label = "ask first"
    ...
    ...     def kept(self, n):
    ...         return keep_count(self.keep, n)
    ...     def select(self, decoder, prompt):
    ...         from lazyllm.engine.partial import run_layers
    ...         run_layers(decoder, prompt.token_ids.to(decoder.device), self.layers, Look([self.layers - 1]))
    ...         return self.best(decoder.probe.take(), self.kept(len(prompt)))
    ...     def scoring_flops(self, config, n):
    ...         return lazyllm.engine.flops.first_layers_flops(config, n, self.layers)
    >>>
    >>> model, _ = lazyllm.load_model("tiny", dtype="float32", device="cpu")
    >>> out = lazyllm.generate(model, list(range(5, 45)), AskFirst(layers=4, keep=0.25), max_new_tokens=3)
    >>> out.computed[0].tolist(), out.scoring_tokens  # 40 tokens through half of the layers
    ([10, 10, 10, 10, 10, 10, 10, 10], 20)
    >>> round(AskFirst(4, 0.25).ideal_speedup(model.config, 1000), 2)
    1.51

    renumber: the model sees the tokens as a prompt of their own, at positions 0, 1, ...; if False, at the positions
    that they have in the whole prompt.
    """

    renumber: ClassVar[bool] = False

    def prepare(self, model: PreTrainedModel) -> None:
        for spec in self.models():
            from lazyllm.methods.beside import load_beside

            load_beside(spec, model)

    @abstractmethod
    def kept(self, n: int) -> int:
        """How many of n prompt tokens are run; if it depends on the prompt, the number to be expected."""

    @abstractmethod
    def select(self, decoder: Decoder, prompt: Prompt) -> Tensor | np.ndarray | Sequence[int]:
        """[k] ascending positions of the prompt tokens to run, k >= 1. The device is idle when this is called."""

    def best(self, scores: Tensor, keep: int) -> Tensor:
        """Ascending indices of the `keep` best of scores [n], the newest token among them, ties to the lower."""
        from lazyllm.methods.sessions import split_prompt

        return split_prompt(scores, keep)[0]

    def selected_at(self, num_layers: int) -> int:
        """The layer whose attention selects, from 1: the key of the tokens in `selected`. 0 if there is none."""
        return 0

    def groups(self, num_layers: int, n: int) -> list[Group]:
        return [Group(range(num_layers), self.kept(n))]

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        from lazyllm.methods.sessions import SelectSession

        return SelectSession(self, decoder, prompt, max_new_tokens)


# (layer at whose end the prefill is, from 1; what `Group.look` saw, layer by layer; m tokens there) ->
# which of them go on (None: all, and nothing was to be selected here), and which each key head keeps, [g, k] (None:
# all)
Cut = Callable[[int, "list[Tensor]", int], "tuple[Tensor | slice | None, Tensor | None]"]


@dataclass(frozen=True)
class Layerwise(Dropping):
    """Base of methods that cut the prompt between layers at its own positions, and whose heads may store parts of it.

    A subclass declares its `groups` with what to look at, and a `cutter`. Layers store what entered them, or what
    the cutter leaves them for each key head. Decoding attends to what is stored and selects nothing.
    """

    @abstractmethod
    def cutter(self, num_layers: int, kv_heads: int, n: int) -> Cut:
        """What is asked after each group of a prefill of n tokens. One for each prompt: it may remember layers."""

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        from lazyllm.methods.sessions import LayerwiseSession

        return LayerwiseSession(self, decoder, prompt, max_new_tokens)


def at_depth(layer: int | None, num_layers: int, share: Fraction) -> int:
    """The layer that is asked for, by default that share of the depth. Raises ValueError if it is beyond the model."""
    if layer is None:
        return max(1, int(share * num_layers))
    if layer > num_layers:
        raise ValueError(f"layer={layer}, but the model has only {num_layers} layers")
    return layer
