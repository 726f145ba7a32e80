"""Prompt compression by self-information (Selective Context, Li et al. 2023, arXiv 2310.06201).

Notation:
    n  prompt tokens      c  those of them that may go      v  vocabulary
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lazyllm.engine.declaration import Prompt
from lazyllm.methods.bases import Select
from lazyllm.methods.prompt_compression.scoring import (
    carried_over,
    scoring_flops,
    self_information,
    window_size,
)
from lazyllm.methods.prompt_compression.segments import LINE_BREAK, check_spacy, load_splitter, starts_in
from lazyllm.methods.schedule import check_ratio, check_whole, keep_count
from lazyllm.models.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lazyllm.engine.decoder import Decoder

UNITS = ("token", "sentence", "phrase")


@dataclass(frozen=True)
class PromptCompression(Select):
    """Drop the least informative units of the prompt's context before the model sees it.

    keep: share of the tokens that may go (`droppable`) that stays: `ceil(keep * c)` of c for unit "token"; for larger
        units, which stay or go whole, the most informative until that many tokens stay, so it may be a few more.
    unit: "token", "sentence" (in code: line) or "phrase" (noun phrases and single words, by spaCy's English model).
    scorer: folder, hub id or preset of the model that scores; None for the model under test, as in LazyLLM.
    window: tokens that the scoring model sees at once; None for as many as it can. See
    `lazyllm.methods.prompt_compression.scoring`.

    The model runs on the rest of the prompt's own tokens, with positions counted anew; nothing is tokenised again. So
    all that is no context (instruction, question, answers of examples) is untouched, token by token. With a prompt of
    bare token ids every token but the newest may go, and the unit is "token".

    The context is scored in one piece, from its first token that may go to its last, answers of examples between them
    included, but neither instruction nor question. All of this is part of TTFT, and on its own `Session.scoring_s`.
    Where nothing can go (keep=1), nothing is scored.

    Ours: a number of tokens to keep in place of a percentile of the units; a unit's self-information is the mean over
    its tokens that may go (as in the authors' code; the paper adds them up, which prefers long units); ties go to the
    lower position; line breaks, indentation and other white space always stay.
    """

    label: ClassVar[str] = "prompt compression"
    order: ClassVar[int] = 3
    colour: ClassVar[str | None] = "#CC79A7"
    marker: ClassVar[str | None] = "D"
    named: ClassVar[tuple[str, ...]] = ("keep", "unit")
    table1: ClassVar[Mapping[str, Any]] = {"keep": 0.5}  # scoring alone costs a prefill; 0.5 is its authors' share
    everything: ClassVar[Mapping[str, Any]] = {"keep": 1.0}
    renumber: ClassVar[bool] = True

    keep: float
    unit: str = "sentence"
    scorer: str | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        check_ratio("keep", self.keep)
        if self.unit not in UNITS:
            raise ValueError(f"unknown unit {self.unit!r}: give one of {', '.join(UNITS)}")
        if self.scorer is not None and not isinstance(self.scorer, str):
            raise TypeError(f"scorer is the name of a model (folder, hub id or preset), got {self.scorer!r}")
        if self.window is not None:
            check_whole("window", self.window, 2)

    def models(self) -> tuple[ModelSpec, ...]:
        return () if self.scorer is None else (ModelSpec(self.scorer),)

    def check(self, config: Any) -> None:
        if self.unit == "phrase":
            check_spacy()
        window_size(self._scorer_config(config), self.window)
        for spec in self.models():
            from lazyllm.methods.beside import tokenizer_beside

            tokenizer_beside(spec)

    def check_prompt(self, prompt: Prompt) -> None:
        needs_text = self.unit != "token" or self.scorer is not None
        if needs_text and not prompt.text:
            what = f"unit={self.unit!r}" if self.unit != "token" else "a scorer with a tokenizer of its own"
            raise ValueError(f"{what} needs the prompt's text: give a lazyllm.Prompt, not bare token ids")
        if prompt.text and len(prompt.spans) != len(prompt):
            raise ValueError(
                f"prompt compression must know which characters each of the {len(prompt)} tokens stands for, and the "
                f"prompt says it of {len(prompt.spans)}: the tokenizer gives no offsets (it is not a fast one), or its "
                "chat template changes the prompt's text"
            )

    def prepare(self, model: PreTrainedModel) -> None:
        if self.unit != "token":
            load_splitter(self.unit)
        for spec in self.models():
            from lazyllm.methods.beside import tokenizer_beside

            tokenizer_beside(spec)
        super().prepare(model)

    def kept(self, n: int) -> int:
        """For bare token ids, of which n - 1 may go. With a text it depends on the prompt: see `kept_of`."""
        return self.kept_of(n - 1) + 1

    def kept_of(self, c: int) -> int:
        """How many stay of c tokens that may go: exactly, for unit "token"; at least, for larger units."""
        return keep_count(self.keep, c)

    def scoring_flops(self, config: Any, n: int) -> int:
        """As for bare token ids. A scorer's tokenizer is taken to give as many tokens."""
        if self.kept(n) == n:
            return 0
        return scoring_flops(self._scorer_config(config), n - 1, self.window)

    def select(self, decoder: Decoder, prompt: Prompt) -> np.ndarray:
        may_go = droppable(prompt)
        budget = self.kept_of(len(may_go))
        stays = np.ones(len(prompt), dtype=bool)
        if budget < len(may_go):
            info = self._self_information(decoder, prompt, may_go)
            stays[may_go] = most_informative(info, self._units(prompt, may_go), budget)
        return stays.nonzero()[0]

    def _scorer_config(self, config: Any) -> Any:
        from lazyllm.models.load import load_config

        return next((load_config(spec) for spec in self.models()), config)

    def _units(self, prompt: Prompt, may_go: np.ndarray) -> np.ndarray:
        """[c] the number of the unit that each of these tokens belongs to, ascending."""
        if self.unit == "token":
            return np.arange(len(may_go))
        starts = starts_in(prompt.text, prompt.context, load_splitter(self.unit))
        # by its last character: a token may begin with the space before its word
        return np.searchsorted(starts, _spans(prompt)[may_go, 1] - 1, side="right")

    def _self_information(self, decoder: Decoder, prompt: Prompt, may_go: np.ndarray) -> np.ndarray:
        """[c] self-information of the prompt's tokens at `may_go`, float64 on the host."""
        first, last = int(may_go[0]), int(may_go[-1])
        if self.scorer is None:
            token_ids = prompt.token_ids[first : last + 1].to(decoder.device)
            info = self_information(decoder, token_ids, self.window)
        else:
            spans = _spans(prompt)[first : last + 1]
            start, stop = spans[0, 0], spans[-1, 1]
            info = self._by_scorer(decoder, prompt.text[start:stop], np.clip(spans - start, 0, stop - start))
        info = info[may_go - first]
        if not np.isfinite(info).all():
            raise FloatingPointError("the scoring model's logits are not finite (NaN or infinite)")
        return info

    def _by_scorer(self, decoder: Decoder, text: str, spans: np.ndarray) -> np.ndarray:
        """[k] self-information by the scorer of tokens that stand for the character ranges `spans` [k, 2] of `text`."""
        import torch

        from lazyllm.methods.beside import open_beside, read_beside

        (spec,) = self.models()
        own = read_beside(spec, text, special_tokens=False)
        with open_beside(spec, decoder) as scorer:
            info = self_information(scorer, torch.tensor(own.token_ids, device=scorer.device), self.window)
        return carried_over(info, np.asarray(own.spans, dtype=np.int64), spans)


def droppable(prompt: Prompt) -> np.ndarray:
    """[c] positions, ascending, of the tokens that may go. The newest one always stays.

    With a text: those that lie wholly in the context and stand for more than white space. A token that holds part of a
    line break or of a line's indentation stays, so that the layout of code and of examples survives.
    Raises ValueError if the text has not one span per token.
    """
    others = len(prompt) - 1
    if not prompt.text:
        return np.arange(others)
    start, stop = _spans(prompt)[:others].T
    in_context = _marks(prompt.text, prompt.context)
    layout = _marks(prompt.text, (match.span() for match in _LAYOUT.finditer(prompt.text)))
    solid = _marks(prompt.text, (match.span() for match in _SOLID.finditer(prompt.text)))

    def count(marks: np.ndarray) -> np.ndarray:
        """[n - 1] how many of each token's characters are marked."""
        upto = np.concatenate([[0], np.cumsum(marks)])
        return upto[stop] - upto[start]

    return ((count(in_context) == stop - start) & (count(layout) == 0) & (count(solid) > 0)).nonzero()[0]


_LAYOUT = re.compile(rf"{LINE_BREAK}\s*|\A\s+")  # with the white space that begins the next line
_SOLID = re.compile(r"\S+")


def most_informative(info: np.ndarray, unit_of: np.ndarray, budget: int) -> np.ndarray:
    """[c] bool: the tokens of the most informative units that together have at least `budget` tokens.

    info [c] self-information; unit_of [c] the unit's number, ascending with position. A unit counts with the mean over
    its tokens; of equals the earlier one is kept. budget: 1 or more, c at most.
    """
    _, unit, sizes = np.unique(unit_of, return_inverse=True, return_counts=True)
    order = np.argsort(-np.bincount(unit, weights=info) / sizes, kind="stable")
    needed = int(np.searchsorted(np.cumsum(sizes[order]), budget)) + 1
    return np.isin(unit, order[:needed])


def _spans(prompt: Prompt) -> np.ndarray:
    """[n, 2] int64."""
    return np.asarray(prompt.spans, dtype=np.int64).reshape(len(prompt), 2)


def _marks(text: str, ranges: Any) -> np.ndarray:
    """[len(text)] bool: which characters lie in the half-open ranges."""
    marks = np.zeros(len(text), dtype=bool)
    for start, stop in ranges:
        marks[start:stop] = True
    return marks
