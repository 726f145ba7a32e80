"""Forecasts: the remaining time after a run's first example, and the prompt that fits after running out of memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from eval.run.cost import memory
from eval.run.measure import Case
from eval.store.record import Record
from lazyllm.engine.devices import devices_of
from lazyllm.methods import Baseline
from lazyllm.models.spec import ModelSpec

MARGIN = 1.05  # for memory that is not counted: norms, masks, gaps between blocks


def first_example(record: Record, rest: Sequence[Case]) -> str:
    """The cost of the first example, and the time of the others at its seconds per prompt token."""
    sides = [side for turn in record.by_turn for side in (turn.method, turn.baseline) if side is not None]
    seconds = sum(side.total_s for side in sides)
    peaks = [side.peak_memory_bytes for side in sides if side.peak_memory_bytes is not None]
    beside = f", {record.baseline.total_s:.2f} s by the baseline" if record.baseline is not None else ""
    left = seconds / record.prompt_tokens * sum(len(case.prompt.token_ids) for case in rest)
    return (
        f"first example: {record.prompt_tokens} prompt tokens, {len(record.method.token_ids)} new ones, "
        f"{record.method.total_s:.2f} s{beside}{f', {max(peaks) / 1e9:.1f} GB at the peak' if peaks else ''}; "
        f"{len(rest)} are left, about {_time(left)}"
    )


def _time(seconds: float) -> str:
    size, unit = (1, "s") if seconds < 120 else (60, "min") if seconds < 7200 else (3600, "h")
    return f"{seconds / size:.3g} {unit}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the host ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def what_fits(model: Any, spec: ModelSpec, case: Case, paired: bool) -> str:
    """The longest prompt that fits into the model's devices, and settings that need less memory."""
    methods = [case.method, Baseline()] if paired else [case.method]
    weights = sum(parameter.nbytes for parameter in model.parameters())
    has, tokens = sum(map(_memory_of, devices_of(model))), len(case.prompt.token_ids)

    def fits(n: int) -> bool:
        needs = [memory(model.config, spec, method, n, case.max_new_tokens, weights).total for method in methods]
        return MARGIN * max(needs) <= has

    low, high = 0, tokens
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    least = f"prompts of about {low} tokens would fit ({has / 1e9:.1f} GB): model.max_prompt_tokens={low}"
    if low < 2:
        least = f"no prompt fits into {has / 1e9:.1f} GB with {weights / 1e9:.1f} GB of weights"
    elif fits(tokens):
        least = f"{has / 1e9:.1f} GB should be enough: check whether another process uses the device"
    others = "model.quantise=int8, model.device_map=auto, or method.aux_device=cpu (lazy)"
    return f"out of memory at {tokens} prompt tokens; {least}. Less memory is needed with {others}"


def _memory_of(device: torch.device) -> int:
    """The device's total bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
