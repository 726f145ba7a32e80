"""Hyperparameters that follow from the model: a target speedup, shares of the depth, a schedule tuned by a search.

A target is `2.0x`, or `table1` for the paper's speedup. The paper does not publish the parameters behind its Table 1.
Ours are solved for (`Method.solve`): a method's `target_parameter` is set so that the *ideal* TTFT speedup
(`lazyllm.engine.flops`) on a prompt of reference length is the one that the paper measured for the task and the model.
`Method.table1` holds the parameters that are not solved for; eval/analysis/published/table1_parameters.csv lists all.
"""

import re
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import yaml

from eval.benchmarks import SUITES
from eval.benchmarks.suite import Dataset
from lazyllm.errors import UserError, require
from lazyllm.methods import by_name, settings_of
from lazyllm.methods.support.schedule import Schedule

# Prompt lengths: the paper's mean for Llama 2, LongBench's limit for XGen (most prompts are truncated to it)
REFERENCE_TOKENS = {"llama2": 3376, "xgen": 7500}

PREFIX = "tuned/"
SHIPPED = Path(__file__).parents[1] / "conf" / "tuned"
FILE = "tuned.yaml"  # of a study with a target
_SPEEDUP = re.compile(r"(\d+(?:\.\d+)?)x")


class OutOfReachError(UserError):
    """A method cannot reach its target speedup on this model."""


def is_preset(value: Any) -> bool:
    """Whether a setting is `table1` or a speedup such as `2.0x`."""
    return isinstance(value, str) and (value == "table1" or _SPEEDUP.fullmatch(value) is not None)


def uses_preset(settings: dict[str, Any]) -> bool:
    """Whether a method's settings depend on the task and the model."""
    return any(is_preset(value) for value in settings.values())


def check(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with placeholders for presets and tuned schedules, to check the others."""
    if is_tuned(settings.get("schedule")):
        settings = settings | {"schedule": "none"}
    name = settings.get("name", "")
    kind, checked = by_name(name), dict(settings)
    for key, value in settings.items():
        if not is_preset(value):
            continue
        if key in kind.table1 and value != "table1":
            raise UserError(f"method {name!r} cannot be solved for {key}={value}: give a number")
        if key != kind.target_parameter and key not in kind.table1:
            raise UserError(f"method {name!r} takes no preset as {key}={value}; give a number")
        default = settings_of(kind)[key]
        checked[key] = 0.5 if default is MISSING else default  # a target_parameter without a default is a keep ratio
    return checked


def with_layers(settings: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The settings with layers for a schedule's shares of the depth (`50%`) and for `tuned/NAME`. Raises ValueError."""
    schedule: Any = settings.get("schedule")
    if is_tuned(schedule):
        return settings | {"schedule": read_tuned(schedule, num_layers)}
    if not isinstance(schedule, dict) and ":" not in str(schedule):  # a name
        return settings
    return settings | {"schedule": dict(Schedule.parse(schedule, num_layers).keep)}


def solved(
    settings: dict[str, Any], dataset: Dataset, model_config: Any, column: str | None, length: int | None = None
) -> dict[str, Any]:
    """A method's settings for one dataset and model, presets replaced by numbers.

    settings: `name` and hyperparameters, as `check` takes them. column: the paper's for this model, llama2 or xgen;
    None takes llama2's. length: the prompt length in tokens to solve for; None for the suite's.
    Raises OutOfReachError if the method cannot reach the speedup.
    """
    if not uses_preset(settings):
        return settings
    kind = by_name(settings["name"])
    settings = settings | {key: value for key, value in kind.table1.items() if settings.get(key) == "table1"}
    value = settings.get(kind.target_parameter or "")
    if not is_preset(value):
        return settings
    column = column or "llama2"
    reference = SUITES[dataset.suite].reference_tokens
    tokens = length or (REFERENCE_TOKENS[column] if reference is None else reference)
    key, expected = f"dataset.{dataset.name}.prompt_tokens", f"the rows' mean, for which {value} is solved"
    require(tokens > 0, key, tokens, expected)
    target = table1_speedup(dataset.task, settings["name"], column) if value == "table1" else float(str(value)[:-1])
    others = {key: value for key, value in settings.items() if key not in ("name", "turns")}
    solution = kind.solve(others, model_config, tokens, target)
    if solution is None:
        instead = "name a draft" if others.get("draft", "") is None else "give less" if target > 1 else "give 1x"
        raise OutOfReachError(
            f"method {settings['name']!r} cannot reach an ideal TTFT speedup of {target} on "
            f"{model_config.num_hidden_layers} layers; {instead}"
        )
    return settings | {str(kind.target_parameter): solution}


def table1_speedup(task: str, method: str, column: str) -> float:
    """The TTFT speedup in the paper's Table 1. Raises UserError if the method is not in it."""
    from eval.analysis.paper_tables import paper_values  # not at the top: pandas is slow to import

    speedup = paper_values().get((column, task, method, "ttft_speedup"))
    if speedup is None:
        raise UserError(f"Table 1 has no speedup of method {method!r}: give a speedup such as 2.0x instead of table1")
    return speedup


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
    """The text of a tuned schedule's file. num_layers: of the model. about: more, about the search."""
    content = {"schedule": schedule, "layers": num_layers, **about}
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=1000)
    return f"# python run.py method.schedule=tuned/{name}      (from another folder: tuned/PATH)\n{text}"


def _file(reference: str) -> Path:
    name = reference.removeprefix(PREFIX)
    path = Path(name).expanduser()
    for file in (SHIPPED / f"{name}.yaml", path / FILE, path):
        if file.is_file():
            return file
    shipped = ", ".join(PREFIX + file.stem for file in sorted(SHIPPED.glob("*.yaml")))
    raise UserError(f"no tuned schedule {name!r}: expected one of {shipped}, or tuned/PATH of a {FILE} or its folder")
