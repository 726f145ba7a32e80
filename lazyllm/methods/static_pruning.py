"""Static token pruning (LazyLLM's baseline): the prompt is pruned once, in prefill, and what is pruned is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lazyllm.engine.decoder import Decoder
from lazyllm.engine.method import Method
from lazyllm.engine.prompt import Prompt
from lazyllm.engine.session import Batch, Group, Session
from lazyllm.methods.schedule import check_ratio, keep_count
from lazyllm.methods.selection import split_prompt


@dataclass(frozen=True)
class StaticPruning(Method):
    """Prune once, after layer `layer`, by the importance (Eq. 1) averaged over layers 1 to `layer`.

    layer: 1-based. keep: share of the prompt tokens that go on, `ceil(keep * n)` of n, the newest among them.

    Pruned tokens leave the KV cache of the early layers too, and never come back: decoding sees the kept ones only.
    """

    label: ClassVar[str] = "static pruning"
    order: ClassVar[int] = 2
    colour: ClassVar[str | None] = "#D55E00"
    marker: ClassVar[str | None] = "s"
    dial: ClassVar[str | None] = "keep"

    layer: int
    keep: float

    def __post_init__(self) -> None:
        check_ratio("keep", self.keep)
        if isinstance(self.layer, bool) or not isinstance(self.layer, int) or self.layer < 1:
            raise ValueError(f"layer is a whole number, 1 for the first layer; got {self.layer!r}")

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        n, kept = len(prompt), keep_count(self.keep, len(prompt))
        self.tokens_per_layer(len(decoder.layers), n)  # refuses a layer beyond the model
        early, late = range(self.layer), range(self.layer, len(decoder.layers))
        groups = [Group(early, n, watched=early, watched_in_steps=False)]
        if late:
            groups.append(Group(late, kept))
        return StaticSession(decoder, groups, n, max_new_tokens, kept)

    def tokens_per_layer(self, num_layers: int, n: int) -> list[int]:
        if self.layer > num_layers:
            raise ValueError(f"static pruning after layer {self.layer}, but the model has only {num_layers} layers")
        return [n] * self.layer + [keep_count(self.keep, n)] * (num_layers - self.layer)


class StaticSession(Session):
    """A session that keeps `keep` prompt tokens after its first group, and nothing of the others."""

    def __init__(
        self, decoder: Decoder, groups: list[Group], prompt_tokens: int, max_new_tokens: int, keep: int
    ) -> None:
        super().__init__(decoder, groups, prompt_tokens, max_new_tokens)
        self._keep = keep

    def cross_in_prefill(self, index: int, batch: Batch) -> Batch:
        if index > 0:
            return batch
        kept, _ = split_prompt(self.decoder.probe.take(), self._keep)
        self.caches[0].retain(kept)
        batch = batch[kept]
        self.selected[-1][len(self.groups[0].layers)] = batch.positions
        return batch
