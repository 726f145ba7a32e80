"""The command `check`: run every invariant on a method, on small random models.

lazyllm-bench check METHOD [KEY=VALUE ...]     e.g. check keep_last layer=2 keep=0.25

METHOD is a name that `lazyllm-bench methods` lists, or a file such as mine.py. The keys are its
hyperparameters, as numbers, words, or mappings such as schedule='{1: 0.5}'. The models have 4
layers and the prompts up to 40 tokens, so give small numbers.
Exit code 1 if an invariant fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lazyllm.engine.depth import Depth
from lazyllm.errors import UserError, parser_of, place_of, reason_of
from lazyllm.methods import Method, Sparse, about_the_method, make

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYERS, TOKENS = 4, 40
# {name: (transformers' model type, its settings, attention)}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {}, "sdpa"),
    "mistral, sliding window": ("mistral", {"sliding_window": 9}, "eager"),
    "qwen3": ("qwen3", {}, "sdpa"),
    "gemma2": ("gemma2", {"sliding_window": 9, "query_pre_attn_scalar": 16}, "eager"),
}
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,  # attention is far from even, so that scores do not tie
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def settings_from(arguments: Sequence[str]) -> dict[str, Any]:
    """Read {key: value} of KEY=VALUE arguments, values as YAML. Raises UserError."""
    import yaml

    settings = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        try:
            settings[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not equals:
            raise UserError(
                f"{argument}: expected KEY=VALUE, the value a number, word or mapping, e.g. keep=1"
            )
    return settings


def random_model(name: str, dtype: str) -> PreTrainedModel:
    """Make a small random model of that name."""
    from transformers import AutoConfig

    from lazyllm.models.load import random_weights
    from lazyllm.spec import ModelSpec

    model_type, settings, attention = MODELS[name]
    config = AutoConfig.for_model(model_type, **SIZES | settings)
    spec = ModelSpec(name, "dummy", dtype, "cpu", attn_implementation=attention)
    return random_weights(config, spec).eval()


def checks() -> Iterator[tuple[str, Callable[..., object], PreTrainedModel, list[list[int]]]]:
    """Yield every check: its description, and an invariant, a model and prompts for it."""
    from lazyllm.check import invariants

    whole = [1 + (7 * position + position**2) % 96 for position in range(TOKENS)]
    prompts = [whole[:n] for n in (1, 2, 3, TOKENS)]
    exact: dict[str, Callable[..., object]] = {
        "keeping every token gives the model's own output": invariants.can_keep_everything,
        "counts are those declared and run": invariants.counts_what_it_computes,
        "no state between prompts": invariants.has_no_state,
        "in a batch and in model.generate as alone": invariants.runs_batches_row_by_row,
    }
    for name in MODELS:
        model = random_model(name, "float64")
        for what, invariant in exact.items():
            yield f"{name}: {what}", invariant, model, prompts
        half = random_model(name, "bfloat16")
        yield f"{name}: finite logits in bfloat16", invariants.gives_finite_logits, half, prompts


def main(arguments: Sequence[str]) -> int:
    """Run the command `check`: a line for each invariant. Returns the exit code."""
    parser = parser_of("check", __doc__)
    parser.add_argument("method", metavar="METHOD")
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*")
    options = parser.parse_args(arguments)
    with about_the_method(f"method {options.method!r}"):
        method = make(options.method, settings_from(options.settings))
        counts = method.tokens_per_layer(Depth(LAYERS), TOKENS)
        rises = any(not 0 < m <= before for before, m in pairwise([TOKENS, *counts]))
    if len(counts) != LAYERS or rises:
        raise UserError(
            f"method {options.method!r} declares {counts} tokens in the layers: expected {LAYERS} "
            f"whole numbers of {TOKENS} or less, none above the one before"
        )
    in_layers = ", ".join(map(str, counts))
    print(f"{method}: tokens computed in each layer, of {TOKENS}: {in_layers}")
    if min(counts) == TOKENS and not isinstance(method, Sparse):
        print("nothing is dropped: give settings that drop tokens, or the checks prove little")
    failed = _run_checks(method)
    if repeated := failed.total() - len(failed):
        print(f"{failed.total()} failed, {repeated} of them for a reason that stands above")
    else:
        print(f"{len(failed)} failed" if failed else "all hold")
    return 1 if failed else 0


def _run_checks(method: Method) -> Counter[str]:
    """Print a line for each check that holds, and each reason once. Returns {reason: failures}."""
    failed = Counter[str]()
    for what, invariant, model, prompts in checks():
        try:
            for prompt in prompts:
                invariant(model, method, prompt)
            print(f"ok      {what}", flush=True)
        except Exception as error:  # whatever the method does
            is_message = isinstance(error, AssertionError | UserError)
            reason = str(error) if is_message else f"{reason_of(error)} ({place_of(error)})"
            failed[reason] += 1
            if failed[reason] == 1:
                print(f"failed  {what}: {reason}", flush=True)
    return failed
