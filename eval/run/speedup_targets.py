"""Parameters given by the speedup that they are to reach: `2.0x`, and `table1` for the paper's own.

The paper does not publish the parameters behind its Table 1. Ours are solved for: those whose *ideal* TTFT speedup
(`lazyllm.engine.flops`) on a prompt of reference length is the one that the paper measured for the task and the model.

method              parameter  what is solved for
lazy                schedule   one keep ratio for three pruning layers: at Figure 4's depths (30, 60 and 90 %) as long
                               as they get there with a ratio of 0.3 or more, else at the next earlier ones of `DEPTHS`
random_drop         keep       the share
static_pruning      keep       the share, for the layer that is given
prompt_compression  keep       nothing: scoring alone costs a prefill. `table1` is 0.5, the share that Selective
                               Context's authors recommend

python -m eval.run.speedup_targets    prints all of table1's parameters as CSV:
eval/paper/published/table1_parameters.csv
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from eval.benchmarks.datasets import DATASETS, Dataset
from eval.run.tuned import is_tuned, read_tuned
from lazyllm.errors import UserError
from lazyllm.methods import METHODS, Lazy, Method, RandomDrop, StaticPruning
from lazyllm.methods.schedule import Schedule
from lazyllm.models.load import load_config
from lazyllm.models.spec import ModelSpec

PARAMETER = {"lazy": "schedule", "random_drop": "keep", "static_pruning": "keep", "prompt_compression": "keep"}
DEPTHS = ((30, 60, 90), (20, 50, 80), (20, 40, 60), (10, 30, 50), (10, 20, 30))  # per cent of the depth
LOWEST_RATIO = 0.3
STATIC_LAYER = 2  # of eval/conf/experiment/table1.yaml: "the first few layers" are not named by the paper
COMPRESSED = 0.5
# Prompts' lengths: the paper's mean for Llama 2, LongBench's limit for XGen (most prompts are cut to it), and the
# middle one of the embedded suite's three
REFERENCE_TOKENS = {"llama2": 3376, "xgen": 7500}
EMBEDDED_REFERENCE_TOKENS = 1024

_TABLE1 = Path(__file__).parents[1] / "paper" / "published" / "table1.csv"
_SPEEDUP = re.compile(r"(\d+(?:\.\d+)?)x")


def is_preset(value: Any) -> bool:
    """Whether a setting is `table1` or a speedup such as `2.0x`."""
    return isinstance(value, str) and (value == "table1" or _SPEEDUP.fullmatch(value) is not None)


def uses_preset(settings: dict[str, Any]) -> bool:
    """Whether a method's settings depend on the task and the model."""
    return any(is_preset(value) for value in settings.values())


def check(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with a stand-in for a preset, so that the rest can be checked before a model is known.

    Raises UserError where the method takes no such preset.
    """
    key = PARAMETER.get(settings.get("name", ""))
    presets = {name: value for name, value in settings.items() if is_preset(value)}
    for name, value in presets.items():
        if name != key:
            raise UserError(f"method {settings.get('name')!r} takes no preset as {name}={value}; give a number")
        if settings["name"] == "prompt_compression" and value != "table1":
            raise UserError(f"prompt compression cannot be solved for keep={value}: give a share such as keep=0.5")
    return settings | dict.fromkeys(presets, "paper" if key == "schedule" else COMPRESSED)


def at_depth(settings: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The settings with a schedule's shares of the depth (`50%`) turned into layers, and `tuned/NAME` into its file's.

    Raises ValueError.
    """
    schedule: Any = settings.get("schedule")
    if is_tuned(schedule):
        return settings | {"schedule": read_tuned(schedule, num_layers)}
    if not isinstance(schedule, dict):
        return settings
    return settings | {"schedule": dict(Schedule.parse(schedule, num_layers).keep)}


def resolve(settings: dict[str, Any], dataset: Dataset, model_config: Any, column: str | None) -> dict[str, Any]:
    """A method's settings for one dataset and model, presets replaced by numbers.

    settings: `name` and hyperparameters. column: the paper's for this model, llama2 or xgen; None takes llama2's.
    Raises UserError: no such preset for the method, or a speedup out of its reach.
    """
    if not uses_preset(settings):
        return settings
    check(settings)
    name = settings["name"]
    key = PARAMETER[name]
    value = settings[key]
    column = column or "llama2"
    tokens = EMBEDDED_REFERENCE_TOKENS if dataset.suite == "embedded" else REFERENCE_TOKENS[column]
    if name == "prompt_compression":
        return settings | {key: COMPRESSED}
    target = table1_speedup(dataset.task, name, column) if value == "table1" else float(value[:-1])
    return settings | {key: _solve(name, settings, model_config, tokens, target)}


@cache
def _paper() -> pd.DataFrame:
    return pd.read_csv(_TABLE1).set_index(["task", "method"])


def table1_speedup(task: str, method: str, column: str) -> float:
    """The TTFT speedup that the paper's Table 1 gives."""
    return float(_paper().loc[(task, method), f"{column}_ttft_speedup"])


def _solve(name: str, settings: dict[str, Any], model_config: Any, tokens: int, target: float) -> Any:
    layers = model_config.num_hidden_layers
    if name == "lazy":
        for depths in DEPTHS:
            places = sorted({layers * depth // 100 for depth in depths} - {0})
            ratio = _ratio(lambda r, at=places: Lazy(Schedule(dict.fromkeys(at, r))), model_config, tokens, target)
            if ratio is not None and ratio >= LOWEST_RATIO:
                return dict.fromkeys(places, ratio)
    else:
        make = RandomDrop if name == "random_drop" else lambda keep: StaticPruning(settings["layer"], keep)
        ratio = _ratio(make, model_config, tokens, target)
        if ratio is not None:
            return ratio
    raise UserError(f"method {name!r} cannot reach an ideal TTFT speedup of {target} on {layers} layers; give less")


def _ratio(make: Callable[[float], Method], model_config: Any, tokens: int, target: float) -> float | None:
    """The ratio, in steps of 1/10000, whose ideal speedup is nearest to `target`; None where none gets there."""

    def speedup(step: int) -> float:
        return make(step / 10_000).ideal_speedup(model_config, tokens)

    if target < 1 or speedup(1) < target:
        return None
    slow, fast = 10_000, 1  # a smaller ratio is faster
    while slow - fast > 1:
        middle = (slow + fast) // 2
        slow, fast = (middle, fast) if speedup(middle) < target else (slow, middle)
    return min((slow, fast), key=lambda step: abs(speedup(step) - target)) / 10_000


def parameters() -> pd.DataFrame:
    """What `table1` means on the paper's two models: task, model, method, parameters, ideal and the paper's speedup."""
    rows = []
    for column, tokens in REFERENCE_TOKENS.items():
        model_config = load_config(ModelSpec(column, "dummy"))
        for dataset in {one.task: one for one in DATASETS.values() if one.suite == "longbench"}.values():
            for name in ("lazy", "static_pruning", "random_drop"):
                layer = {"layer": STATIC_LAYER} if name == "static_pruning" else {}
                settings = {"name": name, **layer, PARAMETER[name]: "table1"}
                found = resolve(settings, dataset, model_config, column)
                kind = METHODS[found.pop("name")]
                rows.append(
                    {
                        "task": dataset.task,
                        "model": column,
                        "method": name,
                        "parameters": json.dumps(found),
                        "prompt_tokens": tokens,
                        "ideal_ttft_speedup": round(kind(**found).ideal_speedup(model_config, tokens), 3),
                        "paper_ttft_speedup": table1_speedup(dataset.task, name, column),
                    }
                )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    print(parameters().to_csv(index=False), end="")
