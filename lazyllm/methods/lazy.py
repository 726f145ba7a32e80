"""LazyLLM: dynamic token pruning in prefill and decoding (arXiv 2407.14057)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lazyllm.decoder import Decoder
from lazyllm.methods.base import Method
from lazyllm.schedule import Schedule
from lazyllm.session import Session


@dataclass(frozen=True)
class Lazy(Method):
    """Prune progressively by the newest token's attention (Eq. 1), anew in every step; revive from the Aux Cache.

    schedule: pruning layers and keep ratios (section 3.2); "paper" for Figure 4's at the model's depth, or a mapping.
    prune_generated: make earlier generated tokens candidates too. The paper does not say; by default they are kept.

    Ours: keep ratios instead of percentiles, ties to the lower position, the newest token always kept.
    """

    schedule: Schedule | Mapping[int, float] | str = "paper"
    prune_generated: bool = False

    def start(self, decoder: Decoder, prompt_tokens: int, max_new_tokens: int) -> Session:
        schedule = Schedule.parse(self.schedule, len(decoder.layers))
        return Session(decoder, schedule, prompt_tokens, max_new_tokens, self.prune_generated)

    def check(self, num_layers: int) -> None:
        Schedule.parse(self.schedule, num_layers)
