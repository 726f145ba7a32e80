"""The start-up check: rounding in half precision is accepted, an unsupported structure is
refused in every dtype.
"""

import logging
import re
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lazyllm
from lazyllm.engine.checks import check_same_as_model
from lazyllm.errors import UserError
from lazyllm.methods import Baseline
from tests.lazyllm.engine.architecture_matrix import is_offered
from tests.reference import VARIANTS, WINDOW, attention_of, random_variant

# with the share that may be rounding
HALVES = {"bfloat16": (torch.bfloat16, 5e-2), "float16": (torch.float16, 1e-2)}
EVERY = {**{name: dtype for name, (dtype, _) in HALVES.items()}, "float32": torch.float32}
FIRST_IDS = list(range(8))  # the prompt that the check took before
OUTLIER = 20_000.0


def outlier_model(dtype: torch.dtype, token_ids: slice) -> PreTrainedModel:
    """A model in which these tokens have an outlier of 20,000 in their first feature, which the
    last MLP takes away.

    So what that MLP rounds is huge beside all other features: real checkpoints do this at their
    special tokens. As many kernels do, the MLP rounds several rows otherwise than one: in the last
    bit, here always up.
    """
    model: Any = random_variant("llama", 0, "sdpa", dtype)
    mlp, width = model.model.layers[-1].mlp, model.config.hidden_size
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0
        model.model.embed_tokens.weight[token_ids, 0] = OUTLIER
        for layer in model.model.layers:  # no other layer writes the feature
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
        model.model.layers[-1].post_attention_layernorm.weight[0] = 1
        for part in (
            mlp.gate_proj,
            mlp.up_proj,
        ):  # each sqrt(width) after the norm, if the outlier is all there is
            part.weight[0] = 0
            part.weight[0, 0] = 1
        mlp.down_proj.weight[0, 0] = -OUTLIER / width

    def round_up(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
        return out * (1 + torch.finfo(out.dtype).eps) if out.shape[1] > 1 else out

    mlp.register_forward_hook(round_up)
    return model


@torch.inference_mode()
def rounding_share(model: Any, token_ids: list[int]) -> float:
    """By how much transformers' own cached steps differ from its run without a cache, as a share
    of the logits.
    """
    ids, logits, cache = torch.tensor([token_ids]), list[torch.Tensor](), None
    for part in ids.split([len(token_ids) - 2, 1, 1], dim=1):
        out = model(part, past_key_values=cache, use_cache=True)
        logits.append(out.logits[0, -1])
        cache = out.past_key_values
    at_once = model(ids, use_cache=False).logits[0, -3:]
    return ((torch.stack(logits) - at_once).abs().max() / at_once.abs().max()).item()


def middle_ids(model: PreTrainedModel, seed: int) -> list[int]:
    quarter, draw = model.config.vocab_size // 4, torch.Generator().manual_seed(seed)
    return torch.randint(quarter, 3 * quarter, (8,), generator=draw).tolist()


def dtypes_seen(model: Any) -> set[torch.dtype]:
    """A set that will hold the dtypes in which the first layer runs."""
    seen = set[torch.dtype]()
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.add(args[0].dtype))
    return seen


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    """The addresses and values of all weights and buffers, and the hooks of all modules."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    hooks = {
        name: [list(part._forward_pre_hooks.values()), list(part._forward_hooks.values())]
        for name, part in model.named_modules()
    }
    return {
        "tensors": {
            name: (tensor.data_ptr(), tensor.dtype, tensor.double().sum().item())
            for name, tensor in tensors
        },
        "hooks": hooks,
        "attention": model.config._attn_implementation,
    }


@pytest.mark.parametrize("name", HALVES)
def test_outliers_of_the_first_tokens_are_not_met(name: str) -> None:
    dtype, share = HALVES[name]
    model = outlier_model(dtype, slice(0, 8))
    assert rounding_share(model, FIRST_IDS) > 1.5 * share  # a check on these tokens would refuse
    assert all(rounding_share(model, middle_ids(model, seed)) < share for seed in range(5))
    seen = dtypes_seen(model)
    check_same_as_model(model)
    assert seen == {dtype}  # nothing had to be repeated


@pytest.mark.parametrize("name", HALVES)
def test_rounding_is_told_from_structure_in_float32(name: str) -> None:
    dtype, share = HALVES[name]
    model = outlier_model(dtype, slice(None))
    assert all(rounding_share(model, middle_ids(model, seed)) > 1.5 * share for seed in range(5))
    seen, before = dtypes_seen(model), state_of(model)
    check_same_as_model(model)
    assert seen == {dtype, torch.float32}
    assert state_of(model) == before
    assert len(lazyllm.generate(model, FIRST_IDS, Baseline(), 3, ()).token_ids) == 3
    assert seen == {dtype, torch.float32}


class Mixing:
    """A hook: what leaves a layer is the causal mean over the last two tokens of a call."""

    def __call__(self, _: Any, __: Any, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden + self.before(hidden)) / 2

    def before(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)


class Remembering(Mixing):
    """The same over the last two tokens of the text: the last one of a call is kept for the next
    step.
    """

    kept: torch.Tensor

    def before(self, hidden: torch.Tensor) -> torch.Tensor:
        first = hidden[:, :1] if hidden.shape[1] > 1 else self.kept
        self.kept = hidden[:, -1:].clone()
        return torch.cat([first, hidden[:, :-1]], dim=1)


def mix_tokens(model: Any, layer: int = 2) -> None:
    model.model.layers[layer].register_forward_hook(Mixing())


def keep_a_state(model: Any, layer: int = 2) -> None:
    model.model.layers[layer].register_forward_hook(Remembering())


def work_outside_the_layers(model: Any, _: int = 0) -> None:
    """What the first feature holds after the last norm is added to all of them."""

    def add(_: Any, __: Any, out: Any) -> Any:
        out.last_hidden_state = out.last_hidden_state + out.last_hidden_state[..., :1]
        return out

    model.model.register_forward_hook(add)


FAULTS = [mix_tokens, keep_a_state, work_outside_the_layers]


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("build", [random_variant, outlier_model], ids=["plain", "with outliers"])
def test_unsupported_model_is_refused_in_every_dtype(
    build: Any, fault: Callable[[Any], None], dtype: str
) -> None:
    is_plain = build is random_variant
    model = (
        build("llama", 0, "sdpa", EVERY[dtype]) if is_plain else build(EVERY[dtype], slice(None))
    )
    fault(model)
    before = state_of(model)
    for _ in range(2):  # also when it is tried again
        with pytest.raises(
            UserError,
            match=r"LlamaForCausalLM is not supported: .* other logits than the model \(by",
        ):
            check_same_as_model(model)
    assert state_of(model) == before


def test_state_that_is_refused_is_one_that_the_model_itself_keeps_rightly() -> None:
    model = random_variant("llama", 0, "sdpa", torch.float32)
    keep_a_state(model)
    assert rounding_share(model, FIRST_IDS) < 1e-5


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize("fault", [mix_tokens, keep_a_state])
@pytest.mark.parametrize("layer", range(4))
def test_fault_in_any_layer_of_any_kind_is_found(fault: Any, layer: int, dtype: str) -> None:
    """gemma3 has both kinds of layers, in turn."""
    model = random_variant("gemma3", 0, "sdpa", EVERY[dtype])
    fault(model, layer)
    with pytest.raises(UserError, match="other logits than the model"):
        check_same_as_model(model)


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_architecture_is_accepted_in_every_dtype(
    variant: str, dtype: str, caplog: Any
) -> None:
    for attention in ("sdpa", "eager"):
        if is_offered(variant, attention):
            check_same_as_model(random_variant(variant, 0, attention, EVERY[dtype]))
    assert not [record for record in caplog.records if record.name.startswith("lazyllm")]


@pytest.mark.parametrize("variant", VARIANTS)
def test_text_is_longer_than_the_shortest_window(variant: str) -> None:
    model: Any = random_variant(variant, 0, attention_of(variant), torch.float32)
    lengths = list[int]()
    model.model.layers[0].register_forward_pre_hook(
        lambda _, args: lengths.append(args[0].shape[1])
    )
    check_same_as_model(model)
    has_window = getattr(model.config, "sliding_window", None) is not None
    assert max(lengths) > (WINDOW + 2 if has_window else 2)


@pytest.mark.parametrize("packed", [torch.int32, torch.float8_e4m3fn])
def test_quantised_weights_leave_the_cause_open(
    packed: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = outlier_model(torch.bfloat16, slice(None))
    model.model.layers[3].mlp.register_buffer("qweight", torch.zeros(4, 4).to(packed))
    seen = dtypes_seen(model)
    with caplog.at_level(logging.WARNING):
        check_same_as_model(model)
        check_same_as_model(model)
    (line,) = caplog.messages
    assert re.search(
        r"rounding or an unsupported structure, and float32 cannot tell: its weights are quantised",
        line,
    )
    assert seen == {torch.bfloat16}


def test_model_that_cannot_run_in_float32_leaves_the_cause_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = outlier_model(torch.bfloat16, slice(None))

    def refuse(_: Any, args: Any) -> None:
        if args[0].dtype == torch.float32:
            raise RuntimeError("expected BFloat16")

    model.model.layers[1].mlp.register_forward_pre_hook(refuse)
    before = state_of(model)
    with caplog.at_level(logging.WARNING):
        check_same_as_model(model)
    assert "expected BFloat16" in caplog.text
    assert state_of(model) == before


def test_full_memory_in_float32_is_not_taken_for_an_unsupported_model() -> None:
    model: Any = outlier_model(torch.bfloat16, slice(None))

    def fill(_: Any, args: Any) -> None:
        if args[0].dtype == torch.float32:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.model.layers[1].mlp.register_forward_pre_hook(fill)
    before = state_of(model)
    with pytest.raises(torch.OutOfMemoryError):
        check_same_as_model(model)
    assert state_of(model) == before


@pytest.mark.parametrize("dtype", EVERY)
def test_logits_that_are_not_finite_are_the_model_s_own(dtype: str) -> None:
    model: Any = random_variant("llama", 0, "sdpa", EVERY[dtype])
    model.model.layers[1].register_forward_hook(lambda _, __, out: out * float("inf"))
    with pytest.raises(FloatingPointError, match="the model's own logits are not finite"):
        check_same_as_model(model)


def test_checks_of_two_threads_wait_for_one_another() -> None:
    model: Any = outlier_model(torch.bfloat16, slice(None))
    errors, threads = list[Exception](), list[Thread]()

    def check() -> None:
        try:
            check_same_as_model(model)
        except Exception as error:
            errors.append(error)

    def start_another(_: Any, args: Any) -> None:
        if args[0].dtype == torch.float32 and not threads:  # while a layer has other weights
            threads.append(Thread(target=check))
            threads[0].start()
            threads[0].join(0.2)

    model.model.layers[1].register_forward_pre_hook(start_another)
    check()
    threads[0].join()
    assert errors == []
