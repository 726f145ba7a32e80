"""Stored runs that share tables, with the frames behind tables, figures and reports. No model is
needed.

Runs share a table if their identities agree in everything but arms, data and seed (`share`).
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.benchmarks.datasets import DATASETS
from eval.store.folder import read_about
from eval.store.record import Answer, Visit
from eval.store.runs import StoredRun, run_folders
from lazyllm.errors import UserError, nearest, reason_of

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

# Keys of an identity that may differ between runs that share a table
_FREE = {
    "arms", "baseline", "data", "subset", "seed", "warmup", "fidelity", "batch_size", "suite_code",
}  # fmt: skip
_MEASURED_ONCE = ["model", "method", "settings", "seed", "dataset"]


class Results:
    """Runs that share tables, and their frames, each made once.

    runs: in order. name: what tells them from other runs of a command; "" if there are no others.
    """

    def __init__(self, runs: Sequence[StoredRun], name: str = "") -> None:
        self.runs = tuple(runs)
        self.name = name

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row for each arm's answer in each visit of each run.

        model, paper_model (missing: the paper has no such model), run (the fingerprint), folder,
        arm (its label in the run), method, settings (canonical JSON of speedup and
        hyperparameters), label (the same for people), speedup (missing for none, "table1" for the
        paper's), seed, is_baseline, dataset, task, suite, id, groups (of `Example`, a list),
        prompt_tokens, visit (from 0, of the example), counts; then `eval.store.frame.MEASURED`, and
        token_s, the seconds to each token (None if steps were not timed). Scores are 0 to 100.

        counts: whether tables count the row: the first answer of its arm in its run, not `apart`,
        and of several runs of a setting and seed that with most examples of the dataset, then the
        newest (`choices`). The others serve `match_baselines` only. Raises UserError.
        """
        frame: Any = self._answers
        frame = frame.assign(counts=frame["counts"] & ~self.apart)
        return frame.assign(counts=frame["counts"] & (frame["folder"] == self._chosen(frame)))

    @cached_property
    def _answers(self) -> pd.DataFrame:
        """The frame as if each run counted."""
        import pandas as pd

        from eval.store.frame import COLUMNS  # neither at the top: pandas is slow to import

        parts = [run.rows for run in self.runs if len(run.rows)]
        if not parts:
            return pd.DataFrame(columns=COLUMNS).astype({"is_baseline": bool, "counts": bool})
        return pd.concat(parts, ignore_index=True)

    @cached_property
    def apart(self) -> Any:
        """Whether each row of the frame is of a task that its run has not finished.

        No table counts such a row, as the task would join means with the few examples that came
        first: unless its model has no finished task on the suite.
        """
        import numpy as np  # not at the top: slow to import

        frame: Any = self._answers
        unvisited = {(str(run.folder), *task) for run in self.runs for task in run.unvisited}
        tasks = frame[["folder", "suite", "task"]].itertuples(index=False, name=None)
        is_apart = frame["counts"] & np.array([task in unvisited for task in tasks], dtype=bool)
        is_whole = (frame["counts"] & ~is_apart).groupby([frame["model"], frame["suite"]])
        return is_apart & is_whole.transform("any")

    def _chosen(self, frame: Any) -> Any:
        """For each row, the folder of the run that counts for its setting, seed and dataset."""
        started = {str(run.folder): run.started for run in self.runs}
        answered = frame[frame["counts"]].groupby([*_MEASURED_ONCE, "folder"], sort=False)["id"]
        sizes = answered.nunique().reset_index()
        sizes = sizes.assign(started=sizes["folder"].map(started))
        sizes = sizes.sort_values(["id", "started", "folder"])
        best = sizes.groupby(_MEASURED_ONCE)["folder"].last().rename("chosen")
        return frame[_MEASURED_ONCE].join(best, on=_MEASURED_ONCE)["chosen"]

    @cached_property
    def superseded(self) -> pd.DataFrame:
        """The rows whose setting, seed and dataset count in another run; `chosen`: its folder."""
        frame: Any = self.frame.assign(chosen=self._chosen(self.frame))
        return frame[frame["chosen"].notna() & (frame["folder"] != frame["chosen"])]

    @property
    def choices(self) -> list[str]:
        """A sentence for each run whose answers do not count, as another run has more or newer."""
        lost: Any = self.superseded[~self.superseded["is_baseline"]]
        return [
            f"{'; '.join(rows['label'].unique())} ({_few(rows['dataset'].unique())}): measured in "
            f"{folder} and in {other}; tables count {other}, which is whole, has more examples "
            "or is newer (--where KEY=VALUE chooses)"
            for (folder, other), rows in lost.groupby(["folder", "chosen"], sort=False)
        ]

    @cached_property
    def unfinished(self) -> list[str]:
        """A sentence for each run that lacks answers; empty if all runs are complete."""
        apart: Any = self._answers[self.apart]
        tasks = apart.groupby("folder", sort=False)["task"].unique()
        return [
            f"Unfinished: {run.folder.name}, {part}."
            + (
                f" No table counts its {', '.join(tasks[str(run.folder)])} until it is whole."
                if str(run.folder) in tasks
                else ""
            )
            for run in self.runs
            if (part := run.unfinished)
        ]

    @cached_property
    def counting(self) -> pd.DataFrame:
        """The rows of the frame that count."""
        return self.frame[self.frame["counts"]]  # type: ignore[return-value]

    @cached_property
    def by_task(self) -> pd.DataFrame:
        """`eval.store.summary.by_task` of the frame. Raises UserError."""
        from eval.store.summary import by_task  # not at the top: pandas is slow to import

        return by_task(self.frame)

    def answers(self, rows: Any) -> Iterator[tuple[Visit, Answer]]:
        """The visit and the answer of each of these rows, with the lists that are in no column."""
        visits = defaultdict[tuple[str, str, str], list[Visit]](list)
        for run in self.runs:
            for visit in run.visits:
                visits[str(run.folder), *visit.key].append(visit)
        names = ["folder", "dataset", "id", "visit", "arm"]
        for folder, dataset, example, number, arm in rows[names].itertuples(index=False):
            visit = visits[folder, dataset, example][number]
            yield visit, visit.answers[arm]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} datasets"


def read_results(folders: Sequence[Path], where: Sequence[str] = ()) -> list[Results]:
    """All runs with answers in the folders and below, by name, as those that share tables.

    where: as of `choose`. Logs what is unfinished or superseded, and what keeps runs apart.
    Raises UserError, which names all damaged runs if there are any.
    """
    groups, damaged = read_whole(folders, where)
    if damaged:
        instead = "a run's command sets damage aside; or give other folders"
        raise UserError("; ".join([*damaged, instead]))
    return groups


def read_whole(
    folders: Sequence[Path], where: Sequence[str] = ()
) -> tuple[list[Results], list[str]]:
    """As `read_results`, but of the runs that are whole; and what is wrong with each other one."""
    found, damaged = open_runs(folders, where)
    if not (runs := [run for run in found if run.answered]):
        nothing = f"no run with answers in {', '.join(map(str, folders))}"
        raise UserError("; ".join([*damaged.values(), nothing]))
    for run in found:
        if not run.answered:
            log.warning("Unfinished: %s, %s.", run.folder.name, run.unfinished or "no answer")
    groups = share(runs)
    if len(groups) > 1:
        log.warning("%s", explain(groups))
    for results in groups:
        for sentence in [*results.unfinished, *results.choices]:
            log.warning("%s", sentence)
    return groups, [*damaged.values()]


def open_runs(
    folders: Sequence[Path], where: Sequence[str] = ()
) -> tuple[list[StoredRun], dict[Path, str]]:
    """All runs in the folders and below, by name, and {folder: what is wrong} of damaged ones.

    where: as of `choose`; a run whose description cannot be read is named whatever it is. Raises
    UserError.
    """
    damaged, described, whole = dict[Path, str](), list[StoredRun](), list[StoredRun]()
    for folder in run_folders(folders):
        try:
            described.append(StoredRun(folder, read_about(folder / "run.json")))
        except UserError as error:
            damaged[folder] = str(error)
    for run in choose(described, where):
        try:
            run.check()
            whole.append(run)
        except (ValueError, KeyError, TypeError) as error:
            damaged[run.folder] = (
                str(error) if isinstance(error, UserError) else f"{run.folder}: {reason_of(error)}"
            )
    return whole, damaged


def share(runs: Sequence[StoredRun]) -> list[Results]:
    """The runs as those that share tables: each run joins the first ones that it agrees with.

    Runs of one model agree in everything but `_FREE`, those of one method or suite in its code, and
    all in the rows and templates of a dataset.
    """
    groups: list[tuple[dict[str, Any], list[StoredRun]]] = []
    for run in runs:
        values = shared_values(run)
        for known, members in groups:
            if all(known.get(key, value) == value for key, value in values.items()):
                known.update(values)
                members.append(run)
                break
        else:
            groups.append((values, [run]))
    if len(groups) == 1:
        return [Results(runs)]
    differing = _list_differing(runs)
    names, taken = [_name(members, values, differing) for values, members in groups], list[str]()
    for name in names:
        taken.append(name if name not in taken else f"{name}-{len(taken) + 1}")
    return [Results(members, name) for name, (_, members) in zip(taken, groups, strict=True)]


def _name(runs: Sequence[StoredRun], values: Mapping[str, Any], differing: Iterable[str]) -> str:
    """`figure5+field_2x`, the labels of these runs; without labels, `dtype=float32`: the values
    that keep them from other runs.
    """
    labels = [run.about["config"].get("label") for run in runs]
    parts = [f"{_last(key)}={_short(values[key])}" for key in differing if key in values]
    name = ", ".join(parts) if None in labels else "+".join(dict.fromkeys(labels))[:60]
    return name.replace("/", "_")


def _list_differing(runs: Iterable[StoredRun]) -> dict[str, list[Any]]:
    """{key of `shared_values` in which runs differ: its values}."""
    seen = defaultdict[str, list[Any]](list)
    for run in runs:
        for key, value in shared_values(run).items():
            if value not in seen[key]:
                seen[key].append(value)
    return {key: values for key, values in seen.items() if len(values) > 1}


def _last(key: str) -> str:
    return key.partition(": ")[2] or key


def explain(groups: Sequence[Results]) -> str:
    """Which keys of their identities keep groups of runs apart."""
    differing = _list_differing(run for results in groups for run in results.runs)
    differ = [
        f"{_last(key)} ({', '.join(map(_short, values))})" for key, values in differing.items()
    ]
    names = "; ".join(results.name for results in groups)
    return f"runs that differ in {', '.join(differ)} share no table: {names}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 20 else f"{text[:17]}..."


def shared_values(run: StoredRun) -> dict[str, Any]:
    """{key: value of a run's identity} that runs of a table have in common; of a model, with its
    name.
    """
    identity = run.identity
    usual = {"clock": None, "chat_args": None, "system": None, "today": None, "thinking_tokens": 0}
    flat = usual | dict(_flat({key: value for key, value in identity.items() if key not in _FREE}))
    values = {f"{run.model}: {key}": value for key, value in flat.items()}
    arms = identity["arms"].values()
    values |= {f"code of {arm['method']['name']}": arm["code"] for arm in arms if "code" in arm}
    suites = {DATASETS[name].suite for name in identity["data"] if name in DATASETS}
    values |= {f"code of {suite}": identity.get("suite_code") for suite in suites}
    return values | {f"rows of {name}": sha256 for name, sha256 in identity["data"].items()}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all values but non-empty mappings."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def as_text(values: Mapping[str, Any]) -> dict[str, str]:
    """{"machine.cpu": ...} of nested mappings, values in the command line's syntax."""
    flat = dict(_flat(values))
    return {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in flat.items()
    }


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select the stored runs of a command."""
    runs = {"nargs": "*", "type": Path, "metavar": "RUNS", "default": [Path("runs")]}
    parser.add_argument("runs", help="default: runs", **runs)
    where = "only runs with this in their config or identity, e.g. model.dtype=bfloat16; repeatable"
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE", help=where)


def choose(runs: Sequence[StoredRun], where: Iterable[str] = ()) -> list[StoredRun]:
    """The runs that the arguments of `add_choice` select. Raises UserError for a bad condition."""
    left = list(runs)
    for condition in where if left else ():
        key, equals, value = condition.partition("=")
        known = [_searchable(run) for run in left]
        if not equals or not any(key in values for values in known):
            names = {name for values in known for name in values if "parameters." not in name}
            near = nearest(key, names, "run.json of a run")
            expected = f"expected KEY=VALUE with a key of these runs: {near}"
            raise UserError(f"--where {condition}: {expected}")
        left = [run for run, values in zip(left, known, strict=True) if values.get(key) == value]
        if not left:
            choices = ", ".join(sorted({values[key] for values in known if key in values}))
            raise UserError(f"--where {condition}: no such run; {key} is one of {choices}")
    return left


def _searchable(run: StoredRun) -> dict[str, str]:
    config, identity = as_text(run.about["config"]), as_text(run.identity)
    return {"folder": run.folder.name, **config, **identity}
