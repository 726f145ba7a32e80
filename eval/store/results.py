"""Stored runs as one value with the frames behind tables, figures and reports, without a model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.store.comparable import chosen, tell_apart, with_baselines, without_baseline
from eval.store.record import MEASURED
from eval.store.runs import StoredRun, stored_runs
from lazyllm.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

COLUMNS = [
    "model", "paper_model", "method", "settings", "label", "seed", "run", "folder", "paired",
    "dataset", "task", "suite", "id", "groups", "prompt_tokens", "turn",
    *(f"{side}{name}" for side in ("", "baseline_") for name in MEASURED),
]  # fmt: skip
_KEY = ["model", "method", "settings", "seed", "dataset", "id", "turn"]


class Results:
    """Stored runs, and their frames for tables and figures, each made once. runs: in order."""

    def __init__(self, runs: Sequence[StoredRun]) -> None:
        self.runs = tuple(runs)
        self._parts: dict[tuple[StoredRun, ...], Results] = {self.runs: self}
        self._known: dict[Any, list[dict[str, Any]]] = {}

    @classmethod
    def read(cls, folders: Sequence[Path], where: Sequence[str] = (), newest: bool = False) -> Results:
        """All runs with records in the folders and their subfolders. Raises UserError as `find_runs`."""
        return cls(find_runs(folders, where, newest))

    @cached_property
    def frame(self) -> pd.DataFrame:
        """`as_frame` of the runs. Raises UserError."""
        return as_frame(self.runs)

    @cached_property
    def by_task(self) -> pd.DataFrame:
        """`eval.store.aggregate.by_task` of the frame. Raises UserError."""
        from eval.store.aggregate import by_task  # not at the top: pandas is slow to import

        return by_task(self.frame, self._known)

    def where(self, keep: Callable[[StoredRun], bool]) -> Results:
        """The results of some runs: all runs of a setting or none, as computed values of settings are shared."""
        runs = tuple(run for run in self.runs if keep(run))
        if runs not in self._parts:
            part = self._parts[runs] = Results(runs)
            part._parts, part._known = self._parts, self._known
        return self._parts[runs]


def find_runs(folders: Sequence[Path], where: Sequence[str] = (), newest: bool = False) -> list[StoredRun]:
    """All runs with records in the folders and their subfolders, by name, raw or collected (`eval.store.collect`).

    where, newest: as in `eval.store.comparable.chosen`. Raises UserError if there is none, or if a file is damaged.
    """
    runs = [run for run in chosen(stored_runs(folders), where, newest) if len(run.examples)]
    if not runs:
        raise UserError(f"no run with records in {', '.join(map(str, folders))}")
    runs = with_baselines(tell_apart(runs))
    for sentence in without_baseline(runs):
        log.warning("%s", sentence)
    return runs


def as_frame(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """A row for each turn of an example of a run.

    model, paper_model (missing: the paper has no such model), method, settings (canonical JSON of the hyperparameters),
    label (the same for people), seed, run (the fingerprint), folder, paired, dataset, task, suite, id, groups (of
    `Example`, a list), prompt_tokens (of the turn's message), turn (from 1); then `eval.store.record.MEASURED` of the
    method, and with the prefix `baseline_` of the paired baseline (NaN without one). Scores are 0 to 100; step_s is the
    mean decoding step (NaN for answers of one token).

    If two runs hold the same example with the same setting and seed, the one with more of the baseline counts
    (`timing.paired`); of two such ones that with more examples. Raises UserError if this does not decide.
    """
    import pandas as pd

    runs = [run for run in runs if len(run.examples)]
    if not runs:
        return pd.DataFrame(columns=COLUMNS)
    examples = pd.concat([run.examples for run in runs], ignore_index=True)
    sizes = [len(run.examples) for run in runs]
    described = [
        {
            "model": run.model,
            "paper_model": run.paper_model,
            "method": run.method,
            "settings": json.dumps(run.settings, sort_keys=True),
            "label": run.label,
            "seed": run.seed,
            "run": run.about["fingerprint"],
            "folder": str(run.folder),
            "paired": run.identity["paired"],
        }
        for run in runs
    ]
    fixed = {name: np.repeat(np.array([run[name] for run in described], dtype=object), sizes) for name in described[0]}
    fixed |= {"seed": fixed["seed"].astype(int)}
    table: Any = pd.concat([pd.DataFrame(fixed), examples], axis=1)[COLUMNS]
    settings = {(run["model"], run["method"], run["settings"], run["seed"]) for run in described}
    return table if len(settings) == len(runs) else _without_repeated(table)  # one run holds an example once


def _without_repeated(table: pd.DataFrame) -> pd.DataFrame:
    ranks = [(False, "ttft", True).index(paired) for paired in table["paired"]]
    table = table.assign(size=table.groupby("folder")["id"].transform("size"), rank=ranks)
    table = table.sort_values(["rank", "size"], ascending=False, kind="stable")
    twice = table[table.duplicated([*_KEY, "rank", "size"], keep=False)]
    if len(twice):
        row = twice.iloc[0]
        both = sorted(set(twice[(twice[_KEY] == row[_KEY]).all(axis=1)]["folder"]))
        raise UserError(
            f"{row['dataset']}, row {row['id']}, {row['label']}: measured twice, in {' and '.join(both)}; remove one, "
            "or choose by a setting in which they differ: --where KEY=VALUE"
        )
    return table.drop_duplicates(_KEY).sort_index().reset_index(drop=True).drop(columns=["size", "rank"])


def first_turns(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of first turns: one for each example of a run."""
    return frame[frame["turn"] == 1]  # type: ignore[return-value]
