"""Prompts as LongBench's `pred.py` builds them for each model (commit 2e00731).

The steps are in the official order: fill the template; count its tokens, special ones included; if they exceed the
limit, keep `int(limit / 2)` tokens of each end, decode the halves without special tokens and join the *texts*; wrap the
text for chat models, except for exempt datasets; append the row's answer prefix; tokenise again. So a truncated
prompt's number of tokens may be a little above or below the limit.

The places of the context (`BuiltPrompt.context`, for methods that shorten it) and of the question are tracked through
all steps.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

from eval.benchmarks.chat_format import CHAT_FORMATS, ChatFormat
from eval.benchmarks.suite import Dataset, Example, Turn
from lazyllm.errors import UserError
from lazyllm.models.chat_template import unseen_tokens

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

    import lazyllm
    from lazyllm.spec import ModelSpec

Ranges = list[tuple[int, int]]  # half-open ranges of characters, ascending and disjoint


@dataclass(frozen=True)
class Message:
    """What the model reads before an answer: the prompt, or a later message, which follows an answer.

    text: in the chat format, with the answer prefix. token_ids: of the text, special ones included; those of a later
        message may begin with an end token (`behind`).
    """

    text: str
    token_ids: tuple[int, ...]

    @cached_property
    def sha256(self) -> str:
        """Of the token ids in decimal, joined by commas: equal hashes are equal prompts."""
        return hashlib.sha256(",".join(map(str, self.token_ids)).encode()).hexdigest()

    def behind(self, answer: Sequence[int], end_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens to run after an answer, without a second end token."""
        return tuple(unseen_tokens(answer[-1], self.token_ids, end_ids))


@dataclass(frozen=True, kw_only=True)
class BuiltPrompt(Message):
    """One example's prompt, truncated and wrapped, ready for the model.

    tokens_before_truncation: tokens of the filled template, special ones included, before truncation and chat format.
    truncated: whether the middle was cut out.
    context: ranges of `text` that a method may shorten: the row's context after truncation, without the answers of its
        examples.
    template: ranges of `text` that the chat format wrote.
    spans: [n, 2] the range of `text` that each token stands for; None if unknown: the tokenizer is not a fast one, or
        its chat template changes the prompt.
    question: where the row's input begins in `text`; None if its first letter was cut away, or is unknown.
    encode: tokenises another text in the same way.
    turns: the later messages, in order.
    """

    tokens_before_truncation: int
    truncated: bool
    context: tuple[tuple[int, int], ...] = ()
    template: tuple[tuple[int, int], ...] = ()
    spans: np.ndarray | None = field(default=None, compare=False, repr=False)
    question: int | None = None
    encode: Callable[[str], list[int]] | None = field(default=None, compare=False, repr=False)
    turns: tuple[Message, ...] = ()

    def as_input(self, tokens: int | None = None) -> lazyllm.Prompt:
        """The prompt for `lazyllm.generate`. tokens: only its first ones, with their part of the text; None for all."""
        import torch

        import lazyllm

        spans = () if self.spans is None else tuple(map(tuple, self.spans[:tokens].tolist()))
        whole = lazyllm.Prompt(torch.tensor(self.token_ids[:tokens]), self.text, spans, self.context, self.template)
        if tokens is None or self.spans is None:
            return whole
        end = int(self.spans[tokens][0])
        context, template = (tuple(_clipped(ranges, 0, end)) for ranges in (self.context, self.template))
        return replace(whole, text=self.text[:end], context=context, template=template)


def build_prompt(
    example: Example,
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int | None = None,
    chat: ChatFormat = CHAT_FORMATS["none"],
) -> BuiltPrompt:
    """The prompt of one example of a dataset, in the official order (see the top of this file).

    max_prompt_tokens: the limit for middle truncation (Llama 2 chat 3500, XGen 7500); None for none.
    chat: the format of the prompt, unless the dataset has none (`Dataset.chat_wrap`).
    Raises UserError for a tokenizer without chat template for "auto", a chat template that refuses the messages, a
        limit that leaves no tokens, or a prompt or later turn without tokens.
    """
    if max_prompt_tokens is not None and max_prompt_tokens < 2:
        raise UserError(f"max_prompt_tokens must be at least 2 (one for each end) or null, got {max_prompt_tokens}")
    text, start = example.instruction + example.context + example.input, len(example.instruction)
    behind = len(example.context)
    question = [(behind, behind + 1)] if example.input else []  # its first letter, as a cut may leave only its rest
    places = [_moved(ranges, start) for ranges in (_unprotected(example.context, dataset.protected), question)]
    ids = _tokenize(tokenizer, text)
    before = len(ids)
    truncated = max_prompt_tokens is not None and before > max_prompt_tokens
    if max_prompt_tokens is not None and truncated:
        left, right = _ends(tokenizer, ids, max_prompt_tokens, dataset.decode_halves)
        places = [_after_cut(ranges, text, left, right) for ranges in places]
        text = left + right
    chat = chat if dataset.chat_wrap else CHAT_FORMATS["none"]
    # its own template writes the special tokens out, BOS among them if the model wants one: none is added
    special = not chat.uses_template(tokenizer)
    is_found = True
    if special:
        own = (len(chat.before), len(chat.before) + len(text))
        text, by = f"{chat.before}{text}{chat.after}", len(chat.before)
    else:
        wrapped, inner = chat.wrapped(tokenizer, text), text.strip()  # which many templates strip
        is_found, start = wrapped.count(inner) == 1, text.index(inner)
        places = [_clipped(ranges, start, start + len(inner)) if is_found else [] for ranges in places]
        found = wrapped.find(inner)
        own = (found, found + len(inner))
        text, by = wrapped, found - start
    around = [(0, own[0]), (own[1], len(text))]
    text += example.answer_prefix
    ids, spans = _tokenize_with_spans(tokenizer, text, special)
    if not ids:
        raise UserError(f"{example.dataset}, row {example.id!r}: the prompt has no tokens (its text is {text!r})")
    context, question = (tuple(_moved(ranges, by)) for ranges in places)
    return BuiltPrompt(
        text,
        tuple(ids),
        tokens_before_truncation=before,
        truncated=truncated,
        context=context,
        template=tuple(_clipped(around, 0, len(text))),
        spans=spans if is_found else None,
        question=question[0][0] if question else None,
        encode=partial(_tokenize, tokenizer, special_tokens=special),
        turns=tuple(_later_turn(turn, tokenizer, chat) for turn in example.turns),
    )


def _later_turn(turn: Turn, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat) -> Message:
    """The turn's message behind an answer, which writes its own special tokens."""
    text = chat.later(tokenizer, turn.text) + turn.answer_prefix
    # some tokenizers put a space before a text that does not begin with a special token
    ids = continuation_ids(tokenizer, text) if text[:1].isspace() else _tokenize(tokenizer, text, special_tokens=False)
    if not ids:
        raise UserError(f"a later turn has no tokens (its text is {text!r})")
    return Message(text, tuple(ids))


@lru_cache(maxsize=2)  # the datasets of a run share one
def tokenizer_for_rows(model: ModelSpec | None, suite: str) -> PreTrainedTokenizerBase:
    """The run's tokenizer, for a suite whose rows depend on it. Raises UserError if there is none."""
    from lazyllm.models.load import load_tokenizer_of

    tokenizer = load_tokenizer_of(model) if model is not None else None
    if tokenizer is None:
        raise UserError(f"{suite}: rows are made for a tokenizer: give model.tokenizer=FOLDER_OR_HUB_ID")
    return tokenizer


def _unprotected(context: str, protected: str) -> Ranges:
    """The ranges of the context without matches of the pattern (`Dataset.protected`)."""
    if not protected:
        return [(0, len(context))]
    matches = re.finditer(protected, context, re.MULTILINE)
    edges = [0, *(edge for match in matches for edge in match.span()), len(context)]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


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

    The decoded ends differ from the text if the cut is within a character of several tokens, or if the tokenizer is not
    lossless. Letters that differ are in no range, so no method shortens them.
    """
    in_left = _clipped(ranges, 0, _same(text, left))
    in_right = _clipped(ranges, len(text) - _same(text[::-1], right[::-1]), len(text))
    in_right = _moved(in_right, len(left) + len(right) - len(text))
    if in_left and in_right and in_left[-1][1] == in_right[0][0]:  # the cut went through this range
        in_right[0] = (in_left.pop()[0], in_right[0][1])
    return in_left + in_right


def _same(left: str, right: str) -> int:
    """The number of letters before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _moved(ranges: Ranges, by: int) -> Ranges:
    return [(start + by, stop + by) for start, stop in ranges]


def _clipped(ranges: Sequence[tuple[int, int]], lowest: int, highest: int) -> Ranges:
    clipped = [(max(start, lowest), min(stop, highest)) for start, stop in ranges]
    return [(start, stop) for start, stop in clipped if start < stop]


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_eos_ids: int | Sequence[int] | None, dataset: Dataset
) -> tuple[int, ...]:
    """The tokens that end an answer: the model's and, for samsum, the newline token (`Dataset.newline_ends`).

    None if answers run to their full length (`Dataset.full_length`).

    model_eos_ids: from the model's generation config; if empty, the tokenizer's end token is used.
    Raises UserError if the newline is needed and the tokenizer has no token for it.
    """
    if dataset.full_length:
        return ()
    ends = [model_eos_ids] if isinstance(model_eos_ids, int) else list(model_eos_ids or ())
    own: Any = tokenizer.eos_token_id
    if not ends and own is not None:
        ends.append(own)
    if dataset.newline_ends:
        newline = _tokenize(tokenizer, "\n", special_tokens=False)
        if not newline:
            raise UserError(f"{dataset.name}: a newline ends its answers, and the tokenizer has no token for it")
        ends.append(newline[-1])
    return tuple(dict.fromkeys(ends))


def gold_token_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, gold: str) -> list[int]:
    """A gold answer as tokens that continue the prompt's text, after a space unless there is white space already."""
    space = "" if prompt[-1:].isspace() or gold[:1].isspace() else " "
    return continuation_ids(tokenizer, f"{space}{gold}")


def continuation_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text that continues another one: without the space that some tokenizers put before a text."""
    before = "x" if text[:1].isspace() else "\n"  # which no token joins with the text
    alone, behind = (_tokenize(tokenizer, each, special_tokens=False) for each in (before, before + text))
    return behind[len(alone) :]


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str, special_tokens: bool = True) -> list[int]:
    # verbose=False: no warning for long prompts, which are truncated later
    ids: Any = tokenizer(text, truncation=False, add_special_tokens=special_tokens, verbose=False)["input_ids"]
    return ids


def _tokenize_with_spans(tokenizer: Any, text: str, special: bool) -> tuple[list[int], np.ndarray | None]:
    """Token ids, and `BuiltPrompt.spans`."""
    import numpy as np

    if not getattr(tokenizer, "is_fast", False):
        return _tokenize(tokenizer, text, special), None
    tokens = tokenizer(text, truncation=False, add_special_tokens=special, verbose=False, return_offsets_mapping=True)
    return tokens["input_ids"], np.array(tokens["offset_mapping"], dtype=np.int32).reshape(-1, 2)
