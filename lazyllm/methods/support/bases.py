"""Bases of most methods: score tokens between layers and keep the best, or choose them before the prefill.

Nothing here imports torch before a session starts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from lazyllm.engine.flops import LayerShape
from lazyllm.engine.inputs import Group, Look, Prompt
from lazyllm.engine.method import Method
from lazyllm.methods.support.ranking import split_prompt

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel

    from lazyllm.engine.decoder import Batch, Decoder
    from lazyllm.engine.session import Session


@dataclass(frozen=True)
class Prune(Method):
    """Base of methods that score the prompt's tokens between two layers of the prefill and keep the best.

    A subclass declares how many tokens are `kept` after which layer. It may override `look`, the attention that it
    needs (default: the newest token's attention in the layer before, Eq. 1), and `score`. A complete method, which
    keeps the last tokens and needs no attention:

    >>> from dataclasses import dataclass
    >>> import lazyllm
    >>> from lazyllm.methods import Look, Prune
    >>> from lazyllm.methods.support.schedule import check_ratio, keep_count
    >>>
    >>> @dataclass(frozen=True)
    ... class KeepLast(Prune):
    ...     layer: int
    ...     keep: float = 0.5
    ...     label, dial = "keep last", "keep"
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

    forget: pruned tokens also leave the KV caches of earlier layers, so decoding never sees them. If False, each layer
        keeps all tokens that it computed.
    """

    forget: ClassVar[bool] = True

    @abstractmethod
    def kept(self, num_layers: int, n: int) -> Mapping[int, int]:
        """{layer, from 1: number of n prompt tokens that go on after it}, the newest token among them."""

    def look(self, layers: range) -> Look:
        """The attention scores to record in a group's layers; its tokens are pruned at its end."""
        return Look(layers[-1:])

    def score(self, seen: list[Tensor], batch: Batch) -> Tensor:
        """[m] a score for each token of the batch; the highest are kept. seen: the scores of `look`, for each layer.

        By default the mean over layers. Must not wait for the device.
        """
        import torch

        return seen[0] if len(seen) == 1 else torch.stack(seen).mean(dim=0)

    def choose(self, scores: Tensor, keep: int) -> Tensor:
        """Ascending indices of the tokens that go on: the `keep` best, the newest among them; ties to the lower index.

        An `adaptive` method may return fewer or more.
        """
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

    def stored_per_layer(self, num_layers: int, n: int, later: int = 0) -> list[int]:
        stored = super().stored_per_layer(num_layers, n, later)
        return [stored[-1]] * num_layers if self.forget else stored

    def cross(self, session: Session, index: int, batch: Batch) -> Batch:
        group, layers = session.groups[index], len(session.decoder.layers)
        layer = group.layers.stop
        keep = self.kept(layers, session.prompt_tokens).get(layer)
        if keep is None:
            return batch
        seen = session.decoder.probe.take_each() if group.look.layers else []
        kept = self.choose(self.score(seen, batch), keep)
        session.check_selection(self.label, kept, len(batch), None if self.adaptive else keep)
        if self.forget:
            for cache in session.caches[: index + 1]:  # all of them hold exactly the tokens of this batch, in order
                cache.retain(kept)
        batch = batch[kept]
        session.selected[-1][layer] = batch.positions
        return batch


@dataclass(frozen=True)
class Select(Method):
    """Base of methods that choose prompt tokens first and then run the model on these alone.

    A subclass declares how many tokens are `kept`, and selects them, unless all stay. All that `select` runs, through
    `decoder` or a model opened by `lazyllm.methods.support.other_models`, is timed and counted as scoring. A complete
    method, which keeps the tokens that the newest one attends to in the first layers:

    >>> from dataclasses import dataclass
    >>> import lazyllm
    >>> from lazyllm.methods import Look, Select
    >>> from lazyllm.methods.support.schedule import keep_count
    >>>
    >>> @dataclass(frozen=True)
    ... class AskFirst(Select):
    ...     layers: int
    ...     keep: float = 0.5
    ...     label, dial = "ask first", "keep"
    ...
    ...     def kept(self, n):
    ...         return keep_count(self.keep, n)
    ...     def select(self, decoder, prompt):
    ...         from lazyllm.engine.decoder import run_layers
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

    renumber: the selected tokens are at positions 0, 1, ...; if False, they keep their positions in the whole prompt.
    """

    renumber: ClassVar[bool] = False

    def prepare(self, model: PreTrainedModel) -> None:
        for spec in self.models():
            from lazyllm.methods.support.other_models import load_beside

            load_beside(spec, model)

    @abstractmethod
    def kept(self, n: int) -> int:
        """The number of n prompt tokens that are run."""

    @abstractmethod
    def select(self, decoder: Decoder, prompt: Prompt) -> Tensor | np.ndarray | Sequence[int]:
        """[k] ascending positions of the prompt tokens to run, k >= 1. The device is idle when this is called."""

    def best(self, scores: Tensor, keep: int) -> Tensor:
        """Ascending indices of the `keep` best of scores [n], the newest token among them; ties to the lower index."""
        return split_prompt(scores, keep)[0]

    def scoring_config(self, config: Any) -> Any:
        """The transformers config of the model that scores: the first of `models`, else the model under test."""
        from lazyllm.methods.support.other_models import config_beside

        return next(map(config_beside, self.models()), config)

    def selected_at(self, num_layers: int) -> int:
        """The layer whose attention selects, from 1, or 0 if there is none: the key in `Generation.selected`."""
        return 0

    def groups(self, num_layers: int, n: int) -> list[Group]:
        return [Group(range(num_layers), self.kept(n))]

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        from lazyllm.methods.support.select_session import SelectSession, timed_selection

        layers, n = len(decoder.layers), len(prompt)
        kept = self.kept(n)
        select = self.select if kept < n else lambda decoder, prompt: range(n)
        selected, scoring = timed_selection(select, decoder, prompt, self.diagnostic)
        groups = [replace(group, prompt_tokens=len(selected)) for group in self.groups(layers, n)]
        length, at = len(selected) if self.renumber else n, self.selected_at(layers)
        session = SelectSession(decoder, groups, length, max_new_tokens, scoring, selected, at, self.renumber)
        session.check_selection(self.label, selected, n, None if self.adaptive else kept, newest=False)
        return session


@dataclass(frozen=True)
class Boundary:
    """The end of a layer of a prefill.

    layer: from 1, of `num_layers`. m: tokens that entered it, of n prompt tokens. kv_heads: its key heads.
    notes: what `Layerwise.cut` remembers from one boundary of a prompt to the next, as methods have no state.
    """

    layer: int
    num_layers: int
    n: int
    m: int
    kv_heads: int
    notes: dict[str, Any]


@dataclass(frozen=True)
class Layerwise(Method):
    """Base of methods that drop tokens between layers, and whose key heads may each store some tokens only.

    A subclass declares its `groups`. After each group that has a `look`, `score` makes scores of what was recorded;
    from these, `cut` chooses the tokens that enter the next layer, and `store` those that each key head keeps. Decoding
    attends to all stored tokens and selects nothing.
    """

    def pruning_layers(self, num_layers: int) -> Collection[int]:
        """The layers, from 1, that `Generation.selected` names even if all their tokens continue."""
        return ()

    def score(self, at: Boundary, seen: Tensor) -> Tensor:
        """The scores for `cut` and `store`; by default `seen`, the attention scores of the group's `look`."""
        return seen

    def cut(self, at: Boundary, scores: Tensor) -> Tensor | None:
        """[k] ascending indices of the tokens that enter the next layer, the newest among them; None for all."""
        return None

    def store(self, at: Boundary, scores: Tensor) -> Tensor | None:
        """[g, k] ascending indices of the tokens that each key head keeps; None for all."""
        return None

    def look_flops(self, config: Any, n: int) -> int:
        """FLOPs of the products of each `look`'s queries with the keys up to them: `scoring_flops` of some methods."""
        pairs = 0
        for group in self.groups(config.num_hidden_layers, n):
            queries = min(group.look.queries, group.prompt_tokens) if group.look.layers else 0
            pairs += queries * group.prompt_tokens - queries * (queries - 1) // 2
        return pairs * LayerShape.of(config).pair_flops // 2  # no product with V

    def cross(self, session: Session, index: int, batch: Batch) -> Batch:
        group, layers = session.groups[index], len(session.decoder.layers)
        layer, kept = group.layers.stop, None
        if group.look.layers:
            kv_heads = LayerShape.of(session.decoder.config).kv_heads
            at = Boundary(layer, layers, session.prompt_tokens, len(batch), kv_heads, session.notes)
            scores = self.score(at, session.decoder.probe.take())
            held = self.store(at, scores)
            if held is not None:
                session.caches[index].retain(held)
            kept = self.cut(at, scores)
            if kept is not None:
                declared = session.groups[index + 1].prompt_tokens if layer < layers and not self.adaptive else None
                session.check_selection(self.label, kept, at.m, declared)
                batch = batch[kept]
        if kept is not None or layer in self.pruning_layers(layers):
            session.selected[-1][layer] = batch.positions
        return batch


def at_depth(layer: int | None, num_layers: int, share: Fraction, key: str = "layer") -> int:
    """`layer`, or by default that share of the depth. Raises ValueError, naming `key`, if it is beyond the model."""
    if layer is None:
        return max(1, int(share * num_layers))
    if layer > num_layers:
        raise ValueError(f"{key}={layer}, but the model has only {num_layers} layers")
    return layer
