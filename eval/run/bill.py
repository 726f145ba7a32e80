"""The cost of a run before it starts: tokens, FLOPs, bytes, memory, hours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.run import speedup_targets
from eval.run.config import (
    RunConfig,
    build_method,
    model_spec,
)
from eval.run.cost import CPU, GPUS, Device, Memory, memory, parameters_of, weight_bytes, work
from lazyllm.models.presets import PRESETS
from lazyllm.models.spec import ModelSpec, source_of

if TYPE_CHECKING:
    from eval.run.corrections import Corrections
    from eval.run.lengths import Lengths

START_S = 20  # of a job before it loads weights, and their bytes a second from a disk: assumed
LOAD_BYTES_PER_S = 1e9
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Setup:
    """A model on a device. name: a part of the device's own. weights: bytes. corrections: of what is assumed of it."""

    spec: ModelSpec
    config: Any
    weights: int
    name: str
    device: Device
    corrections: Corrections

    @classmethod
    def of(cls, config: RunConfig, gpu: str | None, runs: Path) -> Setup:
        """gpu: a key of `GPUS`; None for this machine. runs: the folder of stored runs. Raises UserError."""
        from eval.run.corrections import read_corrections
        from lazyllm.models.load import as_device, device_name, load_config

        spec = model_spec(config)
        preset, source = PRESETS.get(spec.name), source_of(spec.name)
        shape = load_config(replace(spec, load_format="dummy") if preset and preset.architecture else spec)
        name = GPUS[gpu].name if gpu else device_name(as_device(spec.device))
        device = GPUS[gpu] if gpu else next((one for one in GPUS.values() if one.name in name), CPU)
        same = {key: getattr(spec, key) for key in ("load_format", "dtype", "attn_implementation", "quantise")}
        same["model"] = spec.name if Path(source).is_dir() else source
        weights = weight_bytes(spec, parameters_of(shape))
        return cls(spec, shape, weights, name, device, read_corrections(runs, same, name, device, shape, spec, weights))

    def resolved(self, config: RunConfig, lengths: Lengths) -> dict[str, Any]:
        """The run's method on one dataset, {its settings without targets}."""
        settings = speedup_targets.at_depth(config.method, self.config.num_hidden_layers)
        return speedup_targets.resolve(settings, lengths.dataset, self.config, config.model.paper)


@dataclass(frozen=True)
class Side:
    """The cost of one method on one dataset's prompts. answers: tokens."""

    flops: float
    read: float
    seconds: float
    answers: float
    peak: Memory


def side(setup: Setup, settings: dict[str, Any], lengths: Lengths, warm_ups: int) -> Side:
    """What the method of these settings costs on these prompts, and on the first one `warm_ups` times."""
    name, found, device = settings["name"], setup.corrections, setup.device
    method = build_method(settings)
    new = found.answers.get((name, lengths.dataset.name), float(lengths.max_new_tokens))
    works = [work(setup.config, setup.spec, method, n, round(new), setup.weights) for n in lengths.prompts]
    ttft, step = (found.of(factors, name) for factors in (found.ttft, found.step))
    rounds = [(one, new - 1) for one in works] + [(works[0], WARM_UP_STEPS)] * warm_ups
    return Side(
        flops=sum(one.prefill_flops + (new - 1) * one.step_flops for one in works),
        read=sum(setup.weights + (new - 1) * one.step_bytes for one in works),
        seconds=sum(one.ttft_s(device) * ttft + steps * one.step_s(device) * step for one, steps in rounds),
        answers=new * len(works),
        peak=memory(setup.config, setup.spec, method, max(lengths.prompts), lengths.max_new_tokens, setup.weights),
    )


@dataclass(frozen=True)
class Bill:
    """The cost of one run, its paired baseline included.

    prompt_tokens, answer_tokens: sums over examples. longest: tokens of the longest prompt. petaflops, read_terabytes:
    of the method, and of the baseline. gigabytes: at the longest prompt, by what holds them. hours: None if no rate is
    known. corrected_by: how many stored runs. guessed: why prompts were not counted.
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


def bill(config: RunConfig, gpu: str | None = None, runs: Path = Path("runs")) -> Bill:
    """The cost of one run on a GPU of `GPUS`, or on this machine. Raises UserError."""
    from eval.run.lengths import lengths_of
    from eval.store.results import label_of

    setup, lengths = Setup.of(config, gpu, runs), lengths_of(config)
    paired = config.timing.paired and config.method["name"] != "baseline"
    warm_ups = [config.timing.warmup, *[0] * (len(lengths) - 1)]
    own = [side(setup, setup.resolved(config, one), one, n) for one, n in zip(lengths, warm_ups, strict=True)]
    beside = [side(setup, {"name": "baseline"}, one, n) for one, n in zip(lengths, warm_ups, strict=True) if paired]
    seconds = sum(one.seconds for one in own + beside) + START_S + setup.weights / LOAD_BYTES_PER_S
    prompts = [n for one in lengths for n in one.prompts]
    label = label_of(config.method["name"], {key: value for key, value in config.method.items() if key != "name"})
    return Bill(
        run=f"{Path(setup.spec.name).name}, {label}",
        examples=len(prompts),
        prompt_tokens=sum(prompts),
        longest=max(prompts),
        answer_tokens=round(sum(one.answers for one in own)),
        petaflops=sum(one.flops for one in own) / 1e15,
        baseline_petaflops=sum(one.flops for one in beside) / 1e15,
        read_terabytes=sum(one.read for one in own) / 1e12,
        baseline_read_terabytes=sum(one.read for one in beside) / 1e12,
        gigabytes=_gigabytes([one.peak for one in own + beside], setup.device is CPU),
        hours=seconds / 3600 if setup.device is not CPU or setup.corrections.runs else None,
        corrected_by=setup.corrections.runs,
        guessed=tuple(dict.fromkeys(one.guessed for one in lengths if one.guessed)),
    )


def _gigabytes(peaks: Sequence[Memory], on_cpu: bool) -> dict[str, float]:
    """Of the most expensive generation. On a CPU the process counts too: Python, torch and this very command."""
    parts = asdict(max(peaks, key=lambda one: one.total)) | ({"process": _resident_bytes()} if on_cpu else {})
    return {part: size / 1e9 for part, size in parts.items() if size}


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1] if Path("/proc/self/statm").exists() else 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
