"""Models of random weights, by a preset's name or by size: times depend on shapes, not on values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lazyllm.presets import PRESETS
from lazyllm.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SHAPES: dict[str, dict[str, Any]] = {
    **{name: dict(preset.architecture) for name, preset in PRESETS.items() if preset.architecture is not None},
    "llama-1b": dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, tie_word_embeddings=True,
    ),  # Llama 3.2 1B with a plain RoPE, as in the stored measurements
}  # fmt: skip
SIZES = {
    "layers": "num_hidden_layers", "width": "hidden_size", "mlp": "intermediate_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "vocab": "vocab_size",
}  # fmt: skip


def config_of(shape: str, max_tokens: int) -> PreTrainedConfig:
    """The config of a shape. max_tokens: prompt and answer together. Raises ValueError as `fields_of`."""
    from transformers import AutoConfig

    fields: dict[str, Any] = fields_of(shape) | {"max_position_embeddings": max_tokens}
    return AutoConfig.for_model(**fields)


def fields_of(shape: str) -> dict[str, Any]:
    """A config's fields, of a name in `SHAPES` or of sizes such as "layers=16,width=1024,heads=16,kv_heads=4".

    Default sizes: heads of width 64, as many key heads, an MLP of 8/3 of the width, 32,000 words. Raises ValueError for
    another shape.
    """
    if shape in SHAPES:
        return {"model_type": "llama"} | SHAPES[shape]
    sizes: dict[str, int] = {}
    for part in shape.split(","):
        name, _, value = part.partition("=")
        if name not in SIZES or not value.isdecimal():
            raise ValueError(
                f"--shape is one of {', '.join(SHAPES)}, or sizes such as layers=16,width=1024 "
                f"(of {', '.join(SIZES)}); got {part!r}"
            )
        sizes[name] = int(value)
    if not {"layers", "width"} <= set(sizes):
        raise ValueError(f"--shape needs layers and width at least, got {shape!r}")
    width = sizes["width"]
    heads = sizes.get("heads", max(1, width // 64))
    derived = {"mlp": -(-width * 8 // 3 // 64) * 64, "heads": heads, "kv_heads": heads, "vocab": 32000}
    return {"model_type": "llama"} | {SIZES[name]: value for name, value in (derived | sizes).items()}


def build(config: PreTrainedConfig, spec: ModelSpec) -> PreTrainedModel:
    """The model with seeded random weights, in eval mode, after `check_same_as_model`."""
    from lazyllm.engine.checks import check_same_as_model
    from lazyllm.models.load import random_weights

    model = random_weights(config, spec)
    model.eval()
    check_same_as_model(model)
    return model
