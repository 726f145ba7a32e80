"""A method inside transformers' own `model.generate`, with its sampling, processors, criteria and streamers.

transformers prepares a call as always (generation config, logits processors, stopping criteria) and hands it to the
callable in `custom_generate`, which is ours. Rows of a batch run one after the other, each through its own session.

Notation:
    b  rows      n  width of the padded prompts      t  tokens so far, padding included      v  vocabulary
"""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lazyllm.engine.generation import Generation, as_prompt, check_fits, continue_prompt
from lazyllm.engine.method import Method
from lazyllm.integrations.generate_options import check_options

# What `generate` itself puts beside the ids, and what changes nothing here: only the last logits are ever computed.
_KNOWN_KWARGS = frozenset(
    {"attention_mask", "cache_position", "logits_to_keep", "past_key_values", "position_ids", "tokenizer"}
    | {"use_cache"}
)
# These count tokens from the padded prompt's first: transformers makes them once for the whole batch.
_COUNTING = (
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)


@dataclass
class LazyGenerateOutput(GenerateDecoderOnlyOutput):
    """transformers' output with `return_dict_in_generate=True`, and one `lazyllm.Generation` a row.

    sequences: [b, n + longest answer]. scores, logits: per step [b, v] float32, where asked for; once a row has ended
        its scores name the padding token (0, and minus infinity for all others), and its logits are NaN.
    past_key_values, attentions, hidden_states: None. A pruned cache is none that transformers could go on from.
    generations: what each row's prompt, answer, times and selections were; token ids without padding.
    """

    generations: list[Generation] | None = None


def generate_with(method: Method, *, seed: int | None = None) -> GenerateWith:
    """What to hand to transformers as `custom_generate`, so that `model.generate` prunes with `method`.

        model.generate(**inputs, custom_generate=lazyllm.generate_with(method), max_new_tokens=64)

    Everything else is as without it: sampling and its options, logits processors, stopping criteria, streamers (one
    row), `num_return_sequences`, `return_dict_in_generate` (see `LazyGenerateOutput`). Where all tokens are kept, the
    tokens are those of transformers. What cannot be done is refused, by name: beams, assistants, a given cache,
    `inputs_embeds`, attentions and hidden states.

    Batches are padded on the left. Each row is pruned by its own length, runs alone, and comes out as the row alone:
    its processors and criteria see [1, tokens] without the padding. Limits of length count from the end of the padded
    prompt, as in transformers. A row's answer ends where it ends, and padding follows. `max_time` is for the whole
    call. A processor or criterion of one's own sees the rows one after the other; one that carries something from
    step to step has to begin anew when the ids are those of another prompt.

    seed: None draws from torch's global generator, row after row: a batch gives what calls row by row give after one
        `torch.manual_seed`, and one row what it gives in transformers. With a seed, row i draws from a generator of its
        own, seeded with seed + i: it does not depend on the rows before it, and is what `seed=seed + i` gives for the
        row alone; the global generator is neither read nor moved.

    transformers 5 loses `tokenizer` on its way to a callable, so `stop_strings` need either `lazyllm.using` or
    `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`.
    Raises TypeError or ValueError for what is no method or seed.
    """
    return GenerateWith(method, seed)


@contextmanager
def using(model: PreTrainedModel, method: Method, *, seed: int | None = None) -> Iterator[PreTrainedModel]:
    """While it lasts, `model.generate` prunes with `method`, whoever calls it; afterwards the model is as it was.

        with lazyllm.using(model, method):
            model.generate(**inputs, max_new_tokens=64)
            pipeline("text-generation", model=model, tokenizer=tokenizer)("Once upon a time")

    The same arguments and results as with `generate_with`, whose docstring holds here too; `stop_strings` with
    `tokenizer` work. Of several that are nested the innermost holds, and a call's own `custom_generate` before it.
    """
    decode = GenerateWith(method, seed)
    original: Any = model.generate
    own = vars(model).get("generate")

    @functools.wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("custom_generate") is None:
            kwargs = _stop_strings_as_criterion(model, args, kwargs) | {"custom_generate": decode}
        return original(*args, **kwargs)

    setattr(model, "generate", generate)  # noqa: B010 - the instance's, in front of the class's
    try:
        yield model
    finally:
        if own is None:
            del model.generate
        else:
            setattr(model, "generate", own)  # noqa: B010


@dataclass(frozen=True)
class GenerateWith:
    """`generate_with`'s callable. transformers calls it where it would call its own decoding loop."""

    method: Method
    seed: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise TypeError(f"method is a method with its parameters, e.g. lazyllm.methods.Lazy(), got {self.method!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0):
            raise ValueError(f"seed is a whole number of 0 or more, or None, got {self.seed!r}")

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> LazyGenerateOutput | Tensor:
        """The whole decoding of input_ids [b, n]; `model_kwargs` are those that `generate` prepared for `forward`."""
        given = _given_to_generate(self)
        streamer = model_kwargs.pop("streamer", None) or given.get("streamer")
        check_options(generation_config, given.get("assistant_model"))
        _check_call(model, input_ids, streamer, model_kwargs, given)
        width = input_ids.shape[1]
        padding = _left_padding(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
        if given and given["kwargs"].get("attention_mask") is None:
            _check_padded_left(input_ids, generation_config)
        lengths = [one.max_length for one in stopping_criteria if isinstance(one, MaxLengthCriteria)]
        # one token is generated where the limit is reached already, as in transformers
        max_new_tokens = max(1, min(lengths, default=generation_config.max_length) - width)
        _check_can_pad(generation_config, stopping_criteria, len(padding))
        pad_id = _padding_token(generation_config)
        ids_on_host = input_ids.cpu()
        prompts = [as_prompt(model, ids_on_host[row, left:]) for row, left in enumerate(padding)]
        for prompt in prompts:
            check_fits(model, self.method, prompt)

        wanted = generation_config.return_dict_in_generate
        rows: list[_Row] = []
        generations: list[Generation] = []
        put = None if streamer is None else functools.partial(_put, streamer)
        for index, (prompt, left) in enumerate(zip(prompts, padding, strict=True)):
            row = _Row(
                model=model,
                ids=input_ids[index : index + 1],
                left=left,
                processors=[_of_row(one, input_ids, index, left) for one in logits_processor],
                criteria=stopping_criteria,
                generator=self._generator(index, input_ids.device),
                samples=bool(generation_config.do_sample),
                scores=() if wanted and generation_config.output_scores else None,
                logits=() if wanted and generation_config.output_logits else None,
            )
            generations.append(continue_prompt(model, prompt, self.method, max_new_tokens, row.choose, put))
            rows.append(row)
        if streamer is not None:
            streamer.end()
        sequences = _sequences(input_ids, generations, pad_id)
        if not wanted:
            return sequences
        steps = sequences.shape[1] - width
        return LazyGenerateOutput(
            sequences=sequences,  # type: ignore[arg-type]
            scores=_by_step([row.scores for row in rows], steps, pad_id, float("-inf")),  # type: ignore[arg-type]
            logits=_by_step([row.logits for row in rows], steps, None, math.nan),  # type: ignore[arg-type]
            generations=generations,
        )

    def _generator(self, row: int, device: torch.device) -> torch.Generator | None:
        return None if self.seed is None else torch.Generator(device).manual_seed(self.seed + row)


@dataclass
class _Row:
    """One row on its way: chooses its tokens as transformers does, and keeps what transformers would return.

    ids: [1, t], padding included. left: tokens of padding before the prompt. scores, logits: per step [1, v], or None.
    """

    model: PreTrainedModel
    ids: Tensor
    left: int
    processors: Sequence[Any]
    criteria: Sequence[Any]
    generator: torch.Generator | None
    samples: bool
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    _ended: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._ended = torch.zeros(1, dtype=torch.bool, device=self.ids.device)

    def choose(self, last_logits: Tensor) -> tuple[int, bool]:
        """A `Choose`. Tensors of processors and results are ordinary ones, as in transformers."""
        with torch.inference_mode(False), torch.no_grad(), _not_called(self.model):
            # [v] -> [1, v]; processors may write into it
            logits = last_logits[None].to(device=self.ids.device, dtype=torch.float32, copy=True)
            scores = logits
            for processor in self.processors:
                scores = processor(self._seen_by(processor), scores)
            if self.scores is not None:
                self.scores += (scores,)
            if self.logits is not None:
                self.logits += (logits,)
            if self.samples:
                chosen = torch.multinomial(scores.softmax(dim=-1), 1, generator=self.generator)  # [1, 1]
            else:
                chosen = scores.argmax(dim=-1, keepdim=True)
            self.ids = torch.cat([self.ids, chosen], dim=1)
            ended = self._ended
            for criterion in self.criteria:
                ended = ended | criterion(self._seen_by(criterion), self.scores)
            score = scores.gather(1, chosen)
            # one transfer for all three; float64 holds every token id
            token_id, value, last = torch.cat([chosen[0].double(), score[0].double(), ended.double()]).tolist()
        if not math.isfinite(value):
            raise FloatingPointError("no token can be chosen: scores are not finite, or every token is forbidden")
        return int(token_id), bool(last)

    def _seen_by(self, one: Any) -> Tensor:
        return self.ids if isinstance(one, _COUNTING) else self.ids[:, self.left :]


def _put(streamer: Any, token_id: int) -> None:
    with torch.inference_mode(False):
        streamer.put(torch.tensor([token_id]))


@contextmanager
def _not_called(model: PreTrainedModel) -> Iterator[None]:
    """Refuse calls of the model by a processor or criterion: its attention is that of the pruned generation."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(
            f"{type(model).__name__} was called while it generates with a method, by a logits processor or stopping "
            "criterion: give these a model of their own"
        )

    hook = model.register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def _given_to_generate(decode: GenerateWith) -> Mapping[str, Any]:
    """What the caller of `model.generate` gave it, by the names of its parameters; {} where nobody called it.

    transformers 5 drops `streamer` and `assistant_model` on the way to a callable: a streamer would get the prompt and
    then wait for ever. They are still to be had where they were given, in the frame of `generate`.
    """
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals
        if found.get("custom_generate") is decode and "kwargs" in found:
            return found
        frame = frame.f_back
    return {}


def _check_call(
    model: PreTrainedModel, input_ids: Tensor, streamer: Any, model_kwargs: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder: pruning is for decoders")
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds were given: methods work on tokens; give input_ids")
    if given.get("synced_gpus") or model_kwargs.get("synced_gpus"):
        raise ValueError("synced_gpus: rows of different processes cannot wait for each other; set it to False")
    cache = model_kwargs.get("past_key_values")
    of_user = given.get("kwargs", {}).get("past_key_values") is not None
    if of_user or (cache is not None and cache.get_seq_length() > 0):
        raise ValueError("past_key_values were given: leave them out, and give the whole prompt, which is run anew")
    more = sorted(name for name, value in model_kwargs.items() if value is not None and name not in _KNOWN_KWARGS)
    if more:
        raise ValueError(f"{', '.join(more)}: nothing like it is handed on to the model's layers; leave it out")
    if streamer is not None and input_ids.shape[0] > 1:
        raise ValueError(f"a streamer is for one row, got {input_ids.shape[0]}: rows run one after the other")


def _left_padding(input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> list[int]:
    """Per row the number of padding tokens on its left. Raises ValueError for padding anywhere else."""
    rows, width = input_ids.shape
    seen = torch.ones(rows, width, dtype=torch.bool) if mask is None else mask.cpu() != 0
    if seen.shape != (rows, width):
        raise ValueError(f"attention_mask is [rows, tokens] like input_ids, {[rows, width]}, got {list(seen.shape)}")
    padding = (width - seen.sum(dim=1)).tolist()
    for row, left in enumerate(padding):
        if left == width:
            raise ValueError(f"row {row} has no token at all: attention_mask is 0 everywhere")
        if not seen[row, left:].all():
            where = "on the right" if seen[row, : width - left].all() else "between its tokens"
            raise ValueError(
                f"row {row} is padded {where} (attention_mask is 0 there): pad on the left, "
                "tokenizer.padding_side='left'"
            )
    if position_ids is not None:
        _check_positions(position_ids.cpu(), seen)
    return padding


def _check_positions(position_ids: Tensor, seen: Tensor) -> None:
    rows, width = seen.shape
    of_rows = position_ids if position_ids.shape[0] == rows else position_ids[:1].expand(rows, -1)
    counted = seen.long().cumsum(dim=1) - 1
    if of_rows.shape != (rows, width) or not torch.equal(of_rows[seen].long(), counted[seen]):
        raise ValueError("position_ids other than 0, 1, 2, ... from a row's first token were given: leave them out")


def _check_padded_left(input_ids: Tensor, config: GenerationConfig) -> None:
    """Without an attention mask, a last token that is the padding's shows that the batch is padded on the right."""
    pad_id = _padding_token(config)
    if pad_id is not None and input_ids.shape[0] > 1 and (input_ids[:, -1] == pad_id).any():
        raise ValueError(
            "rows end with the padding token and there is no attention_mask: pad on the left, "
            "tokenizer.padding_side='left', and give the attention_mask"
        )


def _padding_token(config: GenerationConfig) -> int | None:
    """The padding token as transformers takes it: the first end token where there is none of its own."""
    for token in (config.pad_token_id, config.eos_token_id):
        if token is not None:
            return int(torch.as_tensor(token).flatten()[0])
    return None


def _check_can_pad(config: GenerationConfig, criteria: Sequence[Any], rows: int) -> None:
    if _padding_token(config) is None and rows > 1 and not all(isinstance(one, MaxLengthCriteria) for one in criteria):
        raise ValueError("rows may end at different lengths, and there is no padding token: give pad_token_id")


def _of_row(processor: Any, input_ids: Tensor, row: int, left: int) -> Any:
    """The processor as it would be if its row were alone, for those of transformers that are made for a whole batch."""
    if input_ids.shape[0] == 1 and left == 0:
        return processor
    prompt = input_ids[row : row + 1, left:]
    match processor:
        case RepetitionPenaltyLogitsProcessor():
            ignored = getattr(processor, "prompt_ignore_length", None)
            if not isinstance(ignored, Tensor):
                return processor
            processor = copy.copy(processor)
            processor.prompt_ignore_length = max(0, int(ignored[row]) - left)
        case EncoderRepetitionPenaltyLogitsProcessor():
            processor = copy.copy(processor)
            processor.encoder_input_ids = prompt
        case EncoderNoRepeatNGramLogitsProcessor():
            processor = EncoderNoRepeatNGramLogitsProcessor(processor.ngram_size, prompt)  # type: ignore[arg-type]
        case PrefixConstrainedLogitsProcessor():
            allowed = processor._prefix_allowed_tokens_fn
            processor = PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), num_beams=1)
        case SynthIDTextWatermarkLogitsProcessor():
            processor = copy.deepcopy(processor)  # it counts its calls and remembers its row's contexts
        case _:
            pass
    return processor


def _sequences(input_ids: Tensor, generations: Sequence[Generation], pad_id: int | None) -> Tensor:
    """[b, n + longest]: prompts, answers, and padding behind the shorter ones."""
    answers = [one.token_ids for one in generations]
    longest = max(map(len, answers))
    # without a padding token all are equally long
    padded = [answer + [pad_id or 0] * (longest - len(answer)) for answer in answers]
    return torch.cat([input_ids, torch.tensor(padded, dtype=input_ids.dtype, device=input_ids.device)], dim=1)


def _by_step(
    rows: Sequence[tuple[Tensor, ...] | None], steps: int, pad_id: int | None, filling: float
) -> tuple[Tensor, ...] | None:
    """Per row and step [1, v] -> per step [b, v]; a row that has ended is `filling`, and 0 at `pad_id`."""
    kept = [row for row in rows if row is not None]
    if not kept:
        return None
    after = torch.full_like(kept[0][0], filling)
    if pad_id is not None and 0 <= pad_id < after.shape[1]:
        after[:, pad_id] = 0
    return tuple(torch.cat([row[step] if step < len(row) else after for row in kept]) for step in range(steps))


def _stop_strings_as_criterion(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`generate`'s keywords with `stop_strings` made into the criterion that transformers would make of them.

    transformers 5 makes it from a tokenizer that it has dropped, where there is a `custom_generate`.
    """
    config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
    configs = (config, getattr(model, "generation_config", None))
    sources = [kwargs.get("stop_strings"), *(getattr(one, "stop_strings", None) for one in configs)]
    strings = next((found for found in sources if found is not None), None)
    tokenizer = kwargs.get("tokenizer")
    if strings is None or tokenizer is None:
        return dict(kwargs)
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    if not any(isinstance(one, StopStringCriteria) for one in criteria):
        criteria.append(StopStringCriteria(tokenizer, strings))
    return {**kwargs, "stop_strings": None, "stopping_criteria": criteria}
