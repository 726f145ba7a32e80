"""Quantised weights: their settings in transformers, and the packages that they need.

torchao or bitsandbytes, through transformers, quantise the weights of every linear layer but `lm_head` while a
checkpoint is read. Activations, K, V and hidden states stay in the model's dtype.
"""

from typing import Any

import torch
import transformers
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils.import_utils import is_accelerate_available, is_bitsandbytes_available, is_torchao_available

from lazyllm.errors import UserError


def config_of(quantise: str, dtype: torch.dtype) -> Any:
    """The `quantization_config` of `from_pretrained`. Its package must be installed."""
    match quantise:
        case "int8":
            from torchao.quantization import Int8WeightOnlyConfig  # pyright: ignore[reportMissingImports]

            # by default, torchao changes torch's compiler and float32 matmul settings for the whole process
            return transformers.TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
        case "bnb_int8":
            return transformers.BitsAndBytesConfig(load_in_8bit=True)
        case _:  # bnb_nf4
            return transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
            )


def quantised_by(config: Any) -> str | None:
    """The quantisation method in a checkpoint's config; None if it is not quantised."""
    settings = getattr(config, "quantization_config", None)
    return None if settings is None else str(settings.get("quant_method", "unknown"))


def check_quantised(source: str, config: Any, device_map: Any) -> None:
    """Refuse a quantised checkpoint that transformers cannot read, or would read as unquantised. Raises UserError."""
    kind = quantised_by(config)
    if kind is None:
        return
    require_package("accelerate", f"{source}, which is quantised ({kind}),")
    try:
        quantizer = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
        quantizer.validate_environment(device_map=device_map, weights_only=True)
    except (ImportError, ValueError, RuntimeError, TypeError, AssertionError) as error:
        raise UserError(f"{source} is quantised by {kind!r} and cannot be read here: {error}") from error


def require_package(package: str, what_for: str) -> None:
    """Raise UserError if the package is absent or too old for the installed transformers."""
    is_available, install = {
        "accelerate": (is_accelerate_available, "pip install 'lazyllm-bench[devices]'"),
        "torchao": (is_torchao_available, "pip install 'lazyllm-bench[quantised]'"),
        "bitsandbytes": (is_bitsandbytes_available, "pip install bitsandbytes"),
    }[package]
    if not is_available():
        raise UserError(
            f"{what_for} needs the package {package}, which is not installed, or too old for transformers "
            f"{transformers.__version__}: {install}"
        )
