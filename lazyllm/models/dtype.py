"""What `dtype="auto"` is: the checkpoint's on an accelerator; on a CPU float32 or bfloat16.

Few processors compute in bfloat16; the others take several times as long as in float32. A product
shows which kind it is. It is measured once for each processor and release of torch, and kept below
`cache_folder()`, so that all runs on a machine take one dtype.
"""

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from lazyllm.errors import UserError
from lazyllm.files import cache_folder, write_whole
from lazyllm.machine import processor_flags, processor_name, version_of
from lazyllm.models.checkpoint import gguf_of, read_config
from lazyllm.models.gguf_file import quantisation_of
from lazyllm.presets import PRESETS
from lazyllm.spec import AUTO, DTYPES, ModelSpec

UNNAMED = "bfloat16"  # of a checkpoint that names no dtype
CLEAR_GAIN = 1.5  # products in bfloat16 are 2 times as fast as in float32 and more, or half as fast
_GGUF = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # files that are not quantised
# virtual processors of several kinds may share a name
_INSTRUCTIONS = {"amx_bf16", "avx512_bf16", "bf16"}
_KEY = "times as fast in bfloat16"


def bfloat16_gain() -> float:
    """Say how many times as fast as in float32 a product is in bfloat16 on this CPU."""
    return _gain_kept_in(gain_file())


def choose_dtype(
    spec: ModelSpec, device: str, gain: Callable[[], float] = bfloat16_gain
) -> tuple[str, str]:
    """Choose the dtype in which a model loads, and say why.

    All presets with a shape are bfloat16: so are their checkpoints, but for Llama 2's (float16) and
    XGen's (float32), which LongBench loads in bfloat16.

    device: its type, such as "cuda". gain: called only if the dtype depends on it.
    Raises UserError if the model's config cannot be read.
    """
    if spec.dtype != AUTO:
        return spec.dtype, "as asked for"
    preset = PRESETS.get(spec.name)
    if preset is not None and preset.architecture is not None:
        config, stored, reason = preset.architecture, UNNAMED, "the preset's dtype"
    elif (file := gguf_of(spec)) is not None:
        kind = quantisation_of(file)
        config, stored, reason = {}, _GGUF.get(kind, UNNAMED), f"the dtype for {kind} weights"
    else:
        config = read_config(spec)
        stored, reason = (
            str(config.get("dtype") or config.get("torch_dtype")),
            "the checkpoint's dtype",
        )
        if stored not in DTYPES:
            stored, reason = UNNAMED, "the checkpoint names none"
    if device != "cpu" or stored in ("float32", "float64"):
        return stored, reason
    if "quantization_config" in config:
        return stored, "its quantised weights are made for it"
    times = gain()
    dtype = "bfloat16" if times >= CLEAR_GAIN else "float32"
    return dtype, f"on this CPU a product is {times:.2g} times as fast in bfloat16 as in float32"


def gain_file() -> Path:
    """Name the JSON file that keeps the number of this kind of processor and release of torch."""
    flags = sorted(_INSTRUCTIONS & processor_flags())
    kind = " ".join([processor_name(), *flags, "torch", version_of("torch")])
    name = "-".join(re.findall(r"\w+", kind))
    return cache_folder() / "dtype" / f"{name}.json"


@cache
def _gain_kept_in(file: Path) -> float:
    """Read the number that a file keeps; measure and keep it if there is none."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return float(json.loads(file.read_text(encoding="utf-8"))[_KEY])
    measured = _measure_gain()
    with suppress(UserError):  # a cache that cannot be written costs time only
        write_whole(file, json.dumps({_KEY: measured}) + "\n")
    return measured


def _measure_gain() -> float:
    """Measure a product of 256 tokens with a matrix of 1,024 x 4,096: the best of four each."""
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
