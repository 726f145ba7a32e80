"""Random token drop (a baseline of the LazyLLM paper, after Random-LTD, arXiv 2211.11586)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from lazyllm.engine.inputs import Prompt
from lazyllm.methods.support.bases import Select
from lazyllm.methods.support.hyperparameters import CountOrZero, Ratio, keep_count

if TYPE_CHECKING:
    from lazyllm.engine.decoder import Decoder


@dataclass(frozen=True)
class RandomDrop(Select):
    """Drop prompt tokens at random before the model sees them; the newest one stays.

    keep: share of the prompt tokens that the model sees, `ceil(keep * n)` of n.
    seed: of the draw; the paper reports the mean of five.
    drop_template: also draw among the tokens of the chat template and special ones. By default they
        stay and count among the kept, the newest of them if there are more.

    Ours: the kept tokens are a shorter prompt, numbered from 0. The draw depends on the seed and
    the prompt's tokens: two prompts of one length lose tokens at different places. The template
    stays, as a model that does not see where its answer begins is no baseline (docs/decisions.md).
    Of a prompt without text, no template is known.
    """

    label = "random token drop"
    order = 1
    colour = "#009E73"
    marker = "^"
    target_parameter = "keep"
    shown_parameters = ("seed",)
    renumber = True

    keep: Ratio = 0.8
    seed: CountOrZero = 0
    drop_template: bool = False

    def kept(self, n: int) -> int:
        return keep_count(self.keep, n)

    def select(self, decoder: Decoder | None, prompt: Prompt) -> list[int]:
        n = len(prompt)
        count = self.kept(n)
        template = [] if self.drop_template else template_tokens(prompt)
        fixed = [*(place for place in template if place < n - 1), n - 1][-count:]
        others = np.setdiff1d(np.arange(n), fixed)
        digest = sha256(prompt.token_ids.numpy().astype("<i8").tobytes()).digest()
        draw = np.random.default_rng([self.seed, int.from_bytes(digest[:8], "little")])
        drawn = draw.choice(others, size=count - len(fixed), replace=False)
        return sorted([*fixed, *drawn.tolist()])


def template_tokens(prompt: Prompt) -> Iterator[int]:
    """Yield ascending places of special tokens and the tokens of the prompt's chat template."""
    ranges = iter(prompt.template)
    start, stop = next(ranges, (0, 0))
    for place, (first, last) in enumerate(prompt.spans):
        while stop <= first and start < stop:
            start, stop = next(ranges, (0, 0))
        if first == last or (start < last and first < stop):
            yield place
