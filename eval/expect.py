"""The runs that a sweep makes, from its own arguments, without a model: what `eval.status` calls missing."""

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

from eval.config import RunConfig, canonical, register_schema, to_run_config
from eval.prepare import identify
from eval.run import USER_ERRORS
from eval.runs import label_of

_CONF = Path(__file__).resolve().parents[1] / "conf"
# of a run's identity: what depends on where a job runs, and on when, not on what was asked for
_OF_THE_MACHINE = {"device", "threads", "versions", "code", "revision"}


@dataclass(frozen=True)
class Expected:
    """A run that a sweep makes. name: its model and method, for people. identity, examples: empty where it is refused.

    refused: why it cannot begin, as its job would say; None where nothing speaks against it.
    """

    name: str
    model: str
    setting: str
    seed: int
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
    """The runs of `python run.py -m ARGUMENTS`, each once, in the sweep's order. Raises ValueError: bad arguments."""
    found: dict[str, Expected] = {}
    for config in configs(arguments):
        one = _expected(config)
        found.setdefault(json.dumps([one.identity or one.name, one.refused], sort_keys=True), one)
    return list(found.values())


def configs(arguments: Sequence[str]) -> list[RunConfig]:
    """The configs of the sweep's jobs; an experiment's methods are jobs of their own. Raises ValueError."""
    register_schema()
    given = [one for one in arguments if not one.startswith(("hydra/", "hydra."))]
    try:
        with initialize_config_dir(str(_CONF), version_base="1.3"):
            parser = OverridesParser.create()
            fixed = [one.input_line for one in parser.parse_overrides(given) if not one.is_sweep_override()]
            swept = compose("config", [str(one) for one in fixed], return_hydra_config=True).hydra.sweeper.params or {}
            overrides = parser.parse_overrides([*(f"{key}={value}" for key, value in swept.items()), *given])
            (jobs,) = BasicSweeper.split_arguments(overrides, None)
            composed = [to_run_config(compose("config", list(job))) for job in jobs]
    except HydraException as error:
        raise ValueError(f"--expect {' '.join(arguments)}: {error}") from error
    return [one for config in composed for one in _runs_of(config)]


def _runs_of(config: RunConfig) -> list[RunConfig]:
    """A comparison's runs, or the one that the config is."""
    labels = [config.only] if config.only is not None else list(config.compare)
    return [replace(config, method=config.compare[label], compare={}, only=None) for label in labels] or [config]


def _expected(config: RunConfig) -> Expected:
    # status need not run where there is a GPU; a map of devices is found out where it runs
    device = "cpu" if config.model.device_map is None else "auto"
    config = replace(config, model=replace(config.model, device=device), shard=None)
    model, seed = Path(config.model.name).name, config.method.get("seed", config.seed)
    try:
        settings = {key: value for key, value in canonical(config.method).items() if key not in ("name", "seed")}
        label = label_of(config.method["name"], settings)
        found = identify(config)
    except USER_ERRORS as error:
        label = label_of(
            config.method.get("name", ""), {key: one for key, one in config.method.items() if key != "name"}
        )
        return Expected(f"{model}, {label}", model, label, seed, {}, [], f"refused before it began: {error}")
    return Expected(f"{model}, {label}, seed {seed}", model, label, seed, found.identity, found.keys, None)
