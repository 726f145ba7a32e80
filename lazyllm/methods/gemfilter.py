"""GemFilter: an early layer selects the tokens for the whole model (Shi 2024, arXiv 2409.17422)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from lazyllm.engine.depth import Depth
from lazyllm.engine.flops import LayerShape, first_layers_flops
from lazyllm.engine.inputs import Prompt
from lazyllm.methods.support.bases import Select, at_depth
from lazyllm.methods.support.hyperparameters import Count, Odd, Ratio, count_of
from lazyllm.methods.support.ranking import rank

if TYPE_CHECKING:
    from torch import Tensor

    from lazyllm.engine.decoder import Decoder


@dataclass(frozen=True)
class GemFilter(Select):
    """Run the first layers, keep the tokens whose keys match the last query best, and run these.

    layer: 1-based layer whose keys score; None for 14/32 of the depth, as the authors' Llama 3.1
        8B, and for 20 of 40 layers, as their Mistral Nemo (`Depth.at_share`). Their Phi-3.5 mini
        takes 20 of 32.
    keep: number of tokens (int) or share of the prompt, rounded up (float).
    pool: odd width of the average pooling.
    sound: the first token and the last `window` tokens always stay, and count in `keep`; in the
        release none need stay.

    The score is q.k of the last token after RoPE, summed over all heads, without scale, softmax or
    sliding window. Kept tokens are numbered from 0. Decoding sees only these. Nothing is scored if
    all tokens stay.

    Source: the authors' code (SalesforceAIResearch/GemFilter, commit 5f79b1a, Apache-2.0),
    described and written anew.
    Ours: `layer` runs only up to its q, k and v; `keep` as a share; `sound`; ties go to the lower
    position.
    """

    label = "GemFilter"
    order = 5
    colour = "#E69F00"
    marker = "v"
    target_parameter = "keep"
    shown_parameters = ("sound",)
    renumber = True

    layer: Count | None = None
    keep: Count | Ratio = 1024
    pool: Odd = 5
    sound: bool = False
    window: Count = 8

    def selected_at(self, depth: Depth) -> int:
        share = Fraction(20, 40) if depth.count == 40 else Fraction(14, 32)
        return at_depth(self.layer, depth, share)

    def kept(self, n: int) -> int:
        forced = min(n, self.window + 1) if self.sound else 1
        return max(count_of(self.keep, n), forced)

    def scoring_flops(self, config: Any, n: int) -> int:
        layer = self.selected_at(Depth.of(config))
        last = n * LayerShape.of(config).projection_flops
        return first_layers_flops(config, n, layer - 1) + last

    def select(self, decoder: Decoder, prompt: Prompt) -> Tensor:
        import torch
        import torch.nn.functional as F

        from lazyllm.engine.decoder import run_to_keys

        layer = self.selected_at(decoder.depth)
        query, key = run_to_keys(decoder, prompt.token_ids.to(decoder.device), layer)
        exact = torch.promote_types(query.dtype, torch.float32)
        # query heads that share a key head are added before the product: [g, d]
        last = query[0, :, -1].to(exact).view(key.shape[1], -1, key.shape[3]).sum(dim=1)
        raw = (key[0].to(exact) @ last[:, :, None]).sum(dim=0)[:, 0]  # [n]
        scores = F.avg_pool1d(raw[None], self.pool, stride=1, padding=self.pool // 2)[0]
        scores = scores.to(decoder.device)
        if self.sound:
            scores[:1] = scores[-self.window :] = float("inf")
        return rank(scores)[: self.kept(len(prompt))].sort().values
