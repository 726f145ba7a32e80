"""What runs the methods of `lazyllm.methods.bases`, and the rule by which tokens are chosen."""

from __future__ import annotations

import time
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lazyllm.engine.declaration import Prompt
from lazyllm.engine.decoder import Decoder
from lazyllm.engine.devices import read_clock
from lazyllm.engine.session import Batch, Session

if TYPE_CHECKING:
    from lazyllm.methods.bases import Prune, Select


def rank(scores: Tensor) -> Tensor:
    """Indices of scores [n], highest first; of equals the lower index first. No synchronisation."""
    return torch.argsort(scores, descending=True, stable=True)


def split_prompt(scores: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Indices of the `keep` tokens that go on and of those that do not, each in ascending order.

    scores: [n] of the tokens that entered the pruning layer, by position. The last one is the step's newest token: it
    always goes on and counts among the kept.
    """
    forced = scores.clone()
    forced[-1] = float("inf")
    order = rank(forced)
    return order[:keep].sort().values, order[keep:].sort().values


class PruneSession(Session):
    """The session of a `Prune`: prunes in prefill, and decodes with what it left."""

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
            for cache in self.caches[: index + 1]:  # which all hold the tokens of this batch, in its order
                cache.retain(kept)
        batch = batch[kept]
        self.selected[-1][layer] = batch.positions
        return batch


class SelectSession(Session):
    """The session of a `Select`: the baseline's, on the selected tokens. `selected` names them at layer 0."""

    def __init__(self, method: Select, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> None:
        began, run_before = time.perf_counter(), decoder.tokens_run
        selected = method.select(decoder, prompt)
        scored = decoder.tokens_run - run_before
        busy = decoder.devices if torch.is_tensor(selected) else ()  # a choice on the host has waited for the devices
        scoring_s = read_clock(*busy) - began if scored else 0.0
        kept = torch.as_tensor(selected).to(decoder.device)
        groups = method.groups(len(decoder.layers), len(prompt))
        groups = [replace(group, prompt_tokens=kept.shape[0]) for group in groups]
        super().__init__(decoder, groups, kept.shape[0] if method.renumber else len(prompt), max_new_tokens)
        self.scoring_s = scoring_s
        self.scoring_tokens = ceil(round(scored, 6))  # shares of tokens add up with rounding errors
        self._kept = kept
        self._positions = self._all_positions[: kept.shape[0]] if method.renumber else kept

    def prefill(self, token_ids: Tensor) -> Tensor:
        logits = self._prefill(token_ids[self._kept], self._positions, self.prompt_tokens)
        self.selected[-1][0] = self._kept
        return logits
