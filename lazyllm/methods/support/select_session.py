"""The session of methods that choose prompt tokens before the prefill, and the clock of their choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from lazyllm.engine.decoder import Decoder, preserve_rope_state
from lazyllm.engine.devices import read_clock
from lazyllm.engine.inputs import Group, Prompt
from lazyllm.engine.session import Scoring, Session


def timed_selection(
    select: Callable[[Decoder, Prompt], Any], decoder: Decoder, prompt: Prompt, is_diagnostic: bool = False
) -> tuple[Tensor, Scoring]:
    """The selected positions [k] on the model's device, and what selecting them took."""
    began, run_before = time.perf_counter(), decoder.tokens_run
    with preserve_rope_state(decoder.model):  # `select` may run a longer text than the prefill
        selected = select(decoder, prompt)
    tokens = decoder.tokens_run - run_before
    busy = decoder.devices if torch.is_tensor(selected) else ()  # a selection on the host has waited already
    seconds = read_clock(*busy) - began if tokens else 0.0
    scoring = Scoring(uncounted_s=seconds) if is_diagnostic else Scoring(seconds, tokens=ceil_tokens(tokens))
    return torch.as_tensor(selected).to(decoder.device), scoring


def ceil_tokens(tokens: float) -> int:
    """A sum of tokens' shares as a whole number, rounded up but for the sum's rounding errors."""
    return ceil(round(tokens, 6))


@dataclass(frozen=True)
class Selection:
    """The prompt tokens that a prefill runs.

    positions: [k] ascending, in the prompt.
    layer: whose attention selected them, the key in `Generation.selected`; 0 for none.
    renumber: as of `Select`.
    """

    positions: Tensor
    layer: int = 0
    renumber: bool = False


class SelectSession(Session):
    """The session of a `Select`: the baseline's, on the selected tokens."""

    def __init__(
        self,
        decoder: Decoder,
        groups: Sequence[Group],
        prompt_tokens: int,
        max_new_tokens: int,
        scoring: Scoring,
        selection: Selection,
    ) -> None:
        super().__init__(decoder, groups, prompt_tokens, max_new_tokens, scoring=scoring)
        self._selection = selection

    def prefill(self, token_ids: Tensor) -> Tensor:
        selection, text = self._selection, self._all_positions[: self.prompt_tokens]
        if selection.renumber:
            tokens = self.decoder.embed(token_ids[selection.positions], text)
        else:  # a RoPE that grows with the text depends on the whole prompt, even if its last token is not selected
            tokens = self.decoder.embed(token_ids, text)[selection.positions]
        logits = self._prefill(tokens, self.prompt_tokens)
        self.note_selection(selection.layer, selection.positions)
        return logits
