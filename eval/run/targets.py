"""Hyperparameters that follow from the model: a target speedup, shares of the depth, a schedule tuned by a search.

A target is `2.0x`, or `table1` for the paper's speedup. The paper does not publish the parameters behind its Table 1.
Ours are solved for (`Method.solve`): a method's `target_parameter` is set so that the *ideal* TTFT speedup
(`lazyllm.engine.flops`) on a prompt of reference length is the one that the paper measured for the task and the model.
A method whose number of tokens depends on the prompt has no such parameter.
`Method.table1` holds the parameters that are not solved for; eval/analysis/published/table1_parameters.csv lists all.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from eval.benchmarks.suite import Dataset
from lazyllm.engine.depth import Depth
from lazyllm.errors import UserError, require
from lazyllm.methods import Method
from lazyllm.methods.support.schedule import Schedule

# Prompt lengths: the paper's mean for Llama 2, LongBench's limit for XGen (most prompts are truncated to it)
REFERENCE_TOKENS = {"llama2": 3376, "xgen": 7500}
TABLE1 = Path(__file__).parents[1] / "analysis" / "published" / "table1.csv"

PREFIX = "tuned/"
SHIPPED = Path(__file__).parents[1] / "conf" / "tuned"
FILE = "tuned.yaml"  # of a study
_SPEEDUP = re.compile(r"(\d+(?:\.\d+)?)x")


class OutOfReachError(UserError):
    """A method cannot reach its target speedup on this model."""


@dataclass(frozen=True)
class Target:
    """An ideal TTFT speedup, for which a method's `target_parameter` is solved. None: the paper's, for each task."""

    speedup: float | None

    @classmethod
    def parse(cls, value: Any) -> "Target | None":
        """The target that a setting names: `table1`, or a speedup such as `2.0x`; None for any other value."""
        if value == "table1":
            return cls(None)
        match = _SPEEDUP.fullmatch(value) if isinstance(value, str) else None
        return None if match is None else cls(float(match[1]))

    def solved(
        self,
        kind: type[Method],
        name: str,
        others: Mapping[str, Any],
        dataset: Dataset,
        shape: Any,
        column: str | None,
        length: int | None = None,
        limit: int | None = None,
    ) -> Any:
        """The value of the method's `target_parameter` for a dataset and a model.

        name: the method's. others: its other hyperparameters. shape: the model's config. column: the paper's for this
        model, llama2 or xgen; None takes llama2's. length: the prompt length in tokens to solve for; None for the
        dataset's. limit: of the run's prompts; no target is solved for more tokens.
        Raises OutOfReachError if the method cannot reach the speedup, UserError if Table 1 has none.
        """
        column = column or "llama2"
        tokens = length or dataset.prompt_tokens
        if tokens is None:
            tokens = REFERENCE_TOKENS[column]
        if limit is not None:
            tokens = min(tokens, limit)
        target = f"{kind.target_parameter}={'table1' if self.speedup is None else f'{self.speedup:g}x'}"
        expected = f"the rows' mean, for which {target} of {name} is solved"
        require(tokens > 0, f"dataset.{dataset.name}.prompt_tokens", tokens, expected)
        speedup = self.speedup or table1_speedup(dataset.task, name, column)
        solution = kind.solve(others, shape, tokens, speedup)
        if solution is None:
            instead = "name a draft" if others.get("draft", "") is None else "give less" if speedup > 1 else "give 1x"
            raise OutOfReachError(
                f"method {name!r} cannot reach an ideal TTFT speedup of {speedup} on {shape.num_hidden_layers} layers; "
                f"{instead}"
            )
        return solution


def table1_speedup(task: str, method: str, column: str) -> float:
    """The TTFT speedup in the paper's Table 1. Raises UserError if the method is not in it."""
    speedup = _table1().get((task, method, column))
    if speedup is None:
        raise UserError(f"Table 1 has no speedup of method {method!r}: give a speedup such as 2.0x instead of table1")
    return speedup


@cache
def _table1() -> dict[tuple[str, str, str], float]:
    """{(task, method, llama2 or xgen): TTFT speedup}."""
    with TABLE1.open(encoding="utf-8", newline="") as opened:
        rows = [*csv.DictReader(opened)]
    return {
        (row["task"], row["method"], column): float(row[f"{column}_ttft_speedup"])
        for row in rows
        for column in REFERENCE_TOKENS
        if row[f"{column}_ttft_speedup"]
    }


def with_layers(schedule: Any, depth: Depth) -> Any:
    """A schedule with layers for shares of the depth (`50%`) and for `tuned/NAME`. Raises ValueError."""
    if is_tuned(schedule):
        return read_tuned(schedule, depth.count)
    if not isinstance(schedule, dict) and ":" not in str(schedule):  # a name
        return schedule
    return dict(Schedule.parse(schedule, depth).keep)


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
