"""Random token drop (a baseline of the LazyLLM paper, after Random-LTD, Yao et al. 2022, arXiv 2211.11586)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lazyllm.engine.inputs import Prompt
from lazyllm.methods.support.bases import Select
from lazyllm.methods.support.hyperparameters import check_int, check_ratio, checked, keep_count

if TYPE_CHECKING:
    from lazyllm.engine.decoder import Decoder


@dataclass(frozen=True)
class RandomDrop(Select):
    """Drop prompt tokens at random before the model sees them; the newest one stays.

    keep: share of the prompt tokens that the model sees, `ceil(keep * n)` of n. seed: of the draw; the paper reports
    the mean of five.

    Ours: the kept tokens are a shorter prompt, numbered from 0. The draw depends on the seed and on n only.
    """

    label = "random token drop"
    order = 1
    colour = "#009E73"
    marker = "^"
    target_parameter = "keep"
    shown_parameters = ("seed",)
    renumber = True

    keep: float = checked(check_ratio, 0.8)
    seed: int = checked(check_int, 0, least=0)

    def kept(self, n: int) -> int:
        return keep_count(self.keep, n)

    def select(self, decoder: Decoder | None, prompt: Prompt) -> list[int]:
        n = len(prompt)
        draw = np.random.default_rng([self.seed, n])
        others = draw.choice(n - 1, size=self.kept(n) - 1, replace=False)
        return [*sorted(others.tolist()), n - 1]
