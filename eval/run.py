"""The run: config in, records and a table out."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from eval import devices, presets, provenance
from eval.config import ConfigError, RunConfig, build_method, check_method, datasets_of
from eval.data import DataError, Example, LoadedDataset, load_rows
from eval.measure import Bench, Case
from eval.memory import release_memory
from eval.progress import progress
from eval.prompts import PromptError, build_prompt, end_token_ids
from eval.record import Failure, Record
from eval.shards import Shard, parse_shard, split
from eval.store import RunStore, StoreError, fingerprint, open_store, read_run, write_whole
from eval.summary import (
    Summary,
    as_table,
    compared_csv,
    compared_markdown,
    compared_table,
    summarise,
    to_csv,
    to_json,
    to_markdown,
)
from eval.tasks import TASKS, Dataset
from eval.trace import Trace, trace
from lazyllm import ModelError, TokenizerError, UnsupportedModelError
from lazyllm.decoder import sliding_window
from lazyllm.models import as_device, load_config, load_end_ids, load_tokenizer_of, load_weights, source_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class RunError(RuntimeError):
    """A run in which no example could be measured; the message says why."""


# What a user can mend: the message says how, and is all that is shown
USER_ERRORS = (
    ConfigError,
    DataError,
    PromptError,
    StoreError,
    RunError,
    ModelError,
    TokenizerError,
    UnsupportedModelError,
)

DEFAULT_THREADS = torch.get_num_threads()  # which a job of a sweep must find again after one that set its own


@dataclass(frozen=True)
class RunResult:
    """A finished run: where its files are, and its table; None while other shards have examples to measure."""

    folder: Path
    summary: Summary | None


def run(config: RunConfig, show: bool = True) -> RunResult:
    """Measure every example that the run folder does not hold yet, then summarise all of the run's examples.

    show: print the table.

    Everything that can be refused is refused before the model loads. Raises ConfigError, DataError, PromptError,
    ModelError, TokenizerError or StoreError with one message for the user.
    """
    check_method(config.method)
    device = as_device(config.model.device)
    torch.set_num_threads(config.threads or DEFAULT_THREADS)
    model_config = load_config(config.model.name, _load_format(config), config.model.revision)
    settings = _settings(config, model_config)
    tokenizer = _tokenizer(config)
    loaded = [load_rows(dataset, config.data.dir, _on_error(config)) for dataset in datasets_of(config)]
    end_ids = load_end_ids(config.model.name, _load_format(config), config.model.revision)
    paired = config.timing.paired and settings["name"] != "baseline"
    parameters = {one.dataset.name: _resolved(config, settings, one.dataset, model_config) for one in loaded}
    cases = list(_cases(config, loaded, parameters, tokenizer, model_config, end_ids))
    identity = _identity(config, loaded, model_config, tokenizer, end_ids, device, paired) | {
        "method": _plain(settings),
        "parameters": _plain(parameters) if presets.uses_preset(settings) else None,
    }
    folder = Path(config.out) if config.out else Path("runs") / _folder_name(config, loaded, identity)
    about = {"config": asdict(replace(config, shard=None)), "provenance": _provenance(device)}
    shard = parse_shard(config.shard) if config.shard is not None else None
    ours = _keys_of(shard, cases)
    with open_store(folder, identity, about, shard.file_part if shard is not None else "") as store:
        _check_prompts(cases, store)
        todo = [case for case in cases if case.key in ours and case.key not in store.records]
        traced = [case for case in _first_of_each(cases, config.trace) if case.key in ours]
        untraced = [case for case in traced if not store.has(_trace_file(case))]
        log.info("%s: %d examples, %d of them already measured", folder, len(ours), len(ours) - len(todo))
        if todo or untraced:
            with devices.held(device, f"process {os.getpid()} for {folder}"), _noted(store, device, len(todo)):
                _measure_all(config, tokenizer, paired, todo, untraced, store)
                release_memory(device)  # the model's, before another run has the device
        store.reload()
        done = [store.records[case.key] for case in cases if case.key in store.records]
        failed = [failure for failure in store.failures if failure.key in {case.key for case in cases}]
        if failed and not done:
            raise RunError(_all_failed(store, failed))
        pending = len(cases) - len(done) - len(failed)
        summary = None if pending else summarise(done)
        title = _title(config, loaded)
        if summary is None:
            log.info("%s: %d examples are left to other shards; the last of them makes the table", folder, pending)
        else:
            _publish(summary, store, title, about | {"identity": identity})
            if show:
                _console().print(as_table(summary, title))
    if failed:
        log.warning("%s", _some_failed(store, failed, len(cases)))
    skipped = sum(len(one.skipped) for one in loaded)
    if skipped:
        first = next(one.skipped[0] for one in loaded if one.skipped)
        log.warning("%d rows were skipped (data.on_error=skip), the first: %s: %s", skipped, first.where, first.reason)
    return RunResult(folder, summary)


def compare(config: RunConfig) -> list[RunResult]:
    """Run each method of `config.compare`, then print one table of them all; `runs/<label>.*` hold it too.

    With `config.only` that method alone is run, as any other run. Same errors as `run`.
    """
    if config.only is not None:
        return [run(replace(config, method=config.compare[config.only], compare={}))]
    from eval.figures import plot_comparison, save  # not at the top: matplotlib is slow to import, and writes caches

    model_config = load_config(config.model.name, _load_format(config), config.model.revision)
    for method in config.compare.values():  # the last one is refused before the first one runs
        settings = _settings(replace(config, method=method), model_config)
        for dataset in datasets_of(config):
            _resolved(config, settings, dataset, model_config)
    results = {label: run(replace(config, method=method), show=False) for label, method in config.compare.items()}
    # every run has its table: shards are refused beside compare
    summaries = {label: result.summary for label, result in results.items() if result.summary is not None}
    console = _console()
    console.print(compared_table(summaries, config.label))
    runs = {label: read_run(result.folder)[0] for label, result in results.items()}
    texts = {
        "md": compared_markdown(summaries, config.label),
        "csv": compared_csv(summaries),
        "json": json.dumps({"config": asdict(config), "runs": runs}, indent=2, sort_keys=True, default=str) + "\n",
    }
    for suffix, text in texts.items():
        write_whole(Path("runs") / f"{config.label}.{suffix}", text)
    table = pd.read_csv(Path("runs") / f"{config.label}.csv")
    pictures = save(plot_comparison(table, f"{config.model.name}, {config.label}"), Path("runs") / config.label)
    console.print("Files:")
    for path in (*(result.folder for result in results.values()), Path("runs") / f"{config.label}.md", *pictures):
        console.print(f"  {path}", highlight=False)
    if config.model.name == "tiny":
        console.print("The same on a checkpoint and LongBench, on a GPU:", highlight=False)
        console.print("  python run.py model=llama2 method=lazy dataset=hotpotqa", highlight=False)
    return list(results.values())


# --------------------------------------------------------------------------------------------------------- preparation


def _load_format(config: RunConfig) -> Any:
    return config.model.load_format


def _on_error(config: RunConfig) -> Any:
    return config.data.on_error


def _settings(config: RunConfig, model_config: PreTrainedConfig) -> dict[str, Any]:
    """The method's settings on this model's depth."""
    try:
        return presets.at_depth(config.method, model_config.num_hidden_layers)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"method: {error}") from error


def _resolved(
    config: RunConfig, settings: dict[str, Any], dataset: Dataset, model_config: PreTrainedConfig
) -> dict[str, Any]:
    """The method's settings for one dataset, without presets, checked against the model's depth."""
    try:
        resolved = presets.resolve(settings, dataset, model_config, config.model.paper)
        build_method(resolved).check(model_config)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"method: {error}") from error
    return resolved


def _tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer_of(
        config.model.name, _load_format(config), revision=config.model.revision, tokenizer=config.model.tokenizer
    )
    if tokenizer is None:
        raise ConfigError(
            "random weights (model.load_format=dummy) download nothing, so the tokenizer must be named: "
            "model.tokenizer=FOLDER (with tokenizer.json or tokenizer.model) or model.tokenizer=HUB_ID"
        )
    return tokenizer


def _cases(
    config: RunConfig,
    loaded: list[LoadedDataset],
    parameters: dict[str, dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    end_ids: tuple[int, ...],
) -> Iterator[Case]:
    """Every example of the run with its prompt. What the model cannot hold, or the method not use, is refused here."""
    longest = min(model_config.max_position_embeddings, sliding_window(model_config) or sys.maxsize)
    examples = _examples(config, loaded)
    for one in loaded:
        method = build_method(parameters[one.dataset.name])
        dataset_end_ids = end_token_ids(tokenizer, end_ids, one.dataset)
        max_new_tokens = min(one.max_new_tokens, config.max_new_tokens or one.max_new_tokens)
        for example in examples[one.dataset.name]:
            prompt = build_prompt(
                example,
                one.template,
                tokenizer,
                config.model.max_prompt_tokens,
                config.model.chat,
                one.dataset.chat_wrap,
                one.dataset.protected,
            )
            try:
                method.check_prompt(prompt.as_input())
            except ValueError as error:
                raise ConfigError(f"{one.dataset.name}, row {example.id}: {error}") from error
            length = len(prompt.token_ids) + max_new_tokens
            if length > longest:
                raise ConfigError(
                    f"{one.dataset.name}, row {example.id}: {len(prompt.token_ids)} prompt tokens and up to "
                    f"{max_new_tokens} new ones are more than the {longest} that the model can see at once "
                    "(its positions, or its sliding window): set a lower model.max_prompt_tokens"
                )
            yield Case(one.dataset, example, prompt, method, max_new_tokens, dataset_end_ids)


def _examples(config: RunConfig, loaded: list[LoadedDataset]) -> dict[str, list[Example]]:
    """What `limit` and `sample` leave of each dataset, in the dataset's order."""
    pairs = [(one.dataset.name, example) for one in loaded for example in one.examples[: config.limit]]
    if config.sample is not None and config.sample < len(pairs):
        drawn = np.random.default_rng(config.seed).choice(len(pairs), config.sample, replace=False)
        pairs = [pairs[number] for number in sorted(drawn.tolist())]
    chosen: dict[str, list[Example]] = {one.dataset.name: [] for one in loaded}
    for name, example in pairs:
        chosen[name].append(example)
    return chosen


def _first_of_each(cases: list[Case], number: int) -> list[Case]:
    """The first so many cases of each dataset."""
    seen: Counter[str] = Counter()
    first = []
    for case in cases:
        if seen[case.dataset.name] < number:
            first.append(case)
        seen[case.dataset.name] += 1
    return first


def _keys_of(shard: Shard | None, cases: list[Case]) -> set[tuple[str, str]]:
    """The examples that the shard measures; all of them where there is none."""
    tokens = {case.key: len(case.prompt.token_ids) for case in cases}
    return (
        set(tokens)
        if shard is None
        else {key for key, one in split(tokens, shard.count).items() if one == shard.number}
    )


def _trace_file(case: Case) -> str:
    return f"traces/{Trace.file_name(case.dataset.name, case.example.id)}"


def _check_prompts(cases: list[Case], store: RunStore) -> None:
    """Raise StoreError where the store holds another prompt of an example than the one that is built now."""
    for case in cases:
        record = store.records.get(case.key)
        if record is not None and record.prompt_sha256 != case.prompt.sha256:
            raise StoreError(
                f"{store.folder}: holds {case.dataset.name}, row {case.example.id}, with another prompt than the one "
                "built now; give another folder with out=FOLDER"
            )


def _identity(
    config: RunConfig,
    loaded: list[LoadedDataset],
    model_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: tuple[int, ...],
    device: torch.device,
    paired: bool,
) -> dict[str, Any]:
    """What must agree for two records to lie in one folder. `limit` is not part of it: a run can be widened."""
    source = source_of(config.model.name)
    dummy = config.model.load_format == "dummy"
    local = Path(source).is_dir()
    scorer = config.method.get("scorer")
    return {
        "model": config.model.name if local else source,
        "revision": config.model.revision or getattr(model_config, "_commit_hash", None),
        "weights": f"random, seed {config.seed}" if dummy else provenance.weights_sha256(source),
        "tokenizer": provenance.tokenizer_sha256(tokenizer)[:16],
        "end_ids": list(end_ids),
        "load_format": config.model.load_format,
        "dtype": config.model.dtype,
        "attn_implementation": config.model.attn_implementation,
        "max_prompt_tokens": config.model.max_prompt_tokens,
        "chat": config.model.chat,
        **({"scorer_weights": provenance.weights_sha256(source_of(scorer))} if scorer else {}),
        "data": {one.dataset.name: f"{one.data_sha256[:16]} {one.config_sha256[:16]}" for one in loaded},
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
        "paired": paired,
        "warmup": config.timing.warmup,
        "versions": provenance.versions(),
        "code": provenance.code_sha256()[:16],
        "device": provenance.device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
    }


def _plain(value: Any) -> Any:
    return {str(key): _plain(one) for key, one in value.items()} if isinstance(value, dict) else value


def _provenance(device: torch.device) -> dict[str, Any]:
    return {
        "git_commit": provenance.git_commit(),
        "versions": provenance.versions(),
        "machine": provenance.machine(device),
        "started": _now(),
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _folder_name(config: RunConfig, loaded: list[LoadedDataset], identity: dict[str, Any]) -> str:
    model = Path(config.model.name).name
    return f"{model}-{config.method['name']}-{_data_label(loaded)}-{fingerprint(identity)[:8]}"


def _data_label(loaded: list[LoadedDataset]) -> str:
    """A short name for people: of one dataset, of a whole task, of a whole suite, or how many there are."""
    names = {one.dataset.name for one in loaded}
    if len(names) == 1:
        return next(iter(names))
    suites = {one.dataset.suite for one in loaded}
    tasks = {one.dataset.task for one in loaded}
    if len(tasks) == 1:
        return next(iter(tasks))
    if len(suites) == 1 and len(tasks) == len(TASKS):
        return "all" if suites == {"longbench"} else next(iter(suites))
    return f"{len(names)}_datasets"


def _title(config: RunConfig, loaded: list[LoadedDataset]) -> str:
    return f"{config.model.name}, {config.method['name']}, {_data_label(loaded)}"


# --------------------------------------------------------------------------------------------------------- measurement


@contextmanager
def _noted(store: RunStore, device: torch.device, examples: int) -> Iterator[None]:
    """Write down when a job begins and ends to measure, why it ended early, and the machine's load at both times."""
    store.note({"event": "begin", "time": _now(), "examples": examples, "load": devices.load(device)})
    error = None
    try:
        yield
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
        raise
    finally:
        store.note({"event": "end", "time": _now(), "error": error, "load": devices.load(device)})


def _measure_all(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    paired: bool,
    cases: list[Case],
    untraced: list[Case],
    store: RunStore,
) -> None:
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    model = load_weights(
        config.model.name,
        _load_format(config),
        config.model.dtype,
        config.model.device,
        revision=config.model.revision,
        attn_implementation=config.model.attn_implementation,
        seed=config.seed,
    )
    _measure_cases(Bench(model, tokenizer, config.model.chat, paired), cases, store, config.timing.warmup)
    for case in untraced:
        store.write(_trace_file(case), trace(model, tokenizer, case).to_json())


def _measure_cases(bench: Bench, cases: list[Case], store: RunStore, warmup: int) -> None:
    if not cases:
        return
    log.info("warming up: %d runs", warmup)
    bench.warm_up(cases[0], warmup)
    with progress(len(cases)) as advance:
        for number, case in enumerate(cases):
            outcome = _measure(bench, case, baseline_first=number % 2 == 0)
            if isinstance(outcome, Failure):
                log.warning("%s, row %s failed: %s", *outcome.key, outcome.reason)
                store.fail(outcome)
                release_memory(bench.model.device)
            else:
                store.append(outcome)
            advance(case.dataset.name)


def _measure(bench: Bench, case: Case, baseline_first: bool) -> Record | Failure:
    """The example's record, or why there is none: out of memory, logits that are not finite, a fault in a method."""
    try:
        return bench.measure(case, baseline_first)
    except USER_ERRORS:
        raise  # every other example would end the same way
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Failure(*case.key, reason, traceback.format_exc())


# ------------------------------------------------------------------------------------------------------------- results


def _all_failed(store: RunStore, failed: list[Failure]) -> str:
    return (
        f"all {len(failed)} examples failed, the first: {failed[0].dataset}, row {failed[0].id}: {failed[0].reason}. "
        f"{store.folder / 'failures.jsonl'} says where; another model.dtype, a smaller model.max_prompt_tokens or "
        "more memory may help"
    )


def _some_failed(store: RunStore, failed: list[Failure], examples: int) -> str:
    return (
        f"{len(failed)} of {examples} examples failed and are not in the table, the first: {failed[0].dataset}, row "
        f"{failed[0].id}: {failed[0].reason}. {store.folder / 'failures.jsonl'} holds all; the same command tries them "
        "again"
    )


def _publish(summary: Summary, store: RunStore, title: str, about: dict[str, Any]) -> None:
    store.write("summary.json", to_json(summary, about))
    store.write("summary.csv", to_csv(summary))
    store.write("summary.md", to_markdown(summary, title))
    log.info("records, summary.json, .csv and .md are in %s", store.folder)


def _console() -> Console:
    console = Console()
    # a file or a pipe has no width of its own
    return console if console.is_terminal else Console(width=120)
