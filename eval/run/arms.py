"""The arms of a run: the methods that answer each of its examples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import product
from typing import Any

import yaml

from eval.benchmarks.datasets import format_value
from eval.benchmarks.rows import sha256_of
from eval.benchmarks.suite import Dataset
from eval.run.config import CONF
from eval.run.settings import RunConfig
from eval.run.targets import Target, is_tuned, with_layers
from lazyllm.engine.depth import Depth
from lazyllm.errors import UserError, require
from lazyllm.methods import Method, by_name, make, name_of, settings_of

BASELINE = "baseline"  # the method's name, and the label of its arm unless `compare` gives another
_NOT_THE_METHODS = ("name", "seeds")  # settings of an arm that are no hyperparameters


@dataclass(frozen=True)
class Arm:
    """A method with its settings.

    label: unique in its run. settings: `name` and hyperparameters as asked for.
    methods: {dataset: its method, by the name of the dataset}.
    solved: {dataset: `name` and hyperparameters}, if a target speedup gives some of them.
    """

    label: str
    settings: dict[str, Any]
    methods: dict[str, Method]
    solved: dict[str, dict[str, Any]] | None = None

    def method(self, dataset: str) -> Method:
        """Its method for a dataset, by name."""
        return self.methods[dataset]


@dataclass(frozen=True)
class MethodAsked:
    """A method as an arm's settings ask for it, before the model is known.

    settings: `name` and hyperparameters, as written, or as the model resolves them (`Method.resolve`).
    hyperparameters: without the one that `target` gives.
    """

    settings: dict[str, Any]
    hyperparameters: dict[str, Any]
    target: Target | None = None

    @classmethod
    def of(cls, settings: dict[str, Any], depth: Depth | None = None) -> "MethodAsked":
        """depth: of the model; None if it is not known yet. Raises UserError for a target of another setting."""
        name, own, found = settings.get("name", ""), dict[str, Any](), None
        kind = by_name(name)
        if depth is not None:
            settings = kind.resolve(settings, depth)
            if "schedule" in settings:
                settings["schedule"] = with_layers(settings["schedule"], depth)
        for key, value in settings.items():
            target = Target.parse(value)
            if key in _NOT_THE_METHODS:
                continue
            if target is None:
                own[key] = value
            elif key in kind.table1:
                if target.speedup is not None:
                    raise UserError(f"method {name!r} cannot be solved for {key}={value}: give a number")
                own[key] = kind.table1[key]
            elif key == kind.target_parameter:
                found = target
            elif kind.adaptive and key in kind.keep_all:
                raise UserError(
                    f"method {name!r} cannot be solved for {key}={value}, as the number of tokens that it computes "
                    f"depends on the prompt: give a number; its default is {key}={settings_of(kind)[key]}"
                )
            else:
                raise UserError(f"method {name!r} takes no preset as {key}={value}; give a number")
        return cls(settings, own, found)

    @property
    def name(self) -> str:
        return self.settings["name"]

    def make(self, **solution: Any) -> Method:
        """The method. solution: of its target. Raises UserError if no method has these hyperparameters."""
        return make(self.name, self.hyperparameters | solution)

    def sample(self) -> Method:
        """A method with all hyperparameters that are known by now, to check them. Raises UserError."""
        kind, unknown = by_name(self.name), dict[str, Any]()
        if self.target is not None and settings_of(kind)[self.target_parameter] is MISSING:
            unknown[self.target_parameter] = 0.5  # a target_parameter without a default is a keep ratio
        if is_tuned(self.hyperparameters.get("schedule")):
            unknown["schedule"] = "none"
        return self.make(**unknown)

    @property
    def target_parameter(self) -> str:
        return str(by_name(self.name).target_parameter)

    def canonical(self) -> dict[str, Any]:
        """The settings in a run's identity: equal for all ways to write the same method.

        Hyperparameters at their default are left out, except a seed and the method's `target_parameter` and
        `shown_parameters`.
        """
        kind, settings = by_name(self.name), self.settings
        written = {"name": name_of(self.name)}
        for key, default in settings_of(kind).items():
            value = settings.get(key, default)
            if key in (kind.target_parameter, "seed", *kind.shown_parameters) or value != default:
                written[key] = value
        return written

    def arm(
        self,
        label: str,
        datasets: Sequence[Dataset],
        shape: Any,
        column: str | None = None,
        length: int | None = None,
        limit: int | None = None,
    ) -> Arm:
        """The arm on a model. shape: the model's config; others: as of `Target.solved`. Raises as that."""
        methods, solved = dict[str, Method](), dict[str, dict[str, Any]]()
        for dataset in datasets:
            solution = dict[str, Any]()
            if self.target is not None:
                given = by_name(self.name), self.name, self.hyperparameters, dataset, shape, column, length, limit
                solution = {self.target_parameter: self.target.solved(*given)}
            methods[dataset.name] = self.make(**solution)
            methods[dataset.name].check(shape)
            solved[dataset.name] = self.settings | self.hyperparameters | solution | {"name": name_of(self.name)}
        uses_preset = any(Target.parse(value) is not None for value in self.settings.values())
        return Arm(label, self.settings, methods, solved if uses_preset else None)


def arms_asked(config: RunConfig) -> dict[str, dict[str, Any]]:
    """{label: settings}, the baseline first if there is one; with `seed` if the method has one. Raises UserError."""
    arms = dict[str, dict[str, Any]]()
    for label, given in _given(config).items():
        for name, settings in _expanded(label, given, config.seed):
            require(name not in arms, "compare", label, "settings that differ in each arm of it")
            arms[name] = settings
    for key, of_one in (("speedup", "method.schedule=2x or method.keep=2x"), ("draft", "method.draft=NAME")):
        value = getattr(config, key)
        is_used = value is None or any(value in settings.values() for settings in arms.values())
        expected = f"experiment=field with it, or an arm with ${{{key}}} (of one method: {of_one})"
        require(is_used, key, value, expected)
    if not config.baseline:
        return arms
    baseline = next((label for label, settings in arms.items() if settings["name"] == BASELINE), BASELINE)
    first = arms.pop(baseline, {"name": BASELINE})
    require(first["name"] == BASELINE, "compare", baseline, "another label for it")
    return {baseline: first, **arms}


def check_distinct(arms: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse two arms of equal settings, as tables show one row for each setting. Raises UserError.

    arms: {label: settings as in the run's identity}. Seeds of one arm are one setting.
    """
    labels: dict[str, str] = {}
    for label, settings in arms.items():
        own = label.removesuffix(f" seed {settings.get('seed')}")
        first = labels.setdefault(sha256_of({key: value for key, value in settings.items() if key != "seed"}), own)
        require(
            first == own,
            f"compare.{own}",
            settings["name"],
            f"settings that differ from those of {first} (seeds: N compares seeds; another version of a file takes "
            "another name)",
        )


def _given(config: RunConfig) -> dict[str, dict[str, Any]]:
    """{label: settings} as the config has them."""
    compare = config.compare
    if compare is None:
        return {name_of(config.method.get("name", "")): config.method}
    arms = dict[str, Any]()
    if isinstance(compare, list) and all(isinstance(name, str) for name in compare):
        for name in compare:
            require(name_of(name) not in arms, "compare", name, "names that differ")
            arms[name_of(name)] = _shipped(name)
    elif isinstance(compare, dict):
        arms = {str(label): arm for label, arm in compare.items()}
    if not arms or not all(isinstance(arm, dict) for arm in arms.values()):
        raise UserError(f"compare={compare}: expected [lazy, fastkv], or {{label: {{name: lazy, ...}}, ...}}")
    for label, arm in arms.items():
        require("name" in arm, f"compare.{label}.name", None, "a method's name")
    return arms


def _shipped(name: str) -> dict[str, Any]:
    """The settings of `method=NAME`: those in its config's file; its class has the others."""
    file = CONF / "method" / f"{name}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return {"name": name, **{key: value for key, value in content.items() if key != "defaults"}}


def _expanded(label: str, settings: dict[str, Any], seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(label, settings) for each value of each list, and each of `seeds`."""
    name, are_lists = settings.get("name", ""), set[str]()
    defaults = settings_of(by_name(name))
    for parameter in fields(by_name(name)):  # type: ignore[arg-type]  # a method is a dataclass
        is_annotated = str(parameter.type).startswith(("list", "tuple", "Sequence"))
        if is_annotated or isinstance(defaults.get(parameter.name), list | tuple):
            are_lists.add(parameter.name)
    seeds, own = settings.get("seeds"), {key: value for key, value in settings.items() if key != "seeds"}
    choices = {key: value for key, value in own.items() if isinstance(value, list) and key not in are_lists}
    for key, values in choices.items():
        require(bool(values), f"{label}.{key}", values, "at least one value")
    if "seed" in defaults:
        own.setdefault("seed", seed)
    if seeds is not None:
        require("seed" in defaults, f"{label}.seeds", seeds, f"no seeds, as method {name} has no seed")
        is_number = isinstance(seeds, int) and not isinstance(seeds, bool) and seeds > 0
        require(is_number, f"{label}.seeds", seeds, "a number of seeds, such as 5 for 0 to 4")
        choices["seed"] = list(range(seeds))
    for values in product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        named = {key: f"{key}={format_value(value)}" for key, value in chosen.items()}
        if seeds is not None:
            named["seed"] = f"seed {chosen['seed']}"
        yield " ".join([label, *named.values()]), own | chosen
