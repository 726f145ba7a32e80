"""Settings of a search: a run's settings, and its own."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from omegaconf import DictConfig

from eval.run.config import RunConfig, to_run_config
from lazyllm.errors import UserError
from lazyllm.methods import METHODS, by_name

_NOT_HERE = ("compare", "only", "shard", "half", "trace")  # keys of a run that a search refuses


@dataclass
class TuneConfig(RunConfig):
    """A run's settings (`eval.run.config.RunConfig`), and the search's.

    target_speedup: the ideal TTFT speedup that a schedule must reach; null searches the whole front of score against
        speedup. trials: number of schedules to measure. layers: greatest number of pruning layers of a schedule.
    finalists: number of schedules of a front to measure on the held-out half.
    timeout_s: seconds after which this process begins no further trial; null for no limit.
    worker: no effect, but a sweep over it (-m worker=1,2,3,4) starts N processes on one study.
    `seed` is also the search's. `out` is the study's folder; null makes studies/<name>-<fingerprint>.
    """

    target_speedup: float | None = None
    trials: int = 64
    layers: int = 3
    finalists: int = 6
    timeout_s: float | None = None
    worker: int | None = None


def to_tune_config(config: DictConfig) -> TuneConfig:
    """The composed config, checked as far as possible without a model. Raises UserError."""
    plain = to_run_config(config)
    assert isinstance(plain, TuneConfig)
    default = TuneConfig()
    for key in _NOT_HERE:
        if getattr(plain, key) != getattr(default, key):
            raise UserError(f"{key}={getattr(plain, key)}: has no meaning in a search; leave it out")
    if not plain.timing.paired:
        raise UserError(
            "timing.paired=false: has no meaning in a search, whose finalists are always paired; leave it out"
        )
    if by_name(plain.method["name"]).dial != "schedule":
        searched = " or ".join(f"method={name}" for name in METHODS if METHODS[name].dial == "schedule")
        raise UserError(f"method={plain.method['name']}: has no schedule to search; give {searched}")
    if plain.method.get("schedule", "paper") != "paper":
        raise UserError("method.schedule is what the search finds: leave it out")
    target = plain.target_speedup
    if target is not None and target <= 1:
        raise UserError(f"target_speedup={target}: expected more than 1, or null for the whole front")
    for key in ("trials", "layers", "finalists"):
        if getattr(plain, key) < 1:
            raise UserError(f"{key}={getattr(plain, key)}: expected 1 or more")
    if plain.timeout_s is not None and plain.timeout_s <= 0:
        raise UserError(f"timeout_s={plain.timeout_s}: expected more than 0 seconds, or null")
    return plain


def as_run(config: TuneConfig, **settings: Any) -> RunConfig:
    """The run settings of a search, with `settings` replaced."""
    return replace(RunConfig(**{key.name: getattr(config, key.name) for key in fields(RunConfig)}), **settings)


def check_installed() -> None:
    """Raise UserError if Optuna is not installed."""
    try:
        version("optuna")
    except PackageNotFoundError as error:
        raise UserError(
            "the search needs the package optuna: run pip install --editable '.[tune]' in the repository's folder"
        ) from error
