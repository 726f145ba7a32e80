"""The run: config in, records and a table out."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from eval import provenance
from eval.config import ConfigError, RunConfig, build_method, datasets_of
from eval.data import DataError, LoadedDataset, load_rows
from eval.measure import Bench, Case
from eval.progress import progress
from eval.prompts import PromptError, build_prompt, end_token_ids
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
from eval.tasks import TASKS
from lazyllm import ModelError, TokenizerError, UnsupportedModelError
from lazyllm.decoder import sliding_window
from lazyllm.methods import Baseline, Method
from lazyllm.models import as_device, load_config, load_end_ids, load_tokenizer_of, load_weights, source_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class RunError(RuntimeError):
    """An example that could not be measured; the message says which and why."""


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
    """A finished run: where its files are, and its table."""

    folder: Path
    summary: Summary


def run(config: RunConfig, show: bool = True) -> RunResult:
    """Measure every example that the run folder does not hold yet, then summarise all of the run's examples.

    show: print the table.

    Everything that can be refused is refused before the model loads. Raises ConfigError, DataError, PromptError,
    ModelError, TokenizerError or StoreError with one message for the user.
    """
    method = build_method(config.method)
    device = as_device(config.model.device)
    torch.set_num_threads(config.threads or DEFAULT_THREADS)
    model_config = load_config(config.model.name, _load_format(config), config.model.revision)
    _check_method(method, model_config)
    tokenizer = _tokenizer(config)
    loaded = [load_rows(dataset, config.data.dir, _on_error(config)) for dataset in datasets_of(config)]
    end_ids = load_end_ids(config.model.name, _load_format(config), config.model.revision)
    paired = config.timing.paired and not isinstance(method, Baseline)
    cases = list(_cases(config, method, loaded, tokenizer, model_config, end_ids))
    identity = _identity(config, loaded, model_config, tokenizer, end_ids, device, paired)
    folder = Path(config.out) if config.out else Path("runs") / _folder_name(config, loaded, identity)
    about = {"config": asdict(config), "provenance": _provenance(device)}
    with open_store(folder, identity, about) as store:
        _check_prompts(cases, store)
        todo = [case for case in cases if (case.dataset.name, case.example.id) not in store.records]
        log.info("%s: %d examples, %d of them already measured", folder, len(cases), len(cases) - len(todo))
        if todo:
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
            bench = Bench(model, tokenizer, config.model.chat, method, paired)
            _measure_all(bench, todo, store, config.timing.warmup)
        summary = summarise([store.records[case.dataset.name, case.example.id] for case in cases])
        title = _title(config, loaded)
        _publish(summary, store, title, about | {"identity": identity})
        if show:
            _console().print(as_table(summary, title))
    skipped = sum(len(one.skipped) for one in loaded)
    if skipped:
        first = next(one.skipped[0] for one in loaded if one.skipped)
        log.warning("%d rows were skipped (data.on_error=skip), the first: %s: %s", skipped, first.where, first.reason)
    return RunResult(folder, summary)


def compare(config: RunConfig) -> list[RunResult]:
    """Run each method of `config.compare`, then print one table of them all; `runs/<label>.*` hold it too.

    Same errors as `run`.
    """
    from eval.figures import plot_comparison, save  # not at the top: matplotlib is slow to import, and writes caches

    model_config = load_config(config.model.name, _load_format(config), config.model.revision)
    for method in config.compare.values():  # the last one is refused before the first one runs
        _check_method(build_method(method), model_config)
    results = {label: run(replace(config, method=method), show=False) for label, method in config.compare.items()}
    summaries = {label: result.summary for label, result in results.items()}
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
    console.print("The same on a checkpoint and LongBench, on a GPU:", highlight=False)
    console.print("  python run.py model=llama2 method=lazy dataset=hotpotqa", highlight=False)
    return list(results.values())


# --------------------------------------------------------------------------------------------------------- preparation


def _load_format(config: RunConfig) -> Any:
    return config.model.load_format


def _on_error(config: RunConfig) -> Any:
    return config.data.on_error


def _check_method(method: Method, model_config: PreTrainedConfig) -> None:
    try:
        method.check(model_config)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"method: {error}") from error


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
    method: Method,
    loaded: list[LoadedDataset],
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    end_ids: tuple[int, ...],
) -> Iterator[Case]:
    """Every example of the run with its prompt. What the model cannot hold, or the method not use, is refused here."""
    longest = min(model_config.max_position_embeddings, sliding_window(model_config) or sys.maxsize)
    for one in loaded:
        dataset_end_ids = end_token_ids(tokenizer, end_ids, one.dataset)
        max_new_tokens = min(one.max_new_tokens, config.max_new_tokens or one.max_new_tokens)
        for example in one.examples[: config.limit]:
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
            yield Case(one.dataset, example, prompt, max_new_tokens, dataset_end_ids)


def _check_prompts(cases: list[Case], store: RunStore) -> None:
    """Raise StoreError where the store holds another prompt of an example than the one that is built now."""
    for case in cases:
        record = store.records.get((case.dataset.name, case.example.id))
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
        "method": {str(key): _plain(value) for key, value in config.method.items()},
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
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


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


def _measure_all(bench: Bench, cases: list[Case], store: RunStore, warmup: int) -> None:
    log.info("warming up: %d runs", warmup)
    bench.warm_up(cases[0], warmup)
    with progress(len(cases)) as advance:
        for number, case in enumerate(cases):
            try:
                record = bench.measure(case, baseline_first=number % 2 == 0)
            except FloatingPointError as error:
                raise RunError(
                    f"{case.dataset.name}, row {case.example.id}: {error}. The records before it are safe; "
                    "another model.dtype may help"
                ) from error
            store.append(record)
            advance(case.dataset.name)


# ------------------------------------------------------------------------------------------------------------- results


def _publish(summary: Summary, store: RunStore, title: str, about: dict[str, Any]) -> None:
    store.write("summary.json", to_json(summary, about))
    store.write("summary.csv", to_csv(summary))
    store.write("summary.md", to_markdown(summary, title))
    log.info("records, summary.json, .csv and .md are in %s", store.folder)


def _console() -> Console:
    console = Console()
    # a file or a pipe has no width of its own
    return console if console.is_terminal else Console(width=120)
