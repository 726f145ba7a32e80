"""Prompt compression by self-information (Selective Context, Li et al. 2023, arXiv 2310.06201).

Notation:
    n  prompt tokens      c  those of them that may go      v  vocabulary
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel

from lazyllm.engine.architecture import Layout, find_layout
from lazyllm.engine.decoder import Decoder, open_decoder
from lazyllm.engine.devices import home_of
from lazyllm.engine.flops import prefill_flops
from lazyllm.engine.method import Method
from lazyllm.engine.prompt import Prompt
from lazyllm.engine.session import Session
from lazyllm.methods.prompt_compression.segments import LINE_BREAK, check_spacy, load_splitter, starts_in
from lazyllm.methods.prompt_compression.self_information import (
    carried_over,
    scoring_flops,
    self_information,
    window_size,
)
from lazyllm.methods.random_drop import DropSession
from lazyllm.methods.schedule import check_ratio, keep_count
from lazyllm.models.load import load_config, load_tokenizer_of, load_weights
from lazyllm.models.spec import ModelSpec

UNITS = ("token", "sentence", "phrase")


@dataclass(frozen=True)
class PromptCompression(Method):
    """Drop the least informative units of the prompt's context before the model sees it.

    keep: share of the tokens that may go (`droppable`) that stays: `ceil(keep * c)` of c for unit "token"; for larger
        units, which stay or go whole, the most informative until so many tokens stay, so it may be a few more.
    unit: "token", "sentence" (in code: line) or "phrase" (noun phrases and single words, by spaCy's English model).
    scorer: folder, hub id or preset of the model that scores; None for the model under test, as in LazyLLM.
    window: tokens that the scoring model sees at once; None for as many as it can. See
    `lazyllm.methods.prompt_compression.self_information`.

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
        if self.window is not None and (
            isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 2
        ):
            raise ValueError(f"window is a whole number of 2 or more tokens, got {self.window!r}")

    def check(self, config: Any) -> None:
        if self.unit == "phrase":
            check_spacy()
        window_size(self._scorer_config(config), self.window)
        if self.scorer is not None and not getattr(load_tokenizer_of(ModelSpec(self.scorer)), "is_fast", False):
            raise ValueError(f"the tokenizer of scorer {self.scorer!r} does not say which characters its tokens are")

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
        if self.scorer is not None:
            self._load_scorer(model.dtype, home_of(model))

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        self.check_prompt(prompt)
        began = time.perf_counter()  # the device is idle: the clock of `generate` has just waited for it
        may_go = droppable(prompt)
        budget = self.kept_of(len(may_go))
        stays = np.ones(len(prompt), dtype=bool)
        if budget < len(may_go):
            info = self._self_information(decoder, prompt, may_go)  # on the host, so the device is idle again
            stays[may_go] = most_informative(info, self._units(prompt, may_go), budget)
            scoring_s = time.perf_counter() - began
        else:
            scoring_s = 0.0
        session = DropSession(decoder, torch.from_numpy(stays.nonzero()[0]).to(decoder.device), max_new_tokens)
        session.scoring_s = scoring_s
        return session

    def kept_of(self, c: int) -> int:
        """How many stay of c tokens that may go: exactly, for unit "token"; at least, for larger units."""
        return keep_count(self.keep, c)

    def tokens_per_layer(self, num_layers: int, n: int) -> list[int]:
        """For bare token ids, of which n - 1 may go. With a text it depends on the prompt: see `kept_of`."""
        return [self.kept_of(n - 1) + 1] * num_layers

    def ideal_speedup(self, config: Any, n: int) -> float:
        """As for bare token ids, the scoring counted. A scorer's tokenizer is taken to give as many tokens."""
        layers = config.num_hidden_layers
        flops = prefill_flops(config, self.tokens_per_layer(layers, n))
        if self.kept_of(n - 1) < n - 1:
            flops += scoring_flops(self._scorer_config(config), n - 1, self.window)
        return prefill_flops(config, [n] * layers) / flops

    def _scorer_config(self, config: Any) -> Any:
        return config if self.scorer is None else load_config(ModelSpec(self.scorer))

    def _load_scorer(self, dtype: torch.dtype, device: torch.device) -> _Scorer:
        assert self.scorer is not None
        spec = ModelSpec(self.scorer, dtype=str(dtype).removeprefix("torch."), device=str(device))
        return _load_scorer(spec)

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
            info = self_information(decoder, token_ids, self.window).double().cpu().numpy()
        else:
            spans = _spans(prompt)[first : last + 1]
            start, stop = spans[0, 0], spans[-1, 1]
            scorer = self._load_scorer(decoder.dtype, decoder.device)
            info = scorer.self_information(
                prompt.text[start:stop], np.clip(spans - start, 0, stop - start), self.window
            )
        info = info[may_go - first]
        if not np.isfinite(info).all():
            raise FloatingPointError("the scoring model's logits are not finite (NaN or infinite)")
        return info


def droppable(prompt: Prompt) -> np.ndarray:
    """[c] positions, ascending, of the tokens that may go. The newest one always stays.

    With a text: those that lie wholly in the context and stand for more than white space. A token that holds part of a
    line break or of a line's indentation stays, so that the layout of code and of examples survives.
    Raises ValueError where the text's spans are not as many as the tokens.
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


@dataclass(frozen=True)
class _Scorer:
    """Another model that scores, with its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any
    layout: Layout  # found before the clock starts, as that of the model that generates

    def self_information(self, text: str, spans: np.ndarray, window: int | None) -> np.ndarray:
        """[n] float64, on the host, of tokens that stand for the character ranges `spans` [n, 2] of `text`."""
        own = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
        )
        with open_decoder(self.model, self.layout) as decoder:
            token_ids = torch.tensor(own["input_ids"], device=decoder.device)
            info = self_information(decoder, token_ids, window).double().cpu().numpy()
        return carried_over(info, np.asarray(own["offset_mapping"], dtype=np.int64), spans)


@lru_cache(maxsize=1)
def _load_scorer(spec: ModelSpec) -> _Scorer:
    """The scoring model, kept for the prompts that follow: methods have no state, and a run has one scorer."""
    model = load_weights(spec)
    return _Scorer(model, load_tokenizer_of(spec), find_layout(model))
