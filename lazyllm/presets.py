"""Models with a short name: their hub ids and shapes.

The shapes are those of the published config.json files, but for LongRoPE's factors, which are 1 here: they change
neither shapes nor times. tests/lazyllm/test_presets.py checks each against the published number of parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lazyllm.errors import UserError


@dataclass(frozen=True)
class Preset:
    """A model with a short name.

    source: hub id or folder. architecture: the shapes and RoPE of the checkpoint's `config.json`, for
    `load_format="dummy"`; None if this package holds the checkpoint. gated: the hub gives it only to those whom its
    owner has granted access. pickled: its weights on the hub are pickles in 32 bits.
    """

    source: str
    architecture: Mapping[str, Any] | None = field(default=None, hash=False)
    gated: bool = False
    pickled: bool = False


def _shape(
    model_type: str,
    layers: int,
    width: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    positions: int,
    *,
    theta: float = 10_000.0,
    **others: Any,
) -> dict[str, Any]:
    """A config's fields. theta: the RoPE's base, unless `others` has `rope_parameters`."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        **others,
    }


def _llama3(layers: int, width: int, mlp: int, heads: int, factor: float, **others: Any) -> dict[str, Any]:
    frequencies = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": factor, **frequencies}
    ends = {"bos_token_id": 128_000, "eos_token_id": [128_001, 128_008, 128_009]}
    sizes = (layers, width, mlp, heads, 8, 128_256, 131_072)
    return _shape("llama", *sizes, rope_parameters=rope, rms_norm_eps=1e-5, **ends, **others)


def _qwen3(layers: int, width: int, mlp: int, heads: int, **others: Any) -> dict[str, Any]:
    return _shape("qwen3", layers, width, mlp, heads, 8, 151_936, 40_960, **_QWEN, **others)


def _phi3(heads: int, kv_heads: int, vocabulary: int, rope: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """rope: settings of the RoPE besides LongRoPE's factors and lengths."""
    factors = {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48, "original_max_position_embeddings": 4096}
    longrope = {"rope_type": "longrope", "rope_theta": 10_000.0, **factors, **rope}
    lengths = {"sliding_window": 262_144, "original_max_position_embeddings": 4096}
    sizes = (32, 3072, 8192, heads, kv_heads, vocabulary, 131_072)
    return _shape("phi3", *sizes, rope_parameters=longrope, **lengths, **others)


_QWEN: dict[str, Any] = dict(head_dim=128, theta=1_000_000.0, bos_token_id=151_643, eos_token_id=[151_645, 151_643])
_MISTRAL: dict[str, Any] = dict(theta=1e6, rms_norm_eps=1e-5, sliding_window=None)
_GEMMA: dict[str, Any] = dict(bos_token_id=2, eos_token_id=[1, 106], tie_word_embeddings=True)
_LLAMA2 = _shape("llama", 32, 4096, 11008, 32, 32, 32_000, 4096, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2)
_XGEN = _shape("llama", 32, 4096, 11008, 32, 32, 51_200, 8192, bos_token_id=50_256, eos_token_id=50_256)
_TIED: dict[str, Any] = dict(tie_word_embeddings=True)

PRESETS: dict[str, Preset] = {
    "llama2": Preset("meta-llama/Llama-2-7b-chat-hf", _LLAMA2, gated=True),
    "llama2-base": Preset("meta-llama/Llama-2-7b-hf", _LLAMA2, gated=True),
    "xgen": Preset("Salesforce/xgen-7b-8k-inst", _XGEN, pickled=True),
    "llama3.1-8b": Preset("meta-llama/Llama-3.1-8B-Instruct", _llama3(32, 4096, 14336, 32, 8.0), gated=True),
    "llama3.2-1b": Preset("meta-llama/Llama-3.2-1B-Instruct", _llama3(16, 2048, 8192, 32, 32.0, **_TIED), gated=True),
    "llama3.2-3b": Preset("meta-llama/Llama-3.2-3B-Instruct", _llama3(28, 3072, 8192, 24, 32.0, **_TIED), gated=True),
    "qwen3-0.6b": Preset("Qwen/Qwen3-0.6B", _qwen3(28, 1024, 3072, 16, **_TIED)),
    "qwen3-1.7b": Preset("Qwen/Qwen3-1.7B", _qwen3(28, 2048, 6144, 16, **_TIED)),
    "qwen3-4b": Preset("Qwen/Qwen3-4B", _qwen3(36, 2560, 9728, 32, **_TIED)),
    "qwen3-8b": Preset("Qwen/Qwen3-8B", _qwen3(36, 4096, 12288, 32)),
    "qwen3-14b": Preset("Qwen/Qwen3-14B", _qwen3(40, 5120, 17408, 40)),
    "qwen2.5-7b": Preset(
        "Qwen/Qwen2.5-7B-Instruct", _shape("qwen2", 28, 3584, 18944, 28, 4, 152_064, 32_768, **_QWEN)
    ),
    "mistral-7b": Preset(
        "mistralai/Mistral-7B-Instruct-v0.3", _shape("mistral", 32, 4096, 14336, 32, 8, 32_768, 32_768, **_MISTRAL)
    ),
    "mistral-nemo": Preset(
        "mistralai/Mistral-Nemo-Instruct-2407",
        _shape("mistral", 40, 5120, 14336, 32, 8, 131_072, 131_072, head_dim=128, **_MISTRAL),
    ),
    "phi3.5-mini": Preset(
        "microsoft/Phi-3.5-mini-instruct",
        _phi3(32, 32, 32_064, {}, bos_token_id=1, eos_token_id=[32_007, 32_001, 32_000]),
    ),
    "phi4-mini": Preset(
        "microsoft/Phi-4-mini-instruct",
        _phi3(
            24, 8, 200_064, {"partial_rotary_factor": 0.75},
            bos_token_id=199_999, eos_token_id=[200_020, 199_999], pad_token_id=199_999, **_TIED,
        ),
    ),
    "gemma2-9b": Preset(
        "google/gemma-2-9b-it",
        _shape("gemma2", 42, 3584, 14336, 16, 8, 256_000, 8192, head_dim=256, sliding_window=4096, **_GEMMA),
        gated=True,
    ),
    "gemma3-1b": Preset(
        "google/gemma-3-1b-it",
        _shape(
            "gemma3_text", 26, 1152, 6912, 4, 1, 262_144, 32_768, head_dim=256, sliding_window=512,
            layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
            **_GEMMA,
        ),
        gated=True,
    ),
    "olmo2-7b": Preset(
        "allenai/OLMo-2-1124-7B-Instruct",
        _shape(
            "olmo2", 32, 4096, 11008, 32, 32, 100_352, 4096,
            theta=500_000.0, rms_norm_eps=1e-6, bos_token_id=100_257, eos_token_id=100_257, pad_token_id=100_277,
        ),
    ),
    "smollm3-3b": Preset(
        "HuggingFaceTB/SmolLM3-3B",
        _shape(
            "smollm3", 36, 2048, 11008, 16, 4, 128_256, 65_536,
            theta=5_000_000.0, eos_token_id=128_012, **_TIED,
        ),
    ),
    "granite3.3-8b": Preset(
        "ibm-granite/granite-3.3-8b-instruct",
        _shape(
            "granite", 40, 4096, 12800, 32, 8, 49_159, 131_072, theta=10_000_000.0, tie_word_embeddings=True,
            rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=0, pad_token_id=0,
            embedding_multiplier=12.0, attention_multiplier=0.0078125, residual_multiplier=0.22, logits_scaling=16.0,
        ),
    ),
    "tiny": Preset(str(Path(__file__).parent / "models" / "tiny")),
    "coder": Preset(str(Path(__file__).parent / "models" / "coder")),
}  # fmt: skip

SIZES = {
    "layers": "num_hidden_layers", "width": "hidden_size", "mlp": "intermediate_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "vocab": "vocab_size",
}  # fmt: skip


def fields_of(shape: str) -> dict[str, Any]:
    """A config's fields, of a preset or of sizes such as "layers=16,width=1024,heads=16,kv_heads=4".

    Default sizes: heads of width 64, as many key heads, an MLP of 8/3 of the width, 32,000 words. "llama-1b" is Llama
    3.2 1B. Raises UserError for another shape.
    """
    preset = PRESETS.get("llama3.2-1b" if shape == "llama-1b" else shape)
    if preset is not None:
        if preset.architecture is not None:
            return dict(preset.architecture)
        return json.loads((Path(preset.source) / "config.json").read_text(encoding="utf-8"))
    sizes = {name: value for name, _, value in (part.partition("=") for part in shape.split(","))}
    if not {"layers", "width"} <= sizes.keys() <= SIZES.keys() or not all(map(str.isdecimal, sizes.values())):
        raise UserError(
            f"shape {shape}: expected one of {', '.join(PRESETS)}, or sizes such as layers=16,width=1024, of "
            f"{', '.join(SIZES)}, layers and width at least"
        )
    width = int(sizes["width"])
    heads = sizes.get("heads", max(1, width // 64))
    default = {"mlp": -(-width * 8 // 3 // 64) * 64, "heads": heads, "kv_heads": heads, "vocab": 32000}
    return {"model_type": "llama", **{SIZES[name]: int(value) for name, value in (default | sizes).items()}}
