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
from lazyllm.spec import ModelSpec

MARGIN = 1.05  # for memory that is not counted: norms, masks, gaps between blocks


def first_example(record: Record, rest: Sequence[Case]) -> str:
    """The cost of the first example, and the time of the others at its seconds per prompt token. All turns count."""
    turns = record.by_turn
    own, beside = [turn.method for turn in turns], [turn.baseline for turn in turns if turn.baseline is not None]
    tokens, in_turns = sum(turn.prompt_tokens for turn in turns), f" in {len(turns)} turns" if len(turns) > 1 else ""
    seconds, of_baseline = (sum(side.total_s for side in sides) for sides in (own, beside))
    peaks = [side.peak_memory_bytes for side in (*own, *beside) if side.peak_memory_bytes is not None]
    left = (seconds + of_baseline) / tokens * sum(case.prompt.conversation_tokens for case in rest)
    return (
        f"first example: {tokens} prompt tokens{in_turns}, {sum(len(side.token_ids) for side in own)} new ones, "
        f"{seconds:.2f} s{f', {of_baseline:.2f} s by the baseline' if beside else ''}"
        f"{f', {max(peaks) / 1e9:.1f} GB at the peak' if peaks else ''}; {len(rest)} are left, about {_time(left)}"
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
