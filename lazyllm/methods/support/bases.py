"""Bases of methods that prune between layers (`Prune`), select before the prefill (`Select`), or
skip attention in it (`Sparse`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from lazyllm.engine.depth import Depth
from lazyllm.engine.flops import LayerShape, windows_of
from lazyllm.engine.inputs import (
    NO_SCORES,
    Boundary,
    Group,
    Prompt,
    ScoreSpec,
    Selection,
    Triangle,
)
from lazyllm.engine.method import Method
from lazyllm.errors import UserError
from lazyllm.methods.support.ranking import best_of_prompt

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel

    from lazyllm.engine.decoder import Decoder
    from lazyllm.engine.session import Session


@dataclass(frozen=True)
class Prune(Method):
    """Base of methods that score the prompt's tokens between layers and keep the best.

    A subclass declares how many tokens are `kept` after which layer. It may override `score_spec`,
    the attention that it needs (default: the newest token's in the layer before, Eq. 1), and
    `score`. A complete method, which keeps the last tokens and needs no attention:

    >>> from dataclasses import dataclass
    >>> import lazyllm
    >>> from lazyllm.methods import Prune, ScoreSpec
    >>> from lazyllm.methods.support.hyperparameters import Ratio, keep_count
    >>>
    >>> @dataclass(frozen=True)
    ... class KeepLast(Prune):
    ...     layer: int
    ...     keep: Ratio = 0.5  # another value is refused before any model loads
    ...     label, target_parameter = "keep last", "keep"
    ...
    ...     def kept(self, depth, n):
    ...         return {self.layer: keep_count(self.keep, n)}
    ...     def score_spec(self, layers, depth):
    ...         return ScoreSpec()
    ...     def score(self, at, recorded):
    ...         return at.positions.double()
    >>>
    >>> model, _ = lazyllm.load_model("tiny", dtype="float32", device="cpu")
    >>> method = KeepLast(layer=2, keep=0.25)
    >>> out = lazyllm.generate(model, list(range(5, 45)), method, max_new_tokens=3)
    >>> out.computed[0].tolist()  # of 40 prompt tokens, layer by layer
    [40, 40, 10, 10, 10, 10, 10, 10]
    >>> KeepLast(layer=9).check(model.config)
    Traceback (most recent call last):
    ValueError: keep last prunes after layer 9, but the model has only 8 layers

    A method whose number of kept tokens depends on the scores overrides `select`. One whose key
    heads each store only some tokens overrides `store`, which acts on all layers of a group. So its
    groups have one layer each: `kept` names all these layers (`fastkv.py`), or, if layers before
    them store all tokens, it declares its `groups` (`claa.py`).

    forget: pruned tokens also leave the KV caches of earlier layers, so decoding never sees them.
        If False, each layer keeps all tokens that it computed, or those of `store`.
    """

    forget: ClassVar[bool] = True

    def kept(self, depth: Depth, n: int) -> Mapping[int, int]:
        """Count {layer, from 1: how many of n prompt tokens, with the newest, go on after it}.

        A default layer is `depth.nearest(layer)` or `at_depth`, so that it sees the whole prompt.
        """
        name = type(self).__name__
        raise UserError(
            f"{name} declares neither kept(depth, n) nor groups(...): write one of them"
        )

    def score_spec(self, layers: range, depth: Depth) -> ScoreSpec:
        """Name the attention scores to record in a group's layers, at whose end tokens are pruned.

        layers: their indices, from 0. `depth.among` names those that see the whole prompt, from 1.
        """
        return ScoreSpec(layers[-1:])

    def score(self, at: Boundary, recorded: list[Tensor]) -> Tensor:
        """Score tokens for `select` and `store`; by default the mean of `recorded`, [m] for Eq. 1.

        recorded: as `score_spec` names them, a tensor for each layer. Must not wait for the device.
        """
        import torch

        return recorded[0] if len(recorded) == 1 else torch.stack(recorded).mean(dim=0)

    def select(self, at: Boundary, scores: Tensor) -> Tensor | None:
        """Choose ascending indices of the tokens that go on, with the newest; None for all.

        By default the best of scores [m], as many as `kept`; ties to the lower index. An `adaptive`
        method may return fewer or more.
        """
        is_tensor = hasattr(scores, "is_floating_point")
        if not is_tensor or scores.shape != (at.m,) or not scores.is_floating_point():
            dtype = getattr(scores, "dtype", type(scores).__name__)
            found = f"{list(getattr(scores, 'shape', ()))} of {dtype}"
            raise UserError(
                f"{self.label}: scored {found}: expected a tensor of {at.m} floating-point numbers"
            )
        return best_of_prompt(scores, self.kept(at.depth, at.n)[at.layer])

    def store(self, at: Boundary, scores: Tensor) -> Tensor | None:
        """Choose [g, k] ascending indices of the tokens that each key head keeps; None for all."""
        return None

    def prune(self, at: Boundary, recorded: list[Tensor]) -> Selection:
        scores = self.score(at, recorded)
        stored = self.store(at, scores)
        if stored is not None and self.forget:
            raise UserError(
                f"{self.label}: store keeps other tokens in each key head: write forget = False "
                "beside it"
            )
        return Selection(self.select(at, scores), stored, self.forget)

    def groups(self, depth: Depth, n: int) -> list[Group]:
        return groups_between(self, self.kept(depth, n), depth, n, self.score_spec)

    def stored_per_layer(self, depth: Depth, n: int) -> list[int]:
        if not self.forget:
            return super().stored_per_layer(depth, n)
        return [min([n, *self.kept(depth, n).values()])] * depth.count

    def scores_flops(self, config: Any, n: int, computed: Sequence[int] | None = None) -> int:
        """Count the products of recorded queries with the keys up to them: `scoring_flops` of some.

        computed: as in `ideal_speedup`.
        """
        depth = Depth.of(config)
        tokens = self.tokens_per_layer(depth, n) if computed is None else computed
        pairs = 0
        for group in self.groups(depth, n):
            scores = group.scores or NO_SCORES
            for layer in scores.layers:
                m = tokens[layer]
                queries = min(scores.queries, m)
                pairs += queries * m - queries * (queries - 1) // 2
        return pairs * LayerShape.of(config).pair_flops // 2  # no product with V


def groups_between(
    method: Method,
    kept: Mapping[int, int],
    depth: Depth,
    n: int,
    score_spec: Callable[[range, Depth], ScoreSpec],
) -> list[Group]:
    """Make the groups between the layers of `kept` and `pruning_layers`.

    Raises ValueError for a layer beyond the model.
    """
    ends = sorted({*kept, *method.pruning_layers(depth)})
    for layer in ends:
        if not 1 <= layer <= depth.count:
            only = f"the model has only {depth.count} layers"
            reason = only if layer > 0 else "layers count from 1"
            raise ValueError(f"{method.label} prunes after layer {layer}, but {reason}")
    groups, start = [], 0
    for end in dict.fromkeys([*ends, depth.count]):
        layers = range(start, end)
        groups.append(Group(layers, n, score_spec(layers, depth) if end in kept else None))
        start, n = end, kept.get(end, n)
    return groups


@dataclass(frozen=True)
class Select(Method):
    """Base of methods that choose prompt tokens first and then run the model on these alone.

    A subclass declares how many tokens are `kept`, and chooses them in `select`, which is not
    called if all stay. What `select` runs, through `decoder` or a model of `other_models`, is timed
    and counted as scoring. A complete method, which keeps the tokens that the newest one attends to
    in an early layer:

    >>> from dataclasses import dataclass
    >>> import lazyllm
    >>> from lazyllm.methods import ScoreSpec, Select
    >>> from lazyllm.methods.support.hyperparameters import keep_count
    >>>
    >>> @dataclass(frozen=True)
    ... class AskFirst(Select):
    ...     layers: int
    ...     keep: float = 0.5
    ...     label, target_parameter = "ask first", "keep"
    ...
    ...     def kept(self, n):
    ...         return keep_count(self.keep, n)
    ...     def select(self, decoder, prompt):
    ...         from lazyllm.engine.decoder import run_layers
    ...         wanted = ScoreSpec([self.layers - 1])
    ...         ids = prompt.token_ids.to(decoder.device)
    ...         _, [scores] = run_layers(decoder, ids, self.layers, wanted)
    ...         return self.best(scores, self.kept(len(prompt)))
    ...     def scoring_flops(self, config, n):
    ...         return lazyllm.engine.flops.first_layers_flops(config, n, self.layers)
    >>>
    >>> model, _ = lazyllm.load_model("tiny", dtype="float32", device="cpu")
    >>> method = AskFirst(layers=4, keep=0.25)
    >>> out = lazyllm.generate(model, list(range(5, 45)), method, max_new_tokens=3)
    >>> out.computed[0].tolist(), out.scoring_tokens  # 40 tokens through half of the layers
    ([10, 10, 10, 10, 10, 10, 10, 10], 20)
    >>> round(method.ideal_speedup(model.config, 1000), 2)
    1.51

    renumber: the selected tokens are at positions 0, 1, ...; if False, they keep their positions.
    plain_models: the method's `models` may be of any architecture: only `model(...)` is called.
    """

    renumber: ClassVar[bool] = False
    plain_models: ClassVar[bool] = False

    def prepare(self, model: PreTrainedModel) -> None:
        for spec in self.models():
            from lazyllm.methods.support.other_models import HELPERS

            HELPERS.load(spec, model, self.plain_models)

    @abstractmethod
    def kept(self, n: int) -> int:
        """Count how many of n prompt tokens the model runs."""

    @abstractmethod
    def select(self, decoder: Decoder, prompt: Prompt) -> Tensor | np.ndarray | Sequence[int]:
        """Choose ascending positions [k] of the prompt tokens to run, k >= 1."""

    def best(self, scores: Tensor, keep: int) -> Tensor:
        """Choose the `keep` best of scores [n], the newest token among them, ascending."""
        return best_of_prompt(scores, keep)

    def scoring_config(self, config: Any) -> Any:
        """Read the config of the model that scores: the first of `models`, else `config`."""
        from lazyllm.methods.support.other_models import config_of

        return next(map(config_of, self.models()), config)

    def selected_at(self, depth: Depth) -> int:
        """Name the layer, from 1, whose attention selects; 0 if there is none.

        It is the key in `Generation.selected`.
        """
        return 0

    def scoring_layers(self, depth: Depth) -> Collection[int]:
        layer = self.selected_at(depth)
        return [layer] if layer else []

    def groups(self, depth: Depth, n: int) -> list[Group]:
        self.selected_at(depth)  # raises for a layer beyond the model
        return [Group(range(depth.count), self.kept(n))]

    def first_token_flops(self, config: Any, n: int, computed: Sequence[int] | None = None) -> int:
        flops = super().first_token_flops(config, n, computed)
        # nothing is scored if all tokens stay
        return flops if self.kept(n) < n else flops - self.scoring_flops(config, n)

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        from lazyllm.methods.support.select_session import SelectSession

        return SelectSession(decoder, self, prompt, max_new_tokens)


@dataclass(frozen=True)
class Sparse(Method):
    """Base of methods whose prefill skips attention, not tokens: all run in all layers, and stay.

    A subclass says in `sees` which keys the queries of a layer attend to. Decoding attends to all.
    """

    @abstractmethod
    def sees(self, layer: int, n: int, depth: Depth) -> Triangle | None:
        """Say which of n tokens a layer's queries attend to in prefill, up to themselves.

        layer: from 1. None: all of them.
        """

    def attended(self, config: Any, n: int) -> dict[int, int]:
        depth, pairs = Depth.of(config), dict[int, int]()
        for layer, window in enumerate(windows_of(config), start=1):
            pattern = self.sees(layer, n, depth)
            if pattern is not None:
                pairs[layer] = config.num_attention_heads * pattern.pairs(n, window)
        return pairs

    def groups(self, depth: Depth, n: int) -> list[Group]:
        return [Group(range(depth.count), n)]

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        from lazyllm.engine.session import Session

        depth, n = decoder.depth, len(prompt)
        sees = partial(self.sees, depth=depth)
        return Session(decoder, self.groups(depth, n), n, max_new_tokens, sees=sees)


def at_depth(layer: int | None, depth: Depth, share: Fraction, key: str = "layer") -> int:
    """Return `layer`, or if it is None, the layer at a share of the depth (`Depth.at_share`).

    Raises ValueError, naming `key`, for a layer beyond the model.
    """
    if layer is None:
        return depth.at_share(share) or depth.nearest(1)
    if layer > depth.count:
        raise ValueError(f"{key}={layer}, but the model has only {depth.count} layers")
    return layer
