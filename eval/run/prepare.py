"""A run, ready to start: its settings become prompts, methods and an identity, without weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from eval.arms import Arm, OutOfReachError, check_distinct, expand
from eval.benchmarks.chat_format import ChatFormat
from eval.benchmarks.prompts import Prompt, build_prompt, end_token_ids
from eval.benchmarks.suite import Dataset, DataSettings, LoadedDataset, Suite
from eval.config import RunConfig
from eval.run.check import RUNS, chat_of, choose_data, read_rows, spec_of, suite_of
from eval.run.identity import identity_of, provenance_of
from eval.run.work import fitting_batch
from eval.store.folder import fingerprint
from eval.store.runs import counted
from lazyllm.engine.depth import Depth
from lazyllm.errors import UserError
from lazyllm.machine import device_name
from lazyllm.measuring import memory_of
from lazyllm.methods import Method, about_the_method, name_of
from lazyllm.models.config import as_device, check_loading, load_end_ids, shape_of
from lazyllm.models.dtype import choose_dtype
from lazyllm.models.tokenizers import check_fits, load_tokenizer_of
from lazyllm.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# restored in a sweep, where an earlier job may have set its own number
DEFAULT_THREADS = torch.get_num_threads()

NEAR = 0.8  # of `prompt_tokens`

Methods = Mapping[tuple[str, str], Method]  # {(label of an arm, name of a dataset): its method}


@dataclass(frozen=True)
class Run:
    """Prompts and arms, before anything is measured.

    spec: the model, with the dtype in which it loads, and why that one. arms: in order, the
        baseline first.
    methods: of each arm for each dataset. prompts: of all examples, in order. batch_size: answers
        that decode together.
    identity: what must agree for two
    visits to share a folder. about: config and provenance, for run.json. counts_cpu_time: whether
    times are the process's CPU time: of prompts that only measure time, by one thread of a CPU.
    """

    config: RunConfig
    spec: ModelSpec
    dtype_reason: str
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    arms: tuple[Arm, ...]
    methods: Methods
    prompts: tuple[Prompt, ...]
    batch_size: int
    identity: dict[str, Any]
    about: dict[str, Any]
    folder: Path
    title: str
    counts_cpu_time: bool = False

    @property
    def baseline(self) -> str | None:
        """The label of the baseline's arm; None without one."""
        return self.arms[0].label if self.config.baseline else None


def prepare(config: RunConfig, runs: Path = RUNS) -> Run:
    """The run that the settings ask for. Sets torch's threads.

    runs: the folder in which it makes its own without `out`. Raises UserError for what cannot be
    run; what is known without rows is refused first, as making them may take minutes.
    """
    torch.set_num_threads(config.threads or DEFAULT_THREADS)
    datasets, data = choose_data(config, quiet=True)
    suite, spec = suite_of(datasets), spec_of(config)
    chat, model_config, device = chat_of(config, suite), check_loading(spec), as_device(spec.device)
    dtype, reason = choose_dtype(spec, device.type)
    spec = replace(spec, dtype=dtype)
    limit = limit_of_prompts(config, suite, data, model_config.max_position_embeddings)
    tokenizer = tokenizer_of_run(spec, suite)
    chat.uses_template(tokenizer)  # refuses a template that is not there
    log.info("reading %s", ", ".join(dataset.name for dataset in datasets))
    rows = read_rows(config, datasets, data)
    arms, methods, left_out = resolve_arms(config, datasets, suite.length(data), limit)
    new_tokens = max(
        limit_of_answers(config, loaded.dataset, loaded.max_new_tokens) for loaded in rows
    )
    memory = memory_of(device)
    batch_size = fitting_batch(
        config.batch_size, spec, [*methods.values()], limit, new_tokens, memory
    )
    prompts = make_prompts(config, rows, tokenizer, chat, data, limit, methods)
    cautions = [*left_out, *_list_cautions(rows, prompts, arms, limit)]
    threads = config.threads or torch.get_num_threads()
    counts_cpu_time = device.type == "cpu" and suite.tokenizer is not None and threads == 1
    identity = identity_of(
        config,
        spec,
        chat,
        tokenizer,
        arms=arms,
        methods=methods,
        rows=rows,
        limit=limit,
        batch_size=batch_size,
        suite_module=suite.load.__module__,
        counts_cpu_time=counts_cpu_time,
    )
    title = f"{name_of_run(config, arms)}, {name_of_data(config, datasets)}"
    return Run(
        config=config,
        spec=spec,
        dtype_reason=reason,
        tokenizer=tokenizer,
        chat=chat,
        arms=arms,
        methods=methods,
        prompts=tuple(prompts),
        batch_size=batch_size,
        identity=identity,
        about=_about(config, spec, datasets, rows, device_name(device), cautions),
        folder=Path(config.out or runs / _folder_name(config, arms, datasets, identity)),
        title=title,
        counts_cpu_time=counts_cpu_time,
    )


def _about(
    config: RunConfig,
    spec: ModelSpec,
    datasets: Sequence[Dataset],
    rows: Sequence[LoadedDataset],
    device: str,
    cautions: Sequence[str],
) -> dict[str, Any]:
    """What run.json holds besides the identity. cautions: sentences that its table repeats."""
    from eval.benchmarks.datasets import describe

    written = config.model_dump(exclude={"method"})
    written["model"]["dtype"] = spec.dtype  # what `auto` is here
    descriptions = describe(config.dataset, config.data.length)
    return {
        "config": written,
        "provenance": provenance_of(device),
        # `limit` chooses from these
        "examples": {loaded.dataset.name: loaded.total for loaded in rows},
        **({"descriptions": descriptions} if descriptions else {}),
        **({"cautions": cautions} if cautions else {}),
    }


def _folder_name(
    config: RunConfig, arms: Sequence[Arm], datasets: tuple[Dataset, ...], identity: dict[str, Any]
) -> str:
    model, what = Path(config.model.name).name, name_of_run(config, arms)
    parts = (model, what, name_of_data(config, datasets), fingerprint(identity)[:8])
    return "-".join(parts).replace("/", "-")


def name_of_run(config: RunConfig, arms: Sequence[Arm]) -> str:
    """What it compares, for people: the label, or the method."""
    others = {name_of(arm.name) for arm in arms[config.baseline :]}
    return config.label or ("comparison" if len(others) > 1 else min(others, default="baseline"))


def name_of_data(config: RunConfig, datasets: tuple[Dataset, ...]) -> str:
    """The data, for people: a dataset, a task or a suite, or the number of datasets, and a
    suite's own subset.
    """
    suite = suite_of(datasets)
    tasks = {dataset.task for dataset in datasets}
    if len(datasets) == 1:
        name = datasets[0].name
    elif len(tasks) == len(suite.all_tasks) or suite.whole in config.dataset:
        name = suite.whole
    else:
        name = min(tasks) if len(tasks) == 1 else f"{len(datasets)}_datasets"
    return f"{name}_{config.subset}" if config.subset in suite.subsets else name


def limit_of_prompts(config: RunConfig, suite: Suite, data: DataSettings, positions: int) -> int:
    """Tokens of a prompt; longer ones lose their middle. positions: the model's. Raises
    UserError.
    """
    length = suite.length(data)
    if length is not None and length > positions:  # before the rows are made
        raise UserError(
            f"{suite.name}: {length} tokens of prompt and answer exceed the model's {positions} "
            f"positions: {suite.too_long_hint}"
        )
    limit = config.model.max_prompt_tokens or prompt_limit(positions)
    if limit > positions:
        raise UserError(
            f"model.max_prompt_tokens={limit}: the model has {positions} positions: give fewer"
        )
    return limit


def prompt_limit(positions: int) -> int:
    """LongBench's limit for prompts of a model with N positions (its model2maxlen.json); the
    others are for answers.
    """
    known = {4096: 3500, 8192: 7500, 16_384: 15_500, 32_768: 31_500}
    return known.get(positions) or max(positions // 2, (positions - 596) // 500 * 500)


def limit_of_answers(config: RunConfig, dataset: Dataset, most: int) -> int:
    """The most tokens of an answer, thoughts included. most: those of the dataset's own answers."""
    thinking = config.model.thinking_tokens if dataset.chat_wrap else 0
    return min(most, config.max_new_tokens or most) + thinking


def tokenizer_of_run(spec: ModelSpec, suite: Suite) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or that of a suite whose prompts measure time only. Raises
    UserError.
    """
    if suite.tokenizer is not None:
        return suite.tokenizer(spec)
    tokenizer = load_tokenizer_of(spec)
    assert tokenizer is not None  # `check` refuses random weights without one
    check_fits(tokenizer, spec)
    return tokenizer


def resolve_arms(
    config: RunConfig, datasets: Sequence[Dataset], length: int | None, limit: int | None
) -> tuple[tuple[Arm, ...], Methods, list[str]]:
    """Make the methods of all arms, with their speedups solved for on this model.

    An arm that cannot reach its speedup is left out, with a log line; the last value tells why, for
    each. length: tokens of prompt and
    answer, if the settings fix it. limit: tokens of a prompt. Raises UserError.
    """
    shape, column = shape_of(spec_of(config)), config.model.paper
    depth, found, unreachable = Depth.of(shape), list[Arm](), list[OutOfReachError]()
    methods = dict[tuple[str, str], Method]()
    arms = [arm.at(depth) for arm in expand(config)]
    for arm in arms:
        try:
            made = {
                (arm.label, dataset.name): arm.method(dataset, shape, column, length, limit)
                for dataset in datasets
            }
        except OutOfReachError as error:
            unreachable.append(error)
            continue
        with about_the_method(arm.label):
            for method in made.values():
                method.check(shape)
        methods |= made
        found.append(arm)
    if len(arms) > config.baseline and not found[config.baseline :]:
        raise UserError(f"no method reaches its speedup on this model: {unreachable[-1]}")
    left_out = [f"left out: {error}" for error in unreachable]
    for line in left_out:
        log.warning("%s", line)
    check_distinct(found)
    return tuple(found), methods, left_out


def make_prompts(
    config: RunConfig,
    rows: Sequence[LoadedDataset],
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatFormat,
    data: DataSettings,
    limit: int,
    methods: Methods | None = None,
) -> list[Prompt]:
    """The prompts of a run, in order. limit: tokens of a prompt.

    Raises UserError for a prompt that the model, or a method, cannot take.
    """
    model, spec = config.model, spec_of(config)
    positions = check_loading(spec).max_position_embeddings
    if None in (model.max_prompt_tokens, model.chat):
        texts = (
            "it has no chat template: prompts are plain text",
            "prompts have its own chat template",
        )
        has = f"has {positions} positions, so prompts beyond {limit} tokens lose their middle"
        log.info("%s: %s; %s", model.name, has, texts[chat.uses_template(tokenizer)])
    prompts = list[Prompt]()
    for loaded in rows:
        dataset = loaded.dataset
        max_new_tokens = limit_of_answers(config, dataset, loaded.max_new_tokens)
        end_ids = end_token_ids(tokenizer, load_end_ids(spec), dataset)
        used = [method for (_, name), method in (methods or {}).items() if name == dataset.name]
        for prompt in _build(loaded, tokenizer, limit if dataset.truncate else None, chat):
            prompt = replace(prompt, max_new_tokens=max_new_tokens, end_ids=end_ids)
            _check_prompt(prompt, used, positions, limit, suite_of((dataset,)))
            prompts.append(prompt)
    return prompts


def _list_cautions(
    rows: Sequence[LoadedDataset], prompts: Sequence[Prompt], arms: Sequence[Arm], limit: int
) -> list[str]:
    """Log and return what the run's table must say of its rows."""
    cautions = [*_describe_rows(rows)]
    if any(arm.solves for arm in arms):
        cautions += _compare_lengths(prompts, limit)
    for caution in cautions:
        log.warning("%s", caution)
    return cautions


def _describe_rows(rows: Sequence[LoadedDataset]) -> Iterator[str]:
    """Say of each dataset how many rows repeat others, and how many are skipped."""
    for loaded in rows:
        examples = loaded.examples
        different = {(row.instruction, row.context, row.input, row.answers) for row in examples}
        if repeated := len(examples) - len(different):
            share = f"{repeated} of {len(examples)} rows repeat others"
            yield f"{loaded.dataset.name}: {share}, but count as independent"
        if loaded.skipped:
            count, (where, reason) = counted(len(loaded.skipped), "row"), loaded.skipped[0]
            yield f"skipped {count} (data.on_error=skip), the first: {where}: {reason}"


def _compare_lengths(prompts: Sequence[Prompt], limit: int) -> Iterator[str]:
    """Name datasets whose speedups are solved for a length that their prompts do not have."""
    for dataset, members in groupby(prompts, key=lambda prompt: prompt.dataset):
        tokens = mean(len(prompt.token_ids) for prompt in members)
        solved = min(dataset.prompt_tokens or 0, limit)
        if solved and not NEAR < tokens / solved < 1 / NEAR:
            yield (
                f"{dataset.name}: speedups are solved for prompts of {solved} tokens "
                f"(prompt_tokens), but these have {tokens:.0f} on average, so ideal speedups differ"
            )


def _build(
    loaded: LoadedDataset, tokenizer: PreTrainedTokenizerBase, limit: int | None, chat: ChatFormat
) -> Iterator[Prompt]:
    for example in loaded.examples:
        yield build_prompt(example, loaded.dataset, tokenizer, limit, chat)


def _check_prompt(
    prompt: Prompt, methods: Sequence[Method], positions: int, limit: int, suite: Suite
) -> None:
    """Refuse a prompt that a method cannot take, or that is too long with its answer. Raises
    UserError.
    """
    where, tokens = "{}, row {}".format(*prompt.key), len(prompt.token_ids)
    try:
        for method in methods:
            method.check_prompt(prompt.as_input())
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    needed = tokens + prompt.max_new_tokens - 1  # the last new token is not run
    if needed <= positions:
        return
    fits = positions - needed + min(prompt.uncut_tokens, limit)
    instead = f"set model.max_prompt_tokens={fits}, or less"
    if not prompt.dataset.truncate:
        instead = suite.too_long_hint
    elif fits < 1:
        instead = "give a lower max_new_tokens or model.thinking_tokens"
    raise UserError(
        f"{where}: {tokens} prompt tokens and up to {prompt.max_new_tokens} new ones exceed the "
        f"model's {positions} positions: {instead}"
    )


def prompts_of(config: RunConfig) -> list[Prompt]:
    """The prompts of a run whatever its arms are. Raises UserError."""
    datasets, data = choose_data(config)
    suite, spec = suite_of(datasets), spec_of(config)
    limit = limit_of_prompts(config, suite, data, check_loading(spec).max_position_embeddings)
    tokenizer, rows = tokenizer_of_run(spec, suite), read_rows(config, datasets, data)
    return make_prompts(config, rows, tokenizer, chat_of(config, suite), data, limit)
