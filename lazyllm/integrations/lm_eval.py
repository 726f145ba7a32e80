"""lm-evaluation-harness on a model with pruned prompts: `--model lazyllm`.

    lazyllm-bench lm-eval --model lazyllm \\
        --model_args pretrained=tiny,method=lazy,schedule=2:0.7+5:0.7 --tasks ...
    lazyllm-bench lm-eval --model lazyllm \\
        --model_args '{"pretrained": "tiny", "schedule": {"2": 0.7}}' --tasks ...

This is lm-eval's command line with one more model, which its own `lm_eval` does not know; it needs
the extra [lm-eval]. Without --device, the accelerator is used if there is one. In Python, `import
lazyllm.integrations.lm_eval` is enough for `simple_evaluate(model="lazyllm", ...)`. Token ids,
truncation, chat templates, stop strings and results are lm-eval's.
"""

import inspect
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lazyllm.errors import UserError

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.loggers.evaluation_tracker import GeneralConfigTracker
    from lm_eval.models import huggingface
    from lm_eval.utils import simple_parse_args_string
except ImportError as error:
    raise UserError(
        f"lm-evaluation-harness could not be imported ({error}): pip install "
        "'lazyllm-bench[lm-eval]'"
    ) from error

from lazyllm.engine.generation import BATCH_SIZE, Forced, Generation, answer_many
from lazyllm.engine.inputs import Prompt
from lazyllm.integrations.transformers_generate import using
from lazyllm.methods import about_the_method, code_of, make
from lazyllm.models.config import as_device, check_loading, load_config, with_dtype
from lazyllm.models.load import load_weights
from lazyllm.models.tokenizers import check_fits, load_tokenizer_of
from lazyllm.spec import AUTO, ModelSpec

_HFLM: Any = huggingface.HFLM  # its decorator hides its type
_Request = tuple[Any, list[int], list[int]]  # key in lm-eval's cache, context, continuation
# Arguments that are passed on to lm-eval's `hf`
_OF_HF = frozenset(
    {"max_length", "softmax_dtype", "prefix_token_id"}
    | {"think_end_token", "enable_thinking", "chat_template_args"}
)


@register_model("lazyllm")
class PrunedLM(_HFLM):
    """A model whose contexts are prefilled by a method, for lm-eval.

    pretrained, dtype, device, revision, tokenizer, attn_implementation: as in `load_model`.
    gguf_file: a GGUF file of the folder or repository, as in lm-eval's `hf`.
    batch_size: likelihoods that are computed together, each pruned by its own length; "auto" is 8.
        Answers come one after the other.
    max_batch_size: ignored; lm-eval passes it to every model.
    settings: the method's hyperparameters (a schedule as `2:0.7+5:0.7`), and arguments of `hf`.

    loglikelihood: the context is the prompt that the method prunes; the continuation's tokens are
        fed one by one.
    loglikelihood_rolling: in lm-eval the whole text is the continuation, after a prompt of one
        token. Nothing is left to prune, so methods that prune prompt tokens only give the
        baseline's perplexity.
    generate_until: as in lm-eval's `hf`; beams are refused (`lazyllm.using`).

    Raises UserError, before the weights load if possible.
    """

    def __init__(
        self,
        pretrained: str,
        method: str = "lazy",
        *,
        dtype: str = AUTO,
        device: str = "auto",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        revision: str | None = None,
        tokenizer: str | None = None,
        attn_implementation: str = "sdpa",
        gguf_file: str | None = None,
        **settings: Any,
    ) -> None:
        spec = ModelSpec(
            pretrained,
            dtype=dtype,
            device=device,
            revision=revision,
            tokenizer=tokenizer,
            attn_implementation=attn_implementation,
            gguf=gguf_file,
        )
        config = check_loading(spec)
        self._spec = with_dtype(spec)
        passed_on = {key: settings.pop(key) for key in _OF_HF & settings.keys()}
        self.method = make(method, settings)
        with about_the_method(f"method {method!r}"):
            self.method.check(config)
            self.method.check_prompt(Prompt(torch.tensor([0])))
        self.method_code = code_of(method)
        is_auto = str(batch_size).startswith("auto")  # "auto:N" too
        super().__init__(
            pretrained,
            backend="causal",
            tokenizer=tokenizer,
            device=str(as_device(device)),
            dtype=self._spec.dtype,
            batch_size=BATCH_SIZE if is_auto else batch_size,
            **passed_on,
        )

    # Hooks of lm-eval's `hf`: config, tokenizer and weights are loaded by lazyllm

    def _get_config(self, pretrained: str, **_: Any) -> None:
        self._config = load_config(self._spec)

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, **_: Any) -> None:
        loaded = load_tokenizer_of(self._spec)
        assert loaded is not None  # None is of random weights alone
        check_fits(loaded, self._spec)
        self.tokenizer = loaded

    def _create_model(self, pretrained: str, **_: Any) -> None:
        self._model = load_weights(replace(self._spec, device=str(self._device)))

    def get_model_info(self) -> dict[str, Any]:
        """Describe the model as lm-eval writes it into its results."""
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": self.model.dtype,
            "model_revision": self._spec.revision,
            "model_sha": getattr(self.config, "_commit_hash", None) or "",
            "method": repr(self.method),
            "method_code": self.method_code,
        }

    def _loglikelihood_tokens(
        self,
        requests: Sequence[_Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Return (log-probability, whether greedy decoding gives it) of each continuation."""
        groups = self._share_prefills(requests)
        generations = []
        for context, group in groups:
            forced = Forced(requests[group[-1]][2])
            prompt = Prompt(torch.tensor(context))
            most = len(forced.token_ids)
            generations.append(Generation(self.model, prompt, self.method, most, forced))
        found: dict[int, tuple[float, bool]] = {}
        for index, generation in answer_many(self.model, generations, self.batch_size):
            sampler: Any = generation.sampler
            logits = torch.stack(sampler.logits)
            sampler.logits.clear()
            for number in groups[index][1]:
                key, _, continuation = requests[number]
                found[number] = self._score(logits[: len(continuation)], continuation)
                if key is not None:  # a window of a rolling request has no key
                    self.cache_hook.add_partial("loglikelihood", key, found[number])
        return [found[number] for number in range(len(requests))]

    def _share_prefills(
        self, requests: Sequence[_Request]
    ) -> list[tuple[tuple[int, ...], list[int]]]:
        """Group the numbers of requests that one prefill answers, with its context.

        They are at most one continuation of several tokens, the last, and those of one token, which
        need the prefill's logits only.
        """
        by_context = defaultdict[tuple[int, ...], list[int]](list)
        for number, (_, context, continuation) in enumerate(requests):
            m, most = len(continuation), self.max_length
            if not 1 <= m <= most:
                raise ValueError(
                    f"a continuation has {m} tokens, expected 1 to {most} (max_length)"
                )
            # leaves room for the continuation without its last token
            by_context[tuple(context[m - 1 - most :])].append(number)
        groups = []
        for context, numbers in by_context.items():
            longer = [number for number in numbers if len(requests[number][2]) > 1]
            single = [number for number in numbers if number not in longer]
            groups.append((context, single + longer[:1]))
            groups += [(context, [number]) for number in longer[1:]]
        return groups

    def _score(self, logits: Tensor, continuation: list[int]) -> tuple[float, bool]:
        """Score a continuation of m tokens by logits [m, v], as `_loglikelihood_tokens` does."""
        wanted = torch.tensor(continuation, device=logits.device)
        logs = F.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
        total = float(logs.gather(1, wanted[:, None])[:, 0].sum())
        if math.isnan(total):
            raise FloatingPointError("the model's logits are not finite (NaN or infinite)")
        return total, bool((logits.argmax(dim=-1) == wanted).all())

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **settings: Any
    ) -> Tensor:
        """Continue context [b, n], padded on the left: [b, n + longest answer].

        Each row is a call of `model.generate` by lm-eval.
        """
        n, answers = context.shape[1], list[Tensor]()
        with using(self.model, self.method):
            for row, seen in zip(context, settings.pop("attention_mask").bool(), strict=True):
                prompt = row[seen][None]
                most = max_length - n + prompt.shape[1]
                mask = torch.ones_like(prompt)
                out = super()._model_generate(prompt, most, stop, attention_mask=mask, **settings)
                answers.append(out[0, prompt.shape[1] :])
        tokenizer: Any = self.tokenizer
        padded = pad_sequence(answers, batch_first=True, padding_value=tokenizer.pad_token_id)
        return torch.cat([context, padded], dim=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run lm-eval's command line with one more model. arguments: None takes the process's."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = {argument.partition("=")[0] for argument in arguments}
    if not options or options <= {"-h", "--help"}:
        print(__doc__)
    if "--model" in options and not options & {"--device", "--config"}:
        arguments += ["--device", str(as_device("auto"))]  # lm-eval's own default is cuda:0
    sys.argv[1:] = arguments  # lm-eval reads sys.argv
    with patch.object(GeneralConfigTracker, "_get_model_name", staticmethod(_name_of)):
        cli_evaluate()


def _name_of(
    model_args: str | dict[str, Any] | None,
    name_before: Any = GeneralConfigTracker._get_model_name,
) -> str | None:
    """Name lm-eval's folder of a model's results, with the method and its settings."""
    name, given = name_before(model_args), model_args or {}
    given = simple_parse_args_string(given) if isinstance(given, str) else given
    loading = inspect.signature(PrunedLM.__init__).parameters.keys() | _OF_HF
    settings = [f"{key}={value}" for key, value in given.items() if key not in loading]
    return name and "-".join([name, given.get("method", "lazy"), *settings])


if __name__ == "__main__":
    main()
