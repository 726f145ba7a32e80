"""All suites' datasets by name, and the loading of their rows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eval.benchmarks import SUITES
from eval.benchmarks.rows import official_row
from eval.benchmarks.suite import Dataset, DataSettings, LoadedDataset, OnError
from lazyllm.errors import UserError

DATASETS: dict[str, Dataset] = {dataset.name: dataset for suite in SUITES.values() for dataset in suite.datasets}

TASKS: tuple[str, ...] = tuple(dict.fromkeys(dataset.task for dataset in DATASETS.values()))
"""All tasks, in the order of tables."""

_WHOLE = {suite.whole: suite.datasets for suite in SUITES.values()}
_TASK = {
    task: tuple(dataset for dataset in suite.datasets if dataset.task == task)
    for suite in SUITES.values()
    for task in suite.tasks
}
CHOICES: dict[str, tuple[Dataset, ...]] = {**_WHOLE, **_TASK, **{name: (DATASETS[name],) for name in DATASETS}}
"""{name in a config: its datasets}: names of suites, tasks and datasets."""


def resolve_datasets(names: str | Iterable[str]) -> tuple[Dataset, ...]:
    """The datasets of one or several names of `CHOICES`, each once, in the order of the names.

    Raises UserError for an unknown name (with the closest known ones), or for no name.
    """
    wanted = [names] if isinstance(names, str) else list(names)
    if not wanted:
        raise UserError(f"no dataset: give a dataset, a task, {', '.join(map(repr, _WHOLE))}, or a list of these")
    return tuple(dict.fromkeys(dataset for name in wanted for dataset in _resolve(name)))


def _resolve(name: Any) -> tuple[Dataset, ...]:
    if not isinstance(name, str):
        raise UserError(f"a dataset is named by a string, got {name!r}")
    if name in CHOICES:
        return CHOICES[name]
    close = difflib.get_close_matches(name, CHOICES)
    meant = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(CHOICES)}"
    raise UserError(f"unknown dataset {name!r}: {meant}")


def load_rows(dataset: Dataset, data_dir: str | Path | None = None, on_error: OnError = "raise") -> LoadedDataset:
    """A dataset's rows, template and answer length.

    data_dir: the folder of the suite's files; None downloads or makes them.
    on_error: "raise" at the first unusable row, or "skip" such rows and list them in `skipped`.
    Raises UserError as the suite's `load` does.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    settings = DataSettings(Path(data_dir) if data_dir is not None else None, on_error)
    return SUITES[dataset.suite].load(dataset, settings)


def official_rows(dataset: Dataset, settings: DataSettings) -> Iterator[Mapping[str, Any]]:
    """The first `settings.limit` rows in the suite's official format. Raises UserError as the suite's `load` does."""
    suite = SUITES[dataset.suite]
    if suite.rows is not None:
        yield from suite.rows(dataset, settings)
    else:
        yield from map(official_row, suite.load(dataset, settings).examples[: settings.limit])


def register_configs() -> None:
    """Register every name of `CHOICES` in Hydra's group `dataset`, and `default` for no dataset."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance().store
    store(group="dataset", name="default", node={})
    for name, datasets in CHOICES.items():
        task = {name: True} if name in _TASK else {}
        store(group="dataset", name=name, node={**task, **{dataset.name: True for dataset in datasets}})
    for suite in SUITES.values():
        if suite.may_lack:  # missing datasets are allowed only if the whole suite is named
            node = {suite.whole: True, **{dataset.name: True for dataset in suite.datasets}}
            store(group="dataset", name=suite.whole, node=node)
    for suite in SUITES.values():
        if suite.limit is not None:  # outside the group, so that limit=N overrides it
            whole = {suite.whole: True} if suite.may_lack else {}
            named = {dataset.name: True for dataset in suite.datasets}
            node = {"dataset": {**whole, **named}, "limit": suite.limit}
            store(group="dataset", name=suite.whole, node=node, package="_global_")
