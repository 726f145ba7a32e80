"""SpecPrefill: a small draft model chooses the chunks of the prompt to run (arXiv 2502.02789)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lazyllm.engine.depth import Depth
from lazyllm.engine.flops import LayerShape, prefill_flops
from lazyllm.engine.inputs import Prompt
from lazyllm.engine.method import warn_once
from lazyllm.errors import require
from lazyllm.methods.support.bases import Select
from lazyllm.methods.support.hyperparameters import Count, ModelName, Odd, Ratio, keep_count
from lazyllm.methods.support.ranking import rank
from lazyllm.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from lazyllm.engine.decoder import Decoder

_OTHER = "give a draft with the model's tokenizer"


@dataclass(frozen=True)
class SpecPrefill(Select):
    """Run the chunks of the prompt that a draft's last and next tokens attend to.

    draft: folder, hub id or preset of a smaller model; None for the model under test, which costs
        more than it saves but shows the choice of a perfect draft.
    keep: share of the chunks, rounded up.
    lookahead: number of queries that score: the last prompt token and the next greedy ones.
    chunk: tokens of a chunk; the last may be shorter.
    pool: odd width of the average pooling of attention.
    sound: the chunks of the first token and of the last `chunk` tokens always stay; in the release
        none need stay.

    Scores: `support.look_ahead`; a chunk's score is the mean over its tokens. Kept tokens keep
    their positions, and decoding continues after the whole prompt. The draft's time is part of
    TTFT, as scoring. Nothing is scored if all chunks stay.

    Source: the authors' code (Jingyu6/speculative_prefill, commit c1d6bd3, MIT), described and
    written anew. Ours: end tokens are the draft's; steps after one run without effect, so that no
    step waits for the device; `sound`; ties go to the lower chunk.
    """

    label = "SpecPrefill"
    adaptive = True  # a short last chunk may stay
    order = 7
    colour = "#0000EE"
    marker = "*"
    target_parameter = "keep"
    shown_parameters = ("draft", "sound")

    draft: ModelName | None = None
    keep: Ratio = 0.3
    lookahead: Count = 8
    chunk: Count = 32
    pool: Odd = 13
    sound: bool = False

    def models(self) -> tuple[ModelSpec, ...]:
        return () if self.draft is None else (ModelSpec(self.draft),)

    def check(self, config: Any) -> None:
        if self.draft is None:
            warn_once(
                "specprefill has no draft: drafting by the model itself costs more than it saves; "
                "give one"
            )
        draft = self.scoring_config(config)
        self.warn_of_windows(draft)
        # models of a family may pad their embeddings to different sizes
        families = {(each.model_type, each.bos_token_id) for each in (draft, config)}
        is_family = len(families) == 1 and draft.bos_token_id is not None
        if draft.vocab_size != config.vocab_size and not is_family:
            raise ValueError(
                f"draft {self.draft!r} has {draft.vocab_size} tokens in its vocabulary, the model "
                f"{config.vocab_size}: {_OTHER}"
            )
        sizes = (
            LayerShape.of(each).linear_flops * each.num_hidden_layers for each in (config, draft)
        )
        model_size, draft_size = sizes
        if draft_size > model_size:
            raise ValueError(
                f"draft {self.draft!r} is {draft_size / model_size:.1f} times as large as the "
                "model: give a smaller model"
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
        expected = (
            f"{scored} positions, not {positions}: give another, or in a run a lower "
            "model.max_prompt_tokens"
        )
        require(scored <= positions, "draft", self.draft, expected)
        if prompt.spans and _visible_tokens(prompt) != _visible_tokens(read):
            raise ValueError(
                f"draft {self.draft!r} tokenises the prompt differently than the model: {_OTHER}"
            )

    def chunks(self, n: int) -> int:
        """Count the chunks of n tokens that stay."""
        count, forced = -(-n // self.chunk), len(self._forced(n))
        return max(keep_count(self.keep, count), forced)

    def kept(self, n: int) -> int:
        # the most; fewer do if a short last chunk is among them
        return min(n, self.chunks(n) * self.chunk)

    def scoring_flops(self, config: Any, n: int) -> int:
        draft = self.scoring_config(config)
        run = n + self.lookahead - 1
        return prefill_flops(draft, [run] * draft.num_hidden_layers, logits=self.lookahead)

    def select(self, decoder: Decoder, prompt: Prompt) -> Tensor:
        from lazyllm.methods.support.look_ahead import look_ahead
        from lazyllm.methods.support.other_models import HELPERS

        opened = HELPERS.open(self.models()[0], decoder) if self.draft else nullcontext(decoder)
        with opened as draft:
            scores = look_ahead(draft, prompt.token_ids, self.lookahead, self.pool)
            return self.choose(scores).to(decoder.device)

    def choose(self, scores: Tensor) -> Tensor:
        """Choose the ascending positions of the tokens in the best chunks, of scores [n]."""
        import torch

        n, count = len(scores), -(-len(scores) // self.chunk)
        positions = torch.arange(count * self.chunk, device=scores.device).view(count, self.chunk)
        padded = torch.nn.functional.pad(scores, (0, positions.numel() - n))
        sums = padded.view(count, self.chunk).sum(dim=1)
        means = sums / (positions < n).sum(dim=1)
        for forced in self._forced(n):
            means[forced : forced + 1] = float("inf")
        chosen = positions[rank(means)[: self.chunks(n)].sort().values].flatten()
        return chosen if n % self.chunk == 0 else chosen[chosen < n]

    def _forced(self, n: int) -> set[int]:
        """Name the chunks that stay whatever their scores."""
        if not self.sound:
            return set()
        return {0, max(0, n - self.chunk) // self.chunk, (n - 1) // self.chunk}


def _visible_tokens(prompt: Prompt) -> list[int]:
    """List the tokens that stand for some text."""
    pairs = zip(prompt.token_ids.tolist(), prompt.spans, strict=True)
    return [token for token, (start, stop) in pairs if start < stop]
