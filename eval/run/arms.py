"""The arms of a run: the methods, or servers, that answer each of its examples."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

import yaml

from eval.benchmarks.datasets import format_value
from eval.benchmarks.rows import sha256_of
from eval.run import targets
from eval.run.config import CONF
from eval.run.settings import SERVER, RunConfig
from lazyllm.engine.inputs import TURNS
from lazyllm.errors import UserError, require
from lazyllm.methods import Method, about_the_method, by_name, make, name_of, settings_of

BASELINE = "baseline"  # the method's name, and the label of its arm unless `compare` gives another
AA_TEST = "baseline again"  # the label of the arm of `aa_test`
_NOT_THE_METHODS = ("name", "turns", "seeds")  # settings of an arm that are no hyperparameters


@dataclass(frozen=True)
class Arm:
    """A method with its settings, or a server.

    label: unique in its run. settings: `name` and hyperparameters, targets included, or a server's settings.
    parameters: {dataset: the same with numbers for targets}; {} for a server.
    """

    label: str
    settings: dict[str, Any]
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)

    def method(self, dataset: str) -> Method:
        """Its method for a dataset, by name."""
        return build_method(self.parameters[dataset])

    @property
    def turns(self) -> str:
        """What later turns of a conversation do, as in `lazyllm.start`."""
        return self.settings.get("turns", "continue")


def arms_asked(config: RunConfig) -> dict[str, dict[str, Any]]:
    """{label: settings}, the baseline first if there is one; with `seed` if the method has one. Raises UserError."""
    arms = dict[str, dict[str, Any]]()
    for label, given in _given(config).items():
        for name, settings in _expanded(label, given, config.seed):
            require(name not in arms, "compare", label, "settings that differ in each arm of it")
            arms[name] = settings
    if not config.baseline:
        return arms
    baseline = next((label for label, settings in arms.items() if settings["name"] == BASELINE), BASELINE)
    first = arms.pop(baseline, {"name": BASELINE})
    require(first["name"] == BASELINE, "compare", baseline, "another label for it")
    last = {AA_TEST: first} if config.aa_test else {}
    return {baseline: first, **arms, **last}


def check_distinct(arms: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse two arms of equal settings, as tables show one row for each setting. Raises UserError.

    arms: {label: settings as in the run's identity}. Seeds of one arm are one setting.
    """
    labels: dict[str, str] = {}
    for label, settings in arms.items():
        if label == AA_TEST:
            continue
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
    name, defaults, are_lists = settings.get("name", ""), dict[str, Any](), set[str]()
    if name != SERVER:
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


def method_asked(settings: dict[str, Any]) -> Method:
    """`build_method` of settings as they were asked for, with placeholders for presets and tuned schedules."""
    with about_the_method():
        return build_method(targets.check(settings))


def build_method(settings: Mapping[str, Any]) -> Method:
    """A method from its settings: `name` and hyperparameters. Raises UserError if no method has them."""
    turns = settings.get("turns", "continue")
    require(turns in TURNS, "method.turns", turns, " or ".join(TURNS))
    own = {key: value for key, value in settings.items() if key not in _NOT_THE_METHODS}
    return make(settings.get("name", ""), own)


def canonical_settings(settings: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """A method's settings in a run's identity: equal for all ways to write the same method.

    Hyperparameters at their default are left out, except a seed and the method's `target_parameter` and
    `shown_parameters`.
    """
    with about_the_method():
        settings = targets.with_layers(settings, num_layers)
    kind = by_name(settings["name"])
    written = {"name": name_of(settings["name"])}
    for key, default in settings_of(kind).items():
        value = settings.get(key, default)
        if key in (kind.target_parameter, "seed", *kind.shown_parameters) or value != default:
            written[key] = value
    turns = settings.get("turns", "continue")
    return written if turns == "continue" else written | {"turns": turns}
