"""The session of methods that choose prompt tokens before the prefill, and the clock of their choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor

from lazyllm.engine.decoder import Decoder, ropes_put_back
from lazyllm.engine.devices import read_clock
from lazyllm.engine.inputs import Group, Prompt
from lazyllm.engine.session import Scoring, Session


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
        super().__init__(decoder, groups, prompt_tokens, max_new_tokens, scoring=scoring)
        self._kept, self._at, self._renumber, self._instead = selected, at, renumber, instead

    def prefill(self, token_ids: Tensor) -> Tensor:
        text = self._all_positions[: self.prompt_tokens]
        if self._renumber:
            run = token_ids[self._kept] if self._instead is None else self._instead.to(self.decoder.device)
            batch = self.decoder.batch(run, text)
        else:  # a RoPE that grows with the text depends on the whole prompt, even if its last token is not selected
            batch = self.decoder.batch(token_ids, text)[self._kept]
        logits = self._prefill(batch, self.prompt_tokens)
        self.selected[-1][self._at] = self._kept
        return logits
