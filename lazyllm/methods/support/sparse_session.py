"""The session of methods whose prefill skips attention (`Sparse`)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from lazyllm.engine.decoder import Decoder, Tokens
from lazyllm.engine.session import Session

if TYPE_CHECKING:
    from lazyllm.methods.support.bases import Sparse


class SparseSession(Session):
    """All tokens run in all layers; in prefill each layer asks the method which keys its queries see."""

    def __init__(self, decoder: Decoder, method: Sparse, prompt_tokens: int, max_new_tokens: int) -> None:
        groups = method.groups(len(decoder.layers), prompt_tokens)
        super().__init__(decoder, groups, prompt_tokens, max_new_tokens)
        self._sparse = method
        self._attended = dict[int, int | Tensor]()

    @property
    def attended(self) -> dict[int, int | Tensor]:
        return self._attended

    def enter(self, index: int, tokens: Tokens) -> None:
        super().enter(index, tokens)
        if self._in_prefill:
            self.context.sees = partial(self._sparse.sees, num_layers=len(self.decoder.layers))
            self.context.attended = self._attended
