"""Runs for tests: made as `python run.py ...` makes them, and a small one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from eval.run.config import (
    ModelConfig,
    RunConfig,
    TimingConfig,
    check_arguments,
    compose_config,
    register_schema,
    to_run_config,
)
from eval.run.resolved import Resolved, resolve

registered = cache(register_schema)  # takes as long as half a run's settings; who registers another restores this one


def run_of(*overrides: str) -> Resolved:
    """The run of `python run.py OVERRIDES`, checked as there."""
    registered()
    check_arguments(overrides)
    return resolve(to_run_config(compose_config(overrides)))


def small_run(out: Path | str | None, **changes: Any) -> Resolved:
    """A quick run: three examples of each of two datasets, short prompts and answers, a paired baseline."""
    settings: dict[str, Any] = dict(
        model=ModelConfig(name="tiny", dtype="float32", device="cpu", max_prompt_tokens=96),
        method={"name": "lazy", "schedule": {2: 0.5}},
        dataset={"lookup": True, "shots": True},
        timing=TimingConfig(warmup=0),
        limit=3,
        max_new_tokens=2,
        threads=1,
        out=None if out is None else str(out),
    )
    return resolve(RunConfig(**(settings | changes)))
