"""Presets: shapes against the published numbers of parameters, and a dummy that the loop over
layers can run.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import lazyllm
from lazyllm.engine.checks import check_same_as_model
from lazyllm.engine.flops import LayerShape
from lazyllm.errors import UserError
from lazyllm.models.config import load_config
from lazyllm.presets import PRESETS, fields_of
from lazyllm.spec import ModelSpec

# As the hub counts the checkpoints' safetensors: an index' total_size / 2 (bfloat16), or the API's
# safetensors.total
PUBLISHED = {
    "llama2": 6_738_415_616,
    "llama2-base": 6_738_415_616,
    "xgen": 6_895_702_016,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "qwen3-0.6b": 751_632_384,
    "qwen3-8b": 8_190_735_360,
    "smollm2": 134_515_008,
    "smollm2-135m": 134_515_008,
}
STORED_TWICE = {"qwen3-0.6b"}  # its files hold the tied embedding as lm_head too


@pytest.mark.parametrize(
    "name", [name for name, preset in PRESETS.items() if preset.architecture is not None]
)
def test_presets_have_the_published_number_of_parameters(offline, name: str) -> None:
    config = load_config(ModelSpec(name, "dummy"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    stored = parameters + (model.lm_head.weight.numel() if name in STORED_TWICE else 0)
    assert stored == pytest.approx(PUBLISHED[name], rel=1e-3)
    # FLOPs are counted for matrices of the same sizes
    layer_parameters = sum(
        parameter.numel() for key, parameter in model.named_parameters() if "layers." in key
    )
    assert LayerShape.of(config).linear_flops // 2 * config.num_hidden_layers == pytest.approx(
        layer_parameters, rel=1e-3
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_thin_model_of_each_shape_runs_in_the_loop_over_layers(name: str) -> None:
    """All settings except sizes are the preset's: RoPE, norms, multipliers, sliding windows,
    tied embeddings.
    """
    config = load_config(ModelSpec(name, "dummy"))
    layers, head_dim = min(config.num_hidden_layers, 6), LayerShape.of(config).head_dim
    thin = {
        "hidden_size": 2 * head_dim,
        "intermediate_size": 64,
        "vocab_size": 64,
        "num_hidden_layers": layers,
    }
    kinds = (
        {"layer_types": config.layer_types[:layers]} if getattr(config, "layer_types", None) else {}
    )
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config.update(thin | kinds | tokens | {"num_attention_heads": 2, "num_key_value_heads": 1})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    check_same_as_model(model.eval())


def test_model_of_this_package_has_a_shape() -> None:
    """The model's card gives these sizes."""
    shape = fields_of("tiny")
    assert (shape["num_hidden_layers"], shape["hidden_size"]) == (8, 128)


def is_installed(name: str) -> bool:
    """Whether a preset's checkpoint is a folder or a file here."""
    try:
        return Path(PRESETS[name].find()).exists()
    except UserError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", [*filter(is_installed, PRESETS)])
def test_installed_preset_loads_in_every_dtype(name: str, dtype: str) -> None:
    model, tokenizer = lazyllm.load_model(name, dtype=dtype, device="cpu")
    assert tokenizer is not None
    ids = tokenizer("The quick brown fox jumps over the lazy dog.").input_ids
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, -1]
    found = lazyllm.generate(model, ids, lazyllm.methods.Baseline(), 2, ()).first_logits
    assert found.dtype == getattr(torch, dtype)
    assert (found - expected).abs().max() <= 0.05 * expected.abs().max()
