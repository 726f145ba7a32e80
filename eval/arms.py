"""Arms are the methods that answer each example of a run, each as the run names it.

A speedup is an arm's key, never a hyperparameter: the paper does not publish the parameters behind
its Table 1, so ours are solved for (`Method.solve`). A method's `target_parameter` is set so that
its *ideal* TTFT speedup (`lazyllm.engine.flops`) on a prompt of reference length is the requested
one; `table1` requests the one that the paper measured for the task and the model. A method whose
number of tokens depends on the prompt has no such parameter. `Method.table1` holds the parameters
that are not solved for; eval/analysis/published/table1_parameters.csv lists all.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from eval.benchmarks.datasets import format_value
from eval.benchmarks.rows import sha256_of
from eval.benchmarks.suite import Dataset
from eval.config import ArmSettings, RunConfig
from lazyllm.engine.depth import Depth
from lazyllm.errors import UserError
from lazyllm.methods import Method, about_the_method, by_name, make, name_of, settings_of

BASELINE = "baseline"  # the method's name, and the label of its arm
PAPER = "table1"  # the speedup that stands for the paper's
# Prompt lengths: the paper's mean for Llama 2, and LongBench's limit for XGen, to which most
# prompts are cut
REFERENCE_TOKENS = {"llama2": 3376, "xgen": 7500}
TABLE1 = Path(__file__).parent / "analysis" / "published" / "table1.csv"


class OutOfReachError(UserError):
    """This method cannot reach its speedup on this model."""


@dataclass(frozen=True)
class Arm:
    """An arm is a method as a run names it.

    label: unique in its run. name: the method's, or its file's.
    hyperparameters: as given; the others have their defaults, but for the one that `speedup` gives.
    speedup: the ideal TTFT speedup that is solved for, `PAPER` for the paper's; None without one.
    """

    label: str
    name: str
    hyperparameters: Mapping[str, Any]
    speedup: float | str | None = None

    @property
    def kind(self) -> type[Method]:
        """Find the method's class."""
        return by_name(self.name)

    @property
    def solves(self) -> bool:
        """Say whether the speedup is solved for.

        `table1` only sets some hyperparameters of some methods.
        """
        return self.speedup is not None and not (self.speedup == PAPER and self.kind.table1)

    def at(self, depth: Depth) -> "Arm":
        """Put numbers for hyperparameters that depend on the model (`Method.resolve`)."""
        with about_the_method(self.label):
            resolved = self.kind.resolve(self.hyperparameters, depth)
        return Arm(self.label, self.name, resolved, self.speedup)

    def sample(self) -> Method:
        """Make the method before its speedup is solved for: its target keeps all tokens."""
        kind, given = self.kind, dict(self.hyperparameters)
        if self.solves:
            given |= kind.keep_all or {str(kind.target_parameter): 1.0}
        elif self.speedup == PAPER:
            given |= kind.table1
        with about_the_method(self.label):
            return make(self.name, given)

    def method(
        self,
        dataset: Dataset,
        config: Any,
        column: str | None,
        length: int | None,
        limit: int | None,
    ) -> Method:
        """Make the method for a dataset on a model; a speedup is solved for.

        config: the model's. column: the paper's for this model, llama2 or xgen; None takes
            llama2's.
        length: tokens of the prompt to solve for; None for the dataset's. limit: of the run's
        prompts; no speedup is solved for more tokens. Raises OutOfReachError if the method cannot
        reach the speedup, UserError if Table 1 has none.
        """
        if not self.solves:
            return self.sample()
        column = column or "llama2"
        tokens = length or (
            REFERENCE_TOKENS[column] if dataset.prompt_tokens is None else dataset.prompt_tokens
        )
        if tokens == 0:
            raise UserError(
                f"dataset={dataset.name}: speedup={show_speedup(self.speedup)} of {self.label} is "
                "solved for a prompt length: give the rows' mean as prompt_tokens in the "
                "dataset's description"
            )
        tokens = min(tokens, limit or tokens)
        speedup = self.speedup
        if speedup == PAPER:
            speedup = table1_speedup(dataset.task, self.name, column)
        assert isinstance(speedup, float)
        with about_the_method(self.label):
            solution = self.kind.solve(self.hyperparameters, config, tokens, speedup)
            if solution is None:
                raise OutOfReachError(self._out_of_reach(speedup, config.num_hidden_layers))
            return make(
                self.name, {**self.hyperparameters, str(self.kind.target_parameter): solution}
            )

    def _out_of_reach(self, speedup: float, layers: int) -> str:
        """Say that the speedup cannot be reached, and what to do."""
        instead = "give a lower one"
        if "draft" in settings_of(self.kind) and self.hyperparameters.get("draft") is None:
            instead = "name a draft model, draft=FOLDER_OR_HUB_ID"
        return (
            f"{self.label} cannot reach an ideal TTFT speedup of {speedup:g} on {layers} layers: "
            f"{instead}"
        )

    def canonical(self) -> dict[str, Any]:
        """Write the method's name and hyperparameters for a run's identity.

        All ways to write the same method give the same.

        Those at their default are left out, except a seed and the method's `target_parameter` and
        `shown_parameters`; so is the one that the speedup gives.
        """
        kind, written = self.kind, {"name": name_of(self.name)}
        always_written = (
            "seed",
            *kind.shown_parameters,
            *(() if self.solves else (kind.target_parameter,)),
        )
        given = {**self.hyperparameters, **(kind.table1 if self.speedup == PAPER else {})}
        for key, default in settings_of(kind).items():
            value = given.get(key, default)
            if value is not MISSING and (key in always_written or value != default):
                written[key] = value
        return written


def expand(config: RunConfig) -> tuple[Arm, ...]:
    """List the arms of a run in the order of tables, the baseline first. Raises UserError."""
    arms = [arm for settings in config.arms for arm in _expand(settings, config)]
    labels = [arm.label for arm in arms]
    for arm in arms:
        if labels.count(arm.label) > 1:
            raise UserError(
                f"arms: two are named {arm.label!r}: give one of them another label, or leave it "
                "out"
            )
        _check_speedup(arm)
        arm.sample()  # refuses bad hyperparameters
    if config.speedup is not None and not any(map(_takes_speedup, config.arms)):
        raise UserError(
            f"speedup={show_speedup(config.speedup)}: no arm takes it "
            f"({', '.join(labels)}): leave it out, or give a method without a speed of its own"
        )
    if not config.baseline:
        return tuple(arms)
    first = next((arm for arm in arms if arm.name == BASELINE), Arm(BASELINE, BASELINE, {}))
    if first not in arms and BASELINE in labels:
        raise UserError(
            f"arms: {BASELINE!r} names the standard model, which baseline=true adds: give another "
            "label"
        )
    return (first, *(arm for arm in arms if arm is not first))


def _expand(settings: ArmSettings, config: RunConfig) -> Iterator[Arm]:
    """Yield an arm for each value of each list, and for each of `seeds`."""
    kind, given = by_name(settings.name), dict(settings.model_extra or {})
    base, defaults = settings.label or name_of(settings.name), settings_of(kind)
    if "seed" in defaults and given.get("seed") is None:
        given["seed"] = config.seed
    choices = {
        key: value
        for key, value in given.items()
        if isinstance(value, list) and key not in _lists_of(kind)
    }
    speedup = config.speedup if _takes_speedup(settings) else settings.speedup
    if isinstance(speedup, list):
        choices = {"speedup": speedup, **choices}
    target = str(kind.target_parameter)
    if speedup is not None and given.get(target) == defaults.get(target):
        given.pop(target, None)  # as `method=NAME` writes all defaults
    if settings.seeds is not None:
        if "seed" not in defaults:
            raise UserError(
                f"{base}: seeds={settings.seeds}: method {settings.name} has no seed: leave seeds "
                "out"
            )
        choices["seed"] = [*range(settings.seeds)]
    for key, values in choices.items():
        if not values:
            raise UserError(f"{base}: {key}=[]: give at least one value")
    for values in product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        aim = chosen.pop("speedup", speedup)
        label = " ".join([base, *_name(choices, values, settings)])
        yield Arm(label, settings.name, given | chosen, aim)


def _name(
    choices: Mapping[str, Any], values: Sequence[Any], settings: ArmSettings
) -> Iterator[str]:
    for key, value in zip(choices, values, strict=True):
        if key == "seed" and settings.seeds is not None:
            yield f"seed {value}"
        else:
            yield f"{key}={show_speedup(value) if key == 'speedup' else format_value(value)}"


def _lists_of(kind: type[Method]) -> set[str]:
    """Name the hyperparameters that are lists themselves."""
    defaults = settings_of(kind)
    return {
        field.name
        for field in fields(kind)  # type: ignore[arg-type]  # a method is a dataclass
        if str(field.type).startswith(("list", "tuple", "Sequence"))
        or isinstance(defaults.get(field.name), list | tuple)
    }


def _takes_speedup(settings: ArmSettings) -> bool:
    """Say whether a run's `speedup` is for this arm.

    It is if the arm's speed can be set, and none of the arm's values sets it.
    """
    kind, given = by_name(settings.name), settings.model_extra or {}
    target, defaults = kind.target_parameter, settings_of(kind)
    return (
        settings.speedup is None
        and target is not None
        and given.get(target, defaults[target]) == defaults[target]
    )


def _check_speedup(arm: Arm) -> None:
    """Refuse a speedup if no hyperparameter sets the speed, or if it has a value already."""
    kind, speedup = arm.kind, f"speedup={show_speedup(arm.speedup)}"
    if not arm.solves:
        return
    if kind.target_parameter is None:
        keys = " and ".join(kind.keep_all)
        reason = (
            ", as the number of tokens that it computes depends on the prompt"
            if kind.adaptive
            else ""
        )
        instead = f"leave it out, and give {keys}" if keys else "leave it out"
        raise UserError(f"{arm.label}: {speedup} cannot be solved for{reason}: {instead}")
    if arm.speedup == PAPER and all(arm.name != method for _, method, _ in _table1()):
        raise UserError(
            f"{arm.label}: Table 1 has no speedup of {arm.name}: give speedup=2x or so instead of "
            "table1"
        )
    if kind.target_parameter in arm.hyperparameters:
        given = (
            f"{kind.target_parameter}={format_value(arm.hyperparameters[kind.target_parameter])}"
        )
        raise UserError(f"{arm.label}: {speedup} gives {kind.target_parameter}: leave out {given}")


def check_distinct(arms: Sequence[Arm]) -> None:
    """Refuse two arms of equal settings, as tables show one row for each setting. Raises UserError.

    arms: as of `Arm.at`. Seeds of one arm are one setting.
    """
    labels: dict[str, str] = {}
    for arm in arms:
        settings = {key: value for key, value in arm.canonical().items() if key != "seed"}
        label = arm.label.removesuffix(f" seed {arm.hyperparameters.get('seed')}")
        first = labels.setdefault(sha256_of([settings, arm.speedup]), label)
        if first != label:
            raise UserError(
                f"arms: {label} has the settings of {first}: change one, or leave it out (seeds: N "
                "compares seeds; another version of a file takes another name)"
            )


def show_speedup(speedup: float | str | None) -> str:
    """Write a speedup as `1.5x` or `table1`."""
    return f"{speedup:g}x" if isinstance(speedup, float) else str(speedup)


def table1_speedup(task: str, method: str, column: str) -> float:
    """Find a TTFT speedup in the paper's Table 1. Raises UserError if the method is not in it."""
    speedup = _table1().get((task, method, column))
    if speedup is None:
        raise UserError(
            f"Table 1 has no speedup of {method} on {task}: give speedup=2x or so instead of table1"
        )
    return speedup


@cache
def _table1() -> dict[tuple[str, str, str], float]:
    """Read {(task, method, llama2 or xgen): TTFT speedup}."""
    with TABLE1.open(encoding="utf-8", newline="") as opened:
        rows = [*csv.DictReader(opened)]
    return {
        (row["task"], row["method"], column): float(row[f"{column}_ttft_speedup"])
        for row in rows
        for column in REFERENCE_TOKENS
        if row[f"{column}_ttft_speedup"]
    }
