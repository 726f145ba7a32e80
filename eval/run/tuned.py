"""Schedules found by search (`lazyllm-bench tune`), for `method.schedule=tuned/NAME`.

NAME is a file of eval/conf/tuned without its suffix, or a path: a study's folder, or a YAML file in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from lazyllm.errors import UserError
from lazyllm.methods.schedule import Schedule

PREFIX = "tuned/"
SHIPPED = Path(__file__).parents[1] / "conf" / "tuned"
FILE = "tuned.yaml"  # of a study with a target


def is_tuned(schedule: Any) -> bool:
    """Whether a method's schedule refers to a tuned one."""
    return isinstance(schedule, str) and schedule.startswith(PREFIX)


def read_tuned(reference: str, num_layers: int) -> dict[int, float]:
    """{layer: keep ratio} of `tuned/NAME`. Raises UserError for a missing or invalid file, or another model depth."""
    file = _file(reference)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        depth = content["layers"]
        schedule = Schedule(content["schedule"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as a tuned schedule ({type(error).__name__}: {error})") from error
    if depth != num_layers:
        shares = ", ".join(f"{100 * layer / depth:g}%: {ratio:g}" for layer, ratio in schedule.keep.items())
        raise UserError(
            f"{reference} is for a model of {depth} layers, but this one has {num_layers}: search on this model "
            f"(lazyllm-bench tune), or give shares of the depth: {{{shares}}}"
        )
    return dict(schedule.keep)


def as_yaml(name: str, schedule: dict[int, float], num_layers: int, about: dict[str, Any]) -> str:
    """The text of a tuned schedule's file. about: facts of the search."""
    flow = "{" + ", ".join(f"{layer}: {ratio:g}" for layer, ratio in schedule.items()) + "}"
    lines = [f"{key}: {json.dumps(value)}" for key, value in about.items()]  # JSON is YAML
    head = f"# python run.py method.schedule=tuned/{name}      (from another folder: tuned/PATH)"
    return "\n".join([head, f"schedule: {flow}", f"layers: {num_layers}  # of the model", *lines, ""])


def _file(reference: str) -> Path:
    name = reference.removeprefix(PREFIX)
    path = Path(name).expanduser()
    for file in (SHIPPED / f"{name}.yaml", path / FILE, path):
        if file.is_file():
            return file
    shipped = ", ".join(PREFIX + file.stem for file in sorted(SHIPPED.glob("*.yaml"))) or "none yet"
    raise UserError(
        f"no tuned schedule {name!r}: expected a file in eval/conf/tuned ({shipped}), a study's folder with {FILE}, or "
        "a path to such a file"
    )
