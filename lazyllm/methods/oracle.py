"""The oracle, a reference for methods: the prompt tokens that the full model's own answer attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lazyllm.engine.depth import Depth
from lazyllm.engine.inputs import Prompt
from lazyllm.methods.support.bases import Select
from lazyllm.methods.support.hyperparameters import check_count_or_ratio, check_int, check_odd, checked, count_of

if TYPE_CHECKING:
    from torch import Tensor

    from lazyllm.engine.decoder import Decoder
    from lazyllm.engine.session import Session


@dataclass(frozen=True)
class Oracle(Select):
    """A diagnostic: run the prompt tokens that the answer of the full model attends to, at their own positions.

    keep: number of tokens (int) or share of the prompt, rounded up (float), the last token among them.
    answer: number of greedy answer tokens whose attention gives the scores, beside that of the last prompt token; None
        for `max_new_tokens`. An end token ends the answer.
    pool: odd width of the average pooling of attention.

    Scores: `lazyllm.methods.support.look_ahead`, with the model as its own draft. The selection costs more than a
    prefill, and is left out of TTFT, of all counts and of the ideal speedup: an upper bound for methods, not a method.

    Source: the Answer-Informed Oracle of CLAA (arXiv 2602.16054), from a description. Written from scratch.
    Ours: the last token always stays; ties go to the lower position.
    """

    label = "oracle (diagnostic)"
    order = 12
    colour = "#00C8C8"
    marker = "h"
    target_parameter = "keep"
    diagnostic = True

    keep: float = checked(check_count_or_ratio, 0.2)
    answer: int | None = checked(check_int, None)
    pool: int = checked(check_odd, 13)

    def kept(self, n: int) -> int:
        return count_of(self.keep, n)

    def scoring_layers(self, depth: Depth) -> Sequence[int]:
        return depth.full

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        asked = self if self.answer is not None else replace(self, answer=max_new_tokens)
        return super(Oracle, asked).start(decoder, prompt, max_new_tokens)

    def select(self, decoder: Decoder, prompt: Prompt) -> Tensor:
        from lazyllm.methods.support.look_ahead import look_ahead

        assert self.answer is not None
        scores = look_ahead(decoder, prompt.token_ids, self.answer + 1, self.pool)
        return self.best(scores, self.kept(len(prompt)))
