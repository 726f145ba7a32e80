"""Stored runs as one value with the frames behind tables, figures and reports, without a model.

Runs of a model share a table if they agree in everything but method, data and seed (`tell_apart`).
"""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.store.folder import fingerprint
from eval.store.record import MEASURED
from eval.store.runs import StoredRun, counted, stored_runs
from lazyllm.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

COLUMNS = [
    "model", "paper_model", "method", "settings", "label", "seed", "run", "folder", "paired",
    "dataset", "task", "suite", "id", "groups", "prompt_tokens", "turn",
    *(f"{side}{name}" for side in ("", "baseline_") for name in MEASURED),
]  # fmt: skip
# Facts that may differ between runs that share a table
_FREE = {
    "method", "parameters", "data", "seed", "paired", "warmup", "method_weights", "method_code", "fidelity",
    "answers_rows",
}  # fmt: skip
_ROWS = "rows of "  # a dataset's fact: the hashes of its rows and templates
_KEY = ["model", "method", "settings", "seed", "dataset", "id", "turn"]


class Results:
    """Stored runs, and their frames for tables and figures, each made once.

    runs: in order. control: the results of their baseline beside itself, if it was measured.
    """

    def __init__(self, runs: Sequence[StoredRun], control: Results | None = None) -> None:
        self.runs, self.control = tuple(runs), control
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

    where, newest: as in `chosen`. Raises UserError if there is none, or if a file is damaged.
    """
    named = tell_apart([run for run in chosen(stored_runs(folders), where, newest) if run.may_have_records])
    runs = [run for run in with_baselines(named) if len(run.examples)]
    if not runs:
        raise UserError(f"no run with records in {', '.join(map(str, folders))}")
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
    described: Any = pd.DataFrame(
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
            "size": len(run.examples),
            "rank": (False, "ttft", True).index(run.identity["paired"]),
        }
        for run in runs
    )
    repeated = described.loc[described.index.repeat(described["size"])].reset_index(drop=True)
    table: Any = pd.concat([repeated, pd.concat([run.examples for run in runs], ignore_index=True)], axis=1)
    table = table.sort_values(["rank", "size"], ascending=False, kind="stable")
    equal = [*_KEY, "rank", "size"]
    undecided = table[table.duplicated(equal, keep=False) & ~table.duplicated(_KEY)]  # the first of a key is the best
    if len(undecided):
        row = undecided.iloc[0]
        both = sorted(set(table[(table[equal] == row[equal]).all(axis=1)]["folder"]))
        facts = [as_text(run.identity).items() for run in runs if str(run.folder) in both]
        differ = {key for one in facts for other in facts for key, _ in one - other}
        choose = f", or choose by {' or '.join(sorted(differ))}: --where KEY=VALUE" if differ else ""
        raise UserError(
            f"{row['dataset']}, row {row['id']}, {row['label']}: measured twice, in {' and '.join(both)}; remove one"
            + choose
        )
    return table.drop_duplicates(_KEY).sort_index().reset_index(drop=True)[COLUMNS]


def first_turns(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of first turns: one for each example of a run."""
    return frame[frame["turn"] == 1]  # type: ignore[return-value]


def tell_apart(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The runs, with the facts in which they differ in `StoredRun.facts`, and `apart` set: ` (dtype=bfloat16)`.

    Runs share a table if runs of one model agree in everything but method, data and seed, runs of one method in its
    code, and all runs in the rows and templates of a dataset. A fact differs unless it has its most common value; of
    equally common values, that of the newest run. `apart` has no more facts than tell the run from all others.
    """
    facts = _facts(runs)
    values: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for run, own in sorted(zip(runs, facts, strict=True), key=_began):
        for fact, value in own.items():
            values[run.model, fact].append(value)
    usual = {key: max(reversed(seen), key=seen.count) for key, seen in values.items()}
    runs = [
        replace(run, facts={fact: value.strip('"') for fact, value in own.items() if value != usual[run.model, fact]})
        for run, own in zip(runs, facts, strict=True)
    ]
    for digits in (4, 8, 64):  # of hashes, so that no two names are equal
        words = [(run.model, *_in_words(run.facts, digits)) for run in runs]
        if len(set(words)) == len({(run.model, *run.facts.items()) for run in runs}):
            break
    return [replace(run, apart=_apart(own, set(words))) for run, own in zip(runs, words, strict=True)]


def with_baselines(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The runs of `tell_apart`, each one with `timing.paired=ttft` with the baseline's runs of its table."""
    baselines: defaultdict[str, list[StoredRun]] = defaultdict(list)
    for run in runs:
        if run.method == "baseline":
            baselines[run.model].append(run)
    return [
        replace(run, baselines=tuple(baselines[run.model])) if run.identity["paired"] == "ttft" else run for run in runs
    ]


def without_baseline(runs: Sequence[StoredRun]) -> list[str]:
    """A sentence, with a command, for each run of the baseline that runs of `with_baselines` lack."""
    lacking: defaultdict[str, list[StoredRun]] = defaultdict(list)
    for run in runs:
        if run.identity["paired"] == "ttft" and run.examples["baseline_score"].hasnans:
            lacking[run.about["baseline_command"]].append(run)
    return [
        f"{counted(len(named), 'run')} of {named[0].model} timed only the baseline's first tokens "
        f"(timing.paired=ttft); the run with its answers and scores is not here, or not finished: {command}"
        for command, named in lacking.items()
    ]


def _apart(words: tuple[str, ...], others: set[tuple[str, ...]]) -> str:
    """The first words after the model's name that tell a run from all others, in brackets."""
    begins = [words[:length] for length in range(2, len(words) + 1)]
    unique = [begin for begin in begins if sum(other[: len(begin)] == begin for other in others) == 1]
    return f" ({', '.join((unique or begins[-1:])[0][1:])})" if begins else ""


def _in_words(facts: Mapping[str, str], digits: int) -> list[str]:
    """The facts in short, hashes of rows as one and last."""
    lengths = {fact: digits if re.fullmatch("[0-9a-f]{16,}", value) else 6 * digits for fact, value in facts.items()}
    words = [f"{fact}={value[: lengths[fact]]}" for fact, value in facts.items() if not fact.startswith(_ROWS)]
    rows = {fact: value for fact, value in facts.items() if fact.startswith(_ROWS)}
    return [*words, f"rows {fingerprint(rows)[:digits]}"] if rows else words


def _facts(runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    """For each run, {fact that it shares with all runs of its table: JSON of its value}.

    A fact that other runs of the model have and this one lacks is null, such as `turns`, but for rows and code of what
    it has not run.
    """
    facts, names = [], defaultdict(set)
    for run in runs:
        facts.append(dict(_flat({name: value for name, value in run.identity.items() if name not in _FREE})))
        names[run.model] |= facts[-1].keys()
    for run, own in zip(runs, facts, strict=True):
        own |= dict.fromkeys(sorted(names[run.model] - own.keys()))
        if run.identity.get("method_code") is not None:
            own[f"code of {run.method}"] = run.identity["method_code"]
        own |= {f"{_ROWS}{name}": sha256 for name, sha256 in run.identity["data"].items()}
    return [{name: json.dumps(value, sort_keys=True) for name, value in own.items()} for own in facts]


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


def _began(pair: tuple[StoredRun, Any]) -> str:
    return str(pair[0].about.get("provenance", {}).get("started", ""))


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select the stored runs of a command."""
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUNS", default=[Path("runs")], help="default: runs")
    parser.add_argument(
        "--where", action="append", default=[], metavar="KEY=VALUE",
        help="only runs with this in their config or identity, e.g. model.dtype=bfloat16; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--newest", action="store_true", help="only runs that share a table with the newest run of their model"
    )


def chosen(runs: Sequence[StoredRun], where: Iterable[str] = (), newest: bool = False) -> list[StoredRun]:
    """The runs that the arguments of `add_choice` select. Raises UserError for a bad condition, or if none is left."""
    left = list(runs)
    for condition in where if left else ():
        key, equals, value = condition.partition("=")
        known = [_described(run) for run in left]
        if not equals or not any(key in facts for facts in known):
            names = ", ".join(sorted({name for facts in known for name in facts if "parameters." not in name}))
            raise UserError(f"--where {condition}: expected KEY=VALUE with a key of these runs: {names}")
        left = [run for run, facts in zip(left, known, strict=True) if facts.get(key) == value]
        if not left:
            values = ", ".join(sorted({facts[key] for facts in known if key in facts}))
            raise UserError(f"--where {condition}: no such run; {key} is one of {values}")
    if newest:
        pairs = list(zip(left, _facts(left), strict=True))
        latest = {run.model: facts for run, facts in sorted(pairs, key=_began)}
        left = [
            run
            for run, facts in pairs
            if all(latest[run.model].get(name, value) == value for name, value in facts.items())
        ]
    return left


def _described(run: StoredRun) -> dict[str, str]:
    """`as_text` of the run's config and identity."""
    return {"folder": run.folder.name, **as_text(run.about["config"]), **as_text(run.identity)}
