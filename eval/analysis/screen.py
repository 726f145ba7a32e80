"""Results on one screen: a row for each model, suite and method. Nothing is written.

lazyllm-bench results [RUNS ...] [--by task|length] [--sort COLUMN] [--where KEY=VALUE] [--json]

Exit code: 1 if runs are damaged, which stderr names after the results of the others.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from typing import Any

import pandas as pd

from eval.analysis.columns import SECTION, SETTING, in_order, range_names, range_of, rows_by
from eval.analysis.run_table import EXAMPLES, is_unforced, shown_in
from eval.analysis.table import LABEL, UNFORCED, Column, Table, cells, console, forms
from eval.benchmarks.datasets import DATASETS, TASKS
from eval.store.results import Results, add_choice, read_whole
from eval.store.summary import NO_INTERVAL
from lazyllm.errors import UserError, nearest, parser_of

_KEYS = ("model", "suite", "method", "label")  # of rows; other keys of --where are of runs


def main(arguments: Sequence[str]) -> int:
    """The command `results`. Returns the exit code. Raises UserError."""
    parser = parser_of("results", __doc__)
    add_choice(parser)
    parser.add_argument(
        "--by",
        choices=["task", "length"],
        help="also a row for each task, or range of prompt tokens",
    )
    parser.add_argument(
        "--sort",
        metavar="COLUMN",
        help="by this column, the highest first: score, ttft_speedup, ...",
    )
    parser.add_argument(
        "--json", action="store_true", help="print a list of objects instead of a table"
    )
    options = parser.parse_args(arguments)
    conditions = [condition for condition in options.where if condition.partition("=")[0] in _KEYS]
    run_conditions = [condition for condition in options.where if condition not in conditions]
    groups, damaged = read_whole(options.runs, run_conditions)
    frames = [summary(results, options.by).assign(runs=results.name) for results in groups]
    frame: Any = _selected(pd.concat(frames, ignore_index=True), conditions)
    if options.sort is not None:
        if options.sort not in frame:
            raise UserError(f"--sort {options.sort}: {nearest(options.sort, frame, '--json')}")
        numbers = pd.api.types.is_numeric_dtype(frame[options.sort])
        frame = frame.sort_values(options.sort, ascending=not numbers, kind="stable")
    if options.json:
        rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
        print(json.dumps(rows, indent=2, default=str))
    else:
        screen, notes = console(), {results.name: results.unfinished for results in groups}
        for name, rows in frame.groupby("runs", sort=False):
            title = f"Results of {name}" if name else "Results"
            table = table_of(rows.reset_index(drop=True), title, notes[name])
            screen.print(table.to_rich(screen.width))
    for why in damaged:
        print(f"Damaged, left out: {why}", file=sys.stderr)
    return 1 if damaged else 0


def _selected(frame: Any, conditions: Sequence[str]) -> Any:
    """The rows that these conditions of --where select. Raises UserError if they select none."""
    for condition in conditions:
        key, _, value = condition.partition("=")
        known = sorted(frame[key].unique())
        frame = frame[frame[key] == value]
        if frame.empty:
            raise UserError(f"--where {condition}: no such row; {key} is one of {', '.join(known)}")
    return frame


def summary(results: Results, by: str | None = None) -> pd.DataFrame:
    """A row for each setting on each suite: the mean over tasks, then by task or length.

    Columns: model, suite, part ("all", a task, or a range of prompt tokens), method, label, score,
    score_difference (from the baseline's on the same examples), ttft_speedup, equal_length_speedup,
    generation_speedup, pct_prompt_tokens_computed, kl, answer_kl, gold_kl, gold_log_likelihood,
    each with `_low` and `_high`, examples, seeds (of the setting; those of an example count as
    one), unfinished.
    """
    values = forms(
        "score",
        "score_difference",
        "ttft_speedup",
        "equal_length_speedup",
        "generation_speedup",
        "pct_prompt_tokens_computed",
        "kl",
        "answer_kl",
        "gold_kl",
        "gold_log_likelihood",
    )
    table: Any = results.by_task
    table = table[table["level"].isin(["all"] if by != "task" else ["all", "task"])].rename(
        columns={"name": "part"}
    )
    if by == "length":
        counting = results.counting.assign(part=range_of(results.counting["prompt_tokens"]))
        lengths: Any = pd.DataFrame(rows_by(counting, "part", results.frame))
        table = pd.concat([table, lengths[lengths["level"] == "all"]])
        # lengths have none
        table["seeds"] = table.groupby(SETTING)["seeds"].transform("max").astype(int)
    unfinished, keys = (
        _unfinished(results),
        zip(table["model"], table["suite"], table["label"], strict=True),
    )
    table = table.assign(
        unfinished=[", ".join(dict.fromkeys(unfinished.get(key, ()))) for key in keys]
    )
    places = ["all", *TASKS, *range_names()]
    table = in_order(table).assign(place=lambda rows: rows["part"].map(places.index))
    columns = [*SECTION, "part", "method", "label", *values, "examples", "seeds", "unfinished"]
    return table.sort_values([*SECTION, "place"], kind="stable")[columns].reset_index(drop=True)


def _unfinished(results: Results) -> dict[tuple[str, str, str], list[str]]:
    """{(model, suite, label): `4 of 120 examples` of each arm that lacks an answer to a planned
    example}.

    Datasets for which another run's answers of the arm count are left out.
    """
    superseded = set(
        results.superseded[["folder", "arm", "dataset"]].itertuples(index=False, name=None)
    )
    lacking: dict[tuple[str, str, str], list[str]] = {}
    for run in results.runs:
        suites = defaultdict[str, set[str]](set)
        for name, _ in run.planned or ():
            suites[DATASETS[name].suite].add(name)
        for (suite, names), arm in product(suites.items(), run.arms.values()):
            counting = {
                name for name in names if (str(run.folder), arm.name, name) not in superseded
            }
            if text := run.lacking([arm.name], counting):
                lacking.setdefault((run.model, suite, arm.label), []).append(text)
    return lacking


def table_of(frame: Any, title: str = "Results", notes: Sequence[str] = ()) -> Table:
    """A `summary` as people read it. notes: sentences for the caption."""
    sections = frame.assign(section=frame["model"] + ", " + frame["suite"] + ", " + frame["part"])
    score, *others = shown_in(frame)
    sentences = [*notes]
    if (sections.groupby("section")["examples"].nunique() > 1).any():
        others.insert(0, Column("score_difference", "score - baseline", 2))
        sentences.append(
            "Rows of another n hold other examples; score - baseline is of the same ones."
        )
    if frame["score_low"].isna().any():
        sentences.append(f"{NO_INTERVAL.capitalize()} have no interval.")
    if is_unforced(frame):
        sentences.append(f"{UNFORCED}.")
    seeds = [Column("seeds", "seeds")] if (frame["seeds"] > 1).any() else []
    unfinished = [Column("unfinished", "unfinished")] if (frame["unfinished"] != "").any() else []
    keys = Column("section", "model, suite, part"), LABEL
    text = cells(sections, [*keys, score, EXAMPLES, *seeds, *unfinished, *others])
    return Table("results", title, " ".join(sentences), frame, text, keys=len(keys))
