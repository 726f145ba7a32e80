"""SpecPrefill with a draft of another tokenizer: the kept tokens become text, which is the model's new prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lazyllm.engine.declaration import Group, Prompt
from lazyllm.engine.decoder import Decoder
from lazyllm.engine.session import Session
from lazyllm.methods.beside import Reading, open_beside, read_beside

if TYPE_CHECKING:
    from lazyllm.methods.specprefill import SpecPrefill

LEFT_OUT = "[...]"

Ranges = list[tuple[int, int]]  # half-open ranges of characters, ascending


def start_on_kept_text(method: SpecPrefill, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
    """The session of a prompt with `text` and `encode`; everything up to the model's own tokens counts as scoring."""
    began, run_before = time.perf_counter(), decoder.tokens_run
    pieces = kept_pieces(method, decoder, prompt.text)
    if pieces is None:
        return KeptTextSession(decoder, prompt.token_ids, torch.arange(len(prompt)), max_new_tokens)
    assert prompt.encode is not None
    kept = prompt.encode(LEFT_OUT.join(prompt.text[start:stop] for start, stop in pieces))
    token_ids = torch.tensor([*kept, *prompt.token_ids[len(prompt) - prompt.later :].tolist()])
    session = KeptTextSession(decoder, token_ids, tokens_in(prompt.spans, pieces), max_new_tokens)
    session.scoring_s = time.perf_counter() - began
    session.scoring_tokens = ceil(round(decoder.tokens_run - run_before, 6))
    return session


def kept_pieces(method: SpecPrefill, decoder: Decoder, text: str) -> Ranges | None:
    """The ranges of the text that the draft keeps; None if it keeps all, without scoring."""
    (spec,) = method.models()
    read: Reading = read_beside(spec, text)
    places = [place for place, (start, stop) in enumerate(read.spans) if start < stop]
    if method.kept(len(places)) == len(places):
        return None
    with open_beside(spec, decoder) as draft:
        scores = method.scores(draft, torch.tensor(read.token_ids))
        chosen = method.choose(scores[places]).tolist()
    pieces: Ranges = []
    for before, number in zip([-2, *chosen], chosen, strict=False):
        start, stop = read.spans[places[number]]
        pieces.append((pieces.pop()[0] if number == before + 1 else start, stop))
    return pieces


def tokens_in(spans: Sequence[tuple[int, int]], pieces: Ranges) -> Tensor:
    """The positions of the tokens that overlap a piece, and of tokens without characters."""
    letters = {letter for start, stop in pieces for letter in range(start, stop)}
    kept = [p for p, (start, stop) in enumerate(spans) if start == stop or not letters.isdisjoint(range(start, stop))]
    return torch.tensor(kept, dtype=torch.long)


class KeptTextSession(Session):
    """The baseline's session on the token ids of the kept text. `selected` names the prompt's tokens in it."""

    def __init__(self, decoder: Decoder, token_ids: Tensor, kept: Tensor, max_new_tokens: int) -> None:
        groups = [Group(range(len(decoder.layers)), len(token_ids))]
        super().__init__(decoder, groups, len(token_ids), max_new_tokens)
        self._token_ids = token_ids.to(decoder.device)
        self._kept = kept

    def prefill(self, token_ids: Tensor) -> Tensor:
        logits = super().prefill(self._token_ids)
        self.selected[-1][0] = self._kept
        return logits
