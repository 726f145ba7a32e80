"""Whether this machine is ready: a line for each thing that a run may need, with the command that fixes it.

    lazyllm-bench doctor                 # for Llama 2 on LongBench
    lazyllm-bench doctor --model qwen3-8b
    lazyllm-bench doctor --url http://127.0.0.1:8000/v1    # what a server is and can do

Nothing is downloaded, and no network is needed. torch is imported only on a GPU: a profile names its attention kernel.
`missing`: the run needs it and would not find it. `not needed`: the run works without it. The exit code is 0 if nothing
is missing, else 2.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path
from types import SimpleNamespace

from eval.benchmarks.datasets import default_suite
from eval.run.device_lock import nvidia_smi
from lazyllm.engine.flops import LayerShape
from lazyllm.errors import parser_of
from lazyllm.machine import handicaps, torch_build
from lazyllm.presets import PRESETS
from lazyllm.spec import source_of

OK, MISSING, NOT_NEEDED = "ok", "missing", "not needed"
DATA_GB = 2  # LongBench, and runs
# Major version of CUDA -> (its oldest driver by NVIDIA's release notes, the torch for it and its index), ascending
CUDA = {11: (450, "torch==2.7.1", "cu118"), 12: (525, "torch", "cu126"), 13: (580, "torch", "cu130")}

State = tuple[str, str]  # `OK`, `MISSING` or `NOT_NEEDED`, and a sentence: what was found, or how to fix it


def check_python() -> State:
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return OK, platform.python_version()
    return MISSING, f"{platform.python_version()}: 3.11 to 3.13 are supported; uv venv --python 3.12 makes one"


def check_torch(gpu: list[str] | None) -> State:
    """Whether the installed torch fits the driver. gpu: name, driver and memory, as nvidia-smi says."""
    build = torch_build()
    if not build:
        return MISSING, "pip install --editable . (in the repository's folder)"
    cuda = None if build["cuda"] is None else int(build["cuda"].split(".")[0])
    installed = f"{build['__version__']}, for {'the CPU' if cuda is None else f'CUDA {cuda}'}"
    if gpu is None:
        return OK, installed
    driver = int(gpu[1].split(".")[0])
    if cuda is not None and driver >= CUDA[cuda][0]:
        return OK, f"{installed}, driver {gpu[1]}"
    needs = f"needs driver {CUDA[cuda][0]} or later, found {gpu[1]}" if cuda is not None else f"but there is {gpu[0]}"
    fits = [(package, index) for least, package, index in CUDA.values() if driver >= least]
    url = "https://download.pytorch.org/whl/"
    remedy = (
        f"pip install --force-reinstall {fits[-1][0]} --index-url {url}{fits[-1][1]}" if fits else "update the driver"
    )
    return MISSING, f"{installed}, {needs}: {remedy}"


def check_gpu(gpu: list[str] | None, gigabytes: float) -> State:
    """gigabytes: of the model's weights."""
    if gpu is None:
        return NOT_NEEDED, "no NVIDIA GPU: runs use the CPU, which is enough for model=tiny"
    has = int(gpu[2].split()[0]) * 2**20 / 1e9
    if has < gigabytes:
        return MISSING, f"{gpu[0]}, {has:.0f} GB: less than {gigabytes:.0f}: try model.quantise=int8"
    return OK, f"{gpu[0]}, {has:.0f} GB"


def check_attention(gpu: list[str] | None, fits: bool) -> State:
    """The kernel that attention runs with the default `model.attn_implementation`. fits: torch fits the driver."""
    if gpu is None:
        return OK, "sdpa runs PyTorch's flash attention for CPUs"
    if not fits:
        return NOT_NEEDED, "its kernel is known once torch fits"
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    from lazyllm.engine.devices import attention_events, attention_kernel

    part = torch.rand(1, 8, 1024, 128, device="cuda", dtype=torch.bfloat16)
    kernel = attention_kernel(attention_events(lambda: attend(part, part, part, is_causal=True)))
    return OK, ". ".join([f"sdpa runs {kernel}", *handicaps(gpu[0], [kernel], nan)])


def check_disk(gigabytes: float) -> State:
    """gigabytes: of the files to download."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = next(parent for parent in (Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).parents) if parent.exists())
    free, needed = shutil.disk_usage(folder).free / 1e9, gigabytes + DATA_GB
    if free < needed:
        advice = "export HF_HOME=FOLDER_ON_A_LARGER_DISK"
        return MISSING, f"{free:.1f} GB free in {folder}, {needed:.0f} GB needed: {advice}"
    return OK, f"{free:.0f} GB free in {folder}"


def is_cached(model: str) -> bool:
    """Whether a checkpoint is a folder, or its config and weights are in the hub's cache, or converted in ours."""
    from huggingface_hub import try_to_load_from_cache

    from lazyllm.models.convert import is_converted

    if Path(source := source_of(model)).is_dir():
        return True
    names = ("config.json", "model.safetensors.index.json", "model.safetensors")
    config, *weights = (isinstance(try_to_load_from_cache(source, name), str) for name in names)
    return config and (any(weights) or is_converted(source))


def check_token(gated: bool) -> State:
    from huggingface_hub import get_token

    if get_token() is not None:
        return OK, "the hub's client has one"
    return MISSING if gated else NOT_NEEDED, "hf auth login (gated models need it)"


def check_weights(model: str, cached: bool, gated: bool, pickled: bool) -> State:
    source = source_of(model)
    if cached:
        return OK, f"{source} is here"
    first = f"ask for access at https://huggingface.co/{source}, then " if gated else ""
    then = ", which also converts its pickled weights" if pickled else ""
    return MISSING, f"{source} is not in the cache: {first}lazyllm-bench fetch model={model}, with a network{then}"


def check_rows(model: str) -> State:
    suite = default_suite(model)
    if suite.cached is None:
        return NOT_NEEDED, f"{model} takes the suite {suite.name}, which makes its own"
    if suite.cached():
        return OK, f"{suite.name} is in the cache"
    advice = f"lazyllm-bench fetch dataset={suite.whole}, or give data.dir=FOLDER"
    return MISSING, f"{suite.name} is not in the cache: {advice}"


def gigabytes_of(model: str) -> float:
    """Gigabytes of a preset's weights in 16 bits; 0 for other models, whose shapes are unknown here."""
    preset = PRESETS.get(model)
    if preset is None or preset.architecture is None:
        return 0
    shape, config = LayerShape.of(SimpleNamespace(**preset.architecture)), preset.architecture
    embeddings = config["vocab_size"] * shape.width * (1 if config.get("tie_word_embeddings") else 2)
    return 2 * (shape.linear_flops // 2 * config["num_hidden_layers"] + embeddings) / 1e9


def examine(model: str) -> dict[str, State]:
    """The state of each thing. Raises UserError for an unknown model."""
    listed = nvidia_smi("--query-gpu=name,driver_version,memory.total")
    gpu = [field.strip() for field in listed[0].split(",")] if listed else None
    cached, size = is_cached(model), gigabytes_of(model)
    gated = not cached and model in PRESETS and PRESETS[model].gated
    pickled = model in PRESETS and PRESETS[model].pickled
    checks: dict[str, Callable[[], State]] = {
        "Python": check_python,
        "torch": lambda: check_torch(gpu),
        "GPU": lambda: check_gpu(gpu, size),
        "attention": lambda: check_attention(gpu, states["torch"][0] == OK),
        "disk": lambda: check_disk(0 if cached else size * (4 if pickled else 1)),  # pickles in 32 bits, converted ones
        "token": lambda: check_token(gated),
        model: lambda: check_weights(model, cached, gated, pickled),
        "rows": lambda: check_rows(model),
    }
    states: dict[str, State] = {}
    for thing, check in checks.items():
        try:
            states[thing] = check()
        except Exception as error:  # a broken machine makes a check fail, which is its finding
            states[thing] = MISSING, f"could not be examined ({type(error).__name__}: {error})"
    return states


def main(arguments: Sequence[str] | None = None) -> int:
    """The verb `doctor`. Returns the exit code. Raises UserError."""
    parser = parser_of("doctor", __doc__)
    parser.add_argument("--model", default="llama2", metavar="NAME", help="preset, folder or hub id; default: llama2")
    parser.add_argument("--url", help="of a server with OpenAI's API; the key is read from OPENAI_API_KEY")
    options = parser.parse_args(arguments)
    if options.url is not None:
        from eval.server import Endpoint, describe

        server = describe(Endpoint(options.url, ""))
        facts = {**vars(server), **vars(server.kind), "kind": server.kind.name}
        for name in ("kind", "version", "models", "positions", "token_ids", "cold", "sampling"):
            print(f"{name:<12}{facts[name]}")
        return 0
    states = examine(options.model)
    for thing, (state, says) in states.items():
        print(f"{thing:<15}{state:<12}{says}")
    return 2 if any(state == MISSING for state, _ in states.values()) else 0
