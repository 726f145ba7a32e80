"""Generation with any method, timed, with the counts that the paper reports.

`generate` chooses greedily. `start` begins a session of several turns, whose tokens may be chosen in another way.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lazyllm.engine.checks import check_once
from lazyllm.engine.decoder import Decoder, check_lengths, longest_text, open_decoder
from lazyllm.engine.devices import read_clock
from lazyllm.engine.inputs import TURNS, Prompt
from lazyllm.engine.method import Method
from lazyllm.engine.session import Session
from lazyllm.errors import UserError

# [v] logits -> the next token, and whether it is the last one
Choose = Callable[[Tensor], tuple[int, bool]]


class Chooser(Protocol):
    """A `Choose` in two halves, so that one transfer from the device serves all generations that decode together."""

    def pick(self, logits: Tensor) -> Tensor:
        """[v] logits -> [k] float64 on their device, which holds every token id: what `read` needs."""
        ...

    def read(self, picked: list[float]) -> tuple[int, bool]:
        """The next token, and whether it is the last one. Raises FloatingPointError if none can be chosen."""
        ...


@dataclass(frozen=True)
class Generation:
    """The answer to one prompt, and its cost.

    token_ids: the generated tokens, the end token included if one was reached.
    first_logits: [vocab] the logits of the first token, on the model's device, in its dtype.
    ttft_s: seconds from handing the prompt to the model to the first token.
    scoring_s: the part of `ttft_s` spent on scoring the prompt before its prefill; 0 without scoring.
    total_s: seconds to the last token.
    decode_step_s: seconds of each step after the first; `ttft_s + sum(decode_step_s)` is `total_s`.
    computed: [steps, layers] distinct prompt tokens computed so far in each layer.
    selected: per step {pruning layer: ascending positions of the tokens that enter the next layer}, prompt tokens and
        generated ones.
    revived: [layers] tokens of earlier steps that each layer computed in this answer.
    kv_bytes, aux_bytes: bytes of K and V, and of hidden states in the Aux Caches, held at the end.
    prompt_tokens: n.
    scoring_tokens: tokens that any model ran to score the prompt before its prefill; a token in two windows counts
        twice. A run through a share of a model's layers counts as that share of a token. The sum is rounded up.
    scored_before: the `scoring_tokens` of earlier turns that this one continues from.
    """

    token_ids: list[int]
    first_logits: Tensor = field(repr=False)
    ttft_s: float
    scoring_s: float
    total_s: float
    decode_step_s: list[float]
    computed: np.ndarray
    selected: list[dict[int, list[int]]]
    revived: np.ndarray
    kv_bytes: int
    aux_bytes: int
    prompt_tokens: int
    scoring_tokens: int = 0
    scored_before: int = 0

    @property
    def pct_prompt_tokens_computed(self) -> float:
        """Prompt tokens computed by the end of the generation, in per cent of the prompt (Table 2).

        The mean over layers, plus the tokens of scoring: more than 100 if scoring costs more than pruning saves.
        """
        scored = self.scored_before + self.scoring_tokens
        return float(100 * (self.computed[-1].mean() + scored) / self.prompt_tokens)


def generate(
    model: PreTrainedModel,
    input_ids: Tensor | Sequence[int] | Prompt,
    method: Method,
    max_new_tokens: int = 64,
    eos_token_ids: Sequence[int] | None = None,
    min_new_tokens: int = 0,
) -> Generation:
    """Continue one prompt greedily.

    model: a transformers causal language model in eval mode; it is left as it was.
    input_ids: the prompt, [n] or [1, n], n >= 1, special tokens included; or a `lazyllm.Prompt`, which also holds the
        text, for methods that read it.
    method: how to prune, e.g. `lazyllm.methods.Lazy(lazyllm.Schedule({9: 0.7}))`.
    max_new_tokens: at least 1. eos_token_ids: tokens that end the answer; None takes the model's own, () none.
    min_new_tokens: end tokens are not chosen before this many tokens (as `min_length` in transformers).

    Only the last position's logits are computed. The clock is read after the device has finished.
    Raises ValueError for bad arguments, UserError for a model that the loop over layers cannot reproduce or that is
    generating already, FloatingPointError if the logits are not finite.
    """
    with start(model, input_ids, method) as conversation:
        return conversation.answer(None, max_new_tokens, eos_token_ids, min_new_tokens)


def start(
    model: PreTrainedModel,
    input_ids: Tensor | Sequence[int] | Prompt,
    method: Method,
    chunk: int | None = None,
    turns: str = "continue",
) -> Conversation:
    """A session of several turns that begins with this prompt. Nothing runs before its first `answer`.

    model, input_ids, method: as in `generate`.
    chunk: run the tokens of a turn through the layers in pieces of N tokens, to save memory; results change by rounding
        only. Models that score the prompt before its prefill run it whole.
    turns: later turns "continue" from the caches: a method that drops tokens for good drops nothing more. Or they run
        the whole text "again", with tokens selected for the new question.
    Raises ValueError for bad arguments.
    """
    prompt = as_prompt(model, input_ids)
    if turns not in TURNS:
        raise ValueError(f"turns={turns!r}: give {' or '.join(TURNS)}")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk={chunk!r}: give a whole number of 1 or more, or None")
    check_fits(model, method, prompt)
    return Conversation(model, prompt, method, chunk, turns)


@dataclass
class Answer:
    """An answer in the making.

    session: after its prefill. first_logits: [v] after the prompt. start: the clock before it. token_ids: the tokens so
    far. times: the clock after each. is_done: whether none follows.
    """

    session: Session
    first_logits: Tensor
    max_new_tokens: int
    start: float
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    is_done: bool = False

    def add(self, token_id: int, ended: bool, now: float) -> None:
        """Note a token, and the clock after it."""
        self.token_ids.append(token_id)
        self.times.append(now)
        self.is_done = ended or len(self.token_ids) == self.max_new_tokens

    def generation(self, prompt_tokens: int) -> Generation:
        """The finished answer. prompt_tokens: as of `Generation`. Raises UserError for a selection against its rule."""
        session = self.session
        session.read_selections()
        clock = [self.start + session.scoring.uncounted_s, *self.times]
        return Generation(
            token_ids=self.token_ids,
            first_logits=self.first_logits,
            ttft_s=clock[1] - clock[0],
            scoring_s=session.scoring.seconds,
            total_s=clock[-1] - clock[0],
            decode_step_s=[after - before for before, after in pairwise(clock[1:])],
            computed=np.array([[int(count) for count in step] for step in session.computed]),
            selected=[{layer: kept.tolist() for layer, kept in step.items()} for step in session.selected],
            revived=np.array(session.revived),
            kv_bytes=session.kv_bytes,
            aux_bytes=session.aux_bytes,
            prompt_tokens=prompt_tokens,
            scoring_tokens=session.scoring.tokens,
            scored_before=session.scored_before,
        )


class Conversation:
    """A session: a prompt, its answer, and later turns on the same text. A context manager; `start` makes one.

    The last token of an answer has not been run when the answer ends, as in transformers. The next turn runs it
    together with its own tokens, even if it is an end token: chat templates put end tokens between turns.

    token_ids: the whole text so far, prompts and answers.
    """

    def __init__(self, model: PreTrainedModel, prompt: Prompt, method: Method, chunk: int | None, turns: str) -> None:
        self.token_ids: list[int] = prompt.token_ids.tolist()
        self._model = model
        self._method = method
        self._prompt = prompt
        self._chunk = chunk
        self._continues = turns == "continue"
        self._has_answered = False
        self._session: Session | None = None
        self._prompt_tokens = len(prompt)  # summed over turns
        self._is_closed = False

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory. No answer can follow."""
        self._session, self._is_closed = None, True

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole text so far, prompts and answers."""
        return len(self.token_ids)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all K and V."""
        return 0 if self._session is None else self._session.kv_bytes

    @property
    def aux_bytes(self) -> int:
        """Bytes of hidden states of tokens that may be revived."""
        return 0 if self._session is None else self._session.aux_bytes

    def fork(self) -> Conversation:
        """An independent copy of the session.

        It costs some bytes a position. K and V (`kv_bytes`) are copied when the fork answers, the Aux Cache
        (`aux_bytes`) when either of the two answers. Raises UserError for a closed session.
        """
        self._check_open()
        other = copy.copy(self)
        other.token_ids = [*self.token_ids]
        other._session = None if self._session is None else self._session.fork()
        return other

    def answer(
        self,
        more_ids: Tensor | Sequence[int] | None = None,
        max_new_tokens: int = 64,
        eos_token_ids: Sequence[int] | None = None,
        min_new_tokens: int = 0,
    ) -> Generation:
        """Answer greedily: the prompt in the first turn; in later turns the text so far and `more_ids` after it.

        more_ids: the turn's new tokens, [m] or [1, m], m >= 1; None in the first turn. Other arguments: as of
        `generate`. The result is that of this turn: `ttft_s` begins with the turn's tokens, and `selected` has a step
        for each token of this answer. `computed` and `prompt_tokens` count the tokens of all turns so far.
        Raises as `generate` and `answer_by`.
        """
        end_ids = end_ids_of(self._model) if eos_token_ids is None else eos_token_ids
        return self.answer_by(Greedy(end_ids, min_new_tokens), more_ids, max_new_tokens)

    @torch.inference_mode()
    def answer_by(
        self,
        choose: Choose,
        more_ids: Tensor | Sequence[int] | None = None,
        max_new_tokens: int = 64,
        put: Callable[[int], None] | None = None,
    ) -> Generation:
        """`answer` with the tokens that `choose` picks.

        choose: called once per token, first with the prompt's logits, in inference mode. It should make one transfer
            from the device.
        put: called with each token after the clock was read; its time counts in the next step, if there is one.

        Raises UserError for a closed session, a turn without tokens, a turn that the model or the method cannot take,
        and a model that the loop over layers cannot reproduce. The session is then unchanged. After an exception while
        layers run (or in `choose` or `put`), a session that continues from its caches is closed, and one that begins
        again from the whole text is unchanged.
        """
        turn = self._check_turn(more_ids, max_new_tokens)
        check_once(self._model)
        self._method.prepare(self._model)
        with open_decoder(self._model) as decoder:
            try:
                start = read_clock(*decoder.devices)
                session, logits = self._begin(decoder, turn, max_new_tokens)
                answer = Answer(session, logits, max_new_tokens, start)
                while not answer.is_done:
                    if answer.token_ids:
                        logits = session.step(answer.token_ids[-1])
                    answer.add(*choose(logits), read_clock(*decoder.devices))
                    if put is not None:
                        put(answer.token_ids[-1])
                generation = answer.generation(self._prompt_tokens)
            except BaseException as error:
                session, self._session = self._session, None
                self._is_closed = self._has_answered and self._continues
                if session is not None and isinstance(error, Exception):
                    session.read_selections()  # one that breaks a rule may be the cause
                raise
        self._has_answered = True
        self.token_ids += [*([] if turn is None else turn.tolist()), *generation.token_ids]
        return generation

    def _begin(self, decoder: Decoder, turn: Tensor | None, max_new_tokens: int) -> tuple[Session, Tensor]:
        """Run the turn's tokens: the session, and the logits [v] after them."""
        if turn is not None and self._session is not None and self._continues:
            self._session.decoder = decoder
            rows = torch.cat([torch.tensor(self.token_ids[-1:]), turn]).to(decoder.device)
            self._prompt_tokens += len(turn)
            return self._session, self._session.turn(rows, max_new_tokens)
        prompt = self._prompt if turn is None else with_more(self._prompt, [*self.token_ids, *turn.tolist()])
        self._prompt_tokens = len(prompt)
        self._session = None  # frees its memory
        self._session = session = self._method.start(decoder, prompt, max_new_tokens)
        session.chunk = self._chunk
        return session, session.prefill(prompt.token_ids.to(decoder.device))

    def _check_turn(self, more_ids: Tensor | Sequence[int] | None, max_new_tokens: int) -> Tensor | None:
        """[m] the turn's tokens on the host; None for the first turn. Raises ValueError as `answer_by`."""
        self._check_open()
        if self._has_answered and more_ids is None:
            raise UserError("a later turn needs tokens: give at least one in more_ids")
        if not self._has_answered and more_ids is not None:
            raise UserError("the first turn runs the prompt: leave out more_ids")
        turn = None if more_ids is None else as_prompt(self._model, more_ids).token_ids
        before = len(self.token_ids) + (0 if turn is None else len(turn))
        check_length(self._model, before, max_new_tokens, ", or start a new session" if self._has_answered else "")
        if turn is not None and self._continues:
            check_lengths(self._model, len(self._prompt), before + max_new_tokens - len(self._prompt))
        return turn

    def _check_open(self) -> None:
        if self._is_closed:
            raise UserError("the session is closed: start a new one with lazyllm.start")


def with_more(prompt: Prompt, token_ids: Sequence[int]) -> Prompt:
    """The prompt with more tokens after it. They are outside its text, so methods that read text keep them."""
    end, later = (len(prompt.text), len(prompt.text)), len(token_ids) - len(prompt)
    spans = (*prompt.spans, *[end] * later) if prompt.spans else ()
    return replace(prompt, token_ids=torch.tensor(token_ids), spans=spans, later=later)


def as_prompt(model: PreTrainedModel, input_ids: Tensor | Sequence[int] | Prompt) -> Prompt:
    """`input_ids` as a Prompt. Raises ValueError unless it is one non-empty prompt of known tokens."""
    if isinstance(input_ids, str | Mapping):
        kind = "a text" if isinstance(input_ids, str) else "a tokenizer's whole output"
        raise ValueError(f"input_ids is {kind}: give token ids, for example tokenizer(text).input_ids")
    whole = input_ids if isinstance(input_ids, Prompt) else Prompt(torch.as_tensor(input_ids))
    prompt = whole.token_ids.cpu()
    if prompt.numel() == 0:
        raise ValueError("input_ids holds no tokens: give at least one")
    if prompt.ndim == 2 and prompt.shape[0] == 1:
        prompt = prompt[0]
    if prompt.ndim != 1 or prompt.is_floating_point():
        raise ValueError(
            f"input_ids is one prompt of token ids, [n] or [1, n]; got shape {list(prompt.shape)}, {prompt.dtype}. "
            "Batches are not supported here: use model.generate with lazyllm.generate_with(method)"
        )
    vocabulary = model.config.vocab_size
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        raise ValueError(
            f"input_ids hold {int(prompt.min())} to {int(prompt.max())}, but the model knows 0 to {vocabulary - 1}: "
            "is the tokenizer another model's?"
        )
    return replace(whole, token_ids=prompt.to(torch.long))


def check_length(model: PreTrainedModel, tokens: int, max_new_tokens: int, advice: str = "") -> None:
    """Refuse a text that is longer than the model's positions (UserError), or an answer without tokens (ValueError).

    tokens: of the text before the answer. advice: what else to do.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: give 1 or more")
    total, most = tokens + max_new_tokens, longest_text(model.config)
    if total - 1 > most:  # the last new token is not run
        raise UserError(
            f"the text would have {total} tokens, but the model has {most} positions: give fewer tokens{advice}"
        )


def check_method(method: object) -> None:
    """Raise TypeError for anything but a method, such as a method's name."""
    if not isinstance(method, Method):
        raise TypeError(f"expected a method such as lazyllm.methods.Lazy(...), got {method!r}")


def check_fits(model: PreTrainedModel, method: Method, prompt: Prompt) -> None:
    """Refuse a model or prompt that the method cannot take, before anything runs. Raises TypeError or ValueError."""
    check_method(method)
    method.check(model.config)
    method.check_prompt(prompt)


def end_ids_of(model: PreTrainedModel) -> frozenset[int]:
    """The model's end tokens."""
    own = (getattr(model, "generation_config", None) or model.config).eos_token_id
    return frozenset([own] if isinstance(own, int) else own or ())


class Greedy:
    """A `Choose` and `Chooser` of the token with the highest logit; ties go as in `torch.argmax`, as in transformers.

    end_ids, min_new_tokens: as in `generate`. It counts tokens, so each generation needs a new one. It raises
    FloatingPointError if the highest logit is not finite.
    """

    def __init__(self, end_ids: Collection[int] = (), min_new_tokens: int = 0) -> None:
        self._end_ids = frozenset(end_ids)
        self._min_new_tokens = min_new_tokens
        self._chosen = 0

    def __call__(self, logits: Tensor) -> tuple[int, bool]:
        return self.read(self.pick(logits).tolist())

    def pick(self, logits: Tensor) -> Tensor:
        if self._end_ids and self._chosen < self._min_new_tokens:
            logits = logits.clone()
            logits[[end_id for end_id in self._end_ids if 0 <= end_id < len(logits)]] = float("-inf")
        self._chosen += 1
        highest, token_id = logits.max(dim=0)
        return torch.stack([highest.double(), token_id.double()])

    def read(self, picked: list[float]) -> tuple[int, bool]:
        highest, token_id = picked
        if not math.isfinite(highest):
            raise FloatingPointError("the model's logits are not finite (NaN or infinite)")
        return int(token_id), int(token_id) in self._end_ids
