"""The cost of a run or a sweep before it starts: arms, tokens, FLOPs, bytes, memory, time.

    lazyllm-bench plan model=llama2 method=lazy dataset=hotpotqa --gpu a100
    lazyllm-bench plan experiment=table1 model=llama2,xgen --gpu h100
    lazyllm-bench plan model=smollm2 method=lazy dataset=needle    # on this machine

The arguments are those of a run or a sweep. Nothing is downloaded and no model runs. Prompts, FLOPs
and bytes are counted for each arm, with warm-ups and other models. Answers have their maximum
length; as many decode together as `batch_size` says, or as fit into the GPU's memory; nothing is
revived. Times follow from one rate, half of the FLOP/s and of the bytes per second in the GPU's
data sheet, or from the 0.6 ms in which a host starts a layer, measured beside an H200. Without
--gpu, it is this machine's GPU, or half of what two matrix products reach now on its CPU. Until
LongBench and the tokenizer are in the caches (lazyllm-bench fetch), prompts have LongBench's
published mean lengths, and the plan is an estimate.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eval.arms import expand
from eval.config import RunConfig
from eval.run.check import choose_data, spec_of, suite_of
from eval.run.job import jobs_of
from eval.run.work import WARMUP_TOKENS, Model, Work, fitting_batch
from eval.store.runs import counted
from lazyllm.engine.flops import attention_ceiling
from lazyllm.errors import UserError, parser_of
from lazyllm.machine import ACCELERATORS, LAYER_START_S, Accelerator
from lazyllm.models.checkpoint import HubError, read_config
from lazyllm.models.dtype import choose_dtype
from lazyllm.models.tokenizers import chat_templates, tokenizer_of

RATE = 0.5  # the assumed share of a data sheet's FLOP/s and bytes per second
ESTIMATE = (
    "an estimate: each prompt has its dataset's published mean number of words, at 1.6 tokens a "
    "word (3.5 in code), cut at model.max_prompt_tokens. Single prompts are longer and need more "
    "memory: after lazyllm-bench fetch, with the same arguments, plan counts them"
)


def seconds_on(device: Accelerator, work: Work) -> float:
    """Seconds at the assumed rate: of the computation, of the reading, or of the host, whichever
    takes longest.
    """
    on_device = max(work.flops / device.flops_per_s, work.read / device.bytes_per_s) / RATE
    return max(on_device, work.layer_starts * LAYER_START_S)


@dataclass(frozen=True)
class Group:
    """`count` rows of a dataset with prompts of this number of tokens, and maximum answers."""

    dataset: str
    prompt_tokens: int
    new_tokens: int
    count: int


@dataclass(frozen=True)
class Cost:
    """The cost of an arm of a run, its warm-ups included.

    run: the model. dtype: of its weights, and why. memory: bytes of each part, at the longest
    prompt. seconds: on the device. ceiling: `attention_ceiling` of the longest prompt. is_estimate:
    prompts have published means, as nothing was there to count.
    """

    run: str
    dtype: str
    arm: str
    examples: int
    prompt_tokens: int
    longest: int
    answer_tokens: int
    work: Work
    memory: dict[str, int]
    seconds: float
    device: Accelerator
    ceiling: float
    is_estimate: bool

    @property
    def peak(self) -> int:
        return sum(self.memory.values())


def groups_of(config: RunConfig) -> list[Group]:
    """The run's rows, the first example's first. Raises UserError if they can be neither counted
    nor estimated.
    """
    from eval.run.prepare import prompts_of

    if is_estimated(config):
        return estimated_groups(config)
    here = config.model_copy(update={"model": config.model.model_copy(update={"device": "cpu"})})
    keys = Counter(
        (prompt.dataset.name, len(prompt.token_ids), prompt.max_new_tokens)
        for prompt in prompts_of(here)
    )
    return [Group(*key, count) for key, count in keys.items()]


def is_estimated(config: RunConfig) -> bool:
    """Whether data or tokenizer are in no cache and the suite publishes sizes. Rows in
    `data.dir` are counted.
    """
    (datasets, data), spec = choose_data(config), spec_of(config)
    suite = suite_of(datasets)
    if suite.published is None or data.dir is not None:
        return False
    if suite.cached is not None and not suite.cached(data):
        return True
    try:
        read_config(spec)
        chat_templates(*tokenizer_of(spec))
    except HubError:
        return True
    return False


def estimated_groups(config: RunConfig) -> list[Group]:
    """The run's rows by its suite's published sizes: those of a dataset all have the mean
    length.
    """
    from eval.run.prepare import limit_of_answers

    (datasets, data), limit = choose_data(config), _limit(config)
    groups, published = list[Group](), suite_of(datasets).published
    assert published is not None  # `is_estimated`
    sizes = published(data)
    for dataset in datasets:
        size = sizes[dataset.name]
        tokens = min(limit, round(size.words * size.tokens_per_word))
        new_tokens = limit_of_answers(config, dataset, size.max_new_tokens)
        groups.append(
            Group(
                dataset.name, tokens, new_tokens, min(size.examples, config.limit or size.examples)
            )
        )
    return groups


def _limit(config: RunConfig) -> int:
    """Tokens of a prompt."""
    from eval.run.prepare import limit_of_prompts
    from lazyllm.models.config import shape_of

    datasets, data = choose_data(config)
    positions = shape_of(spec_of(config)).max_position_embeddings
    return limit_of_prompts(config, suite_of(datasets), data, positions)


def costs_of(config: RunConfig, groups: Sequence[Group], device: Accelerator) -> list[Cost]:
    """The cost of each arm of a run. groups: of `groups_of`. Raises UserError, as the run would."""
    from eval.run.prepare import resolve_arms

    first, costs, is_estimate = groups[0], list[Cost](), is_estimated(config)
    (datasets, data), asked_spec = choose_data(config), spec_of(config)
    dtype, reason = choose_dtype(asked_spec, "cuda" if device.gigabytes else "cpu")
    spec = replace(asked_spec, dtype=dtype)
    model = Model.of(spec)
    arms, methods, _ = resolve_arms(
        config, datasets, suite_of(datasets).length(data), _limit(config)
    )
    longest = max(group.prompt_tokens for group in groups)
    most, memory = max(group.new_tokens for group in groups), 1e9 * device.gigabytes or None
    batch_size = fitting_batch(config.batch_size, spec, [*methods.values()], longest, most, memory)
    warm_up = Group(
        first.dataset, first.prompt_tokens, min(WARMUP_TOKENS, first.new_tokens), config.warmup
    )
    for arm in arms:
        works, peaks = list[tuple[Work, int]](), list[dict[str, int]]()
        for group in (*groups, warm_up):
            answer = (
                methods[arm.label, group.dataset],
                group.prompt_tokens,
                group.new_tokens,
                batch_size,
            )
            works += [(work, group.count) for work in model.work(*answer)]
            peaks.append(model.memory(*answer))
        costs.append(
            Cost(
                run=Path(spec.name).name,
                dtype=f"{dtype} ({reason})",
                arm=arm.label,
                examples=sum(group.count for group in groups),
                prompt_tokens=sum(group.count * group.prompt_tokens for group in groups),
                longest=longest,
                answer_tokens=sum(group.count * group.new_tokens for group in groups),
                work=sum((work * count for work, count in works), Work(0, 0, 0)),
                memory=max(peaks, key=lambda parts: sum(parts.values())),
                seconds=sum(count * seconds_on(device, work) for work, count in works),
                device=device,
                ceiling=attention_ceiling(model.config, longest),
                is_estimate=is_estimate,
            )
        )
    return costs


def device_of(config: RunConfig) -> Accelerator:
    """The device on which a run would run here. Raises UserError if it is not here."""
    # this and others not at the top: planning refuses arguments before it imports torch
    import torch

    from lazyllm.measuring import this_machine
    from lazyllm.models.config import as_device, shape_of

    spec = spec_of(config)
    try:
        device = as_device(spec.device)
    except UserError as error:
        raise UserError(
            f"{error}; or plan for another machine: --gpu {', '.join(ACCELERATORS)}"
        ) from error
    dtype, _ = choose_dtype(spec, device.type)
    return this_machine(device, getattr(torch, dtype), shape_of(spec), config.threads)


def costs(arguments: Sequence[str], device: Accelerator | None = None) -> list[Cost]:
    """The cost of each arm of each run; arms out of reach are left out. device: None for ours."""
    runs = jobs_of(arguments)
    try:
        for config in runs:
            expand(config)  # refuses methods and hyperparameters
            spec = spec_of(config)
            # refuse what the caches lack before torch is imported; an estimate needs only the
            # model's shape
            read_config(replace(spec, load_format="dummy") if is_estimated(config) else spec)
    except HubError as error:
        raise UserError(
            f"{error.reason}. A plan counts the run's prompts: lazyllm-bench fetch gets them"
        ) from error
    return [
        cost
        for config in runs
        for cost in costs_of(config, groups_of(config), device or device_of(config))
    ]


def duration(seconds: float) -> str:
    """`8 s`, `12 min`, `3.4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else "< 1 s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"


def amount(value: float) -> str:
    """`33,090`, `129.2`, `0.0026`."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


_HEADINGS = (
    "model", "arm", "examples", "prompt tokens", "longest", "answer tokens", "PFLOP", "TB read",
    "GB", "time",
)  # fmt: skip


def _cells(cost: Cost) -> list[str]:
    """A row of the table, under `_HEADINGS`."""
    return [
        cost.run,
        cost.arm,
        str(cost.examples),
        f"{cost.prompt_tokens:,}",
        f"{cost.longest:,}",
        f"{cost.answer_tokens:,}",
        amount(cost.work.flops / 1e15),
        amount(cost.work.read / 1e12),
        f"{cost.peak / 1e9:.3g}",
        duration(cost.seconds),
    ]


def as_text(planned: Sequence[Cost]) -> str:
    """A Markdown table, and the assumptions below it."""
    from eval.analysis.table import markdown_lines  # not at the top: it imports pandas

    largest = max(planned, key=lambda cost: cost.peak)
    parts = ", ".join(f"{part} {size / 1e9:.3g}" for part, size in largest.memory.items() if size)
    total = sum((cost.work for cost in planned), Work(0, 0, 0))
    lines = [*markdown_lines(_HEADINGS, [_cells(cost) for cost in planned], 2), ""]
    lines.append(
        f"{counted(len(planned), 'arm')} of "
        f"{counted(len({cost.run for cost in planned}), 'model')}: "
        f"{amount(total.flops / 1e15)} PFLOP, {amount(total.read / 1e12)} TB read"
    )
    lines.append(
        f"most memory: {largest.peak / 1e9:.3g} GB ({parts}), {largest.run}, {largest.arm}; Python "
        "and torch take more"
    )
    lines += dict.fromkeys(f"{cost.run}: {cost.dtype}" for cost in planned)
    lines += dict.fromkeys(
        f"attention takes {1 - 1 / cost.ceiling:.0%} of the FLOPs of {cost.run}'s prefill of "
        f"{cost.longest:,} tokens: methods that skip only attention are at most {cost.ceiling:.2f} "
        "times as fast"
        for cost in planned
    )
    if any(cost.is_estimate for cost in planned):
        lines.append(ESTIMATE)
    rates = dict.fromkeys(
        f"{device.flops_per_s / 1e12:.3g} TFLOP/s and {device.bytes_per_s / 1e12:.3g} TB/s "
        f"({device.name})"
        for device in (cost.device for cost in planned)
    )
    total_s, device = sum(cost.seconds for cost in planned), largest.device
    lines.append(f"{duration(total_s)} one after the other at {RATE:.0%} of {' and '.join(rates)}")
    if device.gigabytes and largest.peak > 0.95e9 * device.gigabytes:
        lines.append(
            f"does not fit into {device.gigabytes:.0f} GB: try a smaller model.max_prompt_tokens, "
            "or a smaller model"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """The command `plan`. Returns the exit code."""
    parser = parser_of("plan", __doc__)
    parser.add_argument("run", nargs="*", metavar="KEY=VALUE", help="as of lazyllm-bench run")
    parser.add_argument(
        "--gpu", choices=ACCELERATORS, help="for times on this GPU, not on this machine"
    )
    parser.add_argument(
        "-m", action="store_true", help="no effect: all jobs of a sweep are planned anyway"
    )
    options = parser.parse_intermixed_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = (
        "1"  # before the hub's client is imported: planning downloads nothing
    )
    print(as_text(costs(options.run, ACCELERATORS.get(options.gpu))))
    return 0
