"""From a run to a plan of all its examples. All checks that need no weights are made here."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import count, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from eval.benchmarks.datasets import CHOICES, datasets_asked_for
from eval.benchmarks.prompts import build_prompt, end_token_ids
from eval.benchmarks.subsets import in_half, parse_shard, shard_numbers
from eval.benchmarks.suite import Example, LoadedDataset, Skipped
from eval.run import targets
from eval.run.config import compose_config, model_arguments, register_schema, to_run_config
from eval.run.identity import machine, now, tokenizer_sha256, versions, weights_sha256
from eval.run.measure import Case
from eval.run.resolved import (
    RUNS,
    Resolved,
    about_the_method,
    build_method,
    canonical,
    data_identity,
    later_turns,
    limit_of_prompts,
    plain,
    rows_of,
)
from eval.run.targets import OutOfReachError
from eval.run.work import rows_of_answers
from eval.server import Server, describe_servers
from eval.store.folder import fingerprint
from eval.store.results import as_text
from eval.store.runs import label_of, settings_in, short_name
from lazyllm.errors import UserError
from lazyllm.machine import device_name, git_commit
from lazyllm.measuring import memory_of
from lazyllm.methods import Baseline, code_of
from lazyllm.models.load import check_loading, devices_in_use, load_config, load_end_ids, load_tokenizer_of, shape_of
from lazyllm.models.quantisation import quantised_by
from lazyllm.spec import QUANTISATIONS

log = logging.getLogger(__name__)

DEFAULT_THREADS = torch.get_num_threads()  # restored for a sweep's job after one that set its own number


@dataclass(frozen=True)
class Plan:
    """A run, ready to be measured.

    identity: must agree for two records to share a folder. about: config and provenance. names: for people: the model,
    the setting, its seed ("" without random numbers), the data. cases: all examples, in order. ours: keys of the
    examples that this job measures (`eval.benchmarks.subsets`). traced: those of them to trace. devices: all
    that the model may compute on. servers: by side; empty for a model in this process, which has a model_config
    (`transformers.PreTrainedConfig`, else None). rows: answers that decode together. skipped: bad rows that were left
    out. file_part: the shard's part of its file names; "" for a run in one job.
    """

    run: Resolved
    folder: Path
    identity: dict[str, Any]
    about: dict[str, Any]
    names: tuple[str, ...]
    cases: list[Case]
    ours: set[tuple[str, str]]
    traced: list[Case]
    model_config: Any
    tokenizer: PreTrainedTokenizerBase
    devices: tuple[torch.device, ...]
    servers: dict[str, Server]
    rows: int
    skipped: list[Skipped]
    file_part: str

    @property
    def baseline_fingerprint(self) -> str:
        """Of the baseline's run on the same prompts."""
        own = {"method_code", "method_weights"}
        shared = {key: value for key, value in self.identity.items() if key not in own}
        return fingerprint(shared | {"method": canonical({"name": "baseline"}), "parameters": None, "paired": False})


def prepare(run: Resolved) -> Plan:
    """A run's plan, without the model's weights. Servers are asked what they are. Raises UserError."""
    config, model = run.config, run.config.model
    servers = describe_servers(model, run.method) if run.is_served else {}
    devices = () if servers else devices_in_use(run.spec)
    torch.set_num_threads(config.threads or DEFAULT_THREADS)
    model_config = None if servers else check_loading(run.spec)
    parameters = dict[str, dict[str, Any]]() if model_config is None else parameters_of(run, model_config)
    tokenizer = load_tokenizer_of(run.spec)
    assert tokenizer is not None  # `resolve` refuses random weights without one
    told = [server.positions for server in servers.values() if server.positions is not None]
    longest = min(told, default=None) if model_config is None else model_config.max_position_embeddings
    limit = limit_of_prompts(run, longest)
    if None in (model.max_prompt_tokens, model.chat):
        log.info(
            "%s: %sprompts beyond %d tokens lose their middle; %s",
            *(model.name, "" if longest is None else f"has {longest} positions, so ", limit),
            "prompts have its own chat template"
            if run.chat.uses_template(tokenizer)
            else "it has no chat template: prompts are plain text",
        )
    loaded = rows_of(run)
    if model_config is None:
        end_ids, rows, measured = (), 1, _served_identity(run, servers)
    else:
        end_ids, new_tokens = load_end_ids(run.spec), max(data.max_new_tokens for data in loaded)
        methods = [build_method(solved) for solved in parameters.values()] + ([Baseline()] if run.paired else [])
        rows = rows_of_answers(config.answers.rows, run.spec, methods, limit, new_tokens, memory_of(*devices))
        measured = _model_identity(run, model_config, end_ids, devices)
    identity = {
        **run.identity(0 if model_config is None else model_config.num_hidden_layers),
        **data_identity(run, loaded),
        **measured,
        **_chat_identity(run, tokenizer),
        "tokenizer": tokenizer_sha256(tokenizer)[:16],
        "max_prompt_tokens": limit,
        **({"answers_rows": rows} if rows > 1 else {}),  # rounding differs by the number of rows
        "parameters": plain(parameters) if targets.uses_preset(run.method) else None,
    }
    chosen, cases = _examples(run, loaded), list[Case]()
    for data in loaded:
        name = data.dataset.name
        cases += _cases(run, data, chosen[name], parameters.get(name, {}), tokenizer, end_ids, limit, longest)
    shard = None if config.shard is None else parse_shard(config.shard)
    tokens = {case.key: len(case.prompt.token_ids) for case in cases}
    numbers = {} if shard is None else shard_numbers(tokens, shard.count)
    ours = {key for key in tokens if shard is None or numbers[key] == shard.number}
    by_dataset = groupby(cases, lambda case: case.dataset.name)
    firsts = [case for _, group in by_dataset for case in islice(group, config.trace)]
    label, method = _data_label(run), identity["method"]
    name = f"{short_name(vars(model)).replace('/', '-')}-{method['name']}-{label}-{fingerprint(identity)[:8]}"
    half = f", {config.half} half" if config.half is not None else ""
    seed = f"seed {method['seed']}" if "seed" in method else ""
    return Plan(
        run=run,
        folder=Path(config.out) if config.out else RUNS / name,
        identity=identity,
        about=_about(run, loaded, devices, label),
        names=(model.name, label_of(method["name"], settings_in(method)), seed, label + half),
        cases=cases,
        ours=ours,
        traced=[case for case in firsts if case.key in ours],
        model_config=model_config,
        tokenizer=tokenizer,
        devices=devices,
        servers=servers,
        rows=rows,
        skipped=[row for data in loaded for row in data.skipped],
        file_part=shard.file_part if shard is not None else "",
    )


def _about(run: Resolved, loaded: list[LoadedDataset], devices: tuple[torch.device, ...], label: str) -> dict[str, Any]:
    """Config and provenance, for run.json. label: of `_data_label`."""
    about: dict[str, Any] = {
        "config": asdict(replace(run.config, shard=None)),
        "provenance": {
            "git_commit": git_commit(),
            "versions": versions(),
            "machine": machine(devices[0] if devices else None),
            "started": now(),
        },
        # `limit` and `sample` choose from these
        "examples": {data.dataset.name: data.total for data in loaded},
    }
    return about | ({"baseline_command": _baseline_command(run, label)} if run.paired == "ttft" else {})


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
    parameters, length = {}, run.suite.length(run.data)
    with about_the_method():
        settings = targets.at_depth(run.method, model_config.num_hidden_layers)
        for dataset in run.datasets:
            solved = targets.solved(settings, dataset, model_config, run.config.model.paper, length)
            build_method(solved).check(model_config)
            parameters[dataset.name] = solved
    return parameters


def _cases(
    run: Resolved,
    data: LoadedDataset,
    examples: Sequence[Example],
    settings: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    model_end_ids: tuple[int, ...],
    limit: int,
    longest: int | None,
) -> Iterator[Case]:
    """A dataset's examples with their prompts. Prompts that the model or the method cannot take are refused here.

    settings: the method's. limit, longest: tokens, as of `limit_of_prompts`.
    """
    dataset = data.dataset
    method = Baseline() if run.is_served else build_method(settings)  # servers have their own
    turns, end_ids = later_turns(settings), end_token_ids(tokenizer, model_end_ids, dataset)
    thinking = run.chat.thinking_tokens if dataset.chat_wrap else 0
    max_new_tokens = min(data.max_new_tokens, run.config.max_new_tokens or data.max_new_tokens) + thinking
    for example in examples:
        prompt = build_prompt(
            example,
            data.template,
            tokenizer,
            limit if dataset.truncate else None,
            run.chat,
            dataset.chat_wrap,
            dataset.protected,
            dataset.decode_halves,
        )
        where, new_tokens = f"{dataset.name}, row {example.id}", max_new_tokens * (1 + len(prompt.turns))
        try:
            method.check_prompt(prompt.as_input())
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        tokens = sum(len(message.token_ids) for message in (prompt, *prompt.turns))
        needed = tokens + new_tokens - (not run.is_served)  # the last new token has no position here; servers count it
        if longest is not None and needed > longest:
            fits = longest - needed + min(prompt.tokens_before_truncation, limit)
            of_turns = f" of {1 + len(prompt.turns)} turns" if prompt.turns else ""
            raise UserError(
                f"{where}: {tokens} prompt tokens{of_turns} and up to {new_tokens} new ones exceed the model's "
                f"{longest} positions: "
                f"{f'set model.max_prompt_tokens={fits}, or less' if dataset.truncate else run.suite.shorter}"
            )
        if run.paired == "ttft" and prompt.turns:
            raise UserError(
                f"timing.paired=ttft: {dataset.name} has later turns, which follow the baseline's own answers: "
                "give timing.paired=true, or turns=1"
            )
        yield Case(dataset, example, prompt, method, max_new_tokens, end_ids, turns)


def _examples(run: Resolved, loaded: list[LoadedDataset]) -> dict[str, list[Example]]:
    """The examples of each dataset after `half`, `turns` and `sample`, in the dataset's order."""
    config = run.config
    last = None if config.turns is None else config.turns - 1
    chosen: dict[str, list[Example]] = {}
    for data in loaded:
        name = data.dataset.name
        if last and not any(example.turns for example in data.examples):
            raise UserError(f"turns={config.turns}: the rows of {name} hold one question each; leave it out")
        examples = in_half(name, data.examples, config.half)
        if config.half is not None and not examples:
            raise UserError(f"half={config.half} leaves no example of {name}: give limit=2 or more, or half=null")
        chosen[name] = [replace(example, turns=example.turns[:last]) for example in examples]
    total = sum(map(len, chosen.values()))
    if config.sample is None or config.sample >= total:
        return chosen
    drawn, numbers = set(np.random.default_rng(config.seed).choice(total, config.sample, replace=False)), count()
    return {name: [one for one in examples if next(numbers) in drawn] for name, examples in chosen.items()}


def _model_identity(
    run: Resolved, model_config: Any, end_ids: tuple[int, ...], devices: tuple[torch.device, ...]
) -> dict[str, Any]:
    """The facts of a model in this process."""
    config, code = run.config, code_of(run.method["name"])  # of lazyllm's own methods it is in "code"
    # of the method's other models: a local one's hash, a hub model's commit
    others = [
        weights_sha256(spec.source) or getattr(load_config(spec), "_commit_hash", None) for spec in run.other_models()
    ]
    packages = {**QUANTISATIONS, "torchao": "torchao", "bitsandbytes": "bitsandbytes"}
    quantiser = packages.get(run.spec.quantise or quantised_by(model_config) or "")
    return {
        "revision": config.model.revision or getattr(model_config, "_commit_hash", None),
        "weights": f"random, seed {config.seed}" if run.spec.is_dummy else weights_sha256(run.spec.source),
        "end_ids": list(end_ids),
        **({"method_code": code} if code is not None else {}),
        **({"method_weights": others} if others else {}),
        "versions": versions() | ({quantiser: version(quantiser)} if quantiser is not None else {}),
        "device": " + ".join(map(device_name, devices)),
        "threads": torch.get_num_threads() if devices[0].type == "cpu" else None,
    }


def _served_identity(run: Resolved, servers: dict[str, Server]) -> dict[str, Any]:
    """The facts of the baseline's server, and of how all are asked. Those of another server are the method's."""
    config, about = run.config, servers["baseline"]
    asked = {key: plain(getattr(config.model, key)) for key in ("api", "cache", "extra_body")}
    return {
        "server": {"url": about.url, "kind": about.kind, "version": about.version, **asked},
        "load": {"concurrency": config.load.concurrency, "rate": config.load.rate},
    }


def _chat_identity(run: Resolved, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The facts of the chat format that can change a number."""
    chat = run.chat
    about: dict[str, Any] = {"chat": run.config.model.chat or "none", "thinking_tokens": chat.thinking_tokens}
    if chat.uses_template(tokenizer):
        about |= {
            "chat": "auto",
            "chat_args": chat.template_args(tokenizer),
            "system": chat.system,
            "today": chat.today if chat.reads_clock(tokenizer) else None,
        }
    return {key: value for key, value in about.items() if value}


def _baseline_command(run: Resolved, label: str) -> str:
    """The command of the baseline's run on the same prompts. label: of `_data_label`."""
    register_schema()
    config, name = run.config, run.config.model.name
    command = model_arguments(name)
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
