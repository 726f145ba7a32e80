"""Generation with any method, timed, with everything counted that the paper reports.

`generate` chooses greedily. `continue_prompt` is the loop behind it, for whoever chooses otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lazyllm.engine.checks import check_once
from lazyllm.engine.declaration import Prompt
from lazyllm.engine.decoder import open_decoder
from lazyllm.engine.devices import read_clock
from lazyllm.engine.method import Method

# [v] logits -> the next token, and whether it is the last one
Choose = Callable[[Tensor], tuple[int, bool]]


@dataclass(frozen=True)
class Generation:
    """What was generated after one prompt, and at what cost.

    token_ids: the generated tokens, the end token included if one was reached.
    first_logits: [vocab] the logits that chose the first token, on the model's device, in its dtype.
    ttft_s: seconds from handing the prompt to the model to the first token.
    scoring_s: seconds of these that went into scoring the prompt before its prefill, 0 if that was not done.
    total_s: seconds to the last token.
    decode_step_s: seconds of each step after the first; `ttft_s + sum(decode_step_s)` is `total_s`.
    computed: [steps, layers] distinct prompt tokens computed so far in each layer.
    selected: per step {pruning layer: ascending positions of all tokens that enter the next layer}: prompt tokens
        first, then the generated ones that stay in the step's set, the newest among them.
    kv_bytes, aux_bytes: bytes of K and V, and of hidden states in the Aux Caches, held at the end.
    prompt_tokens: n.
    scoring_tokens: tokens that any model ran to score the prompt before its prefill, windows that overlap counted each
        time. A run through some of a model's layers counts as that share of a token; the sum is rounded up.
    """

    token_ids: list[int]
    first_logits: Tensor = field(repr=False)
    ttft_s: float
    scoring_s: float
    total_s: float
    decode_step_s: list[float]
    computed: np.ndarray
    selected: list[dict[int, list[int]]]
    kv_bytes: int
    aux_bytes: int
    prompt_tokens: int
    scoring_tokens: int = 0

    @property
    def pct_prompt_tokens_computed(self) -> float:
        """Prompt tokens computed by the end of the generation, in per cent of the prompt (Table 2).

        The mean over layers, plus `scoring_tokens`: so more than 100 if scoring costs more than pruning saves.
        """
        return float(100 * (self.computed[-1].mean() + self.scoring_tokens) / self.prompt_tokens)


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
    input_ids: the prompt, [n] or [1, n], n >= 1, special tokens included; or a `lazyllm.Prompt`, which tells methods
        that read text what the tokens stand for.
    method: what is pruned, e.g. `lazyllm.methods.Lazy(lazyllm.Schedule({9: 0.7}))`.
    max_new_tokens: at least 1. eos_token_ids: tokens that end the answer; None takes the model's own, () none.
    min_new_tokens: end tokens are not chosen before this many tokens (as `min_length` in transformers).

    Only the last position's logits are ever computed. The clock is read when the device has finished.
    Raises ValueError for bad arguments, UserError for a model that the loop over layers would get wrong,
    FloatingPointError if the logits are not finite.
    """
    prompt = as_prompt(model, input_ids)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is at least 1, got {max_new_tokens}")
    check_fits(model, method, prompt)
    end_ids = end_ids_of(model) if eos_token_ids is None else frozenset(eos_token_ids)
    return continue_prompt(model, prompt, method, max_new_tokens, greedy(end_ids, min_new_tokens))


@torch.inference_mode()
def continue_prompt(
    model: PreTrainedModel,
    prompt: Prompt,
    method: Method,
    max_new_tokens: int,
    choose: Choose,
    put: Callable[[int], None] | None = None,
) -> Generation:
    """Continue one prompt, checked by `as_prompt` and `check_fits`, with the tokens that `choose` picks.

    choose: called once per token, first with the prompt's logits. It runs in inference mode, and its one transfer from
        the device is the only one that a token costs beside the method's own.
    put: gets each token after the clock has been read, so its time counts with the next step's, if there is one.

    Raises UserError, and what the method or `choose` raise.
    """
    check_once(model)
    method.prepare(model)
    with open_decoder(model) as decoder:
        start = read_clock(*decoder.devices)
        session = method.start(decoder, prompt, max_new_tokens)
        start += session.uncounted_s
        first_logits = logits = session.prefill(prompt.token_ids.to(decoder.device))
        token_ids: list[int] = []
        clock = [start]
        while True:
            token_id, ended = choose(logits)
            token_ids.append(token_id)
            clock.append(read_clock(*decoder.devices))
            if put is not None:
                put(token_id)
            if ended or len(token_ids) == max_new_tokens:
                break
            logits = session.step(token_id)
    return Generation(
        token_ids=token_ids,
        first_logits=first_logits,
        ttft_s=clock[1] - clock[0],
        scoring_s=session.scoring_s,
        total_s=clock[-1] - clock[0],
        decode_step_s=[after - before for before, after in pairwise(clock[1:])],
        computed=np.array(session.computed),
        selected=[{layer: kept.tolist() for layer, kept in step.items()} for step in session.selected],
        kv_bytes=session.kv_bytes,
        aux_bytes=session.aux_bytes,
        prompt_tokens=len(prompt),
        scoring_tokens=session.scoring_tokens,
    )


def as_prompt(model: PreTrainedModel, input_ids: Tensor | Sequence[int] | Prompt) -> Prompt:
    """The prompt. Raises ValueError if it is not one non-empty prompt of known tokens."""
    if isinstance(input_ids, str):
        raise ValueError("input_ids is a text: give its token ids, for example tokenizer(text).input_ids")
    whole = input_ids if isinstance(input_ids, Prompt) else Prompt(torch.as_tensor(input_ids))
    prompt = whole.token_ids
    if prompt.ndim == 2 and prompt.shape[0] == 1:
        prompt = prompt[0]
    if prompt.ndim != 1 or prompt.shape[0] == 0 or prompt.is_floating_point():
        raise ValueError(
            f"input_ids is one prompt of at least one token id, [n] or [1, n]; got shape {list(prompt.shape)}, "
            f"{prompt.dtype}. Batches are not supported here: use model.generate with lazyllm.generate_with(method)"
        )
    vocabulary = model.config.vocab_size
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        raise ValueError(
            f"input_ids hold {int(prompt.min())} to {int(prompt.max())}, but the model knows 0 to {vocabulary - 1}: "
            "is the tokenizer another model's?"
        )
    return replace(whole, token_ids=prompt.to(torch.long))


def check_fits(model: PreTrainedModel, method: Method, prompt: Prompt) -> None:
    """Refuse, before anything runs, what the method cannot do with this prompt. Raises ValueError."""
    method.tokens_per_layer(model.config.num_hidden_layers, len(prompt))  # refuses what does not fit the depth
    method.check_prompt(prompt)


def end_ids_of(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end an answer of this model."""
    config = getattr(model, "generation_config", None)
    own = config.eos_token_id if config is not None else model.config.eos_token_id
    if own is None:
        return frozenset()
    return frozenset([own] if isinstance(own, int) else own)


def greedy(end_ids: frozenset[int] = frozenset(), min_new_tokens: int = 0) -> Choose:
    """The token with the highest logit; of equals the one that `torch.argmax` finds, as in transformers.

    end_ids, min_new_tokens: as in `generate`. The chooser counts, so each generation needs one of its own; it raises
    FloatingPointError if the highest logit is not finite.
    """
    chosen = 0

    def choose(logits: Tensor) -> tuple[int, bool]:
        nonlocal chosen
        if end_ids and chosen < min_new_tokens:
            logits = logits.clone()
            logits[list(end_ids)] = float("-inf")
        highest, token_id = logits.max(dim=0)
        # one transfer for both; float64 holds every token id
        value, token_id = torch.stack([highest.double(), token_id.double()]).tolist()
        if not math.isfinite(value):
            raise FloatingPointError("the model's logits are not finite (NaN or infinite)")
        chosen += 1
        return int(token_id), int(token_id) in end_ids

    return choose
