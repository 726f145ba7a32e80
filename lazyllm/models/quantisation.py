"""Quantised weights: what transformers is told, and what must be installed.

Weights are quantised while a checkpoint is read, by torchao or bitsandbytes, through transformers: those of every
linear layer but `lm_head`. Activations, K, V and hidden states stay in the model's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils.import_utils import is_accelerate_available, is_bitsandbytes_available, is_torchao_available

from lazyllm.errors import UserError
from lazyllm.models.spec import QUANTISATIONS

INT4_GROUP = 128  # weights of a row that share a scale

_INSTALL = {
    "accelerate": "pip install 'lazyllm-bench[devices]'",
    "torchao": "pip install 'lazyllm-bench[quantised]'",
    "bitsandbytes": "pip install bitsandbytes",
}


def check_quantise(quantise: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a quantisation that cannot be done on this machine. Raises UserError.

    quantise: one of `QUANTISATIONS`.
    """
    require(QUANTISATIONS[quantise], f"quantise={quantise}")
    require("accelerate", f"quantise={quantise}")
    if quantise == "int4" and (device.type != "cuda" or dtype != torch.bfloat16):
        raise UserError(
            f"quantise=int4 needs bfloat16 on CUDA (torchao has kernels for nothing else), got "
            f"{str(dtype).removeprefix('torch.')} on {device.type}: give quantise=int8 or bnb_nf4"
        )


def quantisation_config(quantise: str, dtype: torch.dtype) -> Any:
    """What `from_pretrained` is told. Its package must be installed (`check_quantise`)."""
    match quantise:
        case "int8":
            from torchao.quantization import Int8WeightOnlyConfig  # pyright: ignore[reportMissingImports]

            # torchao would also change torch's settings for the compiler and for float32 products, of the whole process
            return transformers.TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
        case "int4":
            from torchao.quantization import Int4WeightOnlyConfig  # pyright: ignore[reportMissingImports]
            from torchao.quantization.quantize_.workflows import Int4PackingFormat  # pyright: ignore[reportMissingImports]

            return transformers.TorchAoConfig(
                Int4WeightOnlyConfig(
                    group_size=INT4_GROUP,
                    set_inductor_config=False,
                    int4_packing_format=Int4PackingFormat.TILE_PACKED_TO_4D,
                )
            )
        case "bnb_int8":
            return transformers.BitsAndBytesConfig(load_in_8bit=True)
        case "bnb_nf4":
            return transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
            )
        case _:
            raise ValueError(quantise)


def quantised_by(config: Any) -> str | None:
    """The quantisation method that a checkpoint's config names; None if it is not quantised."""
    settings = getattr(config, "quantization_config", None)
    return None if settings is None else str(settings.get("quant_method", "unknown"))


def check_quantised(source: str, config: Any, device_map: Any) -> None:
    """Refuse a quantised checkpoint that cannot be read here, before it is. Raises UserError.

    transformers would take an unknown kind for no quantisation at all.
    """
    kind = quantised_by(config)
    if kind is None:
        return
    require("accelerate", f"{source}, which is quantised ({kind}),")
    settings = config.quantization_config
    if not AutoHfQuantizer.supports_quant_method(settings):
        raise UserError(f"{source} is quantised by {kind!r}, which transformers {transformers.__version__} cannot read")
    try:
        quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=True)
        quantizer.validate_environment(device_map=device_map, weights_only=True)
    except (ImportError, ValueError, RuntimeError, TypeError, AssertionError) as error:
        raise UserError(f"{source} is quantised ({kind}) and cannot be read here: {error}") from error


def require(package: str, what_for: str) -> None:
    """Raises UserError if the package is absent, or older than this transformers can use."""
    is_available = {
        "accelerate": is_accelerate_available,
        "torchao": is_torchao_available,
        "bitsandbytes": is_bitsandbytes_available,
    }[package]
    if not is_available():
        raise UserError(
            f"{what_for} needs the package {package}, which is not installed, or too old for transformers "
            f"{transformers.__version__}: {_INSTALL[package]}"
        )
