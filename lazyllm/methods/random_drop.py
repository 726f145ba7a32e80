"""Random token drop (LazyLLM's baseline, after Random-LTD, Yao et al. 2022, arXiv 2211.11586)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lazyllm.engine.decoder import Decoder
from lazyllm.engine.method import Method
from lazyllm.engine.prompt import Prompt
from lazyllm.engine.session import Group, Session
from lazyllm.methods.schedule import check_ratio, keep_count


@dataclass(frozen=True)
class RandomDrop(Method):
    """Drop prompt tokens at random before the model sees them; the newest one stays.

    keep: share of the prompt tokens that the model sees, `ceil(keep * n)` of n. seed: of the draw; the paper reports
    the mean of five.

    Ours: what is left is a shorter prompt, with positions counted anew, as the model sees nothing of the rest. The
    draw depends on the seed and on n only.
    """

    label: ClassVar[str] = "random token drop"
    order: ClassVar[int] = 1
    colour: ClassVar[str | None] = "#009E73"
    marker: ClassVar[str | None] = "^"
    dial: ClassVar[str | None] = "keep"

    keep: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_ratio("keep", self.keep)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed is a whole number of 0 or more, got {self.seed!r}")

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        n = len(prompt)
        left = keep_count(self.keep, n)
        draw = np.random.default_rng([self.seed, n])
        others = draw.choice(n - 1, size=left - 1, replace=False)
        kept = torch.tensor([*sorted(others.tolist()), n - 1], device=decoder.device)
        return DropSession(decoder, kept, max_new_tokens)

    def tokens_per_layer(self, num_layers: int, n: int) -> list[int]:
        return [keep_count(self.keep, n)] * num_layers


class DropSession(Session):
    """The baseline's session on the tokens at `kept` [k] of the prompt. `selected` names them at layer 0."""

    def __init__(self, decoder: Decoder, kept: Tensor, max_new_tokens: int) -> None:
        left = kept.shape[0]
        super().__init__(decoder, [Group(range(len(decoder.layers)), left)], left, max_new_tokens)
        self._kept = kept

    def prefill(self, token_ids: Tensor) -> Tensor:
        logits = super().prefill(token_ids[self._kept])
        self.selected[-1][0] = self._kept
        return logits
