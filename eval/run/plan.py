"""The cost of a run before it starts: tokens, FLOPs, bytes, memory, hours."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.run.cost import CPU, GPUS, Device, Memory, Work, memory, parameters_of, turn_work, weight_bytes, work
from eval.run.resolved import Resolved, build_method
from lazyllm.methods import Method
from lazyllm.spec import ModelSpec, source_of

if TYPE_CHECKING:
    from eval.run.corrections import Corrections
    from eval.run.lengths import Lengths

START_S = 20  # assumed: seconds of a job before it loads weights
LOAD_BYTES_PER_S = 1e9  # assumed, from a disk
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Setup:
    """A model on a device. name: a part of the driver's device name. weights: bytes. corrections: of assumed rates."""

    spec: ModelSpec
    config: Any
    weights: int
    name: str
    device: Device
    corrections: Corrections

    @classmethod
    def of(cls, run: Resolved, gpu: str | None, runs: Path) -> Setup:
        """gpu: a key of `GPUS`; None for this machine. runs: the folder of stored runs. Raises UserError."""
        from eval.run.corrections import read_corrections
        from lazyllm.models.load import as_device, device_name, shape_of

        spec = run.spec
        shape, source = shape_of(spec), source_of(spec.name)
        name = GPUS[gpu].name if gpu else device_name(as_device(spec.device))
        device = GPUS[gpu] if gpu else next((known for known in GPUS.values() if known.name in name), CPU)
        same = {key: getattr(spec, key) for key in ("load_format", "dtype", "attn_implementation", "quantise")}
        same["model"] = spec.name if Path(source).is_dir() else source
        weights = weight_bytes(spec, parameters_of(shape))
        return cls(spec, shape, weights, name, device, read_corrections(runs, same, name, device, shape, spec, weights))


@dataclass(frozen=True)
class Side:
    """The cost of one method on one dataset's prompts. answers: tokens."""

    flops: float
    read: float
    seconds: float
    answers: float
    peak: Memory


def side(setup: Setup, settings: dict[str, Any], lengths: Lengths, warm_ups: int) -> Side:
    """The cost of a method on these prompts, and `warm_ups` times on the first one."""
    name, found, device = settings["name"], setup.corrections, setup.device
    method = build_method(settings)
    new = found.answers.get((name, lengths.dataset.name), float(lengths.max_new_tokens))
    works = [part for row in lengths.rows for part in _works(setup, method, row, round(new))]
    longest = max(sum(row) + (len(row) - 1) * lengths.max_new_tokens for row in lengths.rows)
    ttft, step = (found.of(name, kind) for kind in ("ttft", "step"))
    rounds = [(answer, new - 1) for answer in works] + [(works[0], WARM_UP_STEPS)] * warm_ups
    return Side(
        flops=sum(answer.prefill_flops + (new - 1) * answer.step_flops for answer in works),
        read=sum(setup.weights + (new - 1) * answer.step_bytes for answer in works),
        seconds=sum(answer.ttft_s(device) * ttft + steps * answer.step_s(device) * step for answer, steps in rounds),
        answers=new * len(works),
        peak=memory(setup.config, setup.spec, method, longest, lengths.max_new_tokens, setup.weights),
    )


def _works(setup: Setup, method: Method, row: Sequence[int], new_tokens: int) -> Iterator[Work]:
    """The work of each answer to a row's messages, which have these numbers of tokens."""
    shapes, n = (setup.config, setup.spec, method), row[0]
    yield work(*shapes, n, new_tokens, setup.weights)
    since = new_tokens - 1
    for message in row[1:]:
        m = 1 + message  # the last token of the answer before it runs with the message
        yield turn_work(*shapes, n, since, m, new_tokens, setup.weights)
        since += m + new_tokens - 1


@dataclass(frozen=True)
class Bill:
    """The cost of one run, its paired baseline included.

    prompt_tokens, answer_tokens: sums over examples and their turns. longest: tokens of the longest prompt, all turns
    included. gigabytes: of each part of memory at the longest prompt and its answers. hours: None if no rate is known.
    corrected_by: number of stored runs. guessed: reasons why prompts were not counted.
    """

    run: str
    examples: int
    prompt_tokens: int
    longest: int
    answer_tokens: int
    petaflops: float
    baseline_petaflops: float
    read_terabytes: float
    baseline_read_terabytes: float
    gigabytes: dict[str, float]
    hours: float | None
    corrected_by: int
    guessed: tuple[str, ...]


def name_of(run: Resolved) -> str:
    """A run's model and method, for people."""
    from eval.store.runs import label_of

    settings = {key: value for key, value in run.method.items() if key != "name"}
    return f"{Path(run.spec.name).name}, {label_of(run.method['name'], settings)}"


def bill(run: Resolved, gpu: str | None = None, runs: Path = Path("runs")) -> Bill:
    """The cost of one run on a GPU of `GPUS`, or on this machine. Raises UserError."""
    from eval.run.lengths import lengths_of
    from eval.run.prepare import parameters_of  # not at the top: it imports torch

    setup, lengths, timing = Setup.of(run, gpu, runs), lengths_of(run), run.config.timing
    parameters = parameters_of(run, setup.config)
    paired = timing.paired and run.method["name"] != "baseline"
    warm_ups = [timing.warmup, *[0] * (len(lengths) - 1)]
    each = list(zip(lengths, warm_ups, strict=True))
    own = [side(setup, parameters[dataset.dataset.name], dataset, count) for dataset, count in each]
    beside = [side(setup, {"name": "baseline"}, dataset, count) for dataset, count in each if paired]
    seconds = sum(part.seconds for part in own + beside) + START_S + setup.weights / LOAD_BYTES_PER_S
    prompts = [sum(row) for dataset in lengths for row in dataset.rows]
    return Bill(
        run=name_of(run),
        examples=len(prompts),
        prompt_tokens=sum(prompts),
        longest=max(prompts),
        answer_tokens=round(sum(part.answers for part in own)),
        petaflops=sum(part.flops for part in own) / 1e15,
        baseline_petaflops=sum(part.flops for part in beside) / 1e15,
        read_terabytes=sum(part.read for part in own) / 1e12,
        baseline_read_terabytes=sum(part.read for part in beside) / 1e12,
        gigabytes=_gigabytes([part.peak for part in own + beside], setup.device is CPU),
        hours=seconds / 3600 if setup.device is not CPU or setup.corrections.runs else None,
        corrected_by=setup.corrections.runs,
        guessed=tuple(dict.fromkeys(dataset.guessed for dataset in lengths if dataset.guessed)),
    )


def _gigabytes(peaks: Sequence[Memory], on_cpu: bool) -> dict[str, float]:
    """Parts of the greatest peak. On a CPU the process is a part (Python, torch and this command), and other models are
    never moved away.
    """
    parts = asdict(max(peaks, key=lambda peak: peak.total))
    if on_cpu:
        parts |= {"beside": max(peak.beside for peak in peaks), "process": _resident_bytes()}
    return {part: size / 1e9 for part, size in parts.items() if size}


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1] if Path("/proc/self/statm").exists() else 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
