"""A method inside transformers' `model.generate`, with its sampling, processors and streamers.

Within `using`, the model has another `generate`. It refuses what a pruned generation cannot honour,
and calls transformers', which prepares the generation config, logits processors and stopping
criteria, and hands them to our callable in `custom_generate`, in place of its own loop.

Notation:
    n  tokens of the prompt      t  tokens so far      v  vocabulary
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    PreTrainedModel,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lazyllm.engine.checks import check_same_as_model
from lazyllm.engine.generation import Generation, answer, check_method
from lazyllm.engine.method import Method

log = logging.getLogger(__name__)

_ONE_SEQUENCE = (
    "one sequence grows token by token: leave it out, and sample (do_sample=True) for variety"
)
_NOT_KEPT = (
    "the layers see different tokens, so it is not recorded: call model(sequences, ...) afterwards"
)
_OWN_CACHE = "a pruned generation makes its own KV cache: leave it out"

# Options that a pruned generation cannot honour: {name: (values without effect, what to do)}. Those
# of other modes are refused by the mode; all others become logits processors and criteria
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "cache_implementation": ((None, "dynamic"), _OWN_CACHE),
    "compile_config": (
        (None,),
        "the number of tokens changes from layer to layer and step to step: leave it out",
    ),
    "guidance_scale": (
        (None, 1),
        "guidance runs the model a second time, unpruned: leave it out",
    ),
    "is_assistant": ((None, False), "a pruned generation cannot draft for another model"),
    "num_beams": ((None, 1), _ONE_SEQUENCE),
    "output_attentions": ((None, False), _NOT_KEPT),
    "output_hidden_states": ((None, False), _NOT_KEPT),
    "prefill_chunk_size": (
        (None,),
        "the newest token's attention to the whole prompt is what prunes: leave it out",
    ),
    "token_healing": (
        (None, False),
        "it changes the prompt behind the attention mask: heal the prompt before",
    ),
    "use_cache": ((None, True), "pruning works on the KV cache: set use_cache=True"),
}

# Arguments of `generate` that are refused: {name: what to do instead}
_REFUSED_ARGUMENTS = {
    "assistant_model": _ONE_SEQUENCE,
    "inputs_embeds": "give input_ids",
    "past_key_values": f"{_OWN_CACHE}, and give the whole prompt",
    "synced_gpus": "answers of different processes cannot wait for each other: set it to False",
}
# Arguments that `generate` hands on. Mask and positions are checked; others have no effect
_KNOWN_ARGUMENTS = frozenset(
    {"attention_mask", "cache_position", "logits_to_keep"}
    | {"past_key_values", "position_ids", "use_cache"}
)
_SIGNATURE = inspect.signature(vars(GenerationMixin)["generate"])


@dataclass
class LazyGenerateOutput(GenerateDecoderOnlyOutput):
    """transformers' output with `return_dict_in_generate=True`, and the `lazyllm.Generation`.

    sequences: [1, n + answer]. scores, logits: per step [1, v] float32, if they are wanted.
    past_key_values, attentions, hidden_states: None: a pruned cache cannot be continued.
    generation: answer, times and selections.
    """

    generation: Generation | None = None


@contextmanager
def using(model: PreTrainedModel, method: Method) -> Iterator[PreTrainedModel]:
    """Let every call of `model.generate` prune by `method`; afterwards the model is as before.

        with lazyllm.using(model, method):
            model.generate(**inputs, max_new_tokens=64)
            pipeline("text-generation", model=model, tokenizer=tokenizer)("Once upon a time")

    Sampling and its options, logits processors, stopping criteria, `stop_strings` with `tokenizer`,
    streamers and `return_dict_in_generate` (`LazyGenerateOutput`) work as always. If all tokens are
    kept, the output is that of transformers, sampled ones after the same `torch.manual_seed` too.
    Refused: several rows (padded batches, `num_return_sequences`), beams, assistants, given caches,
    `inputs_embeds`, attentions and hidden states.

    Nested contexts: the innermost wins. A call's own `custom_generate` wins over all. A call of the
    model itself, `model(**inputs)`, runs unpruned, and the first one logs a warning. Raises
    TypeError for anything but a model of transformers and a method, and as `lazyllm.generate` for a
    model or a method that cannot run.
    """
    if not isinstance(model, GenerationMixin):
        raise TypeError(
            f"expected a model of transformers, got {type(model).__name__}: of a wrapper (peft's, "
            "torch.compile's), give the model inside"
        )
    check_method(method)
    method.check(model.config)
    check_same_as_model(model)  # here, as it calls the model
    changed: Any = model  # its own type knows no change
    users, generate_before = vars(model).get("generate"), changed.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("custom_generate") is not None:
            return generate_before(*args, **kwargs)
        arguments = _SIGNATURE.bind(model, *args, **kwargs).arguments
        given = arguments | arguments.pop("kwargs", {})
        _check_given(model, given)
        decoding = _Decoding(method, given.get("streamer"), given.get("tokenizer"))
        return generate_before(*args, **kwargs, custom_generate=decoding)

    def warn(called: Any, _: Any) -> None:
        hook.remove()
        name = type(called).__name__
        log.warning("%s(...) runs unpruned: within `using` only its `generate` prunes", name)

    changed.generate, hook = generate, model.register_forward_pre_hook(warn)
    try:
        yield model
    finally:
        hook.remove()
        del changed.generate
        if users is not None:
            changed.generate = users


@dataclass(frozen=True)
class _Decoding:
    """The callable that transformers calls in place of its decoding loop.

    streamer, tokenizer: of the call of `generate`, which does not hand them on.
    """

    method: Method
    streamer: Any
    tokenizer: Any

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        stop_strings: str | list[str] | None = None,
        **model_kwargs: Any,
    ) -> LazyGenerateOutput | Tensor:
        """Continue input_ids [1, n].

        stop_strings: `generate` does not act on arguments that a `custom_generate` names.
        model_kwargs: the arguments that `generate` prepared for `forward`.
        """
        check_options(generation_config)
        _check_inputs(input_ids, model_kwargs)
        if stop_strings is not None:
            if self.tokenizer is None:
                raise ValueError(
                    "stop_strings need the model's tokenizer: give tokenizer=... to generate too"
                )
            by_text = StopStringCriteria(self.tokenizer, stop_strings)
            stopping_criteria = [*stopping_criteria, by_text]
        lengths = [
            rule.max_length for rule in stopping_criteria if isinstance(rule, MaxLengthCriteria)
        ]
        most = min(lengths, default=generation_config.max_length)
        # one token is generated if the limit is already reached, as in transformers
        max_new_tokens = max(1, most - input_ids.shape[1])
        wanted = generation_config.return_dict_in_generate
        sampler = _Sampler(
            model=model,
            ids=input_ids,
            processors=logits_processor,
            criteria=stopping_criteria,
            samples=bool(generation_config.do_sample),
            streamer=self.streamer,
            scores=() if wanted and generation_config.output_scores else None,
            logits=() if wanted and generation_config.output_logits else None,
        )
        generation = Generation(model, input_ids, self.method, max_new_tokens, sampler)
        answer(model, generation)
        if self.streamer is not None:
            self.streamer.end()
        if not wanted:
            return sampler.ids
        return LazyGenerateOutput(
            sequences=sampler.ids,  # type: ignore[arg-type]
            scores=sampler.scores,  # type: ignore[arg-type]
            logits=sampler.logits,  # type: ignore[arg-type]
            generation=generation,
        )


@dataclass
class _Sampler:
    """Chooses the tokens as transformers does, and keeps scores and logits to return.

    ids: [1, t].
    scores, logits: per step [1, v]; None if they are not returned.
    """

    model: PreTrainedModel
    ids: Tensor
    processors: Sequence[Any]
    criteria: Sequence[Any]
    samples: bool
    streamer: Any
    scores: tuple[Tensor, ...] | None
    logits: tuple[Tensor, ...] | None

    def sample(self, logits: Tensor) -> Tensor:
        """Sample outside inference mode, so that processors and results have ordinary tensors."""
        refused = self.model.register_forward_pre_hook(_refuse_call, prepend=True)
        with torch.inference_mode(False), torch.no_grad(), refused:
            # [v] -> [1, v]; processors may write into it
            raw = logits[None].to(device=self.ids.device, dtype=torch.float32, copy=True)
            scores = raw
            for processor in self.processors:
                scores = processor(self.ids, scores)
            if self.scores is not None:
                self.scores += (scores,)
            if self.logits is not None:
                self.logits += (raw,)
            if self.samples:
                chosen = torch.multinomial(scores.softmax(dim=-1), 1)  # [1, 1]
            else:
                chosen = scores.argmax(dim=-1, keepdim=True)
            self.ids = torch.cat([self.ids, chosen], dim=1)
            ended = torch.zeros_like(chosen[0], dtype=torch.bool)
            for criterion in self.criteria:
                ended = ended | criterion(self.ids, self.scores)
            score = scores.gather(1, chosen)
            return torch.cat([chosen[0].double(), score[0].double(), ended.double()])

    def read(self, sampled: list[float]) -> tuple[int, bool]:
        token_id, value, last = sampled
        if not math.isfinite(value):
            raise FloatingPointError(
                "no token can be chosen: its score is not finite, or every token is forbidden"
            )
        if self.streamer is not None:
            with torch.inference_mode(False):
                self.streamer.put(torch.tensor([int(token_id)]))
        return int(token_id), bool(last)


def _refuse_call(model: Any, _: Any) -> None:
    """Refuse calls of the model by a processor or criterion: it has the generation's attention."""
    raise RuntimeError(
        f"a logits processor or stopping criterion called {type(model).__name__} while it "
        "generates with a method: give it another model"
    )


def check_options(config: GenerationConfig) -> None:
    """Refuse generation options that a pruned generation cannot honour. Raises ValueError."""
    _check_values(vars(config))
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"generation mode {mode.value} is not supported with a pruning method: {_ONE_SEQUENCE}"
        )


def _check_values(options: Mapping[str, Any]) -> None:
    for name, (accepted, instead) in REFUSED.items():
        if (value := options.get(name)) not in accepted:
            raise ValueError(f"{name}={value!r} is not supported with a pruning method: {instead}")


def _check_given(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Refuse arguments of a call of `generate`, before transformers acts on them: ValueError."""
    for name, instead in _REFUSED_ARGUMENTS.items():
        if given.get(name) is not None and given[name] is not False:
            raise ValueError(f"{name} is not supported with a pruning method: {instead}")
    _check_values(given)  # here too, as a paged cache would never reach the callable
    for config in (given.get("generation_config"), model.generation_config):
        if getattr(config, "stop_strings", None) is not None:
            raise ValueError(
                "stop_strings in a generation config do not reach a method: give them to generate "
                "itself"
            )


def _check_inputs(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse several rows, padding, and arguments that do not reach the layers: ValueError."""
    rows, n = input_ids.shape
    if rows != 1:
        raise ValueError(
            f"one prompt at a time, got {rows} rows: call generate for each prompt and each "
            "sample, or lazyllm.generate_many(model, prompts, method), which decodes several "
            "together"
        )
    given = {
        name: value
        for name, value in model_kwargs.items()
        if value is not None and value is not False
    }
    if unknown := sorted(given.keys() - _KNOWN_ARGUMENTS):
        raise ValueError(f"{', '.join(unknown)}: not passed to the model's layers; leave it out")
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and (mask.shape != (1, n) or not (mask != 0).all()):
        raise ValueError(
            f"attention_mask: expected ones, {[1, n]}, for each token of the prompt: leave out the "
            "padding, or give a mask if the padding token is part of the prompt"
        )
    if positions is not None and positions.flatten().tolist() != list(range(n)):
        raise ValueError(
            "position_ids must count 0, 1, 2, ... from the first token: leave them out"
        )
