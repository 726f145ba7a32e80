"""The sessions of the bases in `lazyllm.methods.support.bases`, and the rules by which tokens are chosen."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lazyllm.engine.decoder import Batch, Decoder, ropes_put_back
from lazyllm.engine.devices import read_clock
from lazyllm.engine.flops import LayerShape
from lazyllm.engine.inputs import Group, Prompt
from lazyllm.engine.session import Scoring, Session


def rank(scores: Tensor) -> Tensor:
    """Indices of scores [..., n], highest first; ties to the lower index. No synchronisation."""
    return torch.argsort(scores, descending=True, stable=True)


def split_prompt(scores: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Indices of the `keep` tokens that go on and of the others, each in ascending order.

    scores: [n] of the tokens that entered the pruning layer, by position. The last one is the step's newest token: it
    always goes on, and counts in `keep`.
    """
    forced = scores.clone()
    forced[-1] = float("inf")
    order = rank(forced)
    return order[:keep].sort().values, order[keep:].sort().values


class PruneSession(Session):
    """The session of a `Prune`: prunes in prefill, then decodes with the kept tokens.

    keep: {layer, from 1: number of tokens to keep after it}. choose: (scores that the group's `look` recorded, the
    group's batch, number of tokens to keep) -> ascending indices of the kept tokens. forget: as of `Prune`.
    """

    def __init__(
        self,
        decoder: Decoder,
        groups: Sequence[Group],
        prompt_tokens: int,
        max_new_tokens: int,
        keep: Mapping[int, int],
        choose: Callable[[list[Tensor], Batch, int], Tensor],
        forget: bool,
    ) -> None:
        super().__init__(decoder, groups, prompt_tokens, max_new_tokens)
        self._keep, self._choose, self._forget = keep, choose, forget

    def cross_in_prefill(self, index: int, batch: Batch) -> Batch:
        group = self.groups[index]
        layer = group.layers.stop
        if layer not in self._keep:
            return batch
        seen = self.decoder.probe.take_each() if group.look.layers else []
        kept = self._choose(seen, batch, self._keep[layer])
        if self._forget:
            for cache in self.caches[: index + 1]:  # all of them hold exactly the tokens of this batch, in order
                cache.retain(kept)
        batch = batch[kept]
        self.selected[-1][layer] = batch.positions
        return batch


def timed_selection(
    select: Callable[[Decoder, Prompt], Any], decoder: Decoder, prompt: Prompt, is_diagnostic: bool = False
) -> tuple[Tensor, Scoring]:
    """The selected positions [k] on the model's device, and what selecting them took."""
    began, run_before = time.perf_counter(), decoder.tokens_run
    with ropes_put_back(decoder.model):  # `select` may run a longer text than the prefill
        selected = select(decoder, prompt)
    tokens = decoder.tokens_run - run_before
    busy = decoder.devices if torch.is_tensor(selected) else ()  # a selection on the host has waited already
    seconds = read_clock(*busy) - began if tokens else 0.0
    scoring = Scoring(uncounted_s=seconds) if is_diagnostic else Scoring(seconds, tokens=whole(tokens))
    return torch.as_tensor(selected).to(decoder.device), scoring


def whole(tokens: float) -> int:
    """A sum of tokens' shares as a whole number, rounded up but for the sum's rounding errors."""
    return ceil(round(tokens, 6))


class SelectSession(Session):
    """The session of a `Select`: the baseline's, on the selected tokens.

    selected: their positions in the prompt, which `Session.selected` names at layer `at`. renumber: as of `Select`.
    instead: [k] token ids to run in place of the selected tokens, such as these in another tokenizer's words.
    """

    def __init__(
        self,
        decoder: Decoder,
        groups: Sequence[Group],
        prompt_tokens: int,
        max_new_tokens: int,
        scoring: Scoring,
        selected: Tensor,
        at: int = 0,
        renumber: bool = False,
        instead: Tensor | None = None,
    ) -> None:
        super().__init__(decoder, groups, prompt_tokens, max_new_tokens, scoring)
        self._kept, self._at, self._renumber, self._instead = selected, at, renumber, instead

    def prefill(self, token_ids: Tensor) -> Tensor:
        run = token_ids[self._kept] if self._instead is None else self._instead.to(self.decoder.device)
        text = self._all_positions[: self.prompt_tokens]
        positions = text if self._renumber else self._kept
        hidden = self.decoder.embed(run, positions)
        # a RoPE that grows with the text depends on the whole prompt, even if its last token is not selected
        rope = self.decoder.rope(hidden, text)
        if not self._renumber:
            rope = tuple(part[:, positions] for part in rope)
        logits = self._prefill(Batch(hidden, positions, rope), self.prompt_tokens)
        self.selected[-1][self._at] = self._kept
        return logits


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


class LayerwiseSession(Session):
    """The session of a `Layerwise`. score, cut, store: its hooks. named: its pruning layers."""

    def __init__(
        self,
        decoder: Decoder,
        groups: Sequence[Group],
        prompt_tokens: int,
        max_new_tokens: int,
        score: Callable[[Boundary, Tensor], Tensor],
        cut: Callable[[Boundary, Tensor], Tensor | None],
        store: Callable[[Boundary, Tensor], Tensor | None],
        named: Collection[int],
    ) -> None:
        super().__init__(decoder, groups, prompt_tokens, max_new_tokens)
        self._score, self._cut, self._store, self._named = score, cut, store, named
        self._kv_heads = LayerShape.of(decoder.config).kv_heads
        self._notes: dict[str, Any] = {}

    def cross_in_prefill(self, index: int, batch: Batch) -> Batch:
        group, layers = self.groups[index], len(self.decoder.layers)
        layer, kept = group.layers.stop, None
        if group.look.layers:
            at = Boundary(layer, layers, self.prompt_tokens, len(batch), self._kv_heads, self._notes)
            scores = self._score(at, self.decoder.probe.take())
            held = self._store(at, scores)
            if held is not None:
                self.caches[index].retain_by_head(held)
            kept = self._cut(at, scores)
            if kept is not None:
                batch = batch[kept]
        if kept is not None or layer in self._named:
            self.selected[-1][layer] = batch.positions
        return batch


def window_scores(sums: Tensor, window: int, kv_heads: int, pool: int, pooling: str) -> Tensor:
    """[g, o] scores of the o tokens outside the window: pooled for each query head, summed over those of a key head.

    sums: [h, m] attention probabilities of m tokens, summed over the window's queries (`Look.summed`).
    window: number of last tokens, which are not scored; less than m. pool: odd width of the pooling.
    pooling: "max", or "average", which counts the zeros around the tokens.
    """
    heads, m = sums.shape
    older = sums[:, : m - window]
    pool_1d = F.max_pool1d if pooling == "max" else F.avg_pool1d
    pooled = pool_1d(older[None], pool, stride=1, padding=pool // 2)[0]
    return sum_over_first(pooled.view(kv_heads, heads // kv_heads, -1).transpose(0, 1))


def sum_over_first(scores: Tensor) -> Tensor:
    """The sum over the first dimension, rounded in the same way for every token, so that equal scores stay equal."""
    return scores.movedim(0, -1).contiguous().sum(dim=-1)


def best_and_window(scores: Tensor, keep: int, m: int) -> Tensor:
    """[..., keep] ascending indices of the `keep` tokens of m that stay: the window, and the best of the others.

    scores: [..., o] of the tokens outside the window. keep: at least m - o. Ties go to the lower index.
    """
    older = scores.shape[-1]
    best = rank(scores)[..., : keep - (m - older)].sort().values
    window = torch.arange(older, m, device=scores.device)
    return torch.cat([best, window.expand(*best.shape[:-1], -1)], dim=-1)
