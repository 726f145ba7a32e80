"""Whether this machine is ready: a line for each thing that a run may need, with the command that
fixes it.

    lazyllm-bench doctor                                # for Llama 2 on LongBench
    lazyllm-bench doctor model=llama2,xgen dataset=all  # for a run or a sweep, by its arguments

Nothing is downloaded, and no network is needed. A GGUF file is read. torch is imported only for a
GGUF file that is new here, and on a CPU where `model.dtype=auto` has to measure a product.
`missing`: the run needs it and would not find it (exit code 2). `not needed`: the run works without
    it.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from eval.config import RunConfig
from eval.run.check import choose_data, models_of, read_rows, spec_of, suite_of
from eval.run.job import jobs_of
from lazyllm.engine.flops import LayerShape
from lazyllm.errors import UserError, parser_of
from lazyllm.machine import torch_build
from lazyllm.models.checkpoint import HubError, check_weights, read_config
from lazyllm.models.dtype import choose_dtype
from lazyllm.models.tokenizers import tokenizer_file, tokenizer_of
from lazyllm.presets import PRESETS, Preset
from lazyllm.spec import ModelSpec

VISIBLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_SMI_TIMEOUT_S = 20.0
OK, MISSING, NOT_NEEDED = "ok", "missing", "not needed"
# Major version of CUDA -> (its oldest driver by NVIDIA's release notes, the torch for it and its
# index), ascending
CUDA = {
    11: (450, "torch==2.7.1", "cu118"),
    12: (525, "torch", "cu126"),
    13: (580, "torch", "cu130"),
}

# `OK`, `MISSING` or `NOT_NEEDED`, and a sentence: what was found, or how to fix it
State = tuple[str, str]


def check_torch(gpu: list[str] | None) -> State:
    """Whether the installed torch fits the driver. gpu: name, driver and memory, as nvidia-smi
    says.
    """
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
    needs = (
        f"needs driver {CUDA[cuda][0]} or later, found {gpu[1]}"
        if cuda is not None
        else f"but there is {gpu[0]}"
    )
    url = "https://download.pytorch.org/whl"
    fits = [
        f"{torch} --index-url {url}/{name}"
        for least, torch, name in CUDA.values()
        if driver >= least
    ]
    remedy = f"pip install --force-reinstall {fits[-1]}" if fits else "update the driver"
    return MISSING, f"{installed}, {needs}: {remedy}"


def check_gpu(gpu: list[str] | None, weights_gb: float) -> State:
    if (
        gpu is None
        and shutil.which("nvidia-smi") is not None
        and nvidia_smi("--query-gpu=name") is None
    ):
        return MISSING, "nvidia-smi fails or hangs: run it, and mend the driver"
    if gpu is None:
        hidden = (
            ""
            if os.environ.get(VISIBLE) is None
            else f" that {VISIBLE}={os.environ[VISIBLE]!r} shows"
        )
        suits = "is enough for a model of this size"
        if weights_gb > 1:
            suits = f"is slow, and its memory must hold {weights_gb:.0f} GB of weights"
        return NOT_NEEDED, f"no NVIDIA GPU{hidden}: runs use the CPU, which {suits}"
    if not gpu[2].split()[0].isdecimal():  # "[N/A]" where the GPU shares the host's memory
        return OK, f"{gpu[0]}, it does not report its memory"
    has = int(gpu[2].split()[0]) * 2**20 / 1e9
    if has < weights_gb:
        return MISSING, f"{gpu[0]}, {has:.0f} GB: less than {weights_gb:.0f}: give a smaller model"
    return OK, f"{gpu[0]}, {has:.0f} GB"


def dtype_of(spec: ModelSpec, gpu: list[str] | None) -> tuple[str, str]:
    """Return the dtype in which a run loads a model here, and why. Raises UserError if its
    config is not here.
    """
    return choose_dtype(spec, "cpu" if gpu is None or spec.device == "cpu" else "cuda")


def check_dtype(specs: Collection[ModelSpec], gpu: list[str] | None) -> State:
    """Say in which dtype each model loads."""
    found = list[str]()
    for spec in specs:
        try:
            found.append("{}: {} ({})".format(spec.name, *dtype_of(spec, gpu)))
        except UserError:  # `check_model` says why
            found.append(f"{spec.name}: known once its config is here")
    return OK, "; ".join(found)


def fault_of(spec: ModelSpec) -> UserError | None:
    """Why a run could not load a model, its tokenizer or its weights; None if it could, as far
    as files tell.
    """
    try:
        read_config(spec)
        tokenizer_file(*tokenizer_of(spec))
        if not spec.is_dummy:
            check_weights(spec)
    except UserError as error:
        return error
    return None


def check_disk(absent: Sequence[ModelSpec]) -> State:
    """The disk for the files of models that are not here."""
    from huggingface_hub import constants

    stored = [
        replace(spec, dtype="float32" if _preset(spec).pickled else "bfloat16") for spec in absent
    ]
    needed = 2 + sum(map(gigabytes_of, stored))
    cache = Path(constants.HF_HUB_CACHE)
    folder = next(parent for parent in (cache, *cache.parents) if parent.exists())
    free = shutil.disk_usage(folder).free / 1e9
    space = f"{free:.1f} GB free in {folder}, {needed:.0f} GB needed"  # 2 for LongBench and runs
    return (
        (OK, space)
        if free >= needed
        else (MISSING, f"{space}: export HF_HOME=FOLDER_ON_A_LARGER_DISK")
    )


def check_token(absent: Sequence[ModelSpec]) -> State:
    from huggingface_hub import get_token

    if get_token() is not None:
        return OK, "the hub's client has one"
    if any(_preset(spec).gated for spec in absent):
        return MISSING, "hf auth login (gated models need it)"
    return NOT_NEEDED, "no gated model is to be fetched"


def check_model(spec: ModelSpec, fault: UserError | None) -> State:
    if fault is None:
        return OK, f"{spec.source} is here: config, tokenizer{'' if spec.is_dummy else ', weights'}"
    if not isinstance(fault, HubError):
        return MISSING, str(fault)
    access = (
        f"ask for access at https://huggingface.co/{spec.source}, then "
        if _preset(spec).gated
        else ""
    )
    return (
        MISSING,
        f"{spec.source} is not in the cache: {access}lazyllm-bench fetch model={spec.name}, with a "
        "network",
    )


def _preset(spec: ModelSpec) -> Preset:
    return PRESETS.get(spec.name, Preset(spec.name))


def check_rows(runs: Sequence[RunConfig]) -> State:
    """The rows of suites that are read from files: those in files of the user's are read."""
    found = list[str]()
    for run in runs:
        try:
            datasets, data = choose_data(run)  # refuses rows that are missing, as a run does
            is_here = data.dir is not None or any(
                getattr(dataset, "file", "") for dataset in datasets
            )
            loaded = read_rows(run, datasets, data) if is_here else []
        except UserError as error:
            return MISSING, str(error)
        suite = suite_of(datasets)
        if is_here:
            rows = sum(len(dataset.examples) for dataset in loaded)
            found.append(f"{rows} rows of {suite.name} can be read")
        elif not suite.models:
            if suite.cached is not None and not suite.cached(data):
                return (
                    MISSING,
                    f"{suite.name} is not in the cache: lazyllm-bench fetch dataset={suite.whole}",
                )
            found.append(f"{suite.name} can be loaded")
    return (
        (OK, "; ".join(dict.fromkeys(found))) if found else (NOT_NEEDED, "the suite brings its own")
    )


def gigabytes_of(spec: ModelSpec) -> float:
    """Gigabytes of a model's weights in the spec's dtype; 0 if its shape is not known here."""
    try:
        config = read_config(replace(spec, load_format="dummy"))
        shape = LayerShape.of(SimpleNamespace(**config))
        embeddings = (
            config["vocab_size"] * shape.width * (1 if config.get("tie_word_embeddings") else 2)
        )
        weights = shape.linear_flops // 2 * config["num_hidden_layers"] + embeddings
    except (UserError, AttributeError, KeyError, TypeError):  # it is not here, or of a nested shape
        return 0
    return {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[spec.dtype] * weights / 1e9


def largest_gigabytes(runs: Sequence[RunConfig], gpu: list[str] | None) -> float:
    """Return the `gigabytes_of` the largest model of the runs. A run's other models load in the
    dtype of its own.
    """
    sizes = [0.0]
    for run in runs:
        for spec in models_of(run):
            try:
                sizes.append(gigabytes_of(replace(spec, dtype=dtype_of(spec_of(run), gpu)[0])))
            except UserError:  # its config is not here
                continue
    return max(sizes)


def first_gpu() -> list[str] | None:
    """Name, driver, memory and id of the GPU that a run takes, as nvidia-smi says; None if there
    is none.
    """
    listed = nvidia_smi("--query-gpu=name,driver_version,memory.total,uuid") or []
    gpus = [[field.strip() for field in line.split(",")] for line in listed]
    visible = os.environ.get(VISIBLE)
    if visible is None or visible.startswith("MIG"):  # a part of a GPU, which this list lacks
        return next(iter(gpus), None)
    first = visible.split(",")[0].strip()
    if first.isdecimal():
        return gpus[int(first)] if int(first) < len(gpus) else None
    return next((gpu for gpu in gpus if first and gpu[-1].startswith(first)), None)


def nvidia_smi(*query: str) -> list[str] | None:
    """The lines that nvidia-smi answers; None if it is absent (ROCm, a bare container), fails or
    hangs.
    """
    command = ["nvidia-smi", *query, "--format=csv,noheader"]
    try:
        run = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.splitlines()


def examine(arguments: Sequence[str]) -> dict[str, State]:
    """The state of each thing that a run or a sweep needs, by its arguments. Raises UserError
    for unknown ones.
    """
    runs = jobs_of(arguments)
    for run in runs:
        choose_data(run, check_rows=False)
    specs = dict.fromkeys(spec for run in runs for spec in models_of(run))
    main_specs = [*dict.fromkeys(map(spec_of, runs))]
    gpu, faults = first_gpu(), {spec: fault_of(spec) for spec in specs}
    absent = [spec for spec, fault in faults.items() if isinstance(fault, HubError)]
    checks: dict[str, Callable[[], State]] = {
        "Python": lambda: (OK, platform.python_version()),  # others cannot install it
        "torch": lambda: check_torch(gpu),
        "GPU": lambda: check_gpu(gpu, largest_gigabytes(runs, gpu)),
        "dtype": lambda: check_dtype(main_specs, gpu),
        "disk": lambda: check_disk(absent),
        "token": lambda: check_token(absent),
        **{spec.name: partial(check_model, spec, fault) for spec, fault in faults.items()},
        "rows": lambda: check_rows(runs),
    }
    states = dict[str, State]()
    for thing, check in checks.items():
        try:
            states[thing] = check()
        except Exception as error:  # from a broken driver or HF_HOME: the check reports it
            states[thing] = MISSING, f"could not be examined ({type(error).__name__}: {error})"
    return states


def main(arguments: Sequence[str]) -> int:
    """The command `doctor`. Returns the exit code."""
    parser = parser_of("doctor", __doc__)
    parser.add_argument(
        "run", nargs="*", metavar="KEY=VALUE", help="as of lazyllm-bench run; default: model=llama2"
    )
    options = parser.parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the hub's client is imported: nothing is downloaded
    states = examine(options.run or ["model=llama2"])
    width = max(map(len, states)) + 2
    for thing, (state, says) in states.items():
        print(f"{thing:<{width}}{state:<12}{says}")
    return 2 if any(state == MISSING for state, _ in states.values()) else 0
