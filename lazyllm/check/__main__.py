"""The command `check`: run every invariant on a method, on small random models.

lazyllm-bench check METHOD [KEY=VALUE ...]     e.g. check keep_last layer=2 keep=0.25

METHOD is a name that `lazyllm-bench methods` lists. The keys are its hyperparameters, as numbers, words, or mappings
such as schedule='{1: 0.5}'. The models have 4 layers and the prompts up to 40 tokens, so give small numbers.
Exit code 1 if an invariant fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lazyllm.errors import UserError, parser_of, place_of, reason_of
from lazyllm.methods import Method, make

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


def settings_from(arguments: Sequence[str]) -> dict[str, Any]:
    """{key: value} of KEY=VALUE arguments, values read as YAML. Raises UserError."""
    import yaml

    settings = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        try:
            settings[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"{argument}: expected a number, word or mapping as the value") from error
        if not equals:
            raise UserError(f"{argument}: expected KEY=VALUE, e.g. keep=0.5")
    return settings


def random_model(name: str, dtype: str) -> PreTrainedModel:
    """A small random model of that name. Its attention is far from even, so that scores do not tie."""
    from transformers import AutoConfig

    from lazyllm.models.load import random_weights
    from lazyllm.spec import ModelSpec

    model_type, own, attention = MODELS[name]
    sizes: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **sizes | own)
    return random_weights(config, ModelSpec(name, "dummy", dtype, "cpu", attn_implementation=attention)).eval()


def checks(method: Method) -> Iterator[tuple[str, Callable[[], object]]]:
    """(description, check) of every invariant on every model; a check raises if its invariant fails."""
    from lazyllm.check import invariants

    prompt = [1 + (7 * position + position**2) % 96 for position in range(TOKENS)]
    lengths = (1, 2, 3, TOKENS)
    for name in MODELS:
        exact, half = random_model(name, "float64"), random_model(name, "bfloat16")

        def run(invariant: Callable[..., object], ns: Sequence[int] = lengths, model: Any = exact) -> Callable[[], Any]:
            return lambda: [invariant(model, method, prompt[:n]) for n in ns]

        def keeps(model: Any = exact) -> None:
            keeping = invariants.keeping_everything(method)
            for n in lengths:
                invariants.is_the_model(model, keeping, prompt[:n])

        yield f"{name}: keeping every token gives the model's own output", keeps
        yield f"{name}: counts are those declared and run", run(invariants.counts_what_it_computes)
        yield f"{name}: no state between prompts", run(invariants.has_no_state)
        yield (
            f"{name}: a row of a batch gives what it gives alone",
            run(invariants.runs_batches_row_by_row, lengths[1:]),
        )
        yield f"{name}: finite logits in bfloat16", run(invariants.gives_finite_logits, model=half)


def main(arguments: Sequence[str]) -> int:
    """Print a line for each check; returns the exit code. Raises UserError for bad settings."""
    parser = parser_of("check", __doc__)
    parser.add_argument("method", metavar="METHOD")
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*")
    options = parser.parse_args(arguments)
    method = make(options.method, settings_from(options.settings))
    try:
        counts = method.tokens_per_layer(LAYERS, TOKENS)
    except (ValueError, TypeError) as error:
        raise UserError(f"method {options.method!r}: {error}") from error
    print(f"{method}: tokens computed in each layer, of {TOKENS}: {', '.join(map(str, counts))}")
    if min(counts) == TOKENS:
        print("nothing is dropped: give settings that drop tokens, or the checks prove little")
    reasons = []
    for what, check in checks(method):
        try:
            check()
            print(f"ok      {what}", flush=True)
        except Exception as error:  # whatever the method does
            is_said = isinstance(error, AssertionError | UserError)
            reason = str(error) if is_said else f"{reason_of(error)} ({place_of(error)})"
            print(f"failed  {what}: {'the same' if reason in reasons else reason}", flush=True)
            reasons.append(reason)
    print(f"{len(reasons)} failed" if reasons else "all hold")
    return 1 if reasons else 0
