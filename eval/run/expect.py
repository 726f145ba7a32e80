"""The runs of a sweep, from its arguments, without a model."""

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

from eval.run.config import (
    CONF,
    check_arguments,
    compose_config,
    one_line,
    register_schema,
    to_run_config,
)
from eval.run.prepare import identify
from eval.run.resolved import Resolved, resolve
from eval.run.targets import OutOfReachError
from eval.store.runs import label_of, settings_in
from lazyllm.errors import UserError

# Parts of a run's identity that depend on the machine and the time, not on the arguments
_OF_THE_MACHINE = {"device", "threads", "versions", "code", "revision"}
# Settings of a model that not every machine supports: `status` may run on another machine
_PLACED = ("quantise", "device_map")


@dataclass(frozen=True)
class Expected:
    """A run of a sweep. name: its model and method, for people.

    refused: why it cannot begin, in its job's words, without identity and examples; None otherwise. A job that is
    refused before its runs are known is named by its arguments. out_of_reach: the reason is that the method cannot
    reach its target speedup: a job leaves it out.
    """

    name: str
    model: str
    setting: str
    seed: int | None
    identity: dict[str, Any]
    examples: list[tuple[str, str]]
    refused: str | None
    out_of_reach: bool = False

    def is_of(self, identity: dict[str, Any]) -> bool:
        """Whether a run of this identity is the expected one, on any machine."""
        ours = {key: value for key, value in self.identity.items() if key not in _OF_THE_MACHINE}
        theirs = {key: value for key, value in identity.items() if key not in _OF_THE_MACHINE}
        return json.loads(json.dumps(ours)) == theirs


def expected_runs(arguments: Sequence[str]) -> list[Expected]:
    """The runs of `python run.py -m ARGUMENTS`, each once, in order; each method of an experiment is a run.

    A refused job is listed with its reason. Raises UserError for arguments that make no sweep.
    """
    expected: dict[str, Expected] = {}
    for job in jobs_of(arguments):
        for run in _runs_of(job):
            expected.setdefault(json.dumps([run.identity or run.name, run.refused], sort_keys=True), run)
    return list(expected.values())


def jobs_of(arguments: Sequence[str]) -> list[list[str]]:
    """The overrides of each job of a run or a sweep. Raises UserError for arguments that neither takes."""
    register_schema()
    overrides = [
        word for word in arguments if not word.startswith(("hydra/", "hydra.")) and word not in ("-m", "--multirun")
    ]
    check_arguments(overrides)
    parser = OverridesParser.create()
    try:
        parsed = parser.parse_overrides(overrides)
        fixed = [override.input_line or "" for override in parsed if not override.is_sweep_override()]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            swept = compose("config", fixed, return_hydra_config=True).hydra.sweeper.params or {}
        overrides = [*(f"{key}={value}" for key, value in swept.items()), *overrides]
        (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides(overrides), None)
    except HydraException as error:
        raise one_line(error) from error
    return jobs


def _runs_of(job: Sequence[str]) -> list[Expected]:
    name = " ".join(override for override in job if not override.startswith("shard="))
    try:
        run = resolve(replace(to_run_config(compose_config(job)), shard=None))
    except UserError as error:
        return [Expected(name, "", "", None, {}, [], f"refused before it began: {error}")]
    return [_expected(one) for one in run.runs.values()]


def _expected(run: Resolved) -> Expected:
    config = run.config
    model, seed = Path(config.model.name).name, run.method.get("seed", config.seed)
    label = label_of(run.method["name"], settings_in(run.method))
    name = f"{model}, {label}, seed {seed}"
    try:
        # on the CPU, as `status` may run on a machine without the devices
        identified = identify(run.changed(model=replace(config.model, device="cpu", **dict.fromkeys(_PLACED))))
    except OutOfReachError as error:
        return Expected(name, model, label, seed, {}, [], str(error), out_of_reach=True)
    except UserError as error:
        return Expected(name, model, label, seed, {}, [], f"refused before it began: {error}")
    identity = identified.identity | {key: getattr(config.model, key) for key in _PLACED}
    return Expected(name, model, label, seed, identity, identified.keys, None)
