"""What `dtype="auto"` is: the checkpoint's dtype on an accelerator; on a CPU float32, or bfloat16 where it is faster.

Few processors compute in bfloat16; the others take several times as long as in float32. A product shows which kind it
is. It is measured once for each processor and release of torch, and kept below `cache_folder()`, so that all runs on a
machine take one dtype. Nothing else here imports torch.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from lazyllm.errors import UserError
from lazyllm.files import cache_folder, write_whole
from lazyllm.machine import processor_flags, processor_name, version_of
from lazyllm.models.checkpoint import gguf_of, read_config
from lazyllm.models.gguf_file import quantisation_of
from lazyllm.presets import PRESETS
from lazyllm.spec import AUTO, DTYPES, ModelSpec

UNNAMED = "bfloat16"  # of a checkpoint that names no dtype
CLEAR_GAIN = 1.5  # products in bfloat16 are either 2 times as fast as in float32 and more, or half as fast and less
_GGUF = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # files that are not quantised
_INSTRUCTIONS = {"amx_bf16", "avx512_bf16", "bf16"}  # virtual processors of several kinds may share a name
_KEY = "times as fast in bfloat16"


def bfloat16_gain() -> float:
    """Return how many times as fast as in float32 a product is in bfloat16 on this CPU, measured once."""
    return _gain_kept_in(gain_file())


def choose_dtype(spec: ModelSpec, device: str, gain: Callable[[], float] = bfloat16_gain) -> tuple[str, str]:
    """Return the dtype in which a model loads, and why.

    device: its type, such as "cuda". gain: called only if the dtype depends on it.
    Raises UserError if the model's config cannot be read.
    """
    if spec.dtype != AUTO:
        return spec.dtype, "as asked for"
    stored, of_checkpoint = stored_dtype(spec)
    if device != "cpu" or stored in ("float32", "float64"):
        return stored, of_checkpoint
    if "quantization_config" in _config_of(spec):
        return stored, "its quantised weights are made for it"
    times = gain()
    dtype = "bfloat16" if times >= CLEAR_GAIN else "float32"
    return dtype, f"on this CPU a product is {times:.2g} times as fast in bfloat16 as in float32"


def stored_dtype(spec: ModelSpec) -> tuple[str, str]:
    """Return the dtype of a model's checkpoint, and whose word that is. Raises UserError.

    All presets with a shape are bfloat16: so are their checkpoints, but for Llama 2's (float16) and XGen's (float32),
    which LongBench loads in bfloat16. A GGUF file is float32 or float16 if it is not quantised.
    """
    if _shape_of_preset(spec) is not None:
        return UNNAMED, "the preset's dtype"
    if (file := gguf_of(spec)) is not None:
        quantisation = quantisation_of(file)
        return _GGUF.get(quantisation, UNNAMED), f"the dtype for {quantisation} weights"
    config = _config_of(spec)
    named = str(config.get("dtype") or config.get("torch_dtype"))
    return (named, "the checkpoint's dtype") if named in DTYPES else (UNNAMED, "the checkpoint names none")


def _config_of(spec: ModelSpec) -> Mapping[str, Any]:
    """Return the config of a model, of a preset without its files."""
    return _shape_of_preset(spec) or read_config(spec)


def _shape_of_preset(spec: ModelSpec) -> Mapping[str, Any] | None:
    preset = PRESETS.get(spec.name)
    return None if preset is None else preset.architecture


def gain_file() -> Path:
    """Return the file, JSON, that keeps the measured number for this kind of processor and release of torch."""
    kind = [processor_name(), *sorted(_INSTRUCTIONS & processor_flags()), "torch", version_of("torch")]
    words = re.findall(r"\w+", " ".join(kind))
    return cache_folder() / "dtype" / f"{'-'.join(words)}.json"


def _read(file: Path) -> float | None:
    try:
        return float(json.loads(file.read_text(encoding="utf-8"))[_KEY])
    except (OSError, ValueError, TypeError, KeyError):
        return None


@cache
def _gain_kept_in(file: Path) -> float:
    """Return the number that a file keeps; measure it if there is none. Other processes wait for it."""
    if (kept := _read(file)) is not None:
        return kept
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            if (kept := _read(file)) is not None:
                return kept
            measured = _measure_gain()
            write_whole(file, json.dumps({_KEY: measured}) + "\n")
            return measured
    except (OSError, UserError):  # a cache that cannot be written costs time only
        return _measure_gain()


def _measure_gain() -> float:
    """Measure a prefill's product of 256 tokens with a matrix of 1,024 x 4,096, in turns: the best of four each."""
    import torch
    from torch.nn.functional import linear

    seconds = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    for _ in range(4):  # the first ones are slower
        for dtype in seconds:
            tokens, weight = (torch.rand(rows, 1024).to(dtype) for rows in (256, 4096))
            began = time.perf_counter()
            linear(tokens, weight)
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - began)
    return round(seconds[torch.float32] / seconds[torch.bfloat16], 3)
