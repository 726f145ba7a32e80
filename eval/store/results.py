"""Stored runs as one value with the frames behind tables, figures and reports, without a model.

Runs of a model share a table if they agree in everything but arms, data and seed (`with_variants`).
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.benchmarks.datasets import DATASETS
from eval.store.record import Answer, Visit
from eval.store.runs import COLUMNS, StoredRun, stored_runs
from lazyllm.errors import UserError, nearest

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

# Keys of an identity that may differ between runs that share a table
_FREE = {"arms", "baseline", "data", "seed", "warmup", "fidelity", "batch_size", "suite_code"}
_SHOWN = 20  # characters of a value in a name
_ROWS = "rows of "  # key of a dataset: the hashes of its rows and templates
_MEASURED_ONCE = ["model", "method", "settings", "seed", "dataset"]


class Results:
    """Stored runs, and their frames for tables and figures, each made once. runs: in order."""

    def __init__(self, runs: Sequence[StoredRun]) -> None:
        self.runs = tuple(runs)

    @classmethod
    def read(cls, folders: Sequence[Path], where: Sequence[str] = (), newest: bool = False) -> Results:
        """All runs with answers in the folders and below, by name. where, newest: as in `chosen`. Raises UserError."""
        read = [replace(run, given=run.visits) for run in chosen(stored_runs(folders), where, newest)]
        if not (runs := [run for run in read if run.answered]):
            raise UserError(f"no run with answers in {', '.join(map(str, folders))}")
        results = cls(with_variants(runs))
        for sentence in [*results.unfinished, *results.choices]:
            log.warning("%s", sentence)
        return results

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row for each arm's answer in each visit of each run.

        model, paper_model (missing: the paper has no such model), run (the fingerprint), folder, arm (its label in the
        run), method, settings (canonical JSON of speedup and hyperparameters), label
        (the same for people), speedup, seed, is_baseline,
        dataset, task, suite, id, groups (of `Example`, a list), prompt_tokens, visit (from 0, of the example), counts;
        then `eval.store.runs.MEASURED`, and token_s, the seconds to each token (None if steps were not timed). Scores
        are 0 to 100.

        counts: whether tables count the row: the first answer of its arm in its run, and of several runs of a setting
        and seed that with most examples of the dataset, then the newest (`choices`). The others serve `beside` only.
        Raises UserError.
        """
        import pandas as pd

        parts = [run.rows for run in self.runs if len(run.rows)]
        if not parts:
            return pd.DataFrame(columns=COLUMNS).astype({"is_baseline": bool, "counts": bool})
        frame = pd.concat(parts, ignore_index=True)
        chosen = self._chosen(frame)
        return frame.assign(counts=frame["counts"] & (frame["folder"] == chosen))

    def _chosen(self, frame: Any) -> Any:
        """For each row, the folder of the run that counts for its setting, seed and dataset."""
        started = {str(run.folder): run.started for run in self.runs}
        sizes = frame[frame["counts"]].groupby([*_MEASURED_ONCE, "folder"], sort=False)["id"].nunique().reset_index()
        sizes = sizes.assign(started=sizes["folder"].map(started)).sort_values(["id", "started", "folder"])
        best = sizes.groupby(_MEASURED_ONCE)["folder"].last().rename("chosen")
        return frame[_MEASURED_ONCE].join(best, on=_MEASURED_ONCE)["chosen"]

    @cached_property
    def superseded(self) -> pd.DataFrame:
        """The rows whose setting, seed and dataset count in another run; `chosen`: its folder."""
        frame = self.frame.assign(chosen=self._chosen(self.frame))
        return frame[frame["folder"] != frame["chosen"]]  # type: ignore[return-value]

    @property
    def choices(self) -> list[str]:
        """A sentence for each run whose answers do not count, as another run has more of the same, or newer ones."""
        lost: Any = self.superseded[~self.superseded["is_baseline"]]
        return [
            f"{', '.join(rows['label'].unique())}, {', '.join(rows['dataset'].unique())}: measured in {folder} and in "
            f"{other}; tables count {other}, which has more examples or is newer (--where KEY=VALUE chooses)"
            for (folder, other), rows in lost.groupby(["folder", "chosen"], sort=False)
        ]

    @cached_property
    def unfinished(self) -> list[str]:
        """A sentence for each run that lacks answers; empty if all runs are complete."""
        return [f"Unfinished: {run.folder.name}, {part}." for run in self.runs if (part := run.unfinished)]

    @cached_property
    def counting(self) -> pd.DataFrame:
        """The rows of the frame that count."""
        return self.frame[self.frame["counts"]]  # type: ignore[return-value]

    @cached_property
    def by_task(self) -> pd.DataFrame:
        """`eval.store.aggregate.by_task` of the frame. Raises UserError."""
        from eval.store.aggregate import by_task  # not at the top: pandas is slow to import

        return by_task(self.frame)

    def answers(self, rows: Any) -> Iterator[tuple[Visit, Answer]]:
        """The visit and the answer of each of these rows of the frame, with the lists that are in no column."""
        visits = defaultdict[tuple[str, str, str], list[Visit]](list)
        for run in self.runs:
            for visit in run.visits:
                visits[str(run.folder), *visit.key].append(visit)
        names = ["folder", "dataset", "id", "visit", "arm"]
        for folder, dataset, example, number, arm in rows[names].itertuples(index=False):
            visit = visits[folder, dataset, example][number]
            yield visit, visit.answers[arm]

    @cached_property
    def families(self) -> dict[str, str]:
        """{model: it without its variant}."""
        return {run.model: run.family for run in self.runs}

    def least_different(self, rows: Any) -> Any:
        """Of these rows of a frame, those of the variant of each model that differs least from its other runs.

        What shows one variant of a model, as figures and claims do, asks it of the rows that it could show.
        """
        differences = rows["model"].map({run.model: len(run.differences) for run in self.runs})
        least = differences.groupby(rows["model"].map(self.families)).transform("min")
        return rows[differences == least]


def with_variants(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The runs, with `differences` and `variant` set, such as ` (dtype=bfloat16)`.

    Runs share a table if those of one model agree in everything but arms, data and seed, those of one method or suite
    in its code, and all in the rows and templates of a dataset. `differences` holds the values that are not the most
    common of the model (of equally common ones, the newest run's is). `variant` names one or two of these, or the
    first and how many there are more, and a number where that is the name of several.
    """
    runs = _with_paths(runs)
    compared = _compared_values(runs)
    seen = defaultdict[tuple[str, str], list[str]](list)
    for run, own in sorted(zip(runs, compared, strict=True), key=lambda pair: pair[0].started):
        for key, value in own.items():
            seen[run.model, key].append(value)
    usual = {key: max(reversed(values), key=values.count) for key, values in seen.items()}
    found = [
        {key: text.strip('"') for key, text in own.items() if text != usual[run.model, key]}
        for run, own in zip(runs, compared, strict=True)
    ]
    variants, named = dict[tuple[Any, ...], str](), Counter[tuple[str, str]]()
    for kind in sorted({(run.model, *own.items()) for run, own in zip(runs, found, strict=True) if own}):
        model, *pairs = kind
        first, *others = (f"{key}={value[:_SHOWN]}" for key, value in pairs)
        text = f"{first} and {len(others)} more" if len(others) > 1 else ", ".join([first, *others])
        named[model, text] += 1
        variants[kind] = f" ({text})" if named[model, text] == 1 else f" ({text}, {named[model, text]})"
    return [
        replace(run, differences=own, variant=variants.get((run.model, *own.items()), ""))
        for run, own in zip(runs, found, strict=True)
    ]


def _with_paths(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The runs, with `path` set where models of other weights have the same short name and another path."""
    firsts = defaultdict[str, dict[str, Path]](dict)  # {short name: {weights: the path that was given first}}
    for run in runs:
        firsts[run.model].setdefault(str(run.identity.get("weights")), Path(run.about["config"]["model"]["name"]))
    ends = {name: _different_ends({*paths.values()}) for name, paths in firsts.items()}
    paths = [firsts[run.model][str(run.identity.get("weights"))] for run in runs]
    return [replace(run, path=ends[run.model][path]) for run, path in zip(runs, paths, strict=True)]


def _different_ends(paths: set[Path]) -> dict[Path, str]:
    """{path: as many of its last parts as tell all apart}; "" for a single path."""
    if len(paths) == 1:
        return dict.fromkeys(paths, "")
    ends = ({path: str(Path(*path.parts[-length:])) for path in paths} for length in count(1))
    return next(found for found in ends if len({*found.values()}) == len(paths))


def _compared_values(runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    """For each run, {key of its identity that all runs of a table share: JSON of its value}.

    A key that only other runs of the model have, such as `batch_size`, is null. Rows and code of what the run has not
    run are left out.
    """
    compared, names = [], defaultdict(set)
    for run in runs:
        compared.append(dict(_flat({name: value for name, value in run.identity.items() if name not in _FREE})))
        names[run.model] |= compared[-1].keys()
    for run, own in zip(runs, compared, strict=True):
        own |= dict.fromkeys(sorted(names[run.model] - own.keys()))
        arms = run.identity["arms"].values()
        own |= {f"code of {arm['method']['name']}": arm["code"] for arm in arms if "code" in arm}
        suites = {DATASETS[name].suite for name in run.identity["data"] if name in DATASETS}
        own |= {f"code of {suite}": run.identity.get("suite_code") for suite in suites}
        own |= {f"{_ROWS}{name}": sha256 for name, sha256 in run.identity["data"].items()}
    return [{name: json.dumps(value, sort_keys=True) for name, value in own.items()} for own in compared]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all values but non-empty mappings."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def as_text(values: dict[str, Any]) -> dict[str, str]:
    """{"machine.cpu": ...} of nested mappings, values in the command line's syntax."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in _flat(values)}


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select the stored runs of a command."""
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUNS", default=[Path("runs")], help="default: runs")
    where = "only runs with this in their config or identity, e.g. model.dtype=bfloat16; may be repeated"
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE", help=where)
    newest = "only runs that share a table with the newest run of their model"
    parser.add_argument("--newest", action="store_true", help=newest)


def chosen(runs: Sequence[StoredRun], where: Iterable[str] = (), newest: bool = False) -> list[StoredRun]:
    """The runs that the arguments of `add_choice` select. Raises UserError for a bad condition, or if none is left."""
    left = list(runs)
    for condition in where if left else ():
        key, equals, value = condition.partition("=")
        known = [{"folder": run.folder.name, **as_text(run.about["config"]), **as_text(run.identity)} for run in left]
        if not equals or not any(key in values for values in known):
            names = {name for values in known for name in values if "parameters." not in name}
            near = nearest(key, names, "run.json of a run")
            raise UserError(f"--where {condition}: expected KEY=VALUE with a key of these runs: {near}")
        left = [run for run, values in zip(left, known, strict=True) if values.get(key) == value]
        if not left:
            choices = ", ".join(sorted({values[key] for values in known if key in values}))
            raise UserError(f"--where {condition}: no such run; {key} is one of {choices}")
    if newest:
        pairs = list(zip(left, _compared_values(left), strict=True))
        latest = {run.model: values for run, values in sorted(pairs, key=lambda pair: pair[0].started)}
        left = [run for run, own in pairs if own.items() <= (own | latest[run.model]).items()]
    return left
