"""lm-evaluation-harness on a model with pruned prompts: `--model lazyllm`. Needs the extra [lm-eval].

python -m lazyllm.integrations.lm_eval --model lazyllm --model_args pretrained=tiny,method=lazy,schedule=2:0.7+5:0.7
--tasks ...
python -m lazyllm.integrations.lm_eval --model lazyllm --model_args '{"pretrained": "tiny", "schedule": {"2": 0.7}}'
--tasks ...

This is lm-eval's own command line, with one more model: lm-eval looks for no plug-ins, so its own `lm_eval` cannot find
the name. In Python, `import lazyllm.integrations.lm_eval` is enough for `simple_evaluate(model="lazyllm", ...)`.

Everything but the model's work is that of lm-eval's `hf`: token ids, truncation, chat templates, stop strings, results.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lazyllm.errors import UserError

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models import huggingface
except ImportError as error:
    raise ImportError(
        f"lm-evaluation-harness is not here, or not whole ({error}): pip install 'lazyllm-bench[lm-eval]'"
    ) from error

from lazyllm.engine.declaration import Prompt
from lazyllm.engine.decoder import Decoder, open_decoder
from lazyllm.integrations.transformers_generate import generate_with
from lazyllm.methods import code_of, make
from lazyllm.methods.schedule import Schedule
from lazyllm.models.load import as_device, load_config, load_tokenizer_of, load_weights
from lazyllm.models.spec import DTYPES, ModelSpec

_HFLM: Any = huggingface.HFLM  # its decorator hides its type
_Request = tuple[Any, list[int], list[int]]  # what the cache knows it by, context, continuation


@register_model("lazyllm")
class PrunedLM(_HFLM):
    """A model whose contexts are prefilled by a method, for lm-eval.

    pretrained: a preset, folder or hub id, as in `lazyllm.load_model`; so are revision, tokenizer, attn_implementation
        and device. dtype: "auto" is the checkpoint's. method: its name; settings: its hyperparameters, a schedule also
        as `2:0.7+5:0.7`. The others as in lm-eval's `hf`. batch_size: any; requests are run one by one.

    loglikelihood: the context is the prompt that the method prunes; the continuation is fed token by token, whatever
        the model would say, so each of its tokens is judged as decoding would see it. A prefill is shared by all
        continuations of one token, and by one longer one.
    loglikelihood_rolling: as lm-eval defines it, the whole text is continuation, after a prompt of one token. There is
        nothing to prune, so methods that prune prompt tokens only give the baseline's perplexity, one token at a time.
    generate_until: as in lm-eval's `hf`, sampled where the task says so; beams are refused (`lazyllm.generate_with`).

    Raises UserError before the weights load, wherever that can
    be known.
    """

    def __init__(
        self,
        pretrained: str,
        method: str = "lazy",
        *,
        dtype: str = "auto",
        device: str = "auto",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        revision: str | None = None,
        tokenizer: str | None = None,
        attn_implementation: str = "sdpa",
        max_length: int | None = None,
        softmax_dtype: str | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._spec = ModelSpec(
            pretrained,
            device=device,
            revision=revision,
            tokenizer=tokenizer,
            attn_implementation=attn_implementation,
        )
        config = load_config(self._spec)
        self.method = make(method, _as_settings(settings, config.num_hidden_layers))
        try:
            self.method.check(config)
            self.method.check_prompt(_prompt_of([0]))
        except (TypeError, ValueError) as error:
            raise UserError(f"method {method!r}: {error}") from error
        self.method_code = code_of(method)
        given = {
            "max_length": max_length,
            "softmax_dtype": softmax_dtype,
            "prefix_token_id": prefix_token_id,
            "think_end_token": think_end_token,
            "enable_thinking": enable_thinking,
            "chat_template_args": chat_template_args,
        }
        # what is not given is left to lm-eval, whose older versions do not know all of it
        super().__init__(
            pretrained,
            backend="causal",
            tokenizer=tokenizer,
            device=str(as_device(device)),
            dtype=dtype,
            batch_size=1,
            **{key: value for key, value in given.items() if value is not None},
        )
        self.method.prepare(self.model)

    # What lm-eval's `hf` leaves to its subclasses: config, tokenizer and weights come from where all of lazyllm's do

    def _get_config(self, pretrained: str, **_: Any) -> None:
        self._config = load_config(self._spec)

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, **_: Any) -> None:
        self.tokenizer = load_tokenizer_of(self._spec)

    def _create_model(self, pretrained: str, dtype: Any = "auto", **_: Any) -> None:
        dtype = _dtype_of(self.config) if dtype == "auto" else dtype
        self._model = load_weights(replace(self._spec, dtype=dtype, device=str(self._device)))

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results."""
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": self.model.dtype,
            "model_revision": self._given_revision,
            "model_sha": getattr(self.config, "_commit_hash", None) or "",
            "method": repr(self.method),
            "method_code": self.method_code,
        }

    def _loglikelihood_tokens(
        self, requests: Sequence[_Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy decoding gives it) of each continuation, in the order of the requests."""
        by_context: dict[tuple[int, ...], list[int]] = {}
        cut = [self._cut(context, continuation) for _, context, continuation in requests]
        for number, context in enumerate(cut):
            by_context.setdefault(context, []).append(number)
        answers: dict[int, tuple[float, bool]] = {}
        with torch.inference_mode(), open_decoder(self.model) as decoder:
            for context, numbers in by_context.items():
                found = self._judge(decoder, context, [requests[number][2] for number in numbers])
                for number, answer in zip(numbers, found, strict=True):
                    answers[number] = answer
                    if requests[number][0] is not None:  # a window of a rolling request has no name of its own
                        self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
        return [answers[number] for number in range(len(requests))]

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[int, ...]:
        """What is left of a context before its continuation, whose last token is never fed to the model."""
        room = self.max_length + 1 - len(continuation)
        if room < 1 or not continuation:
            raise ValueError(f"a continuation has 1 to {self.max_length} tokens (max_length), got {len(continuation)}")
        return tuple(context[-room:])

    def _judge(
        self, decoder: Decoder, context: tuple[int, ...], continuations: list[list[int]]
    ) -> list[tuple[float, bool]]:
        """Each continuation's answer. Raises FloatingPointError where logits are not numbers."""
        prompt = _prompt_of(context)
        token_ids = prompt.token_ids.to(decoder.device)
        session = None  # one that has not been stepped yet
        first: Tensor | None = None
        answers = []
        for continuation in continuations:
            if first is None or (len(continuation) > 1 and session is None):
                longest = max(len(one) for one in continuations)
                session = self.method.start(decoder, prompt, longest)
                first = session.prefill(token_ids)
            logits = [first]
            if len(continuation) > 1:
                assert session is not None
                logits += [session.step(token_id) for token_id in continuation[:-1]]
                session = None
            answers.append(self._answer(torch.stack(logits), continuation))
        return answers

    def _answer(self, logits: Tensor, continuation: list[int]) -> tuple[float, bool]:
        """logits [m, v], one row for each of the continuation's m tokens."""
        wanted = torch.tensor(continuation, device=logits.device)
        logs = F.log_softmax(logits, dim=-1, dtype=self.softmax_dtype).gather(1, wanted[:, None])[:, 0]
        total = float(logs.sum())
        if math.isnan(total):
            raise FloatingPointError("the model's logits are not finite (NaN or infinite)")
        return total, bool((logits.argmax(dim=-1) == wanted).all())

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Tensor:
        """context [1, n] -> [1, n + generated], by lm-eval's own call of `model.generate`."""
        return super()._model_generate(
            context, max_length, stop, custom_generate=generate_with(self.method), **settings
        )


def _as_settings(given: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """A command line's hyperparameters: a schedule there is `2:0.7+5:0.7`, as commas part the arguments; or JSON's."""
    schedule = given.get("schedule")
    try:
        if isinstance(schedule, str) and ":" in schedule:
            pairs = [one.partition(":") for one in schedule.split("+")]
            schedule = {layer.strip(): float(ratio) for layer, _, ratio in pairs}
        if isinstance(schedule, dict):
            return given | {"schedule": dict(Schedule.parse(schedule, num_layers).keep)}
    except (TypeError, ValueError) as error:
        raise UserError(f"schedule={schedule}: {error}; give LAYER:RATIO+LAYER:RATIO, e.g. 2:0.7+5:0.7") from error
    return given


def _prompt_of(token_ids: Sequence[int]) -> Prompt:
    return Prompt(torch.tensor(token_ids, dtype=torch.long))


def _dtype_of(config: Any) -> str:
    """The checkpoint's dtype; float32 where it names none, as in lm-eval's `hf`."""
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return name if name in DTYPES else "float32"


def main() -> None:
    try:
        cli_evaluate()
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
