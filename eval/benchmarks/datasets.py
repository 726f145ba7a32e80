"""Datasets by the names that settings give, and the loading of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eval.benchmarks import SUITES
from eval.benchmarks.own import TASK, OwnDataset, described, own_dataset, own_suite
from eval.benchmarks.suite import DATASETS as DATASETS
from eval.benchmarks.suite import Dataset, DataSettings, LoadedDataset, Suite, register
from lazyllm.errors import UserError, nearest

DESCRIPTIONS = Path(__file__).parents[1] / "conf" / "datasets"  # files that describe datasets

# In the order of tables
TASKS: tuple[str, ...] = tuple(dict.fromkeys((*(each.task for each in DATASETS.values()), TASK)))
# {task: its datasets, of the first suite that has it}
_TASK: dict[str, tuple[Dataset, ...]] = {}
for _suite in SUITES.values():
    for _task in _suite.all_tasks:
        _TASK.setdefault(_task, tuple(dataset for dataset in _suite.datasets if dataset.task == _task))
# {name in settings: its datasets}: names of suites, tasks and datasets
CHOICES: dict[str, tuple[Dataset, ...]] = {suite.whole: suite.datasets for suite in SUITES.values()}
CHOICES |= {**_TASK, **{name: (dataset,) for name, dataset in DATASETS.items()}}
_TAKEN = frozenset({*CHOICES, *SUITES})  # names that no dataset or suite of a user may have

Descriptions = dict[str, dict[str, Any]]  # {name of a dataset: what describes it}


@cache
def shipped_descriptions() -> dict[str, Descriptions]:
    """{name: descriptions} of the files in conf/dataset, and of each dataset of those that describe several."""
    files = {file.stem: described(file) for file in sorted(DESCRIPTIONS.glob("*.yaml"))}
    several = [content for content in files.values() if len(content) > 1]
    return {name: {name: one} for content in several for name, one in content.items()} | files


def describe(names: Iterable[str], length: int) -> Descriptions:
    """The descriptions that these names of settings stand for; empty if they name none.

    length: what `${data.length}` stands for in them. Raises UserError for a file that cannot be read.
    """
    found = Descriptions()
    for name in names:
        if name.endswith((".yaml", ".yml")):
            found |= described(Path(name))
        else:
            found |= shipped_descriptions().get(name, {})
    whole: Any = OmegaConf.to_container(OmegaConf.create({**found, "data": {"length": length}}), resolve=True)
    return {name: whole[name] for name in found}


def reads_length(names: Iterable[str]) -> bool:
    """Whether one of these names stands for a description that depends on `data.length`."""
    short, long = (describe(names, length) for length in (1, 2))
    return short != long


def default_suite(model: str) -> Suite:
    """The suite of a run without `dataset`: the one that the model was made for, else the first, LongBench."""
    return next((suite for suite in SUITES.values() if model in suite.models), next(iter(SUITES.values())))


def add_own(descriptions: Mapping[str, Any]) -> tuple[OwnDataset, ...]:
    """Register the datasets of these descriptions, and their suites. Returns the datasets.

    Raises UserError for a bad description, or a name that is taken.
    """
    own = tuple(own_dataset(name, value) for name, value in descriptions.items())
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


def choose(names: Sequence[str], model: str, length: int) -> tuple[Dataset, ...]:
    """The datasets of a run, all of one suite, each once, in the order of their names; also those that lack rows.

    names: of `CHOICES`, of a description in conf/dataset, or files of descriptions; none for the model's default suite.
    model: its name. The name of a task means the datasets of its default suite. length: as of `describe`.
    Raises UserError for an unknown name (with the closest known ones), or several suites.
    """
    own = describe(names, length)
    known = [name for name in names if name in CHOICES]
    if own and known:
        raise UserError(f"dataset=[{','.join(names)}]: {known[0]} shares no table with your own rows: give one of both")
    datasets: Sequence[Dataset] = add_own(own)
    if not own:
        suite = default_suite(model)
        wanted = [each for name in names or [suite.whole] for each in _named(name, suite, model)]
        datasets = tuple(dict.fromkeys(wanted))
    suites = dict.fromkeys(each.suite for each in datasets)
    if len(suites) > 1:
        raise UserError(f"datasets of several suites ({', '.join(suites)}) share no table: run them separately")
    return tuple(datasets)


def _named(name: str, suite: Suite, model: str) -> Sequence[Dataset]:
    """The datasets of a name. suite: the default one of the model."""
    if name not in CHOICES:
        raise UserError(f"dataset={name}: {nearest(name, [*CHOICES, *shipped_descriptions()])}")
    if model in suite.models and name in suite.all_tasks:
        return [dataset for dataset in suite.datasets if dataset.task == name]
    return CHOICES[name]


@lru_cache(maxsize=64)  # a run's check and its plan share them, and so do the runs of a comparison or a sweep
def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """A dataset's rows, template and answer length. Raises UserError as the suite's `load` does."""
    return SUITES[dataset.suite].load(dataset, settings)


def format_value(value: Any) -> str:
    """A setting's value as shown, as in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {format_value(inner)}" for key, inner in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
