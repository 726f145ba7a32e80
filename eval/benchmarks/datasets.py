"""All suites' datasets by name, their settings in configs, and the loading of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, make_dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.benchmarks import SUITES
from eval.benchmarks.own import TASK, OwnDataset, own_dataset, own_suite
from eval.benchmarks.suite import Dataset, DataSettings, LoadedDataset, OnError, Suite
from lazyllm.errors import UserError, nearest, require

# All datasets by name; `add_own` adds a user's, and its suite to `SUITES`
DATASETS: dict[str, Dataset] = {dataset.name: dataset for suite in SUITES.values() for dataset in suite.datasets}
# In the order of tables
TASKS: tuple[str, ...] = tuple(
    dict.fromkeys((*(task for suite in SUITES.values() for task in (*suite.all_tasks, *suite.tasks)), TASK))
)

_TASK = {
    task: tuple(dataset for dataset in suite.datasets if dataset.task == task)
    for suite in SUITES.values()
    for task in suite.tasks
}
# {name in a config: its datasets}: names of suites, tasks and datasets
CHOICES: dict[str, tuple[Dataset, ...]] = {suite.whole: suite.datasets for suite in SUITES.values()}
CHOICES |= {**_TASK, **{name: (DATASETS[name],) for name in DATASETS}}

if TYPE_CHECKING:

    class SuiteSettings:
        """Of a config: the settings of every suite that has some (`Suite.options`), under the suite's name."""

else:
    SuiteSettings = make_dataclass(
        "SuiteSettings",
        [
            (suite.name, suite.options, field(default_factory=suite.options))
            for suite in SUITES.values()
            if suite.options is not None
        ],
        namespace={"__module__": __name__},  # so that it can be pickled
    )


def default_suite(model: str) -> Suite:
    """The suite of a run without `dataset`: the one that the model was made for, else the first, LongBench."""
    return next((suite for suite in SUITES.values() if model in suite.models), next(iter(SUITES.values())))


def add_own(dataset: Mapping[str, Any]) -> tuple[Dataset, ...]:
    """The user's datasets that a config describes, from now on in `DATASETS`, and their suites in `SUITES`.

    dataset: the config's, as in `datasets_asked_for`. Raises UserError for a bad description, or a name that is taken.
    """
    described = {name: value for name, value in dataset.items() if isinstance(value, Mapping)}
    for name in described:
        if (name in CHOICES or name in SUITES) and not isinstance(DATASETS.get(name), OwnDataset):
            raise UserError(f"dataset.{name}: a dataset, task or suite of this package has this name; give another")
    own = tuple(own_dataset(name, value) for name, value in described.items())
    DATASETS.update({each.name: each for each in own})
    SUITES.update({each.name: own_suite(each) for each in own})
    return own


def datasets_asked_for(dataset: Mapping[str, Any], model: str) -> tuple[Dataset, ...]:
    """The datasets of a run, all of one suite, each once, in the order of their names; also those that lack rows.

    dataset: the config's {name of `CHOICES`: whether it is wanted, or name: description of a user's own dataset}; empty
        for the model's default suite.
    model: its name. The name of a task means the datasets of its default suite.
    Raises UserError for an unknown name (with the closest known ones), no dataset, or several suites.
    """
    if own := add_own(dataset):
        require(len(own) == len(dataset), "dataset", ", ".join(dataset), "own datasets alone")
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


def missing_rows(dataset: Dataset, settings: DataSettings) -> str | None:
    """Why the rows of a dataset cannot be loaded; None if they can."""
    missing = SUITES[dataset.suite].missing
    return missing(dataset, settings) if missing is not None else None


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

    `dataset=NAME` becomes {name: true} of its datasets. The name of a task is an entry too, as it may mean another
    suite's datasets (`datasets_asked_for`), and that of a suite whose rows may be missing, which is no error then.
    """
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance().store
    store(group="dataset", name="default", node={})
    kept = {*_TASK, *(suite.whole for suite in SUITES.values() if suite.missing is not None)}
    for name, datasets in CHOICES.items():
        node = {**({name: True} if name in kept else {}), **{dataset.name: True for dataset in datasets}}
        store(group="dataset", name=name, node=node)


def format_value(value: Any) -> str:
    """A setting's value as shown, as in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {format_value(inner)}" for key, inner in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
