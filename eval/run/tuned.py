"""Schedules that a search found (`lazyllm-bench tune`), as `method.schedule=tuned/NAME` takes them.

NAME is a file of eval/conf/tuned without its suffix, or a path: a study's folder, or one of the YAML files in it.
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
    """Whether a method's schedule is a reference to a tuned one."""
    return isinstance(schedule, str) and schedule.startswith(PREFIX)


def read_tuned(reference: str, num_layers: int) -> dict[int, float]:
    """{layer: keep ratio} of `tuned/NAME`. Raises UserError: no or an invalid file, or tuned at another depth."""
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
            f"{reference} was found on a model of {depth} layers, this one has {num_layers}: search on this one "
            f"(lazyllm-bench tune), or give its shares of the depth yourself: {{{shares}}}"
        )
    return dict(schedule.keep)


def as_yaml(name: str, schedule: dict[int, float], num_layers: int, about: dict[str, Any]) -> str:
    """The text of a tuned schedule's file. about: what it was found on and for."""
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
        f"no tuned schedule {name!r}: expected a file in eval/conf/tuned ({shipped}), a study's folder with "
        f"{FILE} in it, or a path to such a file"
    )
