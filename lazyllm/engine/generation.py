"""Generation with any method, timed, with the counts that the paper reports.

`generate` chooses tokens greedily. `answer` takes a request whose sampler chooses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from numbers import Integral
from operator import index
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lazyllm.engine.checks import check_same_as_model
from lazyllm.engine.decoder import Decoder, concat, longest_text, open_decoder
from lazyllm.engine.devices import read_clock
from lazyllm.engine.inputs import Prompt
from lazyllm.engine.method import Method
from lazyllm.engine.session import Session, step_together
from lazyllm.errors import UserError


class Sampler(Protocol):
    """Chooses the tokens of one generation, in two halves, so that one transfer serves several generations."""

    def sample(self, logits: Tensor) -> Tensor:
        """[v] logits -> [k] numbers for `read`, on the same device, in float64, which is exact for token ids."""
        ...

    def read(self, sampled: list[float]) -> tuple[int, bool]:
        """The next token, and whether it is the last one. The time that this takes counts in the next step.

        Raises FloatingPointError if none can be chosen.
        """
        ...


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to answer, as `make_request` checks it.

    sampler: a new one for each request.
    after_prefill: called once the first token is chosen. Its time is in no step's.
    """

    prompt: Prompt
    method: Method
    max_new_tokens: int
    sampler: Sampler
    after_prefill: Callable[[Prefilled], None] | None = None


@dataclass(frozen=True)
class Prefilled:
    """A prompt that has run. The generation goes on, so `fork` takes a copy.

    first_logits: [v] after the prompt.
    """

    session: Session
    first_logits: Tensor

    @torch.inference_mode()
    def fork(self) -> Prefilled:
        """An independent copy, caches included."""
        return replace(self, session=self.session.fork())

    @property
    def nbytes(self) -> int:
        """Bytes that the caches take, room for more tokens included."""
        return self.session.allocated_bytes

    @torch.inference_mode()
    def forced_logits(self, token_ids: Sequence[int]) -> Tensor:
        """[t, v] on the host: the logits before each of t tokens, if the answer is forced to be these tokens.

        Each token but the last is run as a decoding step of the method, in a fork. t: at most `max_new_tokens` of the
        generation. Raises UserError for a model that is generating, and for a bad selection.
        """
        session, logits = self.session.fork(), [self.first_logits]
        decoder = session.decoder
        with open_decoder(decoder.model, decoder), _naming_bad_selections(session):
            for token_id in token_ids[:-1]:
                logits.append(session.step(torch.full((1,), token_id, device=decoder.device)))
        session.check_selected_values()
        return torch.stack(logits).cpu()


def make_request(
    model: PreTrainedModel,
    input_ids: Tensor | Sequence[int] | Prompt,
    method: Method,
    max_new_tokens: int,
    sampler: Sampler,
    after_prefill: Callable[[Prefilled], None] | None = None,
) -> Request:
    """A checked `Request`. Other arguments and errors are those of `generate`."""
    prompt = prompt_for(model, input_ids, method)
    check_length(model, len(prompt), max_new_tokens)
    return Request(prompt, method, max_new_tokens, sampler, after_prefill)


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
    kv_bytes, aux_bytes: bytes of K and V of stored tokens, and of hidden states of tokens that may be revived, at the
        end. Room for more tokens is not counted: the Aux Cache has a row for each token of the longest text.
    prompt_tokens: number of prompt tokens.
    scoring_tokens: tokens that any model ran to score the prompt before its prefill, each time that it ran; a run
        through a share of a model's layers counts as that share. Rounded up.
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

    @property
    def pct_prompt_tokens_computed(self) -> float:
        """Prompt tokens computed by the end of the generation, in per cent of the prompt (Table 2).

        The mean over layers, plus the tokens of scoring: more than 100 if scoring costs more than pruning saves.
        """
        return float(100 * (self.computed[-1].mean() + self.scoring_tokens) / self.prompt_tokens)


def generate(
    model: PreTrainedModel,
    input_ids: Tensor | Sequence[int] | Prompt,
    method: Method,
    max_new_tokens: int = 64,
    eos_token_ids: Sequence[int] | None = None,
    min_new_tokens: int = 0,
    after_prefill: Callable[[Prefilled], None] | None = None,
) -> Generation:
    """Continue one prompt greedily.

    model: a transformers causal language model in eval mode; it is left as it was.
    input_ids: the prompt, [n] or [1, n], n >= 1, special tokens included; or a `lazyllm.Prompt`, which also holds the
        text, for methods that read it.
    method: how to prune, e.g. `lazyllm.methods.Lazy(lazyllm.Schedule({9: 0.7}))`.
    max_new_tokens: at least 1.
    eos_token_ids: tokens that end the answer; None takes the model's own, () none.
    min_new_tokens: number of new tokens before an end token can be chosen, as in transformers.
    after_prefill: as of `Request`.

    Only the last position's logits are computed. The clock is read after the device has finished.
    Raises ValueError for bad arguments, TypeError if `method` is not a method, UserError for a model that the loop over
    layers cannot reproduce or that is generating already, FloatingPointError if the logits are not finite.
    """
    end_ids = end_ids_of(model) if eos_token_ids is None else eos_token_ids
    sampler = Greedy(end_ids, min_new_tokens)
    return answer(model, make_request(model, input_ids, method, max_new_tokens, sampler, after_prefill))


@torch.inference_mode()
def answer(model: PreTrainedModel, request: Request) -> Generation:
    """Answer one request alone, with the tokens that its sampler chooses. Raises as `generate` and the sampler do."""
    check_same_as_model(model)
    request.method.prepare(model)
    with open_decoder(model) as decoder:
        running = begin(decoder, request)
        while not running.is_done:
            advance([running])
    return running.result()


@dataclass
class RunningGeneration:
    """A generation whose tokens are being chosen.

    began: the clock before scoring and prefill.
    first_logits: [v] after the prompt.
    token_ids: the tokens so far.
    times: the clock after each token.
    is_done: whether no token follows.
    """

    session: Session
    request: Request
    began: float
    first_logits: Tensor
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    is_done: bool = False

    def leave_out(self, seconds: float) -> None:
        """Count these seconds, which have just passed, in no step."""
        self.began += seconds
        self.times = [time + seconds for time in self.times]

    def result(self) -> Generation:
        """The finished generation. Raises UserError for a bad selection."""
        session = self.session
        session.check_selected_values()
        clock = [self.began, *self.times]
        return Generation(
            token_ids=self.token_ids,
            first_logits=self.first_logits,
            ttft_s=clock[1] - clock[0],
            scoring_s=session.scoring.seconds,
            total_s=clock[-1] - clock[0],
            decode_step_s=[after - before for before, after in pairwise(clock[1:])],
            computed=np.array([[int(count) for count in step] for step in session.computed]),
            selected=[{layer: kept.tolist() for layer, kept in step.items()} for step in session.selections()],
            revived=np.array(session.revived),
            kv_bytes=session.kv_bytes,
            aux_bytes=session.aux_bytes,
            prompt_tokens=session.prompt_tokens,
            scoring_tokens=session.scoring.tokens,
        )


def begin(decoder: Decoder, request: Request) -> RunningGeneration:
    """Score and prefill a prompt and choose the first token."""
    began, prompt = read_clock(*decoder.devices), request.prompt
    session = request.method.start(decoder, prompt, request.max_new_tokens)
    with _naming_bad_selections(session):
        logits = session.prefill(prompt.token_ids.to(decoder.device))
        running = RunningGeneration(session, request, began, logits)
        _choose([running], logits[None])
    if request.after_prefill is not None:
        request.after_prefill(Prefilled(session, logits))
        running.leave_out(read_clock(*decoder.devices) - running.times[0])
    return running


def advance(generations: Sequence[RunningGeneration]) -> None:
    """Generate one more token in each of these generations of one open model, all of which go on."""
    sessions = [generation.session for generation in generations]
    with _naming_bad_selections(*sessions):
        device = sessions[0].decoder.device
        last = [torch.full((1,), generation.token_ids[-1], device=device) for generation in generations]
        _choose(generations, step_together(sessions, last))


def _choose(generations: Sequence[RunningGeneration], logits: Tensor) -> None:
    """Choose and note the next token of each generation by its row of logits [r, v]."""
    sampled = [one.request.sampler.sample(of_one) for one, of_one in zip(generations, logits, strict=True)]
    values = iter(concat(sampled, dim=0).tolist())  # one transfer for all
    now = read_clock(*generations[0].session.decoder.devices)
    for generation, own in zip(generations, sampled, strict=True):
        token_id, is_last = generation.request.sampler.read([*islice(values, len(own))])
        generation.token_ids.append(token_id)
        generation.times.append(now)
        generation.is_done = is_last or len(generation.token_ids) == generation.request.max_new_tokens


@contextmanager
def _naming_bad_selections(*sessions: Session) -> Iterator[None]:
    """After an error, raise UserError instead if a selection breaks a rule, as this may be the cause."""
    try:
        yield
    except Exception:
        for session in sessions:
            session.check_selected_values()
        raise


def prompt_for(model: PreTrainedModel, input_ids: Tensor | Sequence[int] | Prompt, method: Method) -> Prompt:
    """`as_prompt`. Raises TypeError or ValueError also for a model or prompt that the method cannot take."""
    prompt = as_prompt(model, input_ids)
    check_method(method)
    method.check(model.config)
    method.check_prompt(prompt)
    return prompt


def as_prompt(model: PreTrainedModel, input_ids: Tensor | Sequence[int] | Prompt) -> Prompt:
    """`input_ids` as a Prompt. Raises ValueError unless it is one non-empty prompt of known tokens."""
    if isinstance(input_ids, str | Mapping):
        kind = "a text" if isinstance(input_ids, str) else "a tokenizer's whole output"
        raise ValueError(f"input_ids is {kind}: give token ids, for example tokenizer(text).input_ids")
    try:
        whole = input_ids if isinstance(input_ids, Prompt) else Prompt(torch.as_tensor(input_ids))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"input_ids are no token ids: give a list of numbers, or a tensor ({error})") from error
    prompt = whole.token_ids.cpu()
    if prompt.numel() == 0:
        raise ValueError("input_ids holds no tokens: give at least one")
    if prompt.ndim == 2 and prompt.shape[0] == 1:
        prompt = prompt[0]
    if prompt.ndim != 1 or prompt.is_floating_point():
        raise ValueError(
            f"input_ids is one prompt of token ids, [n] or [1, n]; got shape {list(prompt.shape)}, {prompt.dtype}. "
            "Of several prompts, give a list to lazyllm.generate_many(model, prompts, method)"
        )
    vocabulary = model.config.vocab_size
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        raise ValueError(
            f"input_ids hold {int(prompt.min())} to {int(prompt.max())}, but the model knows 0 to {vocabulary - 1}: "
            "is the tokenizer another model's?"
        )
    return replace(whole, token_ids=prompt.to(torch.long))


def check_length(model: PreTrainedModel, tokens: int, max_new_tokens: int) -> None:
    """Refuse a text that is longer than the model's positions (UserError), or an answer without tokens (ValueError).

    tokens: of the prompt.
    """
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}: give 1 or more, a whole number")
    total, most = tokens + max_new_tokens, longest_text(model.config)
    if total - 1 > most:  # the last new token is not run
        raise UserError(f"the text would have {total} tokens, but the model has {most} positions: give fewer tokens")


def check_method(method: object) -> None:
    """Raise TypeError for anything but a method, such as a method's name."""
    if not isinstance(method, Method):
        raise TypeError(f"expected a method such as lazyllm.methods.Lazy(...), got {method!r}")


def end_ids_of(model: PreTrainedModel) -> frozenset[int]:
    """The model's end tokens."""
    own = (getattr(model, "generation_config", None) or model.config).eos_token_id
    return frozenset([own] if isinstance(own, int) else own or ())


class Greedy:
    """A `Sampler` of the token with the highest logit; ties go as in `torch.argmax`, as in transformers.

    end_ids, min_new_tokens: as in `generate`. It counts tokens, so each generation needs a new one. `read` raises
    FloatingPointError if the highest logit is not finite.
    """

    def __init__(self, end_ids: Collection[int] = (), min_new_tokens: int = 0) -> None:
        try:
            self._end_ids = frozenset(map(index, end_ids))  # a tensor's elements, too
        except TypeError as error:
            raise ValueError(f"eos_token_ids={end_ids!r}: give a list of token ids") from error
        self._min_new_tokens = min_new_tokens
        self._chosen = 0

    def sample(self, logits: Tensor) -> Tensor:
        if self._end_ids and self._chosen < self._min_new_tokens:
            logits = logits.clone()
            for end_id in self._end_ids:
                if 0 <= end_id < len(logits):
                    # a list of indices, or one element, would be copied from the host, for which CUDA waits
                    logits[end_id : end_id + 1] = float("-inf")
        self._chosen += 1
        highest, token_id = logits.max(dim=0)
        return torch.stack([highest.double(), token_id.double()])

    def read(self, sampled: list[float]) -> tuple[int, bool]:
        highest, token_id = sampled
        if not math.isfinite(highest):
            raise FloatingPointError("the model's logits are not finite (NaN or infinite)")
        return int(token_id), int(token_id) in self._end_ids


class Forced:
    """A `Sampler` of given tokens, which keeps the logits [v] before each of them, on their device."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self.logits: list[Tensor] = []

    def sample(self, logits: Tensor) -> Tensor:
        self.logits.append(logits)
        return logits.new_empty(0, dtype=torch.float64)

    def read(self, sampled: list[float]) -> tuple[int, bool]:
        return self.token_ids[len(self.logits) - 1], False
