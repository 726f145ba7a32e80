"""What a method gets (`Prompt`, `Boundary`), declares (`Group`, ...) and returns (`Selection`).

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from lazyllm.engine.depth import Depth
from lazyllm.engine.flops import causal_pairs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """A prompt as methods see it: its tokens and, if known, their text.

    token_ids: [n] int64, on the host, special tokens included, n >= 1.
    text: what the tokens stand for; "" if only token ids were given.
    spans: per token its half-open range of `text`, empty for a special token; () without a text.
    context: ascending, disjoint ranges of `text` that a method may shorten. The rest (instruction,
        question, an example's answer) is never shortened.
    template: such ranges that the chat format wrote around the question; () if unknown.
    """

    token_ids: Tensor
    text: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    context: tuple[tuple[int, int], ...] = ()
    template: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return self.token_ids.shape[0]


@dataclass(frozen=True)
class ScoreSpec:
    """The attention scores that a method needs; by default none.

    layers: indices, from 0, of the layers whose scores are recorded.
    queries: number of queries, the newest tokens of a layer; fewer if it computes fewer.
    raw: attention logits (scaled and capped by the model, -inf if a token is not attended to)
        instead of probabilities (softmax over the stored tokens).
    per_head: the scores of each query head instead of their mean.
    summed: (first, last) gives the weighted sum over the queries instead of each query's scores,
        with weights spaced evenly from the oldest query's to the newest's. Queries run in blocks,
        so that many of them need little memory. Not with `raw`.

    Each layer gives a tensor [h, w, s] of h query heads, w queries and s stored tokens, in float32
    (float64 for a float64 model), without h unless `per_head`, without w if `queries=1` or
    `summed`. The default is Eq. 1.
    """

    layers: Collection[int] = ()
    queries: int = 1
    raw: bool = False
    per_head: bool = False
    summed: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.raw and self.summed:
            raise ValueError("ScoreSpec: raw and summed exclude each other; leave one out")


@dataclass(frozen=True)
class Triangle:
    """The keys of a prefill's queries: the first and the near ones, for the last queries all.

    sinks: first tokens that all queries see. window: tokens that a query sees, itself included.
    last: number of queries that see all.
    """

    sinks: int
    window: int
    last: int

    def is_dense(self, n: int) -> bool:
        """Say whether every one of n queries sees all tokens before it."""
        return n - self.last <= self.window + self.sinks

    def pairs(self, n: int, window: int | None = None) -> int:
        """Count (query, key) pairs of n tokens in a head. window: the layer's, which also holds."""
        if window is not None and window <= self.window:
            return causal_pairs(n, window)
        before = max(0, n - self.last)
        pairs = causal_pairs(before, self.window + self.sinks)
        for seen in range(window or before, before):
            # of all tokens up to a query, the layer's window hides the first ones
            hidden = seen + 1 - (window or 0)
            pairs -= min(hidden, self.sinks, seen + 1 - self.window)
        return pairs + causal_pairs(n, window) - causal_pairs(before, window)


NO_SCORES = ScoreSpec()
SPARE_SLOTS = 64  # of a cache, at least, so that one growth of it serves several steps


def with_spare(slots: int, most: int) -> int:
    """Add spare slots for tokens whose number is not known yet; at most `most` in all."""
    return min(most, slots + max(SPARE_SLOTS, slots // 8))


@dataclass(frozen=True)
class Group:
    """Neighbouring layers that always see the same tokens.

    layers: their indices, from 0.
    prompt_tokens: number of prompt tokens that enter the group in prefill.
    scores: what the choice of tokens at the group's end needs; NO_SCORES for a choice without
        scores; None if there is no choice: all tokens go on, and all stay stored.
    score_in_decode: record the scores in decoding too.
    revives: tokens that did not enter the group in prefill may enter it later.
    """

    layers: range
    prompt_tokens: int
    scores: ScoreSpec | None = None
    score_in_decode: bool = False
    revives: bool = False

    def slots(self, new_tokens: int, most: int) -> int:
        """Count a layer's slots of K and V from the first step on, for at most `most` tokens."""
        slots = self.prompt_tokens + new_tokens
        return with_spare(slots, most) if self.revives else slots

    def __post_init__(self) -> None:
        if not isinstance(self.prompt_tokens, Integral):
            raise ValueError(
                f"a group of layers has {self.prompt_tokens!r} prompt tokens: expected a whole "
                "number"
            )
        if self.scores and not {*self.scores.layers} <= {*self.layers}:
            raise ValueError(
                f"ScoreSpec names the layers {[*self.scores.layers]}: expected some of "
                f"{[*self.layers]}"
            )


@dataclass(frozen=True)
class Boundary:
    """The end of a group of layers in a prefill, where a method chooses tokens.

    layer: the group's last layer, from 1. n: number of prompt tokens.
    positions: [m] of the tokens that the group computed, ascending.
    kv_heads: key heads of a layer.
    notes: what a method, which has no state, remembers from one boundary of a prompt to the next.
    """

    layer: int
    depth: Depth
    n: int
    positions: Tensor
    kv_heads: int
    notes: dict[str, Any]

    @property
    def m(self) -> int:
        """The number of tokens that the group computed."""
        return self.positions.shape[0]


@dataclass(frozen=True)
class Selection:
    """What a method chooses at a boundary, as indices of the m tokens that the group computed.

    entering: [k] ascending, the tokens that enter the next group, the newest among them; None for
        all.
    stored: [g, k] ascending, the tokens whose K and V each key head of the group's layers keeps;
        None for all.
    forget: tokens that do not go on leave the KV caches of this group and of all before it.
    """

    entering: Tensor | None = None
    stored: Tensor | None = None
    forget: bool = False
