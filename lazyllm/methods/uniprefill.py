"""UniPrefill: cut the prompt several times, by a share of attention (2026, arXiv 2605.06221)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from lazyllm.engine.depth import Depth
from lazyllm.engine.flops import prefill_flops
from lazyllm.engine.inputs import Boundary, ScoreSpec
from lazyllm.methods.support.bases import Prune, at_depth
from lazyllm.methods.support.hyperparameters import (
    Count,
    CountOrZero,
    Ratio,
    share_of,
    sorted_layers,
)
from lazyllm.methods.support.ranking import rank

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class UniPrefill(Prune):
    """Keep the blocks of tokens that hold most of the last tokens' attention, after some layers.

    layers: 1-based layers after which tokens are dropped; None for 2/8 to 7/8 of the depth (the
        release's 8, 12, 16, 20, 24 and 28 of 32), at layers that see the whole prompt
        (`Depth.at_share`).
    p: share of the attention mass. Blocks stay, best first, while those before them hold at most
        this share.
    window: number of last tokens whose attention is summed.
    block: tokens of a block, neighbours among those still there.
    first, last: number of first and last tokens that always stay. Nothing is dropped if no more
        than these entered.

    Scores: probabilities summed over the window's queries and over heads. Tokens keep their
    positions. Each layer stores all tokens that entered it, so decoding sees dropped tokens in
    early layers.

    The number of tokens in each layer depends on the prompt, so no `p` is solved for a speedup.
    `groups` and `ideal_speedup` assume the most tokens, those of evenly spread attention;
    `Generation.computed` gives the actual ones. The method waits for the device once at each of
    `layers`.

    Source: a description of the operator that the authors' vLLM serves (qhfan/UniPrefill, commit
    0d3ba98, Apache-2.0 by its README). As there, ties go to the later block. Written from scratch.
    Ours: the cut is after the layer, the release's between its attention and its MLP. Results are
    the same, as an MLP sees one token at a time. The dropped tokens' MLP is extra work here: all
    cuts together, at most one layer's MLP over the prompt (2.5 % of the linear maps of Llama 3.1
    8B). Queries are the last tokens of the whole prompt; the release, which may prefill in chunks,
    takes those of each chunk.
    """

    label = "UniPrefill"
    order = 11
    colour = "#C300D2"
    marker = "8"
    shown_parameters = ("p",)
    keep_all: ClassVar[Mapping[str, Any]] = {"p": 1.0}
    adaptive = True
    forget = False

    layers: Sequence[Count] | None = None
    p: Ratio = 0.99
    window: Count = 128
    block: Count = 64
    first: CountOrZero = 128
    last: Count = 128

    scoring_flops = Prune.scores_flops

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", sorted_layers(self.layers))

    def pruning_layers(self, depth: Depth) -> list[int]:
        if self.layers is None:
            return sorted({at_depth(None, depth, Fraction(part, 8)) for part in range(2, 8)})
        return [at_depth(layer, depth, Fraction(1), "layers") for layer in self.layers]

    def kept(self, depth: Depth, n: int) -> dict[int, int]:
        kept = {}
        for layer in self.pruning_layers(depth):
            if self.p < 1 and n > self.first + self.last:
                blocks = share_of(self.p, -(-n // self.block)) + 1
                kept[layer] = n = min(n, blocks * self.block + self.first + self.last)
        return kept

    def first_token_flops(self, config: Any, n: int, computed: Sequence[int] | None = None) -> int:
        tokens = self.tokens_per_layer(Depth.of(config), n) if computed is None else computed
        return self.scores_flops(config, n, tokens) + prefill_flops(config, tokens)

    def score_spec(self, layers: range, depth: Depth) -> ScoreSpec:
        return ScoreSpec(layers[-1:], self.window, summed=(1, 1))

    def select(self, at: Boundary, scores: Tensor) -> Tensor | None:
        import torch
        import torch.nn.functional as F

        if at.m <= self.first + self.last:
            return None
        padded = F.pad(scores.double(), (0, -at.m % self.block))
        masses = padded.view(-1, self.block).sum(dim=-1)
        order = masses.shape[0] - 1 - rank(masses.flip(0))  # ties: the later block
        before = (masses[order] / masses.sum()).cumsum(dim=0).roll(1)
        before[:1] = 0  # the best block always stays
        stays = torch.empty_like(before, dtype=torch.bool)
        stays[order] = before <= self.p
        kept = stays.repeat_interleave(self.block)[: at.m]
        kept[: self.first] = kept[at.m - self.last :] = True
        return kept.nonzero()[:, 0]
