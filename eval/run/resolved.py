"""One value for a run: its settings, and all that follows from them without torch, a model or data."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eval.benchmarks import SUITES
from eval.benchmarks.chat_format import NO_TEMPLATE, ChatFormat, chat_format
from eval.benchmarks.datasets import datasets_asked_for, load, missing_rows
from eval.benchmarks.rows import sha256_of
from eval.benchmarks.subsets import parse_shard, spread_over
from eval.benchmarks.suite import Dataset, DataSettings, DoesNotFitError, LoadedDataset, Suite
from eval.run import targets
from eval.run.config import QUIET, SERVER, SERVER_KINDS, SERVER_SETTINGS, RunConfig, prompt_limit
from eval.run.identity import SERVED_CODE, code_sha256, versions
from lazyllm.engine.inputs import TURNS
from lazyllm.errors import UserError, require
from lazyllm.machine import may_have_gpu
from lazyllm.methods import Method, by_name, make, settings_of
from lazyllm.models.checkpoint import read_config
from lazyllm.models.tokenizers import has_chat_template
from lazyllm.spec import ModelSpec

log = logging.getLogger(__name__)

_OF_SERVERS = ("kind", "api", "extra_body", "cache", "trust_prompt", "key_env", "timeout_s")  # settings `model.*`
TOLD = "LAZYLLM_BENCH_TOLD"  # environment variable: what was said to be left out
RUNS = Path("runs")  # the folder of runs without `out`, and `hydra.sweep.dir` of conf/config.yaml


@dataclass(frozen=True)
class Resolved:
    """A run, or a comparison of several methods (`runs` gives its runs). Made by `resolve`.

    config: the settings. spec: the model; behind a server, its tokenizer's. chat: the format of prompts and answers.
    datasets: those whose rows can be loaded, all of `suite`. data: the settings that determine their rows.
    """

    config: RunConfig
    spec: ModelSpec
    chat: ChatFormat
    suite: Suite
    datasets: tuple[Dataset, ...]
    data: DataSettings

    @property
    def method(self) -> dict[str, Any]:
        """The method's `name` and hyperparameters, targets included."""
        return self.config.method

    @property
    def runs(self) -> dict[str, Resolved]:
        """{label: run}: those of a comparison (one with `only`), or this run under its method's name."""
        config = self.config
        methods = config.compare or {config.method["name"]: config.method}
        return {
            label: replace(self, config=replace(config, method=method, compare={}, only=None))
            for label, method in methods.items()
            if config.only in (None, label)
        }

    @property
    def is_served(self) -> bool:
        """Whether servers answer, not a model in this process."""
        return self.config.model.url is not None

    def other_models(self) -> tuple[ModelSpec, ...]:
        """The models that the run's method needs besides `spec`."""
        return tuple(build_method(targets.check(self.method)).models())

    @property
    def paired(self) -> bool | str:
        """Whether the baseline runs beside the method; "ttft": up to its first token."""
        if self.method["name"] == "baseline":
            return self.config.control and bool(self.config.timing.paired)
        return self.config.timing.paired

    def identity(self, num_layers: int) -> dict[str, Any]:
        """The part of the run's identity that its settings give. num_layers: 0 behind a server. Raises UserError."""
        config, model = self.config, self.config.model
        if self.is_served:
            method = {key: plain(value) for key, value in self.method.items() if key != "turns"}
            about = {"model": model.name, "method": method, "code": code_sha256(SERVED_CODE)[:16]}
        else:
            with about_the_method():
                method = targets.at_depth(self.method, num_layers)
            about = {
                "model": model.name if Path(self.spec.source).is_dir() else self.spec.source,
                "load_format": model.load_format,
                "dtype": model.dtype,
                "attn_implementation": model.attn_implementation,
                "quantise": model.quantise,
                "device_map": model.device_map,  # times depend on it, and results, as kernels of devices differ
                "method": plain(canonical(method)),
                "code": code_sha256()[:16],
            }
        return {
            **about,
            "seed": config.seed,
            "paired": self.paired,
            "warmup": config.timing.warmup,
            "versions": versions(),
            **({"turns": config.turns} if config.turns is not None else {}),
            **({"half": config.half} if config.half is not None else {}),  # halves share no table
            **({"fidelity": config.fidelity} if config.fidelity is not None and self.paired else {}),
        }

    def changed(self, **settings: Any) -> Resolved:
        """The run with other settings. Raises UserError."""
        return resolve(replace(self.config, **settings))


def resolve(config: RunConfig) -> Resolved:
    """The run of these settings, checked as far as possible without a model.

    Raises UserError for a model, method or dataset that cannot be used. Datasets of a whole suite without rows are left
    out, with a line in the log.
    """
    model = config.model
    methods = [config.compare[config.only]] if config.only else list(config.compare.values()) or [config.method]
    if model.url is None:
        keys = [setting.name for setting in fields(ModelSpec) if setting.name != "seed"]
        spec = ModelSpec(**{key: getattr(model, key) for key in keys}, seed=config.seed)
        spec.check()
        with_server = "model=server model.url=http://HOST:PORT/v1 with it"
        _check_unused("model", model, with_server, _OF_SERVERS)
        _check_unused("load", config.load, with_server)
        require(all(settings.get("name") != SERVER for settings in methods), "method", SERVER, with_server)
    else:
        _check_servers(config, methods)
        spec = ModelSpec(model.tokenizer or model.name, revision=model.revision, seed=config.seed)
    if not Path(spec.source).is_dir() and spec.is_dummy and spec.tokenizer is None:
        raise UserError(
            "random weights (model.load_format=dummy) download nothing, so the tokenizer must be given: "
            "model.tokenizer=FOLDER (with tokenizer.json or tokenizer.model) or model.tokenizer=HUB_ID"
        )
    by_server = model.api == "chat"  # which then applies the model's template
    chat = chat_format(
        "none" if by_server else model.chat,
        args={} if by_server else model.chat_args or {},
        system=None if by_server else model.system,
        today=model.today,
        thinking_tokens=model.thinking_tokens,
    )
    for settings in methods if model.url is None else ():
        build_method(targets.check(settings))
        later_turns(settings)
    named = datasets_asked_for(config.dataset, model.name)
    suite = SUITES[named[0].suite]
    data = DataSettings(
        dir=Path(config.data.dir) if config.data.dir is not None else None,
        on_error="skip" if config.data.on_error == "skip" else "raise",
        limit=config.limit if config.spread is None else None,  # a spread is chosen from all rows
        options=getattr(config, suite.name, None),
        model=spec,
        chat=chat,
        turns=config.turns,
    )
    expected = f"dataset=NAME with it, as {suite.name} has rows of its own"
    require(data.dir is None or not suite.rows_here, "data.dir", data.dir, expected)
    for other in SUITES.values():
        options = getattr(config, other.name, None)
        if options is not None and other is not suite:
            instead = f"dataset={other.whole} with it: {named[0].name} is of {suite.name}"
            _check_unused(other.name, options, instead)
    return Resolved(config, spec, chat, suite, _with_rows(config, suite, named, data), data)


def check_early(run: Resolved) -> None:
    """Refuse what the model's files, this machine, the run's folder, rows at hand and servers rule out, before torch is
    imported.

    Rows come late, as reading them takes long. What is not known without torch is left to `eval.run.prepare`.
    Raises UserError.
    """
    config, suite, folder = run.config, run.suite, Path(run.config.out or RUNS)
    check_writable(folder)
    if config.tracker.mode == "online":
        require(config.tracker.name == "wandb", "tracker.mode", "online", "tracker=wandb with it")
        os.environ |= QUIET | os.environ
        import wandb  # not at the top: only if it is used

        require(wandb.login(prompt=False, verify=False), "tracker.mode", "online", "a key (wandb login, WANDB_API_KEY)")
    num_layers = 0 if run.is_served else _check_model(run)
    from eval.server import describe_servers  # not at the top, both: they import pyarrow
    from eval.store.folder import about_in, check_free

    known = dict[str, Any]()  # of the identity that the folder has to agree with
    if config.out is not None and any(folder.glob("r*.json*")):
        check_free(folder, "" if config.shard is None else parse_shard(config.shard).file_part)
        if num_layers is not None:
            (one,) = run.runs.values()
            known = one.identity(num_layers)
            about_in(folder, known, in_part=True)
    if suite.rows_here or (suite.rows_in_dir and run.data.dir is not None):
        loaded = rows_of(run)
        if known:
            about_in(folder, known | data_identity(run, loaded), in_part=True)
    for one in run.runs.values() if run.is_served else ():
        describe_servers(config.model, one.method)


def _check_model(run: Resolved) -> int | None:
    """Refuse a device, a chat format, a prompt limit or a method that does not fit. Returns the layers, if known."""
    spec = run.spec
    if spec.device.startswith("cuda") and not may_have_gpu():
        raise UserError(f"model.device={spec.device}: this machine or its torch has no GPU: give model.device=cpu")
    config = read_config(spec)
    for other in {other for one in run.runs.values() for other in one.other_models()}:
        read_config(other)
    if run.chat.from_tokenizer and not run.chat.or_none:
        source = (spec.source, spec.revision) if spec.tokenizer is None else (spec.tokenizer, None)
        if not has_chat_template(*source):
            raise UserError(NO_TEMPLATE)
    if "max_position_embeddings" in config:
        limit_of_prompts(run, config["max_position_embeddings"])
    layers: int | None = config.get("num_hidden_layers")  # None in a nested config, which transformers reads
    if layers is not None:
        for one in run.runs.values():
            with about_the_method():
                build_method(targets.check(targets.at_depth(one.method, layers))).tokens_per_layer(layers, 1)
    return layers


def rows_of(run: Resolved) -> list[LoadedDataset]:
    """The rows of all datasets after `limit` and `spread`. Raises UserError that names each whose rows do not fit."""
    loaded: list[LoadedDataset] = []
    reasons, limit = {}, run.config.limit
    for dataset in run.datasets:
        try:
            data = load(dataset, run.data)
        except DoesNotFitError as error:
            reasons[dataset.name] = str(error)
            continue
        rows, total = data.examples, data.total or len(data.examples)
        rows = rows[:limit] if run.config.spread is None or limit is None else tuple(spread_over(rows, limit))
        loaded.append(replace(data, examples=rows, total=total))
    if reasons:
        others = f", or leave out {' '.join(f'dataset.{name}=false' for name in reasons)}" if loaded else ""
        raise UserError("; ".join(reasons.values()) + others)
    return loaded


def data_identity(run: Resolved, loaded: list[LoadedDataset]) -> dict[str, Any]:
    """The facts of rows and answers. `limit` is not one of them and may be raised."""
    config, longest = run.config, max(data.max_new_tokens for data in loaded)
    facts: dict[str, Any] = {
        "data": {
            data.dataset.name: f"{data.data_sha256[:16]} {data.config_sha256[:16]} v{run.suite.version}"
            for data in loaded
        },
        "max_new_tokens": config.max_new_tokens if (config.max_new_tokens or longest) < longest else None,
    }
    if config.spread is not None:  # equal for all who chose the same rows
        facts["spread"] = sha256_of({data.dataset.name: [one.id for one in data.examples] for data in loaded})
        facts["spread"] = facts["spread"][:16]
    return facts


def limit_of_prompts(run: Resolved, longest: int | None) -> int:
    """Tokens of a prompt; longer ones lose their middle. longest: the model's positions, if known. Raises UserError."""
    length, asked = run.suite.length(run.data), run.config.model.max_prompt_tokens
    if length is not None and longest is not None and length > longest:  # before the rows are made
        raise UserError(
            f"{run.datasets[0].name}: {length} tokens of prompt and answer exceed the model's {longest} positions: "
            f"{run.suite.shorter}"
        )
    limit = asked or (prompt_limit(longest) if longest is not None else length)
    if limit is None:
        raise UserError("the server does not tell how long a prompt may be: give model.max_prompt_tokens=N")
    if longest is not None and limit > longest:
        raise UserError(f"model.max_prompt_tokens={limit}: the model has {longest} positions: give fewer")
    return limit


def check_writable(folder: Path) -> None:
    """Raise UserError if a folder cannot be written, or made."""
    exists = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not exists.is_dir() or not os.access(exists, os.W_OK):
        raise UserError(f"{folder}: cannot be written ({exists}): give another with out=FOLDER, or start elsewhere")


@contextmanager
def about_the_method() -> Iterator[None]:
    """Turn a method's errors, also of an installed package's method, into UserError."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError) as error:
        raise UserError(f"method: {error}") from error


def canonical(settings: dict[str, Any]) -> dict[str, Any]:
    """A method's settings in a run's identity: equal for all ways to write the same method.

    Hyperparameters at their default are left out, except the method's `target_parameter` and `shown_parameters`.
    """
    kind = by_name(settings["name"])
    written = {"name": settings["name"]}
    for key, default in settings_of(kind).items():
        value = settings.get(key, default)
        if key in (kind.target_parameter, *kind.shown_parameters) or value != default:
            written[key] = value
    turns = later_turns(settings)
    return written if turns == "continue" else written | {"turns": turns}


def plain(value: Any) -> Any:
    """The value with keys as in JSON."""
    return {str(key): plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _check_servers(config: RunConfig, methods: list[dict[str, Any]]) -> None:
    """Refuse what servers cannot do, and URLs that cannot be one's. Raises UserError."""
    model = config.model
    for settings in methods:
        name, unknown = settings.get("name", ""), settings.keys() - {*SERVER_SETTINGS, "model", "turns"}
        if name not in ("baseline", SERVER):
            raise UserError(
                f"method={name} runs inside transformers: lazyllm-bench serve model=NAME method={name} port=8123 puts "
                f"it behind a server; then compare with method=server method.url=http://127.0.0.1:8123/v1"
            )
        if unknown:
            raise UserError(f"method server has no setting {min(unknown)!r}; it has {', '.join(SERVER_SETTINGS)}")
        kind = settings.get("kind")
        require(kind in (None, *SERVER_KINDS), "method.kind", kind, " or ".join(SERVER_KINDS))
    for url in (model.url, *(settings["url"] for settings in methods if "url" in settings)):
        parts = urlsplit(url or "")
        if parts.username is not None:
            raise UserError(f"a URL with a name or password would be stored: give a key in {model.key_env}")
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query
        require(is_address, "url", url, "a URL such as http://127.0.0.1:8000/v1")
    is_source = model.tokenizer is not None or "/" in model.name or Path(model.name).is_dir()
    require(is_source, "model.tokenizer", "null", "FOLDER_OR_HUB_ID of the served model, as prompts are made here")
    has_own = model.api == "chat" and model.chat not in (None, "none")
    require(not has_own, "model.chat", model.chat, "none: the server applies its own template")
    one = config.load.rate is None or config.load.concurrency == 1
    require(one, "load.concurrency", config.load.concurrency, "1 with load.rate")
    require(config.trace == 0, "trace", config.trace, "0, as a server does not tell what its layers compute")
    told = "null, as a server does not tell the probabilities that it needs"
    require(config.fidelity is None, "fidelity", config.fidelity, told)


def build_method(settings: dict[str, Any]) -> Method:
    """A method from its config: `name` and hyperparameters. Raises UserError."""
    return make(settings.get("name", ""), {key: settings[key] for key in settings if key not in ("name", "turns")})


def later_turns(settings: dict[str, Any]) -> str:
    """What later turns of a conversation do with a method's config (`lazyllm.start`). Raises UserError."""
    turns = settings.get("turns", "continue")
    if turns not in TURNS:
        raise UserError(f"method.turns={turns}: give {' or '.join(TURNS)}")
    return turns


def _with_rows(config: RunConfig, suite: Suite, named: tuple[Dataset, ...], data: DataSettings) -> tuple[Dataset, ...]:
    """The datasets whose rows can be loaded. Raises UserError if one is missing that is not just part of a suite."""
    for dataset in named:
        suite.check(dataset, data)
    reasons = {dataset: reason for dataset in named if (reason := missing_rows(dataset, data)) is not None}
    is_whole = not config.dataset or config.dataset.get(suite.whole)
    for dataset, reason in reasons.items():
        if not is_whole or len(reasons) == len(named):
            raise UserError(f"{dataset.name}: {reason}")
    for reason in dict.fromkeys(reasons.values()):
        left_out = f"{', '.join(dataset.name for dataset in reasons if reasons[dataset] == reason)}: {reason}"
        told = os.environ.get(TOLD, "")  # by another job of a sweep, which may be in a process that started this one
        if left_out not in told:
            log.warning("left out: %s", left_out)
            os.environ[TOLD] = f"{told}{left_out}\n"
    return tuple(dataset for dataset in named if dataset not in reasons)


def _check_unused(group: str, settings: Any, instead: str, names: Sequence[str] | None = None) -> None:
    """Refuse settings (None: all) that were changed and would change nothing. Raises UserError."""
    for name in names or [item.name for item in fields(settings)]:
        value = getattr(settings, name)
        require(value == getattr(type(settings)(), name), f"{group}.{name}", value, instead)
