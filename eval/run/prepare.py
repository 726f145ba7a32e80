"""From a run to a plan of all its examples. All checks that need no weights are made here."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eval.benchmarks.datasets import CHOICES, datasets_asked_for, load
from eval.benchmarks.prompts import build_prompt, end_token_ids
from eval.benchmarks.rows import sha256_of
from eval.benchmarks.subsets import Shard, in_half, parse_shard, shard_numbers, spread_over
from eval.benchmarks.suite import DoesNotFitError, Example, LoadedDataset
from eval.run import targets
from eval.run.config import RunConfig, compose_config, prompt_limit, register_schema, to_run_config
from eval.run.identity import (
    device_name,
    machine,
    now,
    tokenizer_sha256,
    versions,
    weights_sha256,
)
from eval.run.measure import Case
from eval.run.resolved import RUNS, Resolved, about_the_method, at_depth, build_method, canonical, later_turns, plain
from eval.run.served import describe_servers
from eval.run.targets import OutOfReachError
from eval.run.work import rows_of_answers
from eval.store.comparable import as_text
from eval.store.folder import fingerprint
from eval.store.runs import label_of, settings_in, short_name
from lazyllm.engine.devices import memory_of
from lazyllm.errors import UserError
from lazyllm.machine import git_commit
from lazyllm.methods import Baseline, code_of
from lazyllm.models.load import check_loading, devices_in_use, load_config, load_end_ids, load_tokenizer_of, shape_of
from lazyllm.models.quantisation import quantised_by
from lazyllm.spec import QUANTISATIONS, ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from eval.server.kinds import Server

log = logging.getLogger(__name__)

DEFAULT_THREADS = torch.get_num_threads()  # restored for a sweep's job after one that set its own number


@dataclass(frozen=True)
class Identified:
    """A run without its prompts.

    identity: must agree for two records to share a folder. parameters: the method's, by dataset. devices: all that the
    model may compute on. positions: the longest prompt and answer; None if a server does not tell. prompt_limit:
    tokens; longer prompts lose their middle. servers: by side; empty for a model in this process, which has a
    model_config (`transformers.PreTrainedConfig`, else None). rows: answers that decode together.
    """

    run: Resolved
    identity: dict[str, Any]
    parameters: dict[str, dict[str, Any]]
    examples: dict[str, list[Example]]
    loaded: list[LoadedDataset]
    model_config: Any
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    positions: int | None
    prompt_limit: int
    devices: tuple[torch.device, ...]
    servers: dict[str, Server]
    paired: bool | str
    rows: int

    @property
    def baseline_fingerprint(self) -> str:
        """Of the baseline's run on the same prompts."""
        own = {"method_code", "method_weights"}
        shared = {key: value for key, value in self.identity.items() if key not in own}
        return fingerprint(shared | {"method": canonical({"name": "baseline"}), "parameters": None, "paired": False})


@dataclass(frozen=True)
class Plan(Identified):
    """A run, ready to be measured.

    names: for people: the model, the setting, its seed ("" without random numbers), the data. cases: all examples, in
    order. ours: keys of the examples that this job measures (`eval.benchmarks.subsets`). traced: keys of those to
    trace. about: config and provenance. file_part: the shard's part of its file names; "" for a run in one job.
    """

    folder: Path
    names: tuple[str, ...]
    cases: list[Case]
    ours: set[tuple[str, str]]
    traced: list[Case]
    about: dict[str, Any]
    file_part: str

    @property
    def title(self) -> str:
        return ", ".join(filter(None, self.names))

    @property
    def skipped(self) -> str | None:
        """A message about bad rows that were left out; None for none."""
        rows = [row for data in self.loaded for row in data.skipped]
        if not rows:
            return None
        return f"{len(rows)} rows were skipped (data.on_error=skip), the first: {rows[0].where}: {rows[0].reason}"


def prepare(run: Resolved) -> Plan:
    """A run's plan, without the model's weights. Raises UserError."""
    identified, config = identify(run), run.config
    cases = list(_cases(identified))
    data = _data_label(run)
    half = f", {config.half} half" if config.half is not None else ""
    method = identified.identity["method"]
    setting = label_of(method["name"], settings_in(method))
    seed = f"seed {method['seed']}" if "seed" in method else ""
    shard = parse_shard(config.shard) if config.shard is not None else None
    ours = _keys_of(shard, cases)
    firsts = [
        case for _, group in groupby(cases, lambda case: case.dataset.name) for case in islice(group, config.trace)
    ]
    model = short_name(vars(config.model)).replace("/", "-")
    name = f"{model}-{method['name']}-{data}-{fingerprint(identified.identity)[:8]}"
    return Plan(
        **vars(identified),
        folder=Path(config.out) if config.out else RUNS / name,
        names=(config.model.name, setting, seed, data + half),
        cases=cases,
        ours=ours,
        traced=[case for case in firsts if case.key in ours],
        about={
            "config": asdict(replace(config, shard=None)),
            "provenance": {
                "git_commit": git_commit(),
                "versions": versions(),
                "machine": machine(identified.devices[0] if identified.devices else None),
                "started": now(),
            },
            # `limit` and `sample` choose from these
            "examples": {rows.dataset.name: rows.total or len(rows.examples) for rows in identified.loaded},
            **({"baseline_command": _baseline_command(run)} if identified.paired == "ttft" else {}),
        },
        file_part=shard.file_part if shard is not None else "",
    )


def identify(run: Resolved) -> Identified:
    """The run without its prompts. Servers are asked what they are. Raises UserError."""
    config, model = run.config, run.config.model
    servers = describe_servers(run) if run.is_served else {}
    devices = () if servers else devices_in_use(run.spec)
    torch.set_num_threads(config.threads or DEFAULT_THREADS)
    model_config = None if servers else check_loading(run.spec)
    parameters = {dataset.name: {} for dataset in run.datasets}
    if model_config is not None:
        parameters = parameters_of(run, model_config)
    tokenizer = load_tokenizer_of(run.spec)
    assert tokenizer is not None  # `resolve` refuses random weights without one
    told = [server.positions for server in servers.values() if server.positions is not None]
    longest = min(told, default=None) if model_config is None else model_config.max_position_embeddings
    length = run.suite.length(run.data)
    if length is not None and longest is not None and length > longest:  # before the rows are made
        raise UserError(
            f"{run.datasets[0].name}: {length} tokens of prompt and answer exceed the model's {longest} positions: "
            f"{run.suite.shorter}"
        )
    limit = model.max_prompt_tokens or (prompt_limit(longest) if longest is not None else length)
    if limit is None:
        raise UserError("the server does not tell how long a prompt may be: give model.max_prompt_tokens=N")
    if longest is not None and limit > longest:
        raise UserError(f"model.max_prompt_tokens={limit}: the model has {longest} positions: give fewer")
    if None in (model.max_prompt_tokens, model.chat):
        log.info(
            "%s: %sprompts beyond %d tokens lose their middle; %s",
            *(model.name, "" if longest is None else f"has {longest} positions, so ", limit),
            "prompts have its own chat template"
            if run.chat.uses_template(tokenizer)
            else "it has no chat template: prompts are plain text",
        )
    loaded = _loaded(run)
    end_ids, rows = (), 1
    if model_config is not None:
        end_ids = load_end_ids(run.spec)
        methods = [build_method(solved) for solved in parameters.values()] + ([Baseline()] if run.paired else [])
        new_tokens = max(data.max_new_tokens for data in loaded)
        rows = rows_of_answers(config.answers.rows, run.spec, methods, limit, new_tokens, memory_of(*devices))
    identity = {
        **_identity(run, loaded, model_config, tokenizer),
        **(_served_identity(run, servers) if servers else _model_identity(run, model_config, end_ids, devices)),
        **_chat_identity(run, tokenizer),
        "max_prompt_tokens": limit,
        **({"answers_rows": rows} if rows > 1 else {}),  # rounding differs by the number of rows
        "parameters": plain(parameters) if targets.uses_preset(run.method) else None,
    }
    return Identified(
        run=run,
        identity=identity,
        parameters=parameters,
        examples=_examples(config, loaded),
        loaded=loaded,
        model_config=model_config,
        tokenizer=tokenizer,
        end_ids=end_ids,
        positions=longest,
        prompt_limit=limit,
        devices=devices,
        servers=servers,
        paired=run.paired,
        rows=rows,
    )


def within_reach(run: Resolved) -> dict[str, Resolved]:
    """{label: run} of the comparison's methods that can reach their target speedups.

    The others are left out, with a line in the log. All other errors in methods' settings are raised here, before the
    first method runs. Raises UserError.
    """
    if run.is_served:
        return run.runs
    model_config, runs = shape_of(run.spec), {}
    for label, one in run.runs.items():
        try:
            parameters_of(one, model_config)
        except OutOfReachError as error:
            log.warning("left out: %s: %s", label, error)
        else:
            runs[label] = one
    return runs


def parameters_of(run: Resolved, model_config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """{dataset: the method's settings}, without targets, checked against the model's depth. Raises UserError."""
    settings, length = at_depth(run.method, model_config.num_hidden_layers), run.suite.length(run.data)
    parameters = {}
    for dataset in run.datasets:
        with about_the_method():
            solved = targets.solved(settings, dataset, model_config, run.config.model.paper, length)
            build_method(solved).check(model_config)
        parameters[dataset.name] = solved
    return parameters


def _cases(identified: Identified) -> Iterator[Case]:
    """Every example of the run with its prompt. Prompts that the model or the method cannot take are refused here."""
    run, tokenizer, longest = identified.run, identified.tokenizer, identified.positions
    for rows in identified.loaded:
        dataset = rows.dataset
        settings = identified.parameters[dataset.name]
        method = Baseline() if identified.servers else build_method(settings)  # servers have their own
        turns = later_turns(settings)
        end_ids = end_token_ids(tokenizer, identified.end_ids, dataset)
        thinking = run.chat.thinking_tokens if dataset.chat_wrap else 0
        max_new_tokens = min(rows.max_new_tokens, run.config.max_new_tokens or rows.max_new_tokens) + thinking
        for example in identified.examples[dataset.name]:
            prompt = build_prompt(
                example,
                rows.template,
                tokenizer,
                identified.prompt_limit if dataset.truncate else None,
                run.chat,
                dataset.chat_wrap,
                dataset.protected,
                dataset.decode_halves,
            )
            try:
                method.check_prompt(prompt.as_input())
            except ValueError as error:
                raise UserError(f"{dataset.name}, row {example.id}: {error}") from error
            new_tokens = max_new_tokens * (1 + len(prompt.turns))
            if identified.servers and prompt.turns:
                raise UserError(f"{dataset.name}, row {example.id}: a server answers one question a row: give turns=1")
            if longest is not None and (tokens := prompt.conversation_tokens) + new_tokens > longest:
                around = tokens - min(prompt.tokens_before_truncation, identified.prompt_limit)
                shorter = f"model.max_prompt_tokens={longest - new_tokens - around}"
                of_turns = f" of {1 + len(prompt.turns)} turns" if prompt.turns else ""
                raise UserError(
                    f"{dataset.name}, row {example.id}: {tokens} prompt tokens{of_turns} and up to {new_tokens} new "
                    f"ones exceed the model's {longest} positions: "
                    f"{f'set {shorter}, or less' if dataset.truncate else run.suite.shorter}"
                )
            if identified.paired == "ttft" and prompt.turns:
                raise UserError(
                    f"timing.paired=ttft: {dataset.name} has later turns, which follow the baseline's own answers: "
                    "give timing.paired=true, or turns=1"
                )
            yield Case(dataset, example, prompt, method, max_new_tokens, end_ids, turns)


def _loaded(run: Resolved) -> list[LoadedDataset]:
    """The rows of all datasets. Raises UserError that names each dataset whose rows do not fit."""
    loaded: list[LoadedDataset] = []
    reasons = {}
    for dataset in run.datasets:
        try:
            loaded.append(load(dataset, run.data))
        except DoesNotFitError as error:
            reasons[dataset.name] = str(error)
    if reasons:
        others = f", or leave out {' '.join(f'dataset.{name}=false' for name in reasons)}" if loaded else ""
        raise UserError("; ".join(reasons.values()) + others)
    return loaded


def _examples(config: RunConfig, loaded: list[LoadedDataset]) -> dict[str, list[Example]]:
    """The examples of each dataset after `limit`, `half` and `sample`, in the dataset's order."""
    for data in loaded:
        if (config.turns or 1) > 1 and not any(example.turns for example in data.examples):
            raise UserError(
                f"turns={config.turns}: the rows of {data.dataset.name} hold one question each; leave it out"
            )
    last = None if config.turns is None else config.turns - 1
    pairs = [
        (data.dataset.name, replace(example, turns=example.turns[:last]))
        for data in loaded
        for example in in_half(data.dataset.name, _limited(config, data), config.half)
    ]
    empty = [data.dataset.name for data in loaded if data.dataset.name not in {name for name, _ in pairs}]
    if config.half is not None and empty:
        raise UserError(f"half={config.half} leaves no example of {empty[0]}: give limit=2 or more, or half=null")
    if config.sample is not None and config.sample < len(pairs):
        drawn = np.random.default_rng(config.seed).choice(len(pairs), config.sample, replace=False)
        pairs = [pairs[number] for number in sorted(drawn.tolist())]
    chosen: dict[str, list[Example]] = {data.dataset.name: [] for data in loaded}
    for name, example in pairs:
        chosen[name].append(example)
    return chosen


def _limited(config: RunConfig, data: LoadedDataset) -> Sequence[Example]:
    """A dataset's examples after `limit` and `spread`."""
    if config.spread is not None and config.limit is not None:
        return spread_over(data.examples, config.limit)
    return data.examples[: config.limit]


def _spread_sha256(config: RunConfig, loaded: Sequence[LoadedDataset]) -> str:
    """The hash of the chosen rows' ids: equal for all who chose the same rows."""
    return sha256_of({data.dataset.name: [one.id for one in _limited(config, data)] for data in loaded})[:16]


def _keys_of(shard: Shard | None, cases: list[Case]) -> set[tuple[str, str]]:
    """The keys of the examples that the shard measures; all without a shard."""
    if shard is None:
        return {case.key for case in cases}
    tokens = {case.key: len(case.prompt.token_ids) for case in cases}
    return {key for key, number in shard_numbers(tokens, shard.count).items() if number == shard.number}


def _identity(
    run: Resolved, loaded: list[LoadedDataset], model_config: Any, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The facts that must agree for two records to share a folder, wherever the model runs.

    `limit` is not one of them and may be raised.
    """
    shorter, longest = run.config.max_new_tokens, max(data.max_new_tokens for data in loaded)
    return {
        **run.identity(0 if model_config is None else model_config.num_hidden_layers),
        "tokenizer": tokenizer_sha256(tokenizer)[:16],
        **({"spread": _spread_sha256(run.config, loaded)} if run.config.spread is not None else {}),
        "data": {
            data.dataset.name: f"{data.data_sha256[:16]} {data.config_sha256[:16]} v{run.suite.version}"
            for data in loaded
        },
        "max_new_tokens": shorter if shorter is not None and shorter < longest else None,
    }


def _model_identity(
    run: Resolved, model_config: Any, end_ids: tuple[int, ...], devices: tuple[torch.device, ...]
) -> dict[str, Any]:
    """The facts of a model in this process."""
    config, source = run.config, run.spec.source
    others = run.other_models()
    code = code_of(config.method["name"])  # of lazyllm's own methods it is in "code"
    return {
        "revision": config.model.revision or getattr(model_config, "_commit_hash", None),
        "weights": f"random, seed {config.seed}" if run.spec.is_dummy else weights_sha256(source),
        "end_ids": list(end_ids),
        **({"method_code": code} if code is not None else {}),
        **({"method_weights": [_weights_of(spec) for spec in others]} if others else {}),
        "versions": versions() | _version_of_quantiser(run.spec, model_config),
        "device": " + ".join(map(device_name, devices)),
        "threads": torch.get_num_threads() if devices[0].type == "cpu" else None,
    }


def _served_identity(run: Resolved, servers: dict[str, Server]) -> dict[str, Any]:
    """The facts of the baseline's server, and of how all are asked. Those of another server are the method's."""
    model, load, about = run.config.model, run.config.load, servers["baseline"]
    return {
        "server": {
            "url": about.endpoint.url,
            "kind": about.kind.name,
            "version": about.version,
            "api": model.api,
            "cache": model.cache,
            "extra_body": plain(model.extra_body),
        },
        "load": {"concurrency": load.concurrency, "rate": load.rate},
    }


def _chat_identity(run: Resolved, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The facts of the chat format that can change a number."""
    chat = run.chat
    if not chat.uses_template(tokenizer):
        return {"chat": run.config.model.chat or "none"}
    about = {
        "chat": "auto",
        "chat_args": chat.template_args(tokenizer),
        "system": chat.system,
        "today": chat.today if chat.reads_clock(tokenizer) else None,
        "thinking_tokens": chat.thinking_tokens,
    }
    return {key: value for key, value in about.items() if value}


def _weights_of(spec: ModelSpec) -> str | None:
    """The identity of the weights of a method's other model: a local model's hash, a hub model's commit."""
    return weights_sha256(spec.source) or getattr(load_config(spec), "_commit_hash", None)


def _version_of_quantiser(spec: ModelSpec, model_config: PreTrainedConfig) -> dict[str, str]:
    """{package that quantises the weights: its version}; {} if `lazyllm.models.quantisation` does not quantise them."""
    packages = {**QUANTISATIONS, "torchao": "torchao", "bitsandbytes": "bitsandbytes"}
    package = packages.get(spec.quantise or quantised_by(model_config) or "")
    return {package: version(package)} if package is not None else {}


def _baseline_command(run: Resolved) -> str:
    """The command of the baseline's run on the same prompts."""
    register_schema()
    config, label, name = run.config, _data_label(run), run.config.model.name
    try:
        command = [f"model={name}"]
        compose_config(command)
    except UserError:  # a folder or a hub id
        command = ["model=custom", f"model.name={name}"]
    if label not in CHOICES or datasets_asked_for({label: True}, name) != run.datasets:
        label = f"[{','.join(dataset.name for dataset in run.datasets)}]"
    command += ["method=baseline", f"dataset={label}"]
    usual, here = (
        {key: value for key, value in as_text(asdict(one)).items() if not key.startswith(_NOT_THE_BASELINES)}
        for one in (to_run_config(compose_config(command)), config)
    )
    command += [
        f"{'' if key in usual else '++'}{key}={value}" for key, value in here.items() if usual.get(key) != value
    ]
    return f"python run.py {shlex.join(command)}"


# Settings that the baseline's run of the same prompts has no use for
_NOT_THE_BASELINES = (
    "method", "dataset", "compare", "only", "label", "speedup", "draft", "out", "shard", "trace", "tracker",
    "timing.paired",
)  # fmt: skip


def _data_label(run: Resolved) -> str:
    """A short name for people: that of a dataset, a task or a suite, or the number of datasets."""
    tasks = {dataset.task for dataset in run.datasets}
    if len(run.datasets) == 1:
        return run.datasets[0].name
    if len(tasks) == 1:
        return next(iter(tasks))
    if len(tasks) == len(run.suite.all_tasks) or run.suite.whole in run.config.dataset:
        return run.suite.whole
    return f"{len(run.datasets)}_datasets"
