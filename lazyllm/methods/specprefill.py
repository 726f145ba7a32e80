"""SpecPrefill: a small model chooses the chunks of the prompt that the large one reads (arXiv 2502.02789)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lazyllm.engine.declaration import Prompt
from lazyllm.engine.flops import LayerShape, prefill_flops
from lazyllm.methods.bases import Select
from lazyllm.methods.schedule import check_pool, check_ratio, check_whole, keep_count
from lazyllm.models.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from lazyllm.engine.decoder import Decoder


@dataclass(frozen=True)
class SpecPrefill(Select):
    """Run the chunks of the prompt that a draft's last prompt token and next greedy tokens attend to.

    draft: folder, hub id or preset of a smaller model with the same tokenizer; None for the model under test, which
        costs more than it saves and shows what a perfect draft would choose.
    keep: share of the chunks, rounded up. lookahead: queries that score, the last prompt token's among them.
    chunk: tokens to a chunk; the last may be shorter. pool: odd width of the average pooling of attention.
    sound: the chunks of the first token and of the last `chunk` tokens are kept first. As released, none has to be.

    Scores: `lazyllm.methods.look_ahead`; a chunk's is the mean over its tokens. The model runs kept tokens at the
    prompt's positions, and decoding goes on behind the whole prompt. The draft's time is part of TTFT, as scoring.
    Nothing is scored if all chunks stay.

    Source: the authors' code (Jingyu6/speculative_prefill, commit c1d6bd3, MIT), described and written anew.
    Ours: end tokens are the draft's own; steps behind one run without effect, so that none waits for the device;
    `sound`; ties go to the lower chunk.
    """

    label: ClassVar[str] = "SpecPrefill"
    order: ClassVar[int] = 7
    colour: ClassVar[str | None] = "#0000EE"
    marker: ClassVar[str | None] = "*"
    dial: ClassVar[str | None] = "keep"
    named: ClassVar[tuple[str, ...]] = ("draft", "sound")

    draft: str | None = None
    keep: float = 0.3
    lookahead: int = 8
    chunk: int = 32
    pool: int = 13
    sound: bool = False

    def __post_init__(self) -> None:
        if self.draft is not None and not isinstance(self.draft, str):
            raise TypeError(f"draft is the name of a model (folder, hub id or preset), got {self.draft!r}")
        check_ratio("keep", self.keep)
        check_whole("lookahead", self.lookahead, 1)
        check_whole("chunk", self.chunk, 1)
        check_pool(self.pool)

    def models(self) -> tuple[ModelSpec, ...]:
        return () if self.draft is None else (ModelSpec(self.draft),)

    def check(self, config: Any) -> None:
        draft = self._draft_config(config)
        # a family pads its table of embeddings differently from size to size
        same_family = (draft.model_type, draft.bos_token_id) == (config.model_type, config.bos_token_id)
        if draft.vocab_size != config.vocab_size and not (same_family and draft.bos_token_id is not None):
            raise ValueError(
                f"draft {self.draft!r} has a vocabulary of {draft.vocab_size} tokens and the model one of "
                f"{config.vocab_size}: give a draft with the model's tokenizer"
            )
        own, other = (LayerShape.of(one).linear_flops * one.num_hidden_layers for one in (config, draft))
        if other > own:
            raise ValueError(
                f"draft {self.draft!r} is {other / own:.1f} times as large as the model: give a smaller model"
            )

    def prepare(self, model: PreTrainedModel) -> None:
        from lazyllm.methods.beside import load_beside

        for spec in self.models():
            load_beside(spec, model, tokenizer=False)

    def chunks(self, n: int) -> int:
        """How many chunks of n tokens stay."""
        count, forced = -(-n // self.chunk), len(self._forced(n))
        return max(keep_count(self.keep, count), forced)

    def kept(self, n: int) -> int:
        """If the last chunk is short and stays, it is so many fewer."""
        return min(n, self.chunks(n) * self.chunk)

    def scoring_flops(self, config: Any, n: int) -> int:
        if self.kept(n) == n:
            return 0
        draft = self._draft_config(config)
        run = n + self.lookahead - 1
        return prefill_flops(draft, [run] * draft.num_hidden_layers, logits=self.lookahead)

    def select(self, decoder: Decoder, prompt: Prompt) -> Tensor:
        import torch

        from lazyllm.methods.beside import open_beside
        from lazyllm.methods.sessions import rank

        n, count = len(prompt), -(-len(prompt) // self.chunk)
        positions = torch.arange(count * self.chunk, device=decoder.device).view(count, self.chunk)
        if self.chunks(n) == count:
            return positions.flatten()[:n]
        if self.draft is None:
            scores = self._scores(decoder, prompt)
        else:
            (spec,) = self.models()
            with open_beside(spec, decoder, tokenizer=False) as (draft, _):
                scores = self._scores(draft, prompt).to(decoder.device)
        padded = torch.nn.functional.pad(scores, (0, positions.numel() - n)).view(count, self.chunk)
        means = padded.sum(dim=1) / (positions < n).sum(dim=1)
        for forced in self._forced(n):
            means[forced] = float("inf")
        chosen = positions[rank(means)[: self.chunks(n)].sort().values].flatten()
        return chosen if n % self.chunk == 0 else chosen[chosen < n]

    def _scores(self, draft: Decoder, prompt: Prompt) -> Tensor:
        """[n] scores of the prompt tokens, on the draft's device."""
        from lazyllm.engine.generation import end_ids_of
        from lazyllm.methods.look_ahead import look_ahead

        token_ids = prompt.token_ids.to(draft.device)
        return look_ahead(draft, token_ids, self.lookahead, self.pool, end_ids_of(draft.model))

    def _forced(self, n: int) -> set[int]:
        """The chunks that stay in any case."""
        return {0, max(0, n - self.chunk) // self.chunk, (n - 1) // self.chunk} if self.sound else set()

    def _draft_config(self, config: Any) -> Any:
        from lazyllm.models.load import load_config

        return next((load_config(spec) for spec in self.models()), config)
