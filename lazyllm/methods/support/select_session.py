"""The session of methods that choose prompt tokens before the prefill, and the clock of that."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lazyllm.engine.decoder import Decoder, preserve_rope_state
from lazyllm.engine.devices import read_clock
from lazyllm.engine.inputs import Prompt
from lazyllm.engine.session import Scoring, Session

if TYPE_CHECKING:
    from lazyllm.methods.support.bases import Select


class SelectSession(Session):
    """The baseline's session, on the tokens that a `Select` chooses when the session starts."""

    def __init__(
        self, decoder: Decoder, method: Select, prompt: Prompt, max_new_tokens: int
    ) -> None:
        n, kept = len(prompt), method.kept(len(prompt))
        everything = torch.arange(n, device=decoder.device), Scoring()
        positions, scoring = timed_selection(decoder, method, prompt) if kept < n else everything
        k = len(positions)
        groups = [replace(group, prompt_tokens=k) for group in method.groups(decoder.depth, n)]
        # the base class needs the positions that the prompt takes, the counts its tokens, n
        super().__init__(decoder, groups, k if method.renumber else n, max_new_tokens)
        self.prompt_tokens, self.scoring = n, scoring
        self._select, self._positions = method, positions
        self.check_selection(method.label, positions, n, None if method.adaptive else kept)

    def prefill(self, token_ids: Tensor) -> Tensor:
        renumber = self._select.renumber
        text = token_ids[self._positions] if renumber else token_ids
        # all of the text is embedded: a RoPE that grows depends on its last token, selected or not
        tokens = self.decoder.embed(text, self._all_positions[: len(text)])
        logits = self._prefill(tokens if renumber else tokens[self._positions], len(text))
        self.note_selection(self._select.selected_at(self.decoder.depth), self._positions)
        return logits


def timed_selection(decoder: Decoder, method: Select, prompt: Prompt) -> tuple[Tensor, Scoring]:
    """Select positions [k], on the model's device, and say what that cost."""
    began, run_before = read_clock(), decoder.tokens_run
    with preserve_rope_state(decoder.model):  # `select` may run a longer text than the prefill
        selected = method.select(decoder, prompt)
    tokens = decoder.tokens_run - run_before
    busy = decoder.devices if torch.is_tensor(selected) else ()  # else `select` has waited already
    seconds = read_clock(*busy) - began if tokens else 0.0
    # rounded to 6 places first: the sum of shares of a token may be just above a whole number
    scoring = Scoring(seconds, ceil(round(tokens, 6)))
    return torch.as_tensor(selected).to(decoder.device), scoring
