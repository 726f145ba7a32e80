"""Generation with any method, timed, with the counts that the paper reports.

`generate` answers one prompt greedily, `generate_many` several together: each step runs their
tokens through the layers as one sequence [1, sum of m, w], m tokens of each, without padding. So a
step reads the weights once, and each generation attends to its own KV cache.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, pairwise
from numbers import Integral
from operator import index
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lazyllm.engine.checks import check_same_as_model
from lazyllm.engine.decoder import Decoder, longest_text, open_decoder
from lazyllm.engine.devices import concat, read_clock
from lazyllm.engine.inputs import Prompt
from lazyllm.engine.method import Method
from lazyllm.engine.session import Session, step_together
from lazyllm.errors import UserError

BATCH_SIZE = 8  # generations that decode together by default
Tokens = Tensor | Sequence[int] | Prompt  # a prompt, as users give it


class Sampler(Protocol):
    """Chooses the tokens of one generation, in halves, so that one transfer serves several."""

    def sample(self, logits: Tensor) -> Tensor:
        """Turn logits [v] into numbers [k] for `read`, in float64, on the same device."""
        ...

    def read(self, sampled: list[float]) -> tuple[int, bool]:
        """Return the next token, and whether it is the last one. Its time is the next step's.

        Raises FloatingPointError if none can be chosen.
        """
        ...


class Generation:
    """The answer to a prompt, which grows token by token, and its cost.

    token_ids: the tokens so far, with the end token if one was reached.
    first_logits: [v] the logits of the first token, on the model's device, in its dtype.
    is_done: whether no token follows. Then these are known:
    computed: [steps, layers] distinct prompt tokens computed so far in each layer.
    selected: per step {pruning layer: ascending positions of the tokens that enter the next layer},
        prompt tokens and generated ones.
    revived: [layers] tokens of earlier steps that each layer computed in this answer.
    kv_bytes, aux_bytes: bytes of K and V of stored tokens, and of hidden states of tokens that may
        be revived, at the end. Room for more tokens does not count.
    prompt_tokens: number of prompt tokens.
    scoring_tokens: tokens that any model ran to score the prompt before its prefill, each time that
        it ran, rounded up; a run through some of the layers counts as that share.
    scoring_s: seconds of `ttft_s` spent on that.
    """

    session: Session  # while it grows
    first_logits: Tensor
    computed: np.ndarray
    selected: list[dict[int, list[int]]]
    revived: np.ndarray
    kv_bytes: int
    aux_bytes: int

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tokens,
        method: Method,
        max_new_tokens: int,
        sampler: Sampler,
        after_prefill: Callable[[Generation], None] | None = None,
    ) -> None:
        """Check the arguments; nothing runs yet. Arguments and errors are those of `generate`.

        sampler: a new one for each generation.
        """
        self.prompt = check_prompt(model, input_ids, method)
        check_length(model, len(self.prompt), max_new_tokens)
        self.method = method
        self.max_new_tokens = max_new_tokens
        self.sampler = sampler
        self.after_prefill = after_prefill
        self.prompt_tokens = len(self.prompt)
        self.token_ids: list[int] = []
        self.clock: list[float] = []  # before scoring and prefill, and after each token
        self.is_done = False
        self.scoring_s, self.scoring_tokens = 0.0, 0

    @property
    def ttft_s(self) -> float:
        """Seconds from handing the prompt to the model to the first token."""
        return self.clock[1] - self.clock[0]

    @property
    def total_s(self) -> float:
        """Seconds to the last token."""
        return self.clock[-1] - self.clock[0]

    @property
    def decode_step_s(self) -> list[float]:
        """Seconds of each step after the first."""
        return [after - before for before, after in pairwise(self.clock[1:])]

    @property
    def pct_prompt_tokens_computed(self) -> float:
        """Prompt tokens computed by the end, in per cent of the prompt (Table 2).

        The mean over layers, plus the tokens of scoring: above 100 if these cost more than pruning
        saves.
        """
        return float(100 * (self.computed[-1].mean() + self.scoring_tokens) / self.prompt_tokens)

    def begin(self, decoder: Decoder) -> None:
        """Score and prefill the prompt, and choose the first token."""
        self.clock = [read_clock(*decoder.devices)]
        self.session = self.method.start(decoder, self.prompt, self.max_new_tokens)
        with _naming_bad_selections([self]):
            self.first_logits = self.session.prefill(self.prompt.token_ids.to(decoder.device))
            _choose([self], self.first_logits[None])
        if self.after_prefill is not None:
            self.after_prefill(self)
            passed = read_clock(*decoder.devices) - self.clock[-1]
            self.clock = [time + passed for time in self.clock]  # counts in no step

    def finish(self) -> None:
        """Note what is known at the end, and free the caches. UserError if a choice is bad."""
        session = self.session
        session.check_selected_values()
        self.computed = np.array([[int(count) for count in step] for step in session.computed])
        self.selected = session.selections()
        self.revived = np.array(session.revived)
        self.kv_bytes, self.aux_bytes = session.kv_bytes, session.aux_bytes
        self.scoring_s, self.scoring_tokens = session.scoring.seconds, session.scoring.tokens
        self.after_prefill = None
        del self.session

    @torch.inference_mode()
    def fork(self) -> Self:
        """Copy a growing generation, caches included: `after_prefill` may keep the copy."""
        twin = copy.copy(self)
        twin.session = self.session.fork()
        twin.token_ids, twin.clock = [*self.token_ids], [*self.clock]
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes that the caches of a growing generation take, room for more tokens included."""
        return self.session.allocated_bytes


def generate(
    model: PreTrainedModel,
    input_ids: Tokens,
    method: Method,
    max_new_tokens: int = 64,
    eos_token_ids: Sequence[int] | None = None,
    min_new_tokens: int = 0,
    after_prefill: Callable[[Generation], None] | None = None,
) -> Generation:
    """Continue one prompt greedily.

    model: a transformers causal language model in eval mode; it is left as it was.
    input_ids: the prompt, [n] or [1, n], n >= 1, special tokens included; or a `lazyllm.Prompt`,
        which also holds the text, for methods that read it.
    method: how to prune, e.g. `lazyllm.methods.Lazy({9: 0.7})`.
    max_new_tokens: at least 1.
    eos_token_ids: tokens that end the answer; None takes the model's, () none.
    min_new_tokens: number of new tokens before an end token can be chosen, as in transformers.
    after_prefill: called once the first token is chosen. Its time is in no step's.

    Only the last position's logits are computed. The clock is read after the device has finished.
    Raises ValueError for bad arguments, TypeError if `method` is not a method, UserError for a
    model that the loop over layers cannot reproduce or that is generating already,
    FloatingPointError if the logits are not finite.
    """
    sampler = _greedy(model, eos_token_ids, min_new_tokens)
    return answer(
        model, Generation(model, input_ids, method, max_new_tokens, sampler, after_prefill)
    )


@torch.inference_mode()
def answer(model: PreTrainedModel, generation: Generation) -> Generation:
    """Run a generation alone to its end. Raises as `generate` and its sampler do."""
    check_same_as_model(model)
    generation.method.prepare(model)
    with open_decoder(model) as decoder:
        generation.begin(decoder)
        while not generation.is_done:
            step([generation])
    generation.finish()
    return generation


def step(generations: Sequence[Generation]) -> None:
    """Generate one more token in each of these generations of one open model."""
    sessions = [generation.session for generation in generations]
    with _naming_bad_selections(generations):
        device = sessions[0].decoder.device
        last = [
            torch.full((1,), generation.token_ids[-1], device=device) for generation in generations
        ]
        _choose(generations, step_together(sessions, last))


@torch.inference_mode()
def force(prefilled: Sequence[Generation], answers: Sequence[Sequence[int]]) -> list[Tensor]:
    """Compute [t, v], on the host: the logits before each of t tokens, if these are the answer.

    prefilled: generations of one model after their prefill, which stay as they are.
    answers: for each, at most `max_new_tokens` tokens. All but the last run as decoding steps of
        the method, in a fork, together with the others'.

    Raises UserError for a model that is generating, and for a bad selection.
    """
    twins = [generation.fork() for generation in prefilled]
    logits = [[generation.first_logits] for generation in prefilled]
    decoder = twins[0].session.decoder
    for twin in twins:
        twin.session.decoder = decoder  # each had its own
    with open_decoder(decoder.model, decoder), _naming_bad_selections(twins):
        for place in range(max(map(len, answers)) - 1):
            going = [index for index, ids in enumerate(answers) if place < len(ids) - 1]
            token_ids = [torch.tensor(answers[index][place : place + 1]) for index in going]
            rows = step_together(
                [twins[index].session for index in going],
                [token_id.to(decoder.device) for token_id in token_ids],
            )
            for index, row in zip(going, rows, strict=True):
                logits[index].append(row)
    for twin in twins:
        twin.session.check_selected_values()
    return [torch.stack(rows).cpu() for rows in logits]


def _choose(generations: Sequence[Generation], logits: Tensor) -> None:
    """Choose and note the next token of each generation by its row of logits [r, v]."""
    sampled = [
        generation.sampler.sample(row) for generation, row in zip(generations, logits, strict=True)
    ]
    values = iter(concat(sampled, dim=0).tolist())  # one transfer for all
    now = read_clock(*generations[0].session.decoder.devices)
    for generation, numbers in zip(generations, sampled, strict=True):
        token_id, is_last = generation.sampler.read([*islice(values, len(numbers))])
        generation.token_ids.append(token_id)
        generation.clock.append(now)
        generation.is_done = is_last or len(generation.token_ids) == generation.max_new_tokens


@contextmanager
def _naming_bad_selections(generations: Sequence[Generation]) -> Iterator[None]:
    """After an error, raise UserError instead if a selection breaks a rule: it may be the cause."""
    try:
        yield
    except Exception:
        for generation in generations:
            generation.session.check_selected_values()
        raise


def generate_many(
    model: PreTrainedModel,
    prompts: Sequence[Tokens],
    method: Method,
    max_new_tokens: int = 64,
    eos_token_ids: Sequence[int] | None = None,
    min_new_tokens: int = 0,
    batch_size: int = BATCH_SIZE,
) -> Iterator[tuple[int, Generation]]:
    """Continue prompts greedily, several at a time: (index, `Generation`) as they end.

    batch_size: generations that decode together, 1 or more; memory is the sum of theirs. Other
        arguments are those of `generate`.

    Answers, selections, counts and bytes are those of `generate`, up to rounding: products of
    several tokens may round otherwise than those of one. Prompts are prefilled one by one, the
    longest first, while the others wait. So `ttft_s` is a generation's alone, but `decode_step_s`
    and `total_s` are of all together, later prefills included.

    Raises as `generate`; also UserError for a method that cannot decode in a batch, unless
    `batch_size` is 1. Between two results, the model is as it was.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}: give a whole number of 1 or more")
    generations = [
        Generation(
            model, prompt, method, max_new_tokens, _greedy(model, eos_token_ids, min_new_tokens)
        )
        for prompt in prompts
    ]
    return answer_many(model, generations, batch_size)


def answer_many(
    model: PreTrainedModel, generations: Sequence[Generation], batch_size: int
) -> Iterator[tuple[int, Generation]]:
    """Yield (index, generation) as they end, at most `batch_size` at a time.

    The longest starts first, but with a batch size of 1 they run in order. Raises as `answer`.
    """
    waiting = [*generations]
    if batch_size > 1:
        waiting.sort(key=lambda generation: -generation.prompt_tokens)
    batch = Batch(model, batch_size)
    while waiting or batch.running:
        while waiting and len(batch.running) < batch_size:
            batch.add(waiting.pop(0))
        for generation in batch.run():
            yield generations.index(generation), generation


class Batch:
    """The generations that decode together.

    running: those that have not ended.
    size: the most that the caller adds, which is not checked; with 1, any method can be added.

    Between two calls the model is as it was. After an error the generations cannot go on.
    """

    def __init__(self, model: PreTrainedModel, size: int) -> None:
        self.running: list[Generation] = []
        self._model = model
        self._size = size
        self._decoder: Decoder | None = None

    @torch.inference_mode()
    def add(self, generation: Generation) -> None:
        """Prefill a prompt alone and choose its first token. Raises as `generate`."""
        method = generation.method
        if self._size > 1 and not method.can_batch:
            raise UserError(
                f"{method.label} runs its steps itself, so it cannot be batched: give batch_size=1"
            )
        check_same_as_model(self._model)
        method.prepare(self._model)
        with open_decoder(self._model, self._decoder) as self._decoder:
            generation.begin(self._decoder)
        self.running.append(generation)

    @torch.inference_mode()
    def run(self) -> list[Generation]:
        """Decode until some generations are done; these leave the batch. Raises as `generate`."""
        with open_decoder(self._model, self._decoder):
            while not any(generation.is_done for generation in self.running):
                step(self.running)
        done = [generation for generation in self.running if generation.is_done]
        self.running = [generation for generation in self.running if not generation.is_done]
        for generation in done:
            generation.finish()
        return done


def check_prompt(model: PreTrainedModel, input_ids: Tokens, method: Method) -> Prompt:
    """Make a Prompt of one non-empty prompt of known tokens that the method can take.

    Raises ValueError or TypeError.
    """
    if isinstance(input_ids, str | Mapping):
        kind = "a text" if isinstance(input_ids, str) else "a tokenizer's whole output"
        raise ValueError(
            f"input_ids is {kind}: give token ids, for example tokenizer(text).input_ids"
        )
    try:
        is_prompt = isinstance(input_ids, Prompt)
        prompt = input_ids if is_prompt else Prompt(torch.as_tensor(input_ids))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"input_ids are no token ids: give a list of numbers, or a tensor ({error})"
        ) from error
    ids = prompt.token_ids.cpu()
    if ids.numel() == 0:
        raise ValueError("input_ids holds no tokens: give at least one")
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.is_floating_point():
        raise ValueError(
            f"input_ids is one prompt of token ids, [n] or [1, n]; got shape {list(ids.shape)}, "
            f"{ids.dtype}. Of several prompts, give a list to lazyllm.generate_many(model, "
            "prompts, method)"
        )
    vocabulary = model.config.vocab_size
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(
            f"input_ids hold {int(ids.min())} to {int(ids.max())}, but the model knows 0 to "
            f"{vocabulary - 1}: is the tokenizer another model's?"
        )
    prompt = replace(prompt, token_ids=ids.to(torch.long))
    check_method(method)
    method.check(model.config)
    method.check_prompt(prompt)
    return prompt


def check_length(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuse a text longer than the model's positions: UserError; empty answers: ValueError."""
    is_count = isinstance(max_new_tokens, Integral) and not isinstance(max_new_tokens, bool)
    if not is_count or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}: give 1 or more, a whole number")
    total, most = prompt_tokens + max_new_tokens, longest_text(model.config)
    if total - 1 > most:  # the last new token is not run
        raise UserError(
            f"the text would have {total} tokens, but the model has {most} positions: give fewer "
            "tokens"
        )


def check_method(method: object) -> None:
    """Raise TypeError for anything but a method, such as a method's name."""
    if not isinstance(method, Method):
        raise TypeError(f"expected a method such as lazyllm.methods.Lazy(...), got {method!r}")


def end_ids_of(model: PreTrainedModel) -> frozenset[int]:
    """Read the model's end tokens."""
    ids = (getattr(model, "generation_config", None) or model.config).eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def _greedy(
    model: PreTrainedModel, eos_token_ids: Sequence[int] | None, min_new_tokens: int
) -> Greedy:
    return Greedy(end_ids_of(model) if eos_token_ids is None else eos_token_ids, min_new_tokens)


class Greedy:
    """A `Sampler` of the token with the highest logit; ties go as in `torch.argmax`.

    end_ids, min_new_tokens: as in `generate`. `read` raises FloatingPointError if the highest logit
    is not finite.
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
                    # a list of indices would be copied from the host, for which CUDA waits
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
    """A `Sampler` of given tokens, which keeps the logits [v] before each of them."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self.logits: list[Tensor] = []

    def sample(self, logits: Tensor) -> Tensor:
        self.logits.append(logits)
        return logits.new_empty(0, dtype=torch.float64)

    def read(self, sampled: list[float]) -> tuple[int, bool]:
        return self.token_ids[len(self.logits) - 1], False
