"""The sessions of the bases in `lazyllm.methods.support.bases`, and the rules by which tokens are chosen."""

from __future__ import annotations

import time
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lazyllm.engine.decoder import Decoder, ropes_put_back
from lazyllm.engine.devices import read_clock
from lazyllm.engine.flops import LayerShape
from lazyllm.engine.inputs import Prompt
from lazyllm.engine.session import Batch, Session

if TYPE_CHECKING:
    from lazyllm.methods.support.bases import Layerwise, Prune, Select


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
    """The session of a `Prune`: prunes in prefill, then decodes with the kept tokens."""

    def __init__(self, method: Prune, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> None:
        layers, n = len(decoder.layers), len(prompt)
        super().__init__(decoder, method.groups(layers, n), n, max_new_tokens)
        self.method = method
        self._keep = method.kept(layers, n)

    def cross_in_prefill(self, index: int, batch: Batch) -> Batch:
        group = self.groups[index]
        layer = group.layers.stop
        if layer not in self._keep:
            return batch
        seen = self.decoder.probe.take_each() if group.look.layers else []
        kept = self.method.choose(self.method.score(seen, batch), self._keep[layer])
        if self.method.forget:
            for cache in self.caches[: index + 1]:  # all of them hold exactly the tokens of this batch, in order
                cache.retain(kept)
        batch = batch[kept]
        self.selected[-1][layer] = batch.positions
        return batch


class SelectSession(Session):
    """The session of a `Select`: the baseline's, on the selected tokens. `selected` names them at layer 0."""

    def __init__(self, method: Select, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> None:
        began, run_before = time.perf_counter(), decoder.tokens_run
        with ropes_put_back(decoder.model):  # `select` may run a longer text than the prefill
            selected = method.select(decoder, prompt)
        scored = decoder.tokens_run - run_before
        busy = decoder.devices if torch.is_tensor(selected) else ()  # a selection on the host has waited already
        scoring_s = read_clock(*busy) - began if scored else 0.0
        kept = torch.as_tensor(selected).to(decoder.device)
        groups = method.groups(len(decoder.layers), len(prompt))
        groups = [replace(group, prompt_tokens=kept.shape[0]) for group in groups]
        super().__init__(decoder, groups, kept.shape[0] if method.renumber else len(prompt), max_new_tokens)
        if method.diagnostic:
            self.uncounted_s = scoring_s
        else:
            self.scoring_s = scoring_s
            self.scoring_tokens = ceil(round(scored, 6))  # sums of shares have rounding errors
        self._kept = kept
        self._positions = self._all_positions[: kept.shape[0]] if method.renumber else kept
        self._selected_at = method.selected_at(len(decoder.layers))

    def prefill(self, token_ids: Tensor) -> Tensor:
        logits = self._prefill(token_ids[self._kept], self._positions, self.prompt_tokens)
        self.selected[-1][self._selected_at] = self._kept
        return logits

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Batch:
        if positions is not self._kept:
            return super()._embed(token_ids, positions)
        # a RoPE that grows with the text depends on the whole prompt, even if its last token is not selected
        hidden = self.decoder.embed(token_ids, positions)
        rope = self.decoder.rope(hidden, self._all_positions[: self.prompt_tokens])
        return Batch(hidden, positions, tuple(part[:, positions] for part in rope))


class LayerwiseSession(Session):
    """The session of a `Layerwise`: its cutter decides after each group which tokens go on and which heads keep."""

    def __init__(self, method: Layerwise, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> None:
        layers, n = len(decoder.layers), len(prompt)
        super().__init__(decoder, method.groups(layers, n), n, max_new_tokens)
        self._cut = method.cutter(layers, LayerShape.of(decoder.config).kv_heads, n)

    def cross_in_prefill(self, index: int, batch: Batch) -> Batch:
        group = self.groups[index]
        seen = self.decoder.probe.take_each() if group.look.layers else []
        kept, held = self._cut(group.layers.stop, seen, len(batch))
        if held is not None:
            self.caches[index].retain_by_head(held)
        if kept is None:
            return batch
        batch = batch[kept]
        self.selected[-1][group.layers.stop] = batch.positions
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
