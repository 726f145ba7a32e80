"""Datasets by the names that configs give, the suites' settings in configs, and the loading of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from eval.benchmarks import SUITES
from eval.benchmarks.needle import NeedleConfig
from eval.benchmarks.own import TASK, OwnDataset, own_dataset, own_suite
from eval.benchmarks.random_tokens import RandomConfig
from eval.benchmarks.suite import DATASETS as DATASETS
from eval.benchmarks.suite import Dataset, DataSettings, LoadedDataset, OnError, Suite, register
from lazyllm.errors import UserError, nearest, require

# In the order of tables
TASKS: tuple[str, ...] = tuple(dict.fromkeys((*(each.task for each in DATASETS.values()), TASK)))
# {task: its datasets, of the first suite that has it}
_TASK: dict[str, tuple[Dataset, ...]] = {}
for _suite in SUITES.values():
    for _task in _suite.all_tasks:
        _TASK.setdefault(_task, tuple(dataset for dataset in _suite.datasets if dataset.task == _task))
# {name in a config: its datasets}: names of suites, tasks and datasets
CHOICES: dict[str, tuple[Dataset, ...]] = {suite.whole: suite.datasets for suite in SUITES.values()}
CHOICES |= {**_TASK, **{name: (dataset,) for name, dataset in DATASETS.items()}}
_TAKEN = frozenset({*CHOICES, *SUITES})  # names that no dataset or suite of a user may have


@dataclass
class SuiteSettings:
    """Of a config: the settings of every suite that has some (`Suite.options`), under the suite's name."""

    needle: NeedleConfig = field(default_factory=NeedleConfig)
    random: RandomConfig = field(default_factory=RandomConfig)


def default_suite(model: str) -> Suite:
    """The suite of a run without `dataset`: the one that the model was made for, else the first, LongBench."""
    return next((suite for suite in SUITES.values() if model in suite.models), next(iter(SUITES.values())))


def add_own(dataset: Mapping[str, Any]) -> tuple[Dataset, ...]:
    """Register the datasets that a config describes, and their suites. Returns the datasets.

    dataset: the config's, as in `datasets_asked_for`. Raises UserError for a bad description, or a name that is taken.
    """
    own = tuple(own_dataset(name, value) for name, value in dataset.items() if isinstance(value, Mapping))
    suites: dict[str, list[OwnDataset]] = {}
    for each in own:
        for name in (each.name, each.suite):
            if name in _TAKEN:
                raise UserError(
                    f"dataset.{each.name}: a dataset, task or suite of this package is named {name!r}; give another"
                )
        suites.setdefault(each.suite, []).append(each)
    for name, datasets in suites.items():
        register(own_suite(name, datasets))
    return own


def datasets_asked_for(dataset: Mapping[str, Any], model: str) -> tuple[Dataset, ...]:
    """The datasets of a run, all of one suite, each once, in the order of their names; also those that lack rows.

    dataset: the config's {name of `CHOICES`: whether it is wanted, or name: description of a user's own dataset}; empty
        for the model's default suite.
    model: its name. The name of a task means the datasets of its default suite.
    Raises UserError for an unknown name (with the closest known ones), no dataset, or several suites.
    """
    if own := add_own(dataset):
        wanted = [name for name, value in dataset.items() if value is not False]
        require(len(own) == len(wanted), "dataset", ", ".join(wanted), "own datasets alone")
        return own
    suite = default_suite(model)
    names = [name for name, wanted in dataset.items() if wanted] if dataset else [suite.whole]
    if model in suite.models and (tasks := {*names} & {*suite.all_tasks}):
        others = {each.name for task in tasks for each in _TASK.get(task, ())}  # come with the task's name
        of_task = {task: [each.name for each in suite.datasets if each.task == task] for task in tasks}
        names = [each for name in names if name not in others for each in of_task.get(name, [name])]
    for name in names:
        if name not in CHOICES:
            raise UserError(f"unknown dataset {name!r}: {nearest(name, CHOICES)}")
    named = dict.fromkeys(each for name in names for each in CHOICES[name])
    datasets = tuple(each for each in named if dataset.get(each.name, True))
    if not datasets:
        raise UserError("no dataset is left: give dataset=hotpotqa, a task's name, or dataset=all")
    suites = dict.fromkeys(each.suite for each in datasets)
    if len(suites) > 1:
        raise UserError(f"datasets of several suites ({', '.join(suites)}) share no table: run them separately")
    return datasets


@lru_cache(maxsize=64)  # a run's check and its plan share them, and so do the runs of a comparison or a sweep
def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """A dataset's rows, template and answer length. Raises UserError as the suite's `load` does."""
    return SUITES[dataset.suite].load(dataset, settings)


def load_rows(dataset: Dataset, data_dir: str | Path | None = None, on_error: OnError = "raise") -> LoadedDataset:
    """As `load`, with files read again at each call. data_dir, on_error: `dir` and `on_error` of `DataSettings`."""
    suite, folder = SUITES[dataset.suite], None if data_dir is None else Path(data_dir)
    return suite.load(dataset, DataSettings(folder, on_error, options=suite.options and suite.options()))


def register_configs() -> None:
    """Register every name of `CHOICES` in Hydra's group `dataset`, and `default` for no dataset.

    `dataset=NAME` becomes {name: true} of the name and its datasets: a task's may mean another suite's datasets
    (`datasets_asked_for`), and of a suite rows may be missing, which is no error then.
    """
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance().store
    store(group="dataset", name="default", node={})
    for name, datasets in CHOICES.items():
        store(group="dataset", name=name, node={name: True, **{dataset.name: True for dataset in datasets}})


def format_value(value: Any) -> str:
    """A setting's value as shown, as in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {format_value(inner)}" for key, inner in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
