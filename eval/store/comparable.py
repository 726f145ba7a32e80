"""Which stored runs share a table: runs of a model that agree in everything but method, data and seed."""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.store.folder import fingerprint
from eval.store.runs import StoredRun, counted
from lazyllm.errors import UserError

# Facts that may differ between runs that share a table
_FREE = {
    "method", "parameters", "data", "seed", "paired", "warmup", "method_weights", "method_code", "fidelity",
    "answers_rows",
}  # fmt: skip
_ROWS = "rows of "  # a dataset's fact: the hashes of its rows and templates


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
    odd = [
        {fact: value.strip('"') for fact, value in own.items() if value != usual[run.model, fact]}
        for run, own in zip(runs, facts, strict=True)
    ]
    for digits in (4, 8, 64):  # of hashes, so that no two names are equal
        words = [(run.model, *_in_words(facts, digits)) for run, facts in zip(runs, odd, strict=True)]
        distinct = {(run.model, *facts.items()) for run, facts in zip(runs, odd, strict=True)}
        if len(set(words)) == len(distinct):
            break
    return [
        replace(run, apart=_apart(own, set(words)), facts=facts)
        for run, facts, own in zip(runs, odd, words, strict=True)
    ]


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


def _in_words(facts: dict[str, str], digits: int) -> list[str]:
    """The facts in short, hashes of rows as one and last."""

    def short(value: str) -> str:
        shown = digits if re.fullmatch("[0-9a-f]{16,}", value) else 6 * digits
        return value[:shown]

    words = [f"{fact}={short(value)}" for fact, value in facts.items() if not fact.startswith(_ROWS)]
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


# ---------------------------------------------------------------------------------------------------- the user's choice


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
    for condition in where:
        key, equals, value = condition.partition("=")
        known = [_described(run) for run in left]
        if not equals or not any(key in facts for facts in known):
            names = ", ".join(sorted({name for facts in known for name in facts}))
            raise UserError(f"--where {condition}: expected KEY=VALUE with a key of these runs: {names}")
        left = [run for run, facts in zip(left, known, strict=True) if facts.get(key) == value]
        if not left:
            values = ", ".join(sorted({facts[key] for facts in known if key in facts}))
            raise UserError(f"--where {condition}: no such run; {key} is one of {values}")
    if newest:
        pairs = list(zip(left, _facts(left), strict=True))
        latest = {run.model: facts for run, facts in sorted(pairs, key=_began)}
        left = [run for run, facts in pairs if _agree(facts, latest[run.model])]
    return left


def _described(run: StoredRun) -> dict[str, str]:
    """`as_text` of the run's config and identity."""
    return {"folder": run.folder.name, **as_text(run.about["config"]), **as_text(run.identity)}


def _agree(facts: dict[str, str], others: dict[str, str]) -> bool:
    return all(others.get(name, value) == value for name, value in facts.items())
