"""A method inside transformers' own `model.generate`, with its sampling, processors, criteria and streamers.

transformers prepares a call (generation config, logits processors, stopping criteria) and hands it to our callable in
`custom_generate`. Rows of a batch decode together, each in its own session (`lazyllm.engine.batch`).

Notation:
    b  rows      n  width of the padded prompts      t  tokens so far, padding included      v  vocabulary
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lazyllm.engine.batch import BATCH_SIZE, generate_requests
from lazyllm.engine.generation import Generation, check_method, make_request
from lazyllm.engine.method import Method
from lazyllm.methods.support.hyperparameters import check_int

_ONE_SEQUENCE = "one sequence grows token by token: leave it out, and sample (do_sample=True) for variety"
_NOT_KEPT = "the layers see different tokens, so it is not recorded: call model(sequences, ...) afterwards"
_GIVEN_CACHE = "past_key_values are not supported: leave them out, and give the whole prompt"

# Options that a pruned generation cannot honour: {name: (values that have no effect, what to do instead)}. Those of
# other generation modes are refused by the mode; all others become logits processors and stopping criteria.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "cache_implementation": ((None, "dynamic"), "a pruned generation makes its own KV cache: leave it out"),
    "compile_config": ((None,), "the number of tokens changes from layer to layer and step to step: leave it out"),
    "guidance_scale": ((None, 1), "guidance runs the model a second time, unpruned: leave it out"),
    "is_assistant": ((None, False), "a pruned generation cannot draft for another model"),
    "num_beams": ((None, 1), _ONE_SEQUENCE),
    "output_attentions": ((None, False), _NOT_KEPT),
    "output_hidden_states": ((None, False), _NOT_KEPT),
    "prefill_chunk_size": ((None,), "the newest token's attention to the whole prompt is what prunes: leave it out"),
    "token_healing": ((None, False), "it changes the prompt behind the attention mask: heal the prompt before"),
    "use_cache": ((None, True), "pruning works on the KV cache: set use_cache=True"),
}

# Arguments of `generate` that are refused: {name: what to do instead}
_REFUSED_ARGUMENTS = {
    "assistant_model": _ONE_SEQUENCE,
    "inputs_embeds": "give input_ids",
    "streamer": "it does not reach a custom_generate: call model.generate(..., streamer=...) within "
    "`with lazyllm.using(model, method):`",
    "synced_gpus": "rows of different processes cannot wait for each other: set it to False",
}
# Arguments that `generate` hands on. The mask is read, positions and the cache are checked; others have no effect.
_KNOWN_ARGUMENTS = frozenset(
    {"attention_mask", "cache_position", "logits_to_keep", "past_key_values", "position_ids", "tokenizer", "use_cache"}
)
# Rules that count tokens from the start of the padded prompt get the ids with padding; all others get them without.
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
    """transformers' output with `return_dict_in_generate=True`, and one `lazyllm.Generation` per row.

    sequences: [b, n + longest answer]. scores, logits: per step [b, v] float32, if asked for. After a row has ended,
        its scores are 0 for the padding token and minus infinity for all others, and its logits are NaN.
    past_key_values, attentions, hidden_states: None: transformers could not continue from a pruned cache.
    generations: answer, times and selections of each row; token ids without padding.
    """

    generations: list[Generation] | None = None


def generate_with(method: Method, *, seed: int | None = None, tokenizer: Any = None) -> PrunedDecoding:
    """The value of `custom_generate` with which `model.generate` prunes by `method`.

        model.generate(**inputs, custom_generate=lazyllm.generate_with(method), max_new_tokens=64)

    Sampling and its options, logits processors, stopping criteria, `num_return_sequences` and `return_dict_in_generate`
    (`LazyGenerateOutput`) work as always. If all tokens are kept, the output is that of transformers. Refused: beams,
    assistants, a filled cache, `inputs_embeds`, attentions and hidden states; and a streamer, which transformers 5 does
    not hand to a `custom_generate`: it needs `lazyllm.using`. With `cache_implementation="paged"`, transformers never
    calls the `custom_generate`, so nothing is pruned; `using` refuses this option.

    Batches are padded on the left. A row gives what it gives alone: it is pruned by its own length, and its processors
    and criteria see [1, tokens] without the padding. Limits of length count from the end of the padded prompt.

    Up to 8 rows decode together, as in `lazyllm.generate_many`. Rows run one after the other if they are sampled
    without a seed, or with your own processors or criteria, which must reset their state for another prompt.

    seed: None draws from torch's global generator, row after row: a batch gives what single rows give one after the
        other after one `torch.manual_seed`. With a seed, row i draws from its own generator, seeded with seed + i,
        independent of other rows; the global generator is not used.
    tokenizer: for `stop_strings`; transformers does not hand on the `tokenizer` of its own call either.
    Raises TypeError for anything but a method, TypeError or ValueError for a bad seed.
    """
    return PrunedDecoding(method, seed, tokenizer)


@contextmanager
def using(model: PreTrainedModel, method: Method, *, seed: int | None = None) -> Iterator[PreTrainedModel]:
    """Within this context, every call of `model.generate` prunes by `method`; afterwards the model is as before.

        with lazyllm.using(model, method):
            model.generate(**inputs, max_new_tokens=64)
            pipeline("text-generation", model=model, tokenizer=tokenizer)("Once upon a time")

    Arguments and results are those of `generate_with`. In addition, a `streamer` (for one row) and `stop_strings` with
    `tokenizer` are honoured, and any given cache is refused. Nested contexts: the innermost wins. A call's own
    `custom_generate` wins over all. Raises TypeError for anything but a model of transformers.
    """
    original = type(model)
    if not issubclass(original, GenerationMixin):
        raise TypeError(
            f"expected a model of transformers, got {original.__name__}: of a wrapper (peft's, torch.compile's), give "
            "the model inside"
        )
    # the new class keeps the old one's name, by which a pipeline knows what the model can do
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    decoding = {"lazyllm_decoding": PrunedDecoding(method, seed)}
    bases = (original,) if issubclass(original, _Pruning) else (_Pruning, original)  # in a nested context it is there
    model.__class__ = type(original.__name__, bases, names | decoding)
    try:
        yield model
    finally:
        model.__class__ = original


class _Pruning:
    """Overrides of `GenerationMixin` that `using` mixes into a model. lazyllm_decoding: replaces its loops."""

    lazyllm_decoding: PrunedDecoding

    def _sample(self, input_ids: Tensor, **call: Any) -> LazyGenerateOutput | Tensor:
        return self.lazyllm_decoding(cast(PreTrainedModel, self), input_ids, **call)

    _beam_search = _assisted_decoding = _sample  # refused by their generation mode

    def generate_batch(self, *_: Any, **__: Any) -> None:
        """Refuse continuous batching, which `generate` begins for a paged cache. Raises ValueError."""
        raise ValueError("continuous batching (a paged cache) is not supported with a pruning method: leave it out")

    def _get_deprecated_gen_repo(self, mode: GenerationMode, _: Any, custom_generate: Any = None) -> None:
        """Refuse modes of other loops, before one is fetched from the hub. Raises ValueError."""
        if custom_generate is None:
            _check_mode(mode)

    def _prepare_cache_for_generation(self, config: Any, model_kwargs: dict[str, Any], *others: Any) -> Any:
        """Refuse a given cache, even an empty one: a pruned generation does not fill it. Raises ValueError."""
        if model_kwargs.get("past_key_values") is not None:
            raise ValueError(_GIVEN_CACHE)
        return super()._prepare_cache_for_generation(config, model_kwargs, *others)  # type: ignore[misc]

    def _prepare_attention_mask_for_generation(self, ids: Tensor, config: Any, model_kwargs: dict[str, Any]) -> Tensor:
        """Refuse to guess the mask of rows that may be padded on the right. Raises ValueError."""
        pad_id = config._pad_token_tensor
        if len(ids) > 1 and pad_id is not None and (ids[:, -1] == pad_id).any():
            raise ValueError(
                "rows end with the padding token and there is no attention_mask: pad on the left, "
                "tokenizer.padding_side='left', and give the attention_mask"
            )
        return super()._prepare_attention_mask_for_generation(ids, config, model_kwargs)  # type: ignore[misc]


def _dropped_arguments(frame: FrameType | None) -> dict[str, Any]:
    """Refused arguments that `model.generate` was given and does not pass on to a custom_generate.

    frame: the frame of that custom_generate. Only its caller's local variables still hold such arguments.
    """
    caller = None if frame is None else frame.f_back
    if caller is None or caller.f_code is not inspect.unwrap(vars(GenerationMixin)["generate"]).__code__:
        return {}
    return {name: caller.f_locals[name] for name in _REFUSED_ARGUMENTS.keys() & caller.f_locals.keys()}


@dataclass(frozen=True)
class PrunedDecoding:
    """The callable that `generate_with` returns. transformers calls it in place of its own decoding loop."""

    method: Method
    seed: int | None = None
    tokenizer: Any = None

    def __post_init__(self) -> None:
        check_method(self.method)
        if self.seed is not None:
            check_int("seed", self.seed, 0)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        streamer: Any = None,
        synced_gpus: bool = False,
        stop_strings: str | list[str] | None = None,
        **model_kwargs: Any,
    ) -> LazyGenerateOutput | Tensor:
        """Decode input_ids [b, n].

        stop_strings: as in `generate`, which does not act on arguments that a `custom_generate` names as its own.
        model_kwargs: the arguments that `generate` prepared for `forward`.
        """
        if stop_strings is not None:
            if self.tokenizer is None:
                raise ValueError("stop_strings need generate_with(method, tokenizer=tokenizer)")
            stopping_criteria = [*stopping_criteria, StopStringCriteria(self.tokenizer, stop_strings)]
        check_options(generation_config)
        _check_arguments({**model_kwargs, "synced_gpus": synced_gpus, **_dropped_arguments(inspect.currentframe())})
        (rows, width), device = input_ids.shape, input_ids.device
        if streamer is not None and rows > 1:
            raise ValueError(f"a streamer takes one row, got {rows}: call generate for each row")
        padding = _left_padding(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
        given = (generation_config.pad_token_id, generation_config.eos_token_id)  # transformers pads with the first
        pad_id = next((int(torch.as_tensor(token).flatten()[0]) for token in given if token is not None), None)
        if pad_id is None and rows > 1 and not all(isinstance(rule, MaxLengthCriteria) for rule in stopping_criteria):
            raise ValueError("rows may end at different lengths, and there is no padding token: give pad_token_id")
        lengths = [rule.max_length for rule in stopping_criteria if isinstance(rule, MaxLengthCriteria)]
        # one token is generated if the limit is already reached, as in transformers
        max_new_tokens = max(1, min(lengths, default=generation_config.max_length) - width)
        wanted = generation_config.return_dict_in_generate
        samplers = [
            _RowSampler(
                model=model,
                ids=input_ids[index : index + 1],
                left=left,
                processors=[_rule_of_row(processor, input_ids, index, left) for processor in logits_processor],
                criteria=[_rule_of_row(criterion, input_ids, index, left) for criterion in stopping_criteria],
                generator=None if self.seed is None else torch.Generator(device).manual_seed(self.seed + index),
                samples=bool(generation_config.do_sample),
                streamer=streamer,
                scores=() if wanted and generation_config.output_scores else None,
                logits=() if wanted and generation_config.output_logits else None,
            )
            for index, left in enumerate(padding)
        ]
        ids_on_host = input_ids.cpu()
        requests = [
            make_request(model, ids_on_host[index, row.left :], self.method, max_new_tokens, row)
            for index, row in enumerate(samplers)
        ]
        in_turn = generation_config.do_sample and self.seed is None
        packages = {type(rule).__module__.partition(".")[0] for rule in (*logits_processor, *stopping_criteria)}
        # `_rule_of_row` gives each row its own state for the rules of these two packages
        together = self.method.can_batch and not in_turn and packages <= {"transformers", "lm_eval"}
        done = dict(generate_requests(model, requests, BATCH_SIZE if together else 1))
        generations = [done[index] for index in range(rows)]
        if streamer is not None:
            streamer.end()
        ids = [torch.tensor(generation.token_ids) for generation in generations]
        padded = pad_sequence(ids, batch_first=True, padding_value=pad_id or 0)  # all end together without a pad_id
        sequences = torch.cat([input_ids, padded.to(input_ids)], dim=1)
        if not wanted:
            return sequences
        return LazyGenerateOutput(
            sequences=sequences,  # type: ignore[arg-type]
            scores=_by_step([row.scores for row in samplers], pad_id, float("-inf")),  # type: ignore[arg-type]
            logits=_by_step([row.logits for row in samplers], None, math.nan),  # type: ignore[arg-type]
            generations=generations,
        )


@dataclass
class _RowSampler:
    """One row of the batch: chooses its tokens as transformers does, and keeps scores and logits to return.

    ids: [1, t], padding included.
    left: number of padding tokens before the prompt.
    processors, criteria: transformers' logits processors and stopping criteria, made for this row.
    scores, logits: per step [1, v]; None if they are not returned.
    """

    model: PreTrainedModel
    ids: Tensor
    left: int
    processors: Sequence[Any]
    criteria: Sequence[Any]
    generator: torch.Generator | None
    samples: bool
    streamer: Any
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None

    def sample(self, logits: Tensor) -> Tensor:
        """As `Sampler.sample`, outside inference mode, so that processors and results have ordinary tensors."""
        with torch.inference_mode(False), torch.no_grad(), self.model.register_forward_pre_hook(_refuse_call):
            # [v] -> [1, v]; processors may write into it
            scores = own = logits[None].to(device=self.ids.device, dtype=torch.float32, copy=True)
            for processor in self.processors:
                scores = processor(self._ids_for(processor), scores)
            if self.scores is not None:
                self.scores += (scores,)
            if self.logits is not None:
                self.logits += (own,)
            if self.samples:
                chosen = torch.multinomial(scores.softmax(dim=-1), 1, generator=self.generator)  # [1, 1]
            else:
                chosen = scores.argmax(dim=-1, keepdim=True)
            self.ids = torch.cat([self.ids, chosen], dim=1)
            ended = torch.zeros_like(chosen[0], dtype=torch.bool)
            for criterion in self.criteria:
                ended = ended | criterion(self._ids_for(criterion), self.scores)
            score = scores.gather(1, chosen)
            return torch.cat([chosen[0].double(), score[0].double(), ended.double()])

    def read(self, sampled: list[float]) -> tuple[int, bool]:
        token_id, value, last = sampled
        if not math.isfinite(value):
            raise FloatingPointError("no token can be chosen: its score is not finite, or every token is forbidden")
        if self.streamer is not None:
            with torch.inference_mode(False):
                self.streamer.put(torch.tensor([int(token_id)]))
        return int(token_id), bool(last)

    def _ids_for(self, rule: Any) -> Tensor:
        return self.ids if isinstance(rule, _COUNTING) else self.ids[:, self.left :]


def _refuse_call(model: Any, _: Any) -> None:
    """Refuse calls of the model by a processor or criterion: the model computes with the generation's attention."""
    raise RuntimeError(
        f"a logits processor or stopping criterion called {type(model).__name__} while it generates with a method: "
        "give it another model"
    )


def check_options(config: GenerationConfig) -> None:
    """Refuse generation options that a pruned generation cannot honour. Raises ValueError."""
    for name, (accepted, instead) in REFUSED.items():
        if (value := getattr(config, name, None)) not in accepted:
            raise ValueError(f"{name}={value!r} is not supported with a pruning method: {instead}")
    _check_mode(config.get_generation_mode())


def _check_mode(mode: GenerationMode) -> None:
    """Refuse a mode that is not one sequence, token by token. Raises ValueError."""
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"generation mode {mode.value} is not supported with a pruning method: {_ONE_SEQUENCE}")


def _check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments of `model.generate` that are not supported. Raises ValueError."""
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    for name in _REFUSED_ARGUMENTS.keys() & given.keys():
        raise ValueError(f"{name} is not supported with a pruning method: {_REFUSED_ARGUMENTS[name]}")
    cache = given.get("past_key_values")  # transformers makes an empty one for every call
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(_GIVEN_CACHE)
    if unknown := sorted(given.keys() - _KNOWN_ARGUMENTS):
        raise ValueError(f"{', '.join(unknown)}: not passed to the model's layers; leave it out")


def _left_padding(input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> list[int]:
    """Per row the number of padding tokens on its left. Raises ValueError for padding anywhere else."""
    rows, width = input_ids.shape
    seen = torch.ones(rows, width, dtype=torch.bool) if mask is None else mask.cpu() != 0
    if seen.shape != (rows, width):
        raise ValueError(f"attention_mask is [rows, tokens] like input_ids, {[rows, width]}, got {list(seen.shape)}")
    padding = (width - seen.sum(dim=1)).tolist()
    for row, left in enumerate(padding):
        if left == width:
            raise ValueError(f"row {row} has no token: its attention_mask is 0 everywhere")
        if not seen[row, left:].all():
            where = "on the right" if seen[row, : width - left].all() else "between its tokens"
            raise ValueError(
                f"row {row} is padded {where} (attention_mask is 0 there): pad on the left, "
                "tokenizer.padding_side='left'"
            )
    if position_ids is not None:
        positions = position_ids.cpu().expand(rows, -1) if position_ids.shape[0] == 1 else position_ids.cpu()
        counted = seen.long().cumsum(dim=1) - 1
        if positions.shape != (rows, width) or not torch.equal(positions[seen].long(), counted[seen]):
            raise ValueError("position_ids must count 0, 1, 2, ... from a row's first token: leave them out")
    return padding


def _rule_of_row(processor: Any, input_ids: Tensor, row: int, left: int) -> Any:
    """The processor or criterion for one row, made from the one for the whole batch."""
    if input_ids.shape[0] == 1 and left == 0:
        return processor
    prompt = input_ids[row : row + 1, left:]
    match processor:
        case RepetitionPenaltyLogitsProcessor():
            ignored = getattr(processor, "prompt_ignore_length", None)
            if isinstance(ignored, Tensor):
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
            processor = copy.deepcopy(processor)  # it holds state: its calls and its row's contexts
        case object(done_tracker=[*_], initial_decoder_input_length=int()):  # lm-eval's criterion of a stop string
            processor = copy.copy(processor)
            processor.done_tracker = [False]
            processor.initial_decoder_input_length = prompt.shape[1]
    return processor


def _by_step(
    rows: Sequence[tuple[Tensor, ...] | None], pad_id: int | None, filling: float
) -> tuple[Tensor, ...] | None:
    """Per row and step [1, v] -> per step [b, v]; rows that have ended are `filling`, but 0 at `pad_id`."""
    kept = [torch.cat(row) for row in rows if row is not None]
    if not kept:
        return None
    by_row = pad_sequence(kept, batch_first=True, padding_value=filling)  # [b, steps, v]
    if pad_id is not None and 0 <= pad_id < by_row.shape[2]:
        for padded, row in zip(by_row, kept, strict=True):
            padded[len(row) :, pad_id] = 0
    return by_row.unbind(dim=1)
