"""The invariants of every method, on any model; the library's own tests run them too.

Each takes a model, a method and a prompt of n token ids, and raises AssertionError that names the
difference.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from lazyllm.engine.checks import check_same_as_model
from lazyllm.engine.depth import Depth
from lazyllm.engine.generation import Generation, generate, generate_many
from lazyllm.engine.inputs import Boundary, Selection
from lazyllm.engine.method import Method

_STEPS = 5
_GREEDY: dict[str, Any] = {
    "max_new_tokens": _STEPS,
    "pad_token_id": 0,
    "eos_token_id": None,
    "do_sample": False,
}


def keeping_everything(method: Method) -> Method:
    """Change the method to keep every token. Raises ValueError or TypeError if it refuses that."""
    target = method.target_parameter
    changes = method.keep_all or ({target: 1.0} if target else {})
    return replace(method, **changes)  # type: ignore[type-var]


def can_keep_everything(model: PreTrainedModel, method: Method, prompt: Sequence[int]) -> None:
    """Keeping all tokens gives the model's tokens and logits, computes all, scores none."""
    n, keeping = len(prompt), keeping_everything(method)
    kept = min(keeping.tokens_per_layer(Depth.of(model.config), n))
    declare = "target_parameter = KEY (all at 1.0), or keep_all = {KEY: VALUE, ...}"
    _holds(kept == n, f"{keeping} declares {kept} of {n} tokens: declare what keeps all: {declare}")
    with torch.inference_mode():
        expected = _by_transformers(model, prompt)
        logits = model(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
    out = generate(model, prompt, keeping, _STEPS, ())
    _same("tokens", out.token_ids, expected)
    _same("% of tokens computed", out.pct_prompt_tokens_computed, 100)
    _same("tokens run to score the prompt", out.scoring_tokens, 0)
    _same("ideal speedup", keeping.ideal_speedup(model.config, n), 1)
    worst = (out.first_logits - logits).abs().max().item()
    is_same = torch.equal(out.first_logits, logits)
    _holds(is_same, f"first logits differ from the model's by up to {worst:.3g}")


def counts_what_it_computes(
    model: PreTrainedModel, method: Method, prompt: Sequence[int]
) -> Generation:
    """A method computes what it declares, and each token that a layer runs is counted."""
    n, depth = len(prompt), Depth.of(model.config)
    check_same_as_model(model)  # before counting, as it runs the layers too
    with _tokens_run(model) as runs, _pruning_checked(method):
        first = generate(model, prompt, method, 1, ())
    prefilled, scored = first.computed[0].mean(), first.scoring_tokens
    before = sum(runs) / depth.count - prefilled
    near = before <= scored + 1e-9 and math.isclose(before, scored, abs_tol=0.75)
    _holds(
        near,
        f"layers ran {before:g} tokens before the prefill, {scored} are counted as scoring",
    )
    declares = method.scoring_flops(model.config, n) > 0 or scored == 0
    _holds(
        declares,
        "a model runs before the prefill, but scoring_flops(config, n) is 0: declare what it costs",
    )
    share = 100 * (prefilled + scored) / n
    is_share = math.isclose(first.pct_prompt_tokens_computed, share)
    _holds(is_share, f"% of tokens computed is not {share}")
    out = generate(model, prompt, method, _STEPS, ())
    computed = out.computed
    if not method.adaptive:
        declared = method.tokens_per_layer(depth, n)
        _same("tokens computed in each layer", computed[0].tolist(), declared)
    rises = bool((computed[1:] >= computed[:-1]).all()) and computed.max() <= n
    _holds(
        rises,
        f"counts fall from step to step, or exceed the {n} prompt tokens: {computed.tolist()}",
    )
    _same("scoring takes time", out.scoring_s > 0, out.scoring_tokens > 0)
    _holds(out.ttft_s > out.scoring_s, "the first token came before scoring ended")
    return out


def has_no_state(model: PreTrainedModel, method: Method, prompt: Sequence[int]) -> None:
    """A prompt gives the same result before and after another prompt."""
    first = generate(model, prompt, method, _STEPS, ())
    generate(model, prompt[::-1], method, _STEPS, ())
    again = generate(model, prompt, method, _STEPS, ())
    _same("tokens after another prompt", again.token_ids, first.token_ids)
    _same("selections after another prompt", again.selected, first.selected)
    is_same = torch.equal(first.first_logits, again.first_logits)
    _holds(is_same, "first logits change after another prompt")


def runs_batches_row_by_row(model: PreTrainedModel, method: Method, prompt: Sequence[int]) -> None:
    """A prompt that decodes beside a shorter one gives what it gives alone or in `generate`."""
    from lazyllm import using

    rows = [list(prompt[: max(1, len(prompt) // 2)]), list(prompt)]
    alone = [generate(model, row, method, _STEPS, ()) for row in rows]
    if method.can_batch:
        for number, found in generate_many(model, rows, method, _STEPS, ()):
            row, expected = f"row {number + 1} in a batch", alone[number]
            _same(f"tokens of {row}", found.token_ids, expected.token_ids)
            _same(f"selections of {row}", found.selected, expected.selected)
    with using(model, method):
        for row, expected in zip(rows, alone, strict=True):
            _same("tokens in model.generate", _by_transformers(model, row), expected.token_ids)


def gives_finite_logits(model: PreTrainedModel, method: Method, prompt: Sequence[int]) -> None:
    """The logits are finite and of the model's dtype; meant for half precision."""
    logits = generate(model, prompt, method, _STEPS, ()).first_logits
    _holds(bool(logits.isfinite().all()), "logits are not finite")
    _same("dtype of the logits", logits.dtype, model.dtype)


def _by_transformers(model: Any, prompt: Sequence[int]) -> list[int]:
    """Run `model.generate` greedily."""
    ids = torch.tensor([prompt])
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), **_GREEDY)
    return whole[0, len(prompt) :].tolist()


def _same(what: str, found: object, expected: object) -> None:
    _holds(found == expected, f"{what}: {found}, expected {expected}")


def _holds(condition: bool, message: str) -> None:
    if not condition:  # not `assert`, which `python -O` removes
        raise AssertionError(message)


@contextmanager
def _pruning_checked(method: Method) -> Iterator[None]:
    """Check that `prune` leaves the positions it is given as they are, and scores none NaN."""
    prune = type(method).prune

    def checked(self: Method, at: Boundary, recorded: list[torch.Tensor]) -> Selection:
        before, kept = at.positions.clone(), prune(self, at, recorded)
        _holds(
            torch.equal(at.positions, before),
            f"changed `at.positions` after layer {at.layer}: expected a copy",
        )
        return kept

    kind: Any = type(method)
    score: Any = getattr(kind, "score", None)  # a `Prune` has it

    def scored(self: Any, at: Boundary, recorded: list[torch.Tensor]) -> Any:
        scores = score(self, at, recorded)
        has_nan = torch.is_tensor(scores) and bool(scores.isnan().any())
        _holds(not has_nan, f"scored NaN after layer {at.layer}")
        return scores

    with ExitStack() as patches:
        patches.enter_context(patch.object(kind, "prune", checked))
        if score is not None:
            patches.enter_context(patch.object(kind, "score", scored))
        yield


@contextmanager
def _tokens_run(model: PreTrainedModel) -> Iterator[list[int]]:
    """List the number of tokens in each run of a layer so far."""
    layers: Any = model.model.layers
    runs: list[int] = []

    def note(module: Any, args: tuple[Any, ...]) -> None:
        runs.append(args[0].shape[1])

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(note))
        yield runs
