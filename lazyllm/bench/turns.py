"""Generations that take turns, token by token: what slows a machine for a while slows each of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lazyllm.bench.rate import product_rate
from lazyllm.engine.declaration import Prompt
from lazyllm.engine.decoder import Decoder, open_decoder
from lazyllm.engine.devices import read_clock
from lazyllm.engine.generation import greedy
from lazyllm.engine.session import Session
from lazyllm.methods import Method


class Turns:
    """One generation, as `lazyllm.generate` makes it, a token at a call.

    token_ids: so far. seconds: of each of them, the first one's with the start of the session. product_flops_per_s: see
        `product_rate`, just before the first.
    """

    def __init__(self, decoder: Decoder, method: Method, prompt: Tensor, new_tokens: int) -> None:
        self.token_ids: list[int] = []
        self.seconds: list[float] = []
        self.product_flops_per_s = 0.0
        self.method = method
        self._decoder = decoder
        self._prompt = prompt
        self._new_tokens = new_tokens
        self._session: Session | None = None
        self._choose = greedy()

    @property
    def prompt_tokens(self) -> int:
        return len(self._prompt)

    @property
    def selected(self) -> list[dict[int, list[int]]]:
        """As in `lazyllm.engine.generation.Generation`."""
        assert self._session is not None
        return [{layer: kept.tolist() for layer, kept in step.items()} for step in self._session.selected]

    def take(self) -> None:
        """Generate the next token."""
        if self._session is None:
            self.product_flops_per_s = product_rate(self._decoder.model, self.prompt_tokens)
        start = read_clock(self._decoder.device)
        if self._session is None:
            self._session = self.method.start(self._decoder, Prompt(self._prompt), self._new_tokens)
            logits = self._session.prefill(self._prompt.to(self._decoder.device))
        else:
            logits = self._session.step(self.token_ids[-1])
        token_id, _ = self._choose(logits)
        self.seconds.append(read_clock(self._decoder.device) - start)
        self.token_ids.append(token_id)


@torch.inference_mode()
def in_turns(model: PreTrainedModel, methods: Sequence[Method], prompt: Tensor, new_tokens: int) -> list[Turns]:
    """Continue a prompt [n] with each of the methods, the first token of each before the second of any.

    All of them hold their K and V at once. Raises FloatingPointError where logits are not finite.
    """
    for method in methods:
        method.prepare(model)
    with open_decoder(model) as decoder:
        generations = [Turns(decoder, method, prompt, new_tokens) for method in methods]
        for _ in range(new_tokens):
            for one in generations:
                one.take()
    return generations
