"""Prompt compression by self-information (Selective Context, Li et al. 2023, arXiv 2310.06201).

Notation: n prompt tokens, c droppable tokens, u units.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge

from lazyllm.engine.inputs import Prompt
from lazyllm.methods.prompt_compression.scoring import (
    carried_over,
    scoring_flops,
    self_information,
    window_size,
)
from lazyllm.methods.prompt_compression.sentences import (
    LINE_BREAK,
    released_sentences,
    sentence_starts,
)
from lazyllm.methods.support.bases import Select
from lazyllm.methods.support.hyperparameters import ModelName, Ratio, keep_count
from lazyllm.spec import ModelSpec

if TYPE_CHECKING:
    from lazyllm.engine.decoder import Decoder

# Line breaks, and the white space at the start of a line
_LAYOUT = re.compile(rf"{LINE_BREAK}\s*|\A\s+")
_SOLID = re.compile(r"\S+")


@dataclass(frozen=True)
class PromptCompression(Select):
    """Drop the least informative units of the prompt's context before the model sees it.

    keep: share of the `droppable` tokens that stays, `ceil(keep * c)` of c. Units larger than a
        token are kept whole: the most informative units that have at least that many tokens.
    unit: "token" or "sentence" (in code: line).
    scorer: folder, hub id or preset of the model that scores, any causal model of transformers with
        a fast tokenizer (Selective Context: `openai-community/gpt2`); None for the model itself.
    window: tokens that the scoring model sees at once; None for all its positions (`scoring`).
    scoring: "context" scores the context in one piece; "sentences" scores each sentence alone, by a
        call of its own and with its white space as single spaces, and cuts sentences as the
        authors' released code does.

    The model runs the remaining tokens, numbered from 0; nothing is tokenised again. Everything
    outside the context (instruction, question, answers of examples) stays, token by token. If a
    prompt is only token ids, every token but the newest is droppable, and the unit is "token".

    In one piece, the context is scored from its first droppable token to its last, answers of
    examples between them included. With keep=1 nothing is scored. `scoring_flops` assumes one.

    Source: the authors' package (liyucheng09/Selective_Context, commit 099e651), described and
    written anew. Ours: no phrases; a number of tokens to keep instead of a percentile of the units;
    a unit's self-information is the mean over its tokens (as in the authors' code; the paper adds
    them up, which prefers long units; in one piece, only droppable tokens count); ties go to the
    lower position; line breaks, indentation and other white space always stay.
    """

    label = "prompt compression"
    order = 3
    colour = "#CC79A7"
    marker = "D"
    shown_parameters = ("keep", "unit")
    # scoring alone costs a prefill; 0.5 is its authors' share
    table1: ClassVar[Mapping[str, Any]] = {"keep": 0.5}
    keep_all: ClassVar[Mapping[str, Any]] = {"keep": 1.0}
    renumber = True
    plain_models = True
    adaptive = True

    keep: Ratio = 0.5
    unit: Literal["token", "sentence"] = "sentence"
    scorer: ModelName | None = None
    window: Annotated[int, Ge(2), "a whole number of 2 or more"] | None = None
    scoring: Literal["context", "sentences"] = "context"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.unit, self.scoring) == ("token", "sentences"):
            raise ValueError(
                "scoring='sentences' keeps or drops whole sentences: give unit='sentence'"
            )

    def models(self) -> tuple[ModelSpec, ...]:
        return () if self.scorer is None else (ModelSpec(self.scorer),)

    def check(self, config: Any) -> None:
        window_size(self.scoring_config(config), self.window)
        for spec in self.models():
            from lazyllm.methods.support.other_models import matrices_of, tokenizer_of

            tokenizer_of(spec)
            matrices_of(spec)

    def check_prompt(self, prompt: Prompt) -> None:
        if not prompt.text and (self.unit, self.scorer) != ("token", None):
            raise ValueError(
                "only unit='token' without a scorer can do without the prompt's text: give these, "
                "or a lazyllm.Prompt in place of token ids"
            )
        if prompt.text and len(prompt.spans) != len(prompt):
            raise ValueError(
                f"the prompt has character ranges of {len(prompt.spans)} of its {len(prompt)} "
                "tokens: the tokenizer gives no offsets (it is not a fast one), or its chat "
                "template changes the prompt's text"
            )

    def kept(self, n: int) -> int:
        """Count for token ids without text, n - 1 of them droppable; else the prompt decides."""
        return keep_count(self.keep, n - 1) + 1

    def scoring_flops(self, config: Any, n: int) -> int:
        """Count for token ids without text. A scorer's tokenizer is assumed to give as many."""
        matrices = None
        for spec in self.models():
            from lazyllm.methods.support.other_models import matrices_of

            config, matrices = self.scoring_config(config), matrices_of(spec)
        return scoring_flops(config, n - 1, self.window, matrices)

    def select(self, decoder: Decoder, prompt: Prompt) -> np.ndarray:
        may_go = droppable(prompt)
        budget = keep_count(self.keep, len(may_go))
        stays = np.ones(len(prompt), dtype=bool)
        if budget < len(may_go):
            info, units = self._units(decoder, prompt, may_go)
            if not np.isfinite(info).all():
                raise FloatingPointError(
                    "the scoring model's logits are not finite (NaN or infinite)"
                )
            stays[may_go] = most_informative(info, units, budget)
        return stays.nonzero()[0]

    def _units(
        self, decoder: Decoder, prompt: Prompt, may_go: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compute self-information [u] of all units, and the unit [c] of each droppable token."""
        if self.unit == "token":
            return self._score_tokens(decoder, prompt, may_go), np.arange(len(may_go))
        # a token belongs to the sentence of its last character: its first may be a space
        last_characters = _spans(prompt)[may_go, 1] - 1
        if self.scoring == "sentences":
            starts, info = self._score_sentences(decoder, prompt)
            return info, np.searchsorted(starts, last_characters, side="right") - 1
        starts = [
            begin + at
            for begin, end in prompt.context
            for at in sentence_starts(prompt.text[begin:end])
        ]
        units = np.searchsorted(starts, last_characters, side="right") - 1
        return unit_means(self._score_tokens(decoder, prompt, may_go), units), units

    def _score_sentences(self, decoder: Decoder, prompt: Prompt) -> tuple[np.ndarray, np.ndarray]:
        """Find the sentences' beginnings [u], and their self-information [u], each scored alone."""
        begins, ends = _spans(prompt).T
        starts, means = list[int](), list[float]()
        for start, stop in released_sentences(prompt.text, prompt.context):
            if self.scorer is None:
                inside = ((begins < stop) & (ends > start) & (begins < ends)).nonzero()[0]
                token_ids = prompt.token_ids[inside].to(decoder.device)
                info = self_information(decoder, token_ids, self.window)
            else:
                _, info = self._by_scorer(decoder, " ".join(prompt.text[start:stop].split()))
            starts.append(start)
            means.append(info.mean())
        return np.array(starts), np.array(means)

    def _by_scorer(self, decoder: Decoder, text: str) -> tuple[Prompt, np.ndarray]:
        """Read the text in the scorer's tokens, and compute their self-information."""
        from lazyllm.methods.support.other_models import HELPERS, read_for

        (spec,) = self.models()
        read = read_for(spec, text, special_tokens=False)
        scorer = HELPERS.load(spec, decoder.model, plain=True)
        token_ids = read.token_ids.to(scorer.device)
        return read, self_information(decoder, token_ids, self.window, scorer)

    def _score_tokens(self, decoder: Decoder, prompt: Prompt, may_go: np.ndarray) -> np.ndarray:
        """Compute [c] self-information of the prompt's tokens at `may_go`, float64 on the host."""
        first, last = int(may_go[0]), int(may_go[-1])
        if self.scorer is None:
            token_ids = prompt.token_ids[first : last + 1].to(decoder.device)
            info = self_information(decoder, token_ids, self.window)
        else:
            spans = _spans(prompt)[first : last + 1]
            start, stop = spans[0, 0], spans[-1, 1]
            read, scored = self._by_scorer(decoder, prompt.text[start:stop])
            info = carried_over(scored, _spans(read), np.clip(spans - start, 0, stop - start))
        return info[may_go - first]


def droppable(prompt: Prompt) -> np.ndarray:
    """Find [c] ascending positions of the tokens that may be dropped; the newest always stays.

    With a text: tokens that lie wholly in the context and stand for more than white space. Tokens
    that hold part of a line break or of a line's indentation stay: the layout of code and examples.
    """
    others = len(prompt) - 1
    if not prompt.text:
        return np.arange(others)
    start, stop = _spans(prompt)[:others].T
    layout, solid = (
        _marks(prompt.text, map(re.Match.span, part.finditer(prompt.text)))
        for part in (_LAYOUT, _SOLID)
    )

    def count(marks: np.ndarray) -> np.ndarray:
        """Count the marked characters of each token, [n - 1]."""
        upto = np.concatenate([[0], np.cumsum(marks)])
        return upto[stop] - upto[start]

    inside = _marks(prompt.text, prompt.context) & ~layout
    return ((count(inside) == stop - start) & (count(solid) > 0)).nonzero()[0]


def unit_means(info: np.ndarray, unit_of: np.ndarray) -> np.ndarray:
    """Average info [c] over each unit's tokens, 0 without one. unit_of: [c] unit of each token."""
    return np.bincount(unit_of, weights=info) / np.maximum(np.bincount(unit_of), 1)


def most_informative(info: np.ndarray, unit_of: np.ndarray, budget: int) -> np.ndarray:
    """Mark [c] the tokens of the most informative units that have at least `budget` tokens.

    info: [u] self-information of the units. unit_of: [c] unit of each token, ascending. budget: 1
    to c. Of equal units the earlier one is kept.
    """
    units, unit, sizes = np.unique(unit_of, return_inverse=True, return_counts=True)
    order = np.argsort(-info[units], kind="stable")
    needed = int(np.searchsorted(np.cumsum(sizes[order]), budget)) + 1
    return np.isin(unit, order[:needed])


def _spans(prompt: Prompt) -> np.ndarray:
    """[n, 2] int64."""
    return np.asarray(prompt.spans, dtype=np.int64).reshape(len(prompt), 2)


def _marks(text: str, ranges: Iterable[tuple[int, int]]) -> np.ndarray:
    """Mark the characters that lie in half-open ranges, [len(text)] bool."""
    marks = np.zeros(len(text), dtype=bool)
    for start, stop in ranges:
        marks[start:stop] = True
    return marks
