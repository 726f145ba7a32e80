"""SpecPrefill: a small draft model chooses the chunks of the prompt that the model runs (arXiv 2502.02789)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from lazyllm.engine.depth import Depth
from lazyllm.engine.flops import LayerShape, prefill_flops
from lazyllm.engine.inputs import Prompt
from lazyllm.errors import require
from lazyllm.methods.support.bases import Select
from lazyllm.methods.support.hyperparameters import (
    check_int,
    check_model_name,
    check_odd,
    check_ratio,
    checked,
    keep_count,
)
from lazyllm.methods.support.ranking import rank
from lazyllm.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from lazyllm.engine.decoder import Decoder

_OTHER = "give a draft with the model's tokenizer"
_warn_once = cache(logging.getLogger(__name__).warning)


@dataclass(frozen=True)
class SpecPrefill(Select):
    """Run the chunks of the prompt that a draft's last prompt token and next greedy tokens attend to.

    draft: folder, hub id or preset of a smaller model; None for the model under test, which costs more than it saves
        but shows the choice of a perfect draft.
    keep: share of the chunks, rounded up. lookahead: number of queries that score, the last prompt token among them.
    chunk: tokens of a chunk; the last may be shorter. pool: odd width of the average pooling of attention.
    sound: the chunks of the first token and of the last `chunk` tokens always stay; in the release none need stay.

    Scores: `lazyllm.methods.support.look_ahead`; a chunk's score is the mean over its tokens. Kept tokens keep their
    positions, and decoding continues after the whole prompt. The draft's time is part of TTFT, as scoring. Nothing
    is scored if all chunks stay.

    Source: the authors' code (Jingyu6/speculative_prefill, commit c1d6bd3, MIT), described and written anew.
    Ours: end tokens are the draft's; steps after one run without effect, so that no step waits for the device;
    `sound`; ties go to the lower chunk.
    """

    label = "SpecPrefill"
    adaptive = True  # a short last chunk may stay
    order = 7
    colour = "#0000EE"
    marker = "*"
    target_parameter = "keep"
    shown_parameters = ("draft", "sound")

    draft: str | None = checked(check_model_name, None)
    keep: float = checked(check_ratio, 0.3)
    lookahead: int = checked(check_int, 8)
    chunk: int = checked(check_int, 32)
    pool: int = checked(check_odd, 13)
    sound: bool = False

    def models(self) -> tuple[ModelSpec, ...]:
        return () if self.draft is None else (ModelSpec(self.draft),)

    def check(self, config: Any) -> None:
        if self.draft is None:
            _warn_once("specprefill has no draft: drafting by the model itself costs more than it saves; give one")
        draft = self.scoring_config(config)
        self.warn_of_windows(draft)
        # models of a family may pad their embeddings to different sizes
        same_family = (draft.model_type, draft.bos_token_id) == (config.model_type, config.bos_token_id)
        may_differ = same_family and draft.bos_token_id is not None
        if draft.vocab_size != config.vocab_size and not may_differ:
            sizes = f"{draft.vocab_size} tokens in its vocabulary, the model {config.vocab_size}"
            raise ValueError(f"draft {self.draft!r} has {sizes}: {_OTHER}")
        own, other = (LayerShape.of(each).linear_flops * each.num_hidden_layers for each in (config, draft))
        if other > own:
            raise ValueError(
                f"draft {self.draft!r} is {other / own:.1f} times as large as the model: give a smaller model"
            )

    def scoring_layers(self, depth: Depth) -> Sequence[int]:
        return depth.full

    def check_prompt(self, prompt: Prompt) -> None:
        if self.draft is None:
            return
        from lazyllm.engine.decoder import longest_text
        from lazyllm.methods.support.other_models import config_of, read_for

        (spec,) = self.models()
        read = read_for(spec, prompt.text) if prompt.spans else prompt
        scored, positions = len(read) + self.lookahead - 1, longest_text(config_of(spec))
        expected = f"{scored} positions, not {positions}: give another, or in a run a lower model.max_prompt_tokens"
        require(scored <= positions, "draft", self.draft, expected)
        if not prompt.spans:
            return
        own, other = (
            [token for token, (start, stop) in zip(each.token_ids.tolist(), each.spans, strict=True) if start < stop]
            for each in (prompt, read)
        )
        if own != other:
            raise ValueError(f"draft {self.draft!r} tokenises the prompt differently than the model: {_OTHER}")

    def chunks(self, n: int) -> int:
        """The number of chunks of n tokens that stay."""
        count, forced = -(-n // self.chunk), len(self._forced(n))
        return max(keep_count(self.keep, count), forced)

    def kept(self, n: int) -> int:
        """The greatest number of n tokens that stay; fewer do if a short last chunk is among them."""
        return min(n, self.chunks(n) * self.chunk)

    def scoring_flops(self, config: Any, n: int) -> int:
        draft = self.scoring_config(config)
        run = n + self.lookahead - 1
        return prefill_flops(draft, [run] * draft.num_hidden_layers, logits=self.lookahead)

    def select(self, decoder: Decoder, prompt: Prompt) -> Tensor:
        from lazyllm.methods.support.look_ahead import look_ahead
        from lazyllm.methods.support.other_models import HELPERS

        with HELPERS.open(self.models()[0], decoder) if self.draft else nullcontext(decoder) as draft:
            return self.choose(look_ahead(draft, prompt.token_ids, self.lookahead, self.pool)).to(decoder.device)

    def choose(self, scores: Tensor) -> Tensor:
        """The ascending positions of the tokens in the best chunks, of scores [n]."""
        import torch

        n, count = len(scores), -(-len(scores) // self.chunk)
        positions = torch.arange(count * self.chunk, device=scores.device).view(count, self.chunk)
        padded = torch.nn.functional.pad(scores, (0, positions.numel() - n)).view(count, self.chunk)
        means = padded.sum(dim=1) / (positions < n).sum(dim=1)
        for forced in self._forced(n):
            means[forced : forced + 1] = float("inf")
        chosen = positions[rank(means)[: self.chunks(n)].sort().values].flatten()
        return chosen if n % self.chunk == 0 else chosen[chosen < n]

    def _forced(self, n: int) -> set[int]:
        """The chunks that stay whatever their scores."""
        return {0, max(0, n - self.chunk) // self.chunk, (n - 1) // self.chunk} if self.sound else set()
