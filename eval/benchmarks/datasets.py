"""Datasets by the names that settings give, and the loading of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from omegaconf import OmegaConf

from eval.benchmarks.own import TASK, OwnDataset, described, own_dataset, own_suite
from eval.benchmarks.suite import (
    DATASETS,
    SUITES,
    Dataset,
    DataSettings,
    LoadedDataset,
    Suite,
    register,
)
from lazyllm.errors import UserError, nearest

DESCRIPTIONS = Path(__file__).parents[1] / "conf" / "datasets"  # files that describe datasets

for _module in iter_modules([str(Path(__file__).parent)]):
    import_module(f"eval.benchmarks.{_module.name}")  # a suite registers itself
_found = sorted(SUITES.values(), key=lambda suite: suite.published is None)
SUITES.clear()
DATASETS.clear()
for _suite in _found:  # in the order of tables: the paper's suite, then by the modules' names
    register(_suite)

TASKS: tuple[str, ...] = tuple(dict.fromkeys([each.task for each in DATASETS.values()] + [TASK]))


def _choices() -> dict[str, tuple[Dataset, ...]]:
    """{name in settings: its datasets}, of suites, of tasks (the first suite's) and of datasets."""
    tasks: dict[str, tuple[Dataset, ...]] = {}
    for suite in SUITES.values():
        for task in suite.all_tasks:
            tasks.setdefault(task, tuple(each for each in suite.datasets if each.task == task))
    suites = {suite.whole: suite.datasets for suite in SUITES.values()}
    return suites | tasks | {name: (dataset,) for name, dataset in DATASETS.items()}


CHOICES = _choices()
_TAKEN = frozenset({*CHOICES, *SUITES})  # names that no dataset or suite of a user may have

Descriptions = dict[str, dict[str, Any]]  # {name of a dataset: what describes it}


@cache
def shipped_descriptions() -> dict[str, Descriptions]:
    """Return {name: descriptions} of the files in conf/datasets and of each dataset in them."""
    files = {file.stem: described(file) for file in sorted(DESCRIPTIONS.glob("*.yaml"))}
    datasets = {name: {name: about} for file in files.values() for name, about in file.items()}
    return datasets | files


def describe(names: Iterable[str], length: int) -> Descriptions:
    """Return the descriptions that these names of settings stand for; none if they name none.

    length: what `${data.length}` stands for in them. Raises UserError for an unreadable file.
    """
    found = Descriptions()
    for name in names:
        if name.endswith((".yaml", ".yml")):
            found |= described(Path(name))
        else:
            found |= shipped_descriptions().get(name, {})
    config = OmegaConf.create({**found, "data": {"length": length}})
    whole: Any = OmegaConf.to_container(config, resolve=True)
    return {name: whole[name] for name in found}


def reads_length(names: Iterable[str]) -> bool:
    """Whether one of these names stands for a description that depends on `data.length`."""
    short, long = (describe(names, length) for length in (1, 2))
    return short != long


def default_suite(model: str) -> Suite:
    """Return the suite of a run without `dataset`: that made for the model, else LongBench."""
    suites = [*SUITES.values()]
    return next((suite for suite in suites if model in suite.models), suites[0])


def add_own(descriptions: Mapping[str, Any]) -> tuple[OwnDataset, ...]:
    """Register the datasets of these descriptions, and their suites. Returns the datasets.

    Raises UserError for a bad description, or a name that is taken.
    """
    datasets = tuple(own_dataset(name, value) for name, value in descriptions.items())
    suites: dict[str, list[OwnDataset]] = {}
    for dataset in datasets:
        for name in (dataset.name, dataset.suite):
            if name in _TAKEN:
                taken = f"a dataset, task or suite of this package is named {name!r}"
                raise UserError(f"dataset.{dataset.name}: {taken}; give another")
        suites.setdefault(dataset.suite, []).append(dataset)
    for name, members in suites.items():
        register(own_suite(name, members))
    return datasets


def choose(names: Sequence[str], model: str, length: int) -> tuple[Dataset, ...]:
    """Return a run's datasets, all of one suite, each once, in the order of their names.

    names: of `CHOICES`, of a description in conf/datasets, or files of descriptions; none for the
        model's default suite. The name of a task means the datasets of that suite.
    model: its name. length: as of `describe`.
    Datasets without rows are among them. Raises UserError for an unknown name (with the closest
        known ones), or several suites.
    """
    user_datasets = describe(names, length)
    known = [name for name in names if name in CHOICES]
    if user_datasets and known:
        given = f"dataset=[{','.join(names)}]"
        raise UserError(f"{given}: {known[0]} shares no table with your own rows: give one of both")
    datasets: Sequence[Dataset] = add_own(user_datasets)
    if not user_datasets:
        suite = default_suite(model)
        wanted = [each for name in names or [suite.whole] for each in _named(name, suite, model)]
        datasets = tuple(dict.fromkeys(wanted))
    suites = dict.fromkeys(each.suite for each in datasets)
    if len(suites) > 1:
        several = f"datasets of several suites ({', '.join(suites)})"
        raise UserError(f"{several} share no table: run them separately")
    return tuple(datasets)


def _named(name: str, suite: Suite, model: str) -> Sequence[Dataset]:
    """The datasets of a name. suite: the default one of the model."""
    if name not in CHOICES and ("/" in name or Path(name).suffix):
        raise UserError(f"dataset={name}: expected a YAML file that describes your rows")
    if name not in CHOICES:
        raise UserError(f"dataset={name}: {nearest(name, [*CHOICES, *shipped_descriptions()])}")
    if model in suite.models and name in suite.all_tasks:
        return [dataset for dataset in suite.datasets if dataset.task == name]
    return CHOICES[name]


@lru_cache(maxsize=64)  # a run's check and its plan share them, and so do the runs of a sweep
def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """A dataset's rows, template and answer length. Raises UserError as the suite's `load` does."""
    return SUITES[dataset.suite].load(dataset, settings)


def format_value(value: Any) -> str:
    """A setting's value as shown, as in YAML's flow style."""
    if isinstance(value, dict):
        pairs = (f"{key}: {format_value(inner)}" for key, inner in value.items())
        return "{" + ", ".join(pairs) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
