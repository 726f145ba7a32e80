"""Prompts as LongBench's `pred.py` builds them for each model (commit 2e00731).

The steps are in the official order: fill the template; count its tokens, special ones included; if
they exceed the limit, keep `int(limit / 2)` tokens of each end, decode the halves without special
tokens and join the *texts*; wrap the text for chat models, except for exempt datasets; append the
row's answer prefix; tokenise again. So a truncated prompt's number of tokens may be a little above
or below the limit.

The places of the context (`Prompt.context`, for methods that shorten it) are tracked through
all steps.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

from eval.benchmarks.chat_format import CHAT_FORMATS, ChatFormat
from eval.benchmarks.suite import Dataset, Example
from lazyllm.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

    import lazyllm
    from lazyllm.spec import ModelSpec

Ranges = list[tuple[int, int]]  # half-open ranges of characters, ascending and disjoint


@dataclass(frozen=True)
class Prompt:
    """An example as token ids: truncated, wrapped, ready for the model.

    text: in the chat format, with the answer prefix.
    token_ids: of the text, special ones included.
    uncut_tokens: tokens of the filled template, special ones included, before
        truncation and chat format.
    truncated: whether the middle was cut out.
    context: ranges of `text` that a method may shorten: the row's context after truncation, without
        the answers of its examples.
    template: ranges of `text` that the chat format wrote.
    spans: [n, 2] the range of `text` that each token stands for; None if unknown: the tokenizer is
        not a fast one, or its chat template changes the prompt.
    max_new_tokens, end_ids: the most tokens of an answer, and those that end it; set by a run.
    """

    example: Example
    dataset: Dataset
    text: str
    token_ids: tuple[int, ...]
    uncut_tokens: int
    truncated: bool
    context: tuple[tuple[int, int], ...] = ()
    template: tuple[tuple[int, int], ...] = ()
    spans: np.ndarray | None = field(default=None, compare=False, repr=False)
    max_new_tokens: int = 0
    end_ids: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """The names of dataset and example."""
        return self.dataset.name, self.example.id

    @property
    def options(self) -> dict[str, Any]:
        """The options of `lazyllm.generate`."""
        least = 1 if self.dataset.newline_ends else 0
        return {
            "max_new_tokens": self.max_new_tokens,
            "eos_token_ids": self.end_ids,
            "min_new_tokens": least,
        }

    @cached_property
    def sha256(self) -> str:
        """Of the token ids in decimal, joined by commas: equal hashes are equal prompts."""
        return hashlib.sha256(",".join(map(str, self.token_ids)).encode()).hexdigest()

    def as_input(self) -> lazyllm.Prompt:
        """Make the prompt for `lazyllm.generate`."""
        import torch

        import lazyllm

        ids = torch.tensor(self.token_ids)
        spans = () if self.spans is None else tuple(map(tuple, self.spans.tolist()))
        return lazyllm.Prompt(ids, self.text, spans, self.context, self.template)


def build_prompt(
    example: Example,
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int | None = None,
    chat: ChatFormat = CHAT_FORMATS["none"],
) -> Prompt:
    """Build an example's prompt, in the official order (see the top of this file).

    max_prompt_tokens: the limit for middle truncation (Llama 2 chat 3500, XGen 7500), or None.
    chat: the format of the prompt, unless the dataset has none (`Dataset.chat_wrap`).
    Raises UserError for a tokenizer without chat template for "auto", a chat template that refuses
        the messages, a limit that leaves no tokens, or a prompt without tokens.
    """
    if max_prompt_tokens is not None and max_prompt_tokens < 2:
        expected = "max_prompt_tokens must be at least 2 (one for each end) or null"
        raise UserError(f"{expected}, got {max_prompt_tokens}")
    text = example.instruction + example.context + example.input
    context = _moved(_unprotected(example.context, dataset.protected), len(example.instruction))
    ids = _tokenize(tokenizer, text)
    before = len(ids)
    truncated = max_prompt_tokens is not None and before > max_prompt_tokens
    if max_prompt_tokens is not None and truncated:
        left, right = _ends(tokenizer, ids, max_prompt_tokens, dataset.decode_halves)
        context = _after_cut(context, text, left, right)
        text = left + right
    chat = chat if dataset.chat_wrap else CHAT_FORMATS["none"]
    # a tokenizer's template writes the special tokens out, so none is added
    special = not chat.uses_template(tokenizer)
    is_found = True
    if special:
        inner, start, found = text, 0, len(chat.before)
        text = f"{chat.before}{text}{chat.after}"
    else:
        inner = text.strip()  # as many templates do
        start = text.index(inner)
        text = chat.wrapped(tokenizer, text)
        found = text.find(inner)
        is_found = text.count(inner) == 1
        context = _clipped(context, start, start + len(inner)) if is_found else []
    around = [(0, found), (found + len(inner), len(text))]
    template = _clipped(around, 0, len(text))
    text += example.answer_prefix
    ids, spans = _tokenize_with_spans(tokenizer, text, special)
    if not ids:
        where = f"{example.dataset}, row {example.id!r}"
        raise UserError(f"{where}: the prompt has no tokens (its text is {text!r})")
    return Prompt(
        example,
        dataset,
        text,
        tuple(ids),
        uncut_tokens=before,
        truncated=truncated,
        context=tuple(_moved(context, found - start)),
        template=tuple(template),
        spans=spans if is_found else None,
    )


@lru_cache(maxsize=2)  # the datasets of a run share one
def tokenizer_for_rows(model: ModelSpec | None, suite: str) -> PreTrainedTokenizerBase:
    """Load the run's tokenizer, for a suite whose rows depend on it. Raises UserError if none."""
    from lazyllm.models.tokenizers import load_tokenizer_of

    tokenizer = load_tokenizer_of(model) if model is not None else None
    if tokenizer is None:
        instead = "give model.tokenizer=FOLDER_OR_HUB_ID"
        raise UserError(f"{suite}: rows are made for a tokenizer: {instead}")
    return tokenizer


def _unprotected(context: str, protected: str) -> Ranges:
    """The ranges of the context without matches of the pattern (`Dataset.protected`)."""
    if not protected:
        return [(0, len(context))]
    matches = re.finditer(protected, context, re.MULTILINE)
    edges = [0, *(edge for match in matches for edge in match.span()), len(context)]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return [(start, stop) for start, stop in gaps if start < stop]


def _ends(tokenizer: Any, ids: list[int], limit: int, decode_halves: bool) -> tuple[str, str]:
    """The texts of the first and the last tokens, together `limit` tokens."""
    half, decode = limit // 2, partial(tokenizer.decode, skip_special_tokens=True)
    left = decode(ids[:half])
    if decode_halves:
        return left, decode(ids[-half:])
    both = decode(ids[:half] + ids[half - limit :])
    cut = _same(left, both)  # all of `left`, unless the cut went through a character
    return both[:cut], both[cut:]


def _after_cut(ranges: Ranges, text: str, left: str, right: str) -> Ranges:
    """The ranges of `text` in `left + right`, which are its ends, decoded from tokens.

    The decoded ends differ from the text if the cut is within a character of several tokens, or if
    the tokenizer is not lossless. Letters that differ are in no range, so no method shortens them.
    """
    in_left = _clipped(ranges, 0, _same(text, left))
    in_right = _clipped(ranges, len(text) - _same(text[::-1], right[::-1]), len(text))
    in_right = _moved(in_right, len(left) + len(right) - len(text))
    if in_left and in_right and in_left[-1][1] == in_right[0][0]:  # the cut went through this range
        in_right[0] = (in_left.pop()[0], in_right[0][1])
    return in_left + in_right


def _same(left: str, right: str) -> int:
    """The number of letters before the first difference."""
    pairs = enumerate(zip(left, right, strict=False))
    shorter = min(len(left), len(right))
    return next((place for place, (a, b) in pairs if a != b), shorter)


def _moved(ranges: Ranges, by: int) -> Ranges:
    return [(start + by, stop + by) for start, stop in ranges]


def _clipped(ranges: Sequence[tuple[int, int]], lowest: int, highest: int) -> Ranges:
    clipped = [(max(start, lowest), min(stop, highest)) for start, stop in ranges]
    return [(start, stop) for start, stop in clipped if start < stop]


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_eos_ids: int | Sequence[int] | None, dataset: Dataset
) -> tuple[int, ...]:
    """Return the tokens that end an answer; none if answers run to their full length.

    They are the model's and, for samsum, the newline token (`Dataset.newline_ends`).

    model_eos_ids: from the model's generation config; if empty, the tokenizer's end token is used.
    Raises UserError if the newline is needed and the tokenizer has no token for it.
    """
    if dataset.full_length:
        return ()
    ends = [model_eos_ids] if isinstance(model_eos_ids, int) else list(model_eos_ids or ())
    eos_id: Any = tokenizer.eos_token_id
    if not ends and eos_id is not None:
        ends.append(eos_id)
    if dataset.newline_ends:
        newline = _tokenize(tokenizer, "\n", special_tokens=False)
        if not newline:
            lack = "a newline ends its answers, and the tokenizer has no token for it"
            raise UserError(f"{dataset.name}: {lack}")
        ends.append(newline[-1])
    return tuple(dict.fromkeys(ends))


def gold_token_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, gold: str) -> list[int]:
    """Return a gold answer as tokens that continue the prompt's text.

    They begin after a space, unless there is white space already.
    """
    space = "" if prompt[-1:].isspace() or gold[:1].isspace() else " "
    return continuation_ids(tokenizer, f"{space}{gold}")


def continuation_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text that continues another one.

    They are without the space that some tokenizers put before a text.
    """
    before = "x" if text[:1].isspace() else "\n"  # which no token joins with the text
    alone = _tokenize(tokenizer, before, special_tokens=False)
    both = _tokenize(tokenizer, before + text, special_tokens=False)
    return both[len(alone) :]


def _tokenize(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    special_tokens: bool = True,
) -> list[int]:
    # verbose=False: no warning for long prompts, which are truncated later
    tokens: Any = tokenizer(
        text,
        truncation=False,
        add_special_tokens=special_tokens,
        verbose=False,
    )
    return tokens["input_ids"]


def _tokenize_with_spans(
    tokenizer: Any,
    text: str,
    special: bool,
) -> tuple[list[int], np.ndarray | None]:
    """Return token ids, and `Prompt.spans`."""
    import numpy as np

    if not getattr(tokenizer, "is_fast", False):
        return _tokenize(tokenizer, text, special), None
    tokens = tokenizer(
        text,
        truncation=False,
        add_special_tokens=special,
        verbose=False,
        return_offsets_mapping=True,
    )
    return tokens["input_ids"], np.array(tokens["offset_mapping"], dtype=np.int32).reshape(-1, 2)
