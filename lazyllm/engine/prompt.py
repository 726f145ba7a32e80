"""A prompt as methods see it: its tokens and, where it is known, the text that they stand for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """token_ids: [n] int64, on the host, special tokens included, n >= 1.

    text: what the tokens stand for; "" where only token ids were given.
    spans: per token the half-open range of `text` that it stands for, empty for a special token; () without a text.
    context: ascending, disjoint ranges of `text` that a method may shorten by leaving tokens out; what lies outside
        (instruction, question, an example's answer) is never touched.
    """

    token_ids: Tensor
    text: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    context: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return self.token_ids.shape[0]
