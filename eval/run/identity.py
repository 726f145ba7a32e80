"""A run's identity, and its numbers' provenance. Functions take an `eval.run.run.Run`, whose properties call them."""

import ast
import hashlib
import importlib.metadata
import inspect
import json
import os
import platform
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eval.benchmarks.rows import sha256_of
from eval.run import targets
from eval.run.arms import Arm, canonical_settings, method_asked
from lazyllm.machine import device_name, git_commit, version_of
from lazyllm.methods import by_name, code_of, name_of
from lazyllm.models.checkpoint import gguf_of, title_of
from lazyllm.models.gguf_file import quantisation_of
from lazyllm.models.gguf_file import sha256_of as sha256_of_file
from lazyllm.models.load import devices_in_use, load_config, load_end_ids
from lazyllm.models.quantisation import quantised_by
from lazyllm.spec import QUANTISATIONS, ModelSpec

PACKAGES = ("lazyllm-bench", "torch", "transformers", "tokenizers", "rouge-score", "fuzzywuzzy")
# The code that can change a number, besides that of the suite and of the chosen methods
ENGINE = (
    "lazyllm/spec.py",
    "lazyllm/presets.py",
    "lazyllm/presets.yaml",
    "lazyllm/engine",
    "lazyllm/models",
    "lazyllm/methods/support",
    "eval/run/measure.py",
    "eval/run/fidelity.py",
    "eval/run/evidence.py",
)
SERVED = ("eval/serving/client.py", "eval/serving/subject.py", "eval/run/measure.py")  # the same for runs of servers
_PROMPTS = ("chat_format.py", "metrics.py", "prompts.py", "rows.py", "suite.py")  # in eval/benchmarks, of all suites
_ROOT = Path(__file__).parents[2]
_SAMPLES, _SAMPLE_BYTES = 256, 2**14  # of a weight file, spread evenly over it


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that can change a number."""
    return {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}


@cache
def code_sha256(parts: tuple[str, ...]) -> str:
    """16 hex digits of the SHA-256 of sources, Python's without comments, docstrings and layout.

    parts: files, and folders with their subfolders, relative to the folder of the packages.
    """
    digest = hashlib.sha256()
    for part in parts:
        for file in _sources(_ROOT / part):
            digest.update(f"{file.relative_to(_ROOT).as_posix()}\0{_content(file)}\0".encode())
    return digest.hexdigest()[:16]


def _sources(path: Path) -> list[Path]:
    """The sources of a folder with its subfolders, or a file alone."""
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def suite_code(module: str) -> str:
    """`code_sha256` of a suite, by the module of one of its functions, and of what all suites share."""
    own = _own_files(module, "eval.benchmarks")
    return code_sha256(tuple(sorted(own | {f"eval/benchmarks/{name}" for name in _PROMPTS})))


def method_code(name: str) -> str:
    """`code_sha256` of a method's own files; of another package's, `code_of`; of a notebook's class, its functions'."""
    kind = by_name(name)
    if kind.__module__.partition(".")[0] != "lazyllm":
        functions = [inspect.unwrap(part) for part in vars(kind).values() if inspect.isfunction(part)]
        own = [part for part in functions if part.__code__.co_filename != "<string>"]  # not those of `dataclass`
        return code_of(name) or sha256_of([inspect.getsource(part) for part in own])[:16]
    return code_sha256(tuple(sorted(_own_files(kind.__module__, "lazyllm.methods"))))


def _own_files(module: str, package: str) -> set[str]:
    """The files of a module of a package, and of the modules there that it imports; not those in `ENGINE`."""
    paths, names = dict[str, Path](), [".".join(module.split(".")[:3])]
    for name in names:  # it grows
        path = _ROOT / name.replace(".", "/")
        paths[name] = path if path.is_dir() else path.with_suffix(".py")
        for imported in (module for file in _sources(paths[name]) for module in _imports(file)):
            other = ".".join(imported.split(".")[:3])
            if other.startswith(f"{package}.") and other not in (*names, "lazyllm.methods.support"):
                names.append(other)
    return {path.relative_to(_ROOT).as_posix() for path in paths.values()}


@cache
def _content(file: Path) -> str:
    """A source as it is hashed."""
    if file.suffix == ".py":
        return json.dumps(_meaning(ast.parse(file.read_bytes())))
    return file.read_text(encoding="utf-8")


@cache
def _imports(file: Path) -> list[str]:
    """The modules from which a source imports names."""
    nodes = ast.walk(ast.parse(file.read_bytes()))
    return [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module is not None]


def _meaning(node: Any) -> Any:
    """A syntax tree as nested lists, without positions, docstrings and empty fields, which new Pythons add."""
    match node:
        case ast.Expr(value=ast.Constant(value=str())):  # only a text, like a docstring
            return None
        case ast.AST():
            filled = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
            return [type(node).__name__, *([name, _meaning(value)] for name, value in filled)]
        case list():
            return [meaning for item in node if (meaning := _meaning(item)) is not None]
    return repr(node)


def identity_of(run: Any) -> dict[str, Any]:
    """What must agree for two visits of a run to share a folder."""
    config = run.config
    limit, chat = run.max_prompt_tokens, _chat_identity(run)  # refused before rows are made, which may take minutes
    # splits share no table; rounding differs by the number of answers that decode together
    optional = {"turns": config.turns, "split": config.split, "fidelity": config.fidelity}
    optional["batch_size"] = run.batch_size if run.batch_size > 1 else None
    identity = {
        **(_served_identity(run) if run.is_served else _model_identity(run)),
        **_data_identity(run),
        **chat,
        "suite_code": suite_code(run.suite.load.__module__),
        "tokenizer": tokenizer_sha256(run.tokenizer)[:16],
        "max_prompt_tokens": limit,
        "seed": config.seed,
        "warmup": config.warmup,
        **{key: value for key, value in optional.items() if value is not None},
        "arms": {arm.label: _arm_identity(run, arm) for arm in run.arms},
        "baseline": run.baseline,
    }
    return json.loads(json.dumps(identity))  # with keys and lists as in run.json


def _data_identity(run: Any) -> dict[str, Any]:
    """What identifies rows and answers. `limit` is left out, so it may be raised."""
    config, longest = run.config, max(data.max_new_tokens for data in run.loaded)
    rows = {one.dataset.name: f"{one.data_sha256[:16]} {one.config_sha256[:16]}" for one in run.loaded}
    identity: dict[str, Any] = {
        "data": rows,
        "max_new_tokens": config.max_new_tokens if (config.max_new_tokens or longest) < longest else None,
    }
    if config.subset == "by_length":  # equal for all who chose the same rows
        ids = {one.dataset.name: [example.id for example in one.examples] for one in run.loaded}
        identity["subset"] = sha256_of(ids)[:16]
    return identity


def _arm_identity(run: Any, arm: Arm) -> dict[str, Any]:
    if run.is_served:
        server = run.servers[arm.label]
        reported = {"url": server.url, "kind": server.kind, "version": server.version, "model": server.name}
        method = {key: value for key, value in arm.settings.items() if key != "turns"}
        return {"method": method, "server": reported}
    # of the method's other models: a local one's hash, a hub model's commit
    others = [
        weights_sha256(spec) or getattr(load_config(spec), "_commit_hash", None)
        for spec in method_asked(arm.settings).models()
    ]
    solved = {data: settings | {"name": name_of(settings["name"])} for data, settings in arm.parameters.items()}
    return {
        "method": canonical_settings(arm.settings, run.model_config.num_hidden_layers),
        "parameters": solved if targets.uses_preset(arm.settings) else None,
        "code": method_code(arm.settings["name"]),
        **({"weights": others} if others else {}),
    }


def _model_identity(run: Any) -> dict[str, Any]:
    """What identifies a model in this process."""
    config, model, devices = run.config, run.config.model, devices_in_use(run.spec)
    packages = {**QUANTISATIONS, "torchao": "torchao", "bitsandbytes": "bitsandbytes"}
    quantiser = packages.get(run.spec.quantise or quantised_by(run.model_config) or "")
    file = gguf_of(run.spec)
    readers = [*([quantiser] if quantiser else []), *(["gguf"] if file else [])]
    return {
        "model": title_of(run.spec),
        **({} if file is None else {"gguf": quantisation_of(file)}),
        "load_format": model.load_format,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
        "sdpa_backend": model.sdpa_backend,
        "quantise": model.quantise,
        "device_map": model.device_map,  # times depend on it, and results, as kernels of devices differ
        "revision": model.revision or getattr(run.model_config, "_commit_hash", None),
        "weights": f"random, seed {config.seed}" if run.spec.is_dummy else weights_sha256(run.spec),
        "end_ids": list(load_end_ids(run.spec)),
        "engine": code_sha256(ENGINE),
        "versions": versions() | {package: importlib.metadata.version(package) for package in readers},
        "device": " + ".join(map(device_name, devices)),
        "threads": (config.threads or torch.get_num_threads()) if devices[0].type == "cpu" else None,
    }


def _served_identity(run: Any) -> dict[str, Any]:
    """What identifies how all servers are asked."""
    config = run.config
    return {
        "model": config.model.name,
        "server": {key: getattr(config.server, key) for key in ("api", "cache", "extra_body")},
        "load": {"concurrency": config.load.concurrency, "rate": config.load.rate},
        "engine": code_sha256(SERVED),
        "versions": versions(),
    }


def _chat_identity(run: Any) -> dict[str, Any]:
    """What identifies the chat format: all that can change a number."""
    chat, tokenizer = run.chat, run.tokenizer
    about: dict[str, Any] = {"chat": run.config.model.chat or "none", "thinking_tokens": chat.thinking_tokens}
    if chat.uses_template(tokenizer):
        today = chat.today if chat.reads_clock(tokenizer) else None
        about |= {"chat": "auto", "chat_args": chat.template_args(tokenizer), "system": chat.system, "today": today}
    return {key: value for key, value in about.items() if value}


def provenance_of(run: Any) -> dict[str, Any]:
    """Where, when and with which code the run's first job ran: not part of the identity, without folders and hosts."""
    machine = {
        "device": "server" if run.is_served else device_name(devices_in_use(run.spec)[0]),
        "cpu": device_name(torch.device("cpu")),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cuda": torch.version.cuda,
    }
    return {"git_commit": git_commit(), "versions": versions(), "machine": machine, "started": now()}


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of everything that determines the token ids of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(content.encode()).hexdigest()


def weights_sha256(spec: ModelSpec) -> str | None:
    """SHA-256 of a GGUF file, or of a folder's config, and name, size and samples, not all 13 GB, of its weight files.

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
