"""The page's overview: findings, runs, the provenance of their numbers, and warnings to read before comparing them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from eval.analysis.columns import BASELINE, in_order
from eval.analysis.run_table import shown_in
from eval.analysis.table import EXAMPLES, KEPT_WITHIN, MODEL, Column, Table, cells
from eval.benchmarks.datasets import DATASETS
from eval.store.aggregate import NO_INTERVAL
from eval.store.results import Results, as_text
from eval.store.runs import StoredRun, counted

KEPT = 0.99  # of the baseline's score

# values that are elsewhere on the page
_SHOWN_ELSEWHERE = {"arms", "baseline", "versions", "seed"}


def summary(runs: Sequence[StoredRun]) -> list[tuple[str, str]]:
    """The first lines of the page: (name, value)."""
    examples = {(run.model, *key) for run in runs for key in run.answered}
    started = sorted(_moment(run) for run in runs)
    return [
        ("Models", _listed(run.model for run in runs)),
        ("Methods", _listed(arm.method for run in runs for arm in run.arms.values())),
        ("Runs", f"{len(runs)}, with {counted(sum(len(run.arms) for run in runs), 'arm')}"),
        ("Datasets", _listed(name for run in runs for name in run.datasets)),
        ("Examples", f"{len(examples):,}, in {counted(sum(len(run.visits) for run in runs), 'visit')}"),
        ("Measured", started[0] if started[0] == started[-1] else f"{started[0]} to {started[-1]}"),
        ("On", _listed(run.device for run in runs)),
        ("Attention kernel", _listed(kernel for run in runs for kernel in run.kernels) or "unknown"),
    ]


def findings(results: Results) -> list[str]:
    """A sentence for each model and suite: the fastest setting that keeps 99 % of its baseline's score.

    It says instead what the runs cannot show: without a baseline, with one that scores 0, with few examples (a share of
    the score that is not known to within `KEPT_WITHIN` points).
    Of the variant of each model that differs least; the last sentence names the others.
    """
    whole: Any = results.least_different(results.by_task[results.by_task["level"] == "all"])
    sentences = list[str]()
    for (model, suite), rows in whole.groupby(["model", "suite"], sort=False):
        name = model if f"({suite})" in model else f"{model} on {suite}"
        sentences.append(f"{name}: {_finding(rows.to_dict('records'))}")
    shown = set(whole["model"])
    others = _listed(run.model for run in results.runs if run.model not in shown)
    return [*sentences, f"Other settings, in the tables: {others}."] if others else sentences


def _finding(rows: Sequence[dict[Any, Any]]) -> str:
    methods = [row for row in rows if row["method"] != BASELINE]
    paired = [row for row in methods if not pd.isna(row["ttft_speedup"])]
    faster = [row for row in paired if row["ttft_speedup"] > 1]
    if not methods:
        return "only the baseline was measured."
    if not paired:
        return "no speedup and no kept score, as no baseline was measured (baseline=true does)."
    if not faster:
        return f"no setting is faster to its first token than the baseline ({counted(len(paired), 'setting')})."
    fastest = max(faster, key=lambda row: row["ttft_speedup"])
    if all(pd.isna(row["relative_score"]) for row in faster):
        return f"{_described(fastest)} The baseline scores 0, so no score could be kept or lost."
    known = [row for row in faster if row["relative_score_high"] - row["relative_score_low"] <= 2 * KEPT_WITHIN]
    if not known:
        few = counted(fastest["examples"], "example")
        return f"{_described(fastest)} Whether it keeps the score to within {KEPT_WITHIN} points, {few} cannot show."
    keeping = [row for row in known if row["relative_score"] >= 100 * KEPT]
    if not keeping:
        best = _described(max(faster, key=lambda row: row["score"]))
        return f"no setting that is faster than the baseline keeps {KEPT:.0%} of its score. The best: {best}"
    of = f"the fastest of {len(keeping)} that keep" if len(keeping) > 1 else "the only one that keeps"
    chosen = _described(max(keeping, key=lambda row: row["ttft_speedup"]))
    return f"{chosen} Of {counted(len(faster), 'faster setting')}, it is {of} {KEPT:.0%} of the baseline's score."


def _described(row: dict[Any, Any]) -> str:
    speedup, theirs = row["ttft_speedup"], row["reference_score"]
    return (
        f"{row['label']} gives the first token {speedup:.2f} times as fast as the baseline, scoring "
        f"{theirs + row['score_difference']:.2f} against {theirs:.2f} ({counted(row['examples'], 'example')})."
    )


def _moment(run: StoredRun) -> str:
    return run.started.replace("T", " ").replace("Z", " UTC")


def runs_table(runs: Sequence[StoredRun]) -> Table:
    """One row a run: its arms, examples, time and identity."""
    rows = [
        {
            "model": run.model,
            "arms": _shortened(list(run.arms)),
            "examples": len(run.answered),
            "datasets": len(run.datasets),
            "unfinished": run.unfinished,
            "started": _moment(run),
            "fingerprint": run.about["fingerprint"],
            "folder": run.folder.name,
        }
        for run in runs
    ]
    caption = "A fingerprint is a hash of everything that can change a number: runs that share one can share visits."
    return _plain("runs", "Runs", pd.DataFrame(rows), caption)


def _plain(name: str, title: str, values: pd.DataFrame, caption: str = "") -> Table:
    """A table of these values as they are."""
    return Table(name, title, caption, values, cells(values, [Column(heading, heading) for heading in values]))


def settings_table(runs: Sequence[StoredRun]) -> Table | None:
    """The settings behind the models' names, such as `tiny (turns=4)`; None if no run has any."""
    rows = {(run.model, fact, value): None for run in runs for fact, value in run.differences.items()}
    caption = "Runs that differ in these from most runs of the model share no table with them."
    values = pd.DataFrame(list(rows), columns=["model", "setting", "value"])
    return _plain("settings", "Settings of the models", values, caption) if rows else None


def results_table(results: Results) -> Table:
    """One row for each setting and task or dataset, means over tasks first; the seeds of a setting share a row.

    A task with one dataset has the row of that dataset only, as has the mean over one dataset.
    """
    table: Any = results.by_task
    datasets = table.groupby(["model", "suite", "level", "name"])["datasets"].transform("max")
    table = table[(table["level"] == "dataset") | (datasets > 1)]
    table = in_order(table).sort_values("level", key=lambda levels: levels != "all", kind="stable")
    names = table["name"].where(table["level"] != "all", "mean over tasks")
    if table["suite"].nunique() > 1:
        names = names.where(table["level"] == "dataset", names + ", " + table["suite"])
    table = table.assign(row=names, setting=table["label"])
    caption = "Scores 0 to 100, and speedups over the baseline of the same visits."
    notes = f"{NO_INTERVAL.capitalize()} have no interval; the seeds of a setting count as one example."
    keys = [Column("row", "task or dataset"), MODEL, Column("setting", "setting")]
    columns = [*keys, *shown_in(table), Column("seeds", "seeds"), EXAMPLES]
    return Table("results", "Results", caption, table, cells(table, columns), keys=len(keys), notes=notes)


def provenance(runs: Sequence[StoredRun]) -> tuple[list[tuple[str, str]], Table | None]:
    """(name, value) of all values that the runs share; and a table of the others, None if there are none."""
    values_of: Any = pd.DataFrame(
        as_text({key: value for key, value in run.identity.items() if key not in _SHOWN_ELSEWHERE})
        | as_text(run.about["provenance"])
        for run in runs
    ).fillna("")
    is_shared = values_of.nunique() == 1
    differing = values_of.loc[:, ~is_shared]
    differing.insert(0, "folder", [run.folder.name for run in runs])
    table = None if is_shared.all() else _plain("differing", "What differs between the runs", differing)
    return list(values_of.loc[0, is_shared].items()), table


def warnings(runs: Sequence[StoredRun], most: int | None) -> list[str]:
    """Warnings to read before comparing numbers, in sentences. most: examples shown of a run and dataset, or None."""
    unpaired = [run for run in runs if run.identity["baseline"] is None]
    cold = [run for run in runs if run.identity["warmup"] == 0]
    changed = [run for run in runs if (run.about["provenance"]["git_commit"] or "+changes").endswith("+changes")]
    concerned = {
        "Measured without a baseline: no speedup, and no answer to compare with": unpaired,
        "Timed without warm-up: the first examples' times include one-off costs": cold,
        "Measured with uncommitted code: it cannot be checked out again": changed,
    }
    concerned |= {sign: [run for run in runs if sign in run.warnings] for run in runs for sign in run.warnings}
    sentences = Results(runs).unfinished + [f"{text} ({_names(named)})." for text, named in concerned.items() if named]
    sentences += _missing(runs)
    if most is not None and any(max(Counter(dataset for dataset, _ in run.answered).values()) > most for run in runs):
        shown = f"only the first {most} examples are" if most > 1 else "only the first example is"
        sentences.append(f"Of each run and dataset, {shown} shown below; tables count all.")
    return sentences


def _missing(runs: Sequence[StoredRun]) -> list[str]:
    """A sentence for the runs that lack the same examples of another run of their model and suite."""
    sentences, alike = list[str](), dict[Any, list[StoredRun]]()
    for run in runs:
        alike.setdefault((run.model, DATASETS[run.datasets[0]].suite), []).append(run)
    for (model, _), group in alike.items():
        wanted, lacking = {key for run in group for key in run.answered}, dict[Any, list[StoredRun]]()
        for run in group:
            lacking.setdefault(frozenset(wanted - run.answered.keys()), []).append(run)
        sentences += [
            f"Missing examples: {len(keys)} of the {len(wanted)} that runs of {model} have, of "
            f"{_listed(sorted(dataset for dataset, _ in keys))} ({_names(named)})."
            for keys, named in lacking.items()
            if keys
        ]
    return sentences


def _names(runs: Sequence[StoredRun]) -> str:
    return _shortened([run.folder.name for run in runs])


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} more"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
