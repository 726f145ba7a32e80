"""The runs that a sweep makes, from its own arguments, without a model: what `eval.run.status` calls missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from eval.run.config import RunConfig, canonical, register_schema, to_run_config
from eval.run.plan import identify
from eval.store.results import label_of
from lazyllm.errors import UserError
from lazyllm.models.spec import QUANTISATIONS

_CONF = Path(__file__).resolve().parents[1] / "conf"
# of a run's identity: what depends on where a job runs, and on when, not on what was asked for
_OF_THE_MACHINE = {"device", "threads", "versions", "code", "revision"}

_PLACED = ("quantise", "device_map")  # settings of a model that not every machine can do
_REFUSED = "refused before it began"


@dataclass(frozen=True)
class Expected:
    """A run that a sweep makes. name: its model and method, for people. identity, examples: empty where it is refused.

    A job that is refused before its runs are known has its arguments as its name, no model and no seed.
    refused: why it cannot begin, as its job would say; None where nothing speaks against it.
    """

    name: str
    model: str
    setting: str
    seed: int | None
    identity: dict[str, Any]
    examples: list[tuple[str, str]]
    refused: str | None

    def is_of(self, identity: dict[str, Any]) -> bool:
        """Whether a run of that identity is this one, on whatever machine it was measured."""
        if self.refused is not None:
            return False
        ours, theirs = (
            {key: value for key, value in one.items() if key not in _OF_THE_MACHINE}
            for one in (self.identity, identity)
        )
        return json.loads(json.dumps(ours)) == theirs


def expected(arguments: Sequence[str]) -> list[Expected]:
    """The runs of `python run.py -m ARGUMENTS`, each once, in the sweep's order; an experiment's methods are runs each.

    A job that is refused is there with its reason. Raises ValueError: arguments that make no sweep.
    """
    register_schema()
    given = [one for one in arguments if not one.startswith(("hydra/", "hydra."))]
    found: dict[str, Expected] = {}
    try:
        with initialize_config_dir(str(_CONF), version_base="1.3"):
            for job in _jobs(given):
                for one in _of_job(job):
                    found.setdefault(json.dumps([one.identity or one.name, one.refused], sort_keys=True), one)
    except HydraException as error:
        raise ValueError(f"--expect {' '.join(arguments)}: {error}") from error
    return list(found.values())


def _jobs(given: Sequence[str]) -> list[list[str]]:
    """The sweep's jobs, each as what it overrides. Raises HydraException."""
    parser = OverridesParser.create()
    fixed = [one.input_line for one in parser.parse_overrides(list(given)) if not one.is_sweep_override()]
    swept = compose("config", [str(one) for one in fixed], return_hydra_config=True).hydra.sweeper.params or {}
    overrides = parser.parse_overrides([*(f"{key}={value}" for key, value in swept.items()), *given])
    (jobs,) = BasicSweeper.split_arguments(overrides, None)
    return jobs


def _of_job(job: Sequence[str]) -> list[Expected]:
    composed = compose("config", list(job))
    try:
        _check_quantise(composed.model.quantise)
        model: Any = OmegaConf.to_container(composed.model)
        asked = {key: model[key] for key in _PLACED}
        # status need not run where there is a GPU, nor what quantises there: only the job's own machine can check these
        composed.model.update({"device": "cpu", **dict.fromkeys(_PLACED)})
        return [_expected(one, asked) for one in _runs_of(to_run_config(composed))]
    except UserError as error:
        name = " ".join(one for one in job if not one.startswith("shard="))
        return [Expected(name, "", "", None, {}, [], f"{_REFUSED}: {error}")]


def _check_quantise(name: str | None) -> None:
    if name is not None and name not in QUANTISATIONS:
        raise UserError(f"model.quantise={name}: expected {', '.join(QUANTISATIONS)}, or null")


def _runs_of(config: RunConfig) -> list[RunConfig]:
    """A comparison's runs, or the one that the config is."""
    labels = [config.only] if config.only is not None else list(config.compare)
    return [replace(config, method=config.compare[label], compare={}, only=None) for label in labels] or [config]


def _expected(config: RunConfig, asked: dict[str, Any]) -> Expected:
    """One run. asked: of its identity, what was taken out of the config for this machine to accept it."""
    config = replace(config, shard=None)
    model, seed = Path(config.model.name).name, config.method.get("seed", config.seed)
    try:
        settings = {key: value for key, value in canonical(config.method).items() if key not in ("name", "seed")}
        label = label_of(config.method["name"], settings)
        found = identify(config)
    except UserError as error:
        label = label_of(
            config.method.get("name", ""), {key: one for key, one in config.method.items() if key != "name"}
        )
        return Expected(f"{model}, {label}", model, label, seed, {}, [], f"{_REFUSED}: {error}")
    return Expected(f"{model}, {label}, seed {seed}", model, label, seed, found.identity | asked, found.keys, None)
