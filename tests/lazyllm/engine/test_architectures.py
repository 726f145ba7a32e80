"""Every supported kind of decoder, with every method, dtype and attention; and refused models."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import lazyllm
from lazyllm.engine.architecture import Surroundings, check_surroundings
from lazyllm.engine.checks import check_same_as_model
from lazyllm.engine.decoder import open_decoder
from lazyllm.engine.depth import Depth
from lazyllm.engine.flops import LayerShape, prefill_flops, windows_of
from lazyllm.engine.inputs import Prompt
from lazyllm.errors import UserError
from lazyllm.methods import Baseline, Lazy, RandomDrop
from tests.conftest import ROOT
from tests.helpers import TOLERANCE, VOCABULARY, slow
from tests.lazyllm.engine.architecture_matrix import Cell, cells, check
from tests.lazyllm.engine.test_exactness import check as check_exact
from tests.lazyllm.methods.method_matrix import LISTED
from tests.reference import (
    SMALL,
    VARIANTS,
    WINDOW,
    attention_of,
    casts_in_float64,
    forward_reference,
    random_variant,
)

UNLIKE, LINEAR = "is not built like a Llama", "layers of type linear_attention"
# Refused models: model type, settings in addition to `SMALL`, and a part of the message
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "GPT-2": ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 97}, UNLIKE),
    "Mamba": ("mamba", {}, UNLIKE),
    "Jamba": ("jamba", {}, UNLIKE),
    "LFM2 (convolutions)": ("lfm2", {}, UNLIKE),
    "Qwen3-Next (linear attention)": ("qwen3_next", {"num_experts": 4}, LINEAR),
    "MiniMax (linear attention)": ("minimax", {}, LINEAR),
    "Granite 4 hybrid (Mamba)": ("granitemoehybrid", {}, LINEAR),
    "Llama 4 (chunked attention)": ("llama4_text", {}, "layers of type chunked_attention"),
    "Gemma 3n (states between layers)": (
        "gemma3n_text",
        {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 97},
        "changes the hidden states between its layers",
    ),
    "Gemma 4 (inputs by layer)": (
        "gemma4_text",
        {"vocab_size_per_layer_input": 97},
        "gives its layers per_layer_input",
    ),
    "GPT-OSS (attention sinks)": ("gpt_oss", {"num_local_experts": 4}, "attends with s_aux"),
    "DiffLlama (two attentions a layer)": ("diffllama", {}, "8 of 4 watched layers"),
}


def refusal_of(name: str) -> str:
    """The message that refuses a model of `REFUSED` at start-up; "" if it is not refused."""
    kind, settings, _ = REFUSED[name]
    # of which each kind has its own
    common = {key: value for key, value in SMALL.items() if key != "rope_parameters"}
    config = AutoConfig.for_model(kind, **(({} if kind == "gpt2" else common) | settings))
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    try:
        check_same_as_model(model)
    except UserError as error:
        return str(error)
    return ""


# layers see tokens in different ways
KINDS = ("llama", "mistral, window", "gemma2", "llama, dynamic NTK")
# the bases' own rows, on one of each kind
BASES = [
    Cell(architecture, method, "float64", attention_of(architecture))
    for architecture in KINDS
    for method in ("a Prune", "a Select")
]


def is_slow(cell: Cell) -> bool:
    """float64 shows what is exact, by one attention implementation: LazyLLM in all, each other
    method in one.
    """
    exact = (cell.dtype, cell.attention) == ("float64", attention_of(cell.architecture))
    kind = KINDS[[*LISTED].index(cell.method) % len(KINDS)]
    return not exact or not (cell.architecture == kind or cell.method in ("baseline", "lazy"))


CELLS = [
    pytest.param(cell, marks=[pytest.mark.slow] * is_slow(cell), id=str(cell)) for cell in cells()
]


@pytest.mark.parametrize("cell", [*CELLS, *(pytest.param(cell, id=str(cell)) for cell in BASES)])
def test_matrix(cell: Cell) -> None:
    check(cell)


@pytest.mark.parametrize("variant", VARIANTS)
def test_reference_is_transformers_forward(variant: str) -> None:
    model = random_variant(variant, 5, attention_of(variant))
    for length in (1, 3, WINDOW + 1, 16, 17, 30):
        prompt = np.random.default_rng(length).integers(0, VOCABULARY, length).tolist()
        with torch.no_grad(), casts_in_float64():
            logits = model(torch.tensor([prompt])).logits[0].numpy()
        np.testing.assert_allclose(forward_reference(model, prompt), logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_random_lengths_and_schedules(variant: str, seed: int) -> None:
    rng = random.Random(f"{variant} {seed}")
    model = random_variant(variant, seed, attention_of(variant))
    schedule = {
        layer: rng.choice([0.1, 0.3, 0.5, 0.8])
        for layer in sorted(rng.sample(range(1, 5), rng.randint(1, 3)))
    }
    prompt = rng.choices(range(VOCABULARY), k=rng.choice([2, WINDOW + 2, 21, 33]))
    if "LongRoPE" in variant and len(prompt) < 17:
        prompt *= 9
    steps, prune_generated = rng.randint(3, 8), rng.random() < 0.4
    with casts_in_float64():
        check_exact(model, prompt, schedule, steps, prune_generated)


def test_lengths_at_which_a_longrope_changes_are_refused() -> None:
    model = random_variant("phi3, LongRoPE and window", 0)
    assert len(lazyllm.generate(model, list(range(10)), Lazy({2: 0.5}), 6, ()).token_ids) == 6
    assert len(lazyllm.generate(model, list(range(17)), Lazy({2: 0.5}), 6, ()).token_ids) == 6
    # the last new token is not run
    assert len(lazyllm.generate(model, list(range(10)), Lazy({2: 0.5}), 7, ()).token_ids) == 7
    with pytest.raises(
        ValueError, match="beyond 16 tokens, and 10 prompt tokens with up to 8 new ones would"
    ):
        lazyllm.generate(model, list(range(10)), Lazy({2: 0.5}), 8, ())
    # the prompt that the model sees counts
    assert len(lazyllm.generate(model, list(range(17)), RandomDrop(0.5), 3, ()).token_ids) == 3


def test_growing_rope_begins_anew_with_every_prompt() -> None:
    model, short, long = random_variant("llama, dynamic NTK", 0), list(range(12)), list(range(60))
    alone = lazyllm.generate(random_variant("llama, dynamic NTK", 0), short, Baseline(), 12, ())
    before = model.model.rotary_emb.inv_freq.clone()
    lazyllm.generate(model, long, Baseline(), 3, ())
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert lazyllm.generate(model, short, Baseline(), 12, ()).token_ids == alone.token_ids


@pytest.mark.parametrize("variant", VARIANTS)
def test_surroundings_are_the_models_own_and_leave_it_as_it_was(variant: str) -> None:
    """What the first layer is given and what the head returns, against hooks on a run of the
    model itself.
    """
    model: Any = random_variant(variant, 0, attention_of(variant), torch.float32)
    token_ids, given, normed = torch.arange(9), list[dict[str, Any]](), list[torch.Tensor]()
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: given.append({"hidden_states": args[0]} | kwargs),
            with_kwargs=True,
        )
        for layer in model.model.layers
    ]
    hooks.append(model.model.norm.register_forward_hook(lambda *call: normed.append(call[2])))
    with torch.inference_mode():
        logits = model(token_ids[None], use_cache=False).logits
        for hook in hooks:
            hook.remove()
        modules = dict(model.named_modules())
        check_surroundings(model)
        surroundings = Surroundings(model)
        hidden, calls = surroundings.before_layers(token_ids, torch.arange(9))
        assert torch.equal(surroundings.logits(normed[0]), logits)
    assert torch.equal(hidden, given[0]["hidden_states"])
    for ours, theirs in zip(calls, given, strict=True):
        for found, expected in zip(
            ours["position_embeddings"], theirs["position_embeddings"], strict=True
        ):
            assert torch.equal(found, expected)
    kinds = len({id(call["position_embeddings"]) for call in calls})
    assert kinds == (2 if variant == "gemma3" else 1)
    assert dict(model.named_modules()) == modules
    assert not any(module._forward_hooks for module in modules.values())


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_model_is_refused_with_the_reason(name: str) -> None:
    expected = REFUSED[name][2]
    assert expected in refusal_of(name)


class Mixing(nn.Module):
    """A causal mean over the last two tokens, like a convolution in a layer."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        before = torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)
        return (hidden + before) / 2


def _llama(**overrides: Any) -> PreTrainedModel:
    return random_variant("llama", 0, "sdpa", torch.float32, **overrides)


def mix_tokens(model: Any) -> None:
    model.model.layers[2].mlp = nn.Sequential(Mixing(), model.model.layers[2].mlp)


def drop_layers(model: Any) -> None:
    model.model.layers = model.model.layers[:2]


def name_a_window(model: Any) -> None:
    model.config.sliding_window = 5  # which a Llama does not heed


def share_attention(model: Any) -> None:
    model.model.layers[3].self_attn = model.model.layers[
        2
    ].self_attn  # whose K and V it then shares


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (mix_tokens, "other logits than the model"),
        (drop_layers, "2 modules in `layers`, but num_hidden_layers=4"),
        (name_a_window, "the last 5 tokens by its config"),
        (share_attention, "other logits than the model"),
    ],
)
def test_changed_model_is_refused_at_its_first_generation(
    change: Callable[[Any], None], message: str
) -> None:
    model = _llama()
    change(model)
    with pytest.raises(UserError, match=message):
        lazyllm.generate(model, [1, 2, 3], Baseline(), 2, ())


def test_model_that_lazyllm_did_not_load_is_checked_once() -> None:
    model, logits = _llama(), list[None]()
    model.lm_head.register_forward_hook(lambda *_: logits.append(None))
    counts = []
    for _ in range(2):
        lazyllm.generate(model, [1, 2, 3], Baseline(), 2, ())
        counts.append(len(logits))
    assert counts[1] - counts[0] == 2 < counts[0]


def test_full_memory_is_not_taken_for_an_unsupported_model() -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = _llama()
    model.model.layers[2].mlp.forward = full
    with pytest.raises(torch.OutOfMemoryError):
        check_same_as_model(model)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("variant", VARIANTS)
def test_flops_are_those_that_run(variant: str) -> None:
    model, n = random_variant(variant, 0, "eager", torch.float32), 300
    model.config.max_position_embeddings = 512
    tokens = Lazy({2: 0.6}).tokens_per_layer(Depth.of(model.config), n)
    with torch.inference_mode(), open_decoder(model) as decoder:
        session = Lazy({2: 0.6}).start(decoder, Prompt(torch.arange(n) % VOCABULARY), 1)
        with FlopCounterMode(display=False) as counter:
            session.prefill(torch.arange(n) % VOCABULARY)
    shape = LayerShape.of(model.config)
    windows = windows_of(model.config)
    pairs = [
        sum(
            1
            for query in range(m)
            for key in range(m)
            if key <= query and (window is None or query - key < window)
        )
        for m, window in zip(tokens, windows, strict=True)
    ]
    layers = sum(m * shape.linear_flops for m in tokens) + 2 * shape.width * VOCABULARY
    assert prefill_flops(model.config, tokens) == layers + sum(pairs) * shape.pair_flops
    # eager attention computes every pair of a block in a window, else every pair; the pruning layer
    # the row of Eq. 1
    every_pair = sum(m * m for m in tokens) * shape.pair_flops
    attention = counter.get_total_flops() - layers - tokens[1] * shape.pair_flops // 2
    least = every_pair if set(windows) == {None} else sum(pairs) * shape.pair_flops
    # cos and sin are a product in some models
    assert least <= attention <= every_pair + 0.01 * layers


def test_docs_list_the_architectures_of_the_matrix_and_the_refusals() -> None:
    text = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    assert "".join(f"- {name}\n" for name in VARIANTS) in text
    for name, (_, _, reason) in REFUSED.items():
        assert f"| {name} | {reason} |" in text
