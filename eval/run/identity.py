"""A run's identity, and its numbers' provenance."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eval.arms import Arm
from eval.benchmarks.chat_format import ChatFormat
from eval.benchmarks.rows import sha256_of
from eval.benchmarks.suite import LoadedDataset
from eval.config import RunConfig
from lazyllm.machine import device_name, git_commit, version_of
from lazyllm.methods import Method, by_name, code_of
from lazyllm.methods.support.schedule import Schedule
from lazyllm.models.checkpoint import gguf_of, title_of
from lazyllm.models.config import as_device, load_config, load_end_ids, quantised_by
from lazyllm.models.gguf_file import quantisation_of
from lazyllm.models.gguf_file import sha256_of as sha256_of_file
from lazyllm.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKAGES = ("lazyllm-bench", "torch", "transformers", "tokenizers", "rouge-score", "fuzzywuzzy")
# The code that can change a number of any run
SHARED_CODE = (
    "lazyllm/spec.py",
    "lazyllm/presets.py",
    "lazyllm/presets.yaml",
    "lazyllm/measuring.py",
    "lazyllm/engine",
    "lazyllm/models",
    "lazyllm/methods/support",
    "eval/run/bench.py",
    "eval/run/device.py",
    "eval/run/answer.py",
)
# In eval/benchmarks, of all suites
_SUITES = ("chat_format", "downloads", "metrics", "prompts", "rows", "subsets", "suite", "tables")
_ROOT = Path(__file__).parents[2]
_SAMPLES, _SAMPLE_BYTES = 256, 2**14  # of a weight file, spread evenly over it


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that can change a number."""
    return {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}


@cache
def code_sha256(parts: tuple[str, ...]) -> str:
    """16 hex digits of the SHA-256 of sources.

    parts: files, and folders with their subfolders, relative to the folder of the packages.
    """
    digest = hashlib.sha256()
    for part in parts:
        path = _ROOT / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(
                f"{file.relative_to(_ROOT).as_posix()}\0".encode() + file.read_bytes() + b"\0"
            )
    return digest.hexdigest()[:16]


def _part(module: str) -> str:
    """The file of a module, or the folder of the package that holds it:
    `lazyllm/methods/lazy.py`.
    """
    path = "/".join(module.split(".")[:3])
    return path if (_ROOT / path).is_dir() else f"{path}.py"


def suite_code(module: str) -> str:
    """`code_sha256` of a suite, by the module of one of its functions, and of what all suites
    share.
    """
    return code_sha256((*(f"eval/benchmarks/{name}.py" for name in _SUITES), _part(module)))


def method_code(name: str) -> str:
    """A text that changes with the sources of a method's class and of all classes that it inherits
    from.

    `code_of` a package or a file of the user's, which counts whole, or the functions of a
    notebook's class; then `code_sha256` of lazyllm's methods among these classes. Other classes of
    lazyllm are in `SHARED_CODE`.
    """
    kinds = by_name(name).__mro__
    shipped = {
        _part(kind.__module__) for kind in kinds if kind.__module__.startswith("lazyllm.methods.")
    }
    codes = [code_of(name)]
    if codes == [None] and not kinds[0].__module__.startswith("lazyllm."):
        notebook = [
            part
            for kind in kinds
            if kind.__module__ == kinds[0].__module__
            for part in vars(kind).values()
        ]
        functions = [inspect.unwrap(part) for part in notebook if inspect.isfunction(part)]
        # not those of `dataclass`
        written = [part for part in functions if part.__code__.co_filename != "<string>"]
        codes = [sha256_of([inspect.getsource(part) for part in written])[:16]]
    if methods := shipped - {*SHARED_CODE}:
        codes.append(code_sha256(tuple(sorted(methods))))
    return " ".join(filter(None, codes))


def identity_of(
    config: RunConfig,
    spec: ModelSpec,
    chat: ChatFormat,
    tokenizer: PreTrainedTokenizerBase,
    *,
    arms: Sequence[Arm],
    methods: Mapping[tuple[str, str], Method],
    rows: Sequence[LoadedDataset],
    limit: int,
    batch_size: int,
    suite_module: str,
    counts_cpu_time: bool,
) -> dict[str, Any]:
    """What must agree for two visits of a run to share a folder. Arguments: as of
    `eval.run.prepare.Run`.

    limit: tokens of a prompt.
    """
    optional: dict[str, Any] = {"fidelity": config.fidelity}
    optional["batch_size"] = batch_size if batch_size > 1 else None  # rounding differs by it
    identity = {
        **_identify_model(config, spec),
        **({"clock": "CPU time of the process"} if counts_cpu_time else {}),
        **_identify_data(config, rows),
        **_identify_chat(config, chat, tokenizer),
        "suite_code": suite_code(suite_module),
        "tokenizer": tokenizer_sha256(tokenizer)[:16],
        "max_prompt_tokens": limit,
        "seed": config.seed,
        "warmup": config.warmup,
        **{key: value for key, value in optional.items() if value is not None},
        "arms": {arm.label: _identify_arm(arm, methods) for arm in arms},
        "baseline": arms[0].label if config.baseline else None,
    }
    return json.loads(json.dumps(identity, default=dict))  # with keys and lists as in run.json


def _identify_data(config: RunConfig, rows: Sequence[LoadedDataset]) -> dict[str, Any]:
    """What identifies rows and answers. `limit` is left out, so it may be raised."""
    longest = max(loaded.max_new_tokens for loaded in rows)
    identity: dict[str, Any] = {
        "data": {
            loaded.dataset.name: f"{loaded.data_sha256[:16]} {loaded.config_sha256[:16]}"
            for loaded in rows
        },
        "max_new_tokens": config.max_new_tokens
        if (config.max_new_tokens or longest) < longest
        else None,
    }
    if config.subset == "by_length":  # equal for all who chose the same rows
        ids = {loaded.dataset.name: [example.id for example in loaded.examples] for loaded in rows}
        identity["subset"] = sha256_of(ids)[:16]
    return identity


def _identify_chat(
    config: RunConfig, chat: ChatFormat, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """What identifies the chat format: all that can change a number. Raises UserError if there
    is no template.
    """
    about: dict[str, Any] = {
        "chat": config.model.chat or "none",
        "thinking_tokens": chat.thinking_tokens,
    }
    if chat.uses_template(tokenizer):
        today = chat.today if chat.reads_clock(tokenizer) else None
        about |= {
            "chat": "auto",
            "chat_args": chat.template_args(tokenizer),
            "system": chat.system,
            "today": today,
        }
    return {key: value for key, value in about.items() if value}


def _identify_model(config: RunConfig, spec: ModelSpec) -> dict[str, Any]:
    """What identifies a run's model, with the dtype in which it loads."""
    model, model_config, file = config.model, load_config(spec), gguf_of(spec)
    device = as_device(spec.device)
    readers = [name for name in ("torchao", "bitsandbytes") if name == quantised_by(model_config)]
    readers += ["gguf"] if file else []
    return {
        "model": title_of(spec),
        **({} if file is None else {"gguf": quantisation_of(file)}),
        "load_format": model.load_format,
        "dtype": spec.dtype,
        "attn_implementation": model.attn_implementation,
        "sdpa_backend": model.sdpa_backend,
        "revision": model.revision or getattr(model_config, "_commit_hash", None),
        "weights": f"random, seed {config.seed}" if spec.is_dummy else weights_sha256(spec),
        "end_ids": list(load_end_ids(spec)),
        "engine": code_sha256(SHARED_CODE),
        "versions": versions()
        | {package: importlib.metadata.version(package) for package in readers},
        "device": device_name(device),
        "threads": (config.threads or torch.get_num_threads()) if device.type == "cpu" else None,
    }


def _identify_arm(arm: Arm, methods: Mapping[tuple[str, str], Method]) -> dict[str, Any]:
    made = {dataset: method for (label, dataset), method in methods.items() if label == arm.label}
    # of the method's other models: a local one's hash, a hub model's commit
    others = [
        weights_sha256(spec) or getattr(load_config(spec), "_commit_hash", None)
        for spec in next(iter(made.values())).models()
    ]
    solved = {dataset: solved_parameters(arm, method) for dataset, method in made.items()}
    return {
        "method": arm.canonical(),
        **({} if arm.speedup is None else {"speedup": arm.speedup, "parameters": solved}),
        "code": method_code(arm.name),
        **({"weights": others} if others else {}),
    }


def solved_parameters(arm: Arm, method: Method) -> dict[str, Any]:
    """{hyperparameter: value} of those that an arm's speedup gave."""
    names = [str(arm.kind.target_parameter)] if arm.solves else [*arm.kind.table1]
    values = {name: getattr(method, name) for name in names}
    return {
        name: dict(value.keep) if isinstance(value, Schedule) else value
        for name, value in values.items()
    }


def provenance_of(device: str) -> dict[str, Any]:
    """Where, when and with which code a run's first job ran: not part of the identity, without
    folders and hosts.
    """
    machine = {
        "device": device,
        "cpu": device_name(torch.device("cpu")),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cuda": torch.version.cuda,
    }
    return {
        "git_commit": git_commit(),
        "versions": versions(),
        "machine": machine,
        "started": now(),
    }


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of everything that determines the token ids of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = (
        backend.to_str()
        if backend is not None
        else json.dumps(sorted(tokenizer.get_vocab().items()))
    )
    return hashlib.sha256(content.encode()).hexdigest()


def weights_sha256(spec: ModelSpec) -> str | None:
    """SHA-256 of a GGUF file, or of a folder's config, and name, size and samples, not all 13 GB,
    of its weight files.

    None for other hub ids, whose commit identifies them.
    """
    if (file := gguf_of(spec)) is not None:
        return sha256_of_file(file)
    if not spec.is_local:
        return None
    folder = Path(spec.source)
    digest = hashlib.sha256()
    weights = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    for file in sorted([folder / "config.json", *weights]):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        is_small = size <= _SAMPLES * _SAMPLE_BYTES
        with file.open("rb") as opened:
            for sample in range(1 if is_small else _SAMPLES):
                opened.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1) if sample else 0)
                digest.update(opened.read(-1 if is_small else _SAMPLE_BYTES))
    return digest.hexdigest()


def now() -> str:
    """The time in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
