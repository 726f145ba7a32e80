"""Measured values beside the paper's Tables 1 and 2."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.known_methods import BASELINE, STUDIED
from eval.analysis.table import COMPUTED, Table
from eval.analysis.tables.cells import SECTION, model_name, random_models, shown
from eval.benchmarks import SUITES
from eval.benchmarks.datasets import DATASETS
from eval.store.results import Results
from eval.store.runs import settings_in

PUBLISHED = Path(__file__).parents[1] / "published"
PAPER_MODELS = ("llama2", "xgen")
_KEYS = [
    "model", "suite", "paper_model", "task", "method", "settings", "label", "parameters", "status", "examples",
    "datasets", "seeds", "score_seed_std",
]  # fmt: skip
_FORMS = (
    ("", ""),
    ("", "_low"),
    ("", "_high"),
    ("paper_", ""),
    ("", "_difference"),
)  # (prefix, suffix) of a value's columns; the last two need the paper's number


@dataclass(frozen=True)
class _Value:
    """A column. name: as in `by_task`. paper: its name in the paper's CSV after `<model>_`; None if it is not there."""

    name: str
    paper: str | None
    heading: str
    digits: int


_TABLE1 = (
    _Value("score", "score", "score", 2),
    _Value("ttft_speedup", "ttft_speedup", "TTFT speedup", 2),
    _Value("kl", None, "KL, nats", 5),
)
_TABLE2 = (
    _Value("pct_prompt_tokens_computed", "prompt_tokens_computed_pct", "% tokens computed", 2),
    _Value("generation_speedup", "generation_speedup", "generation speedup", 2),
)


@cache
def published(name: str) -> pd.DataFrame:
    """The paper's "table1" or "table2", by task and method, with columns `<model>_<value>`."""
    table = pd.read_csv(PUBLISHED / f"{name}.csv")
    return table if "method" in table else table.assign(method=STUDIED)


@cache
def paper_values() -> dict[tuple[str, str, str, str], float]:
    """{(llama2 or xgen, task, method, value): the paper's number}; value: a column of `by_task`."""
    return {
        (model, row["task"], row["method"], value.name): float(row[f"{model}_{value.paper}"])
        for name, values in (("table1", _TABLE1), ("table2", _TABLE2))
        for row in published(name).to_dict("records")
        for model in PAPER_MODELS
        for value in values
        if value.paper is not None
    }


def table1(results: Results) -> Table:
    """Score and TTFT speedup by model, task and method: measured, the paper's, the difference."""
    title = "Table 1: score and TTFT speedup beside the paper's"
    note = (
        "Scores 0 to 100, mean over seeds; their standard deviation is in the CSV. "
        "KL: of the first token's distribution from the paired baseline's; - if it was not measured."
    )
    return _beside_paper(results, "table1", title, _TABLE1, note)


def table2(results: Results) -> Table:
    """Share of prompt tokens computed and generation speedup of LazyLLM by model and task, beside the paper's."""
    title = "Table 2: prompt tokens computed and generation speedup of LazyLLM, beside the paper's"
    note = (
        f"% tokens computed: by the end of generation, mean over layers; {COMPUTED}. Generation speedup compares whole "
        "answers, which may differ in length."
    )
    return _beside_paper(results, "table2", title, _TABLE2, note)


def is_table1_preset(settings: dict[str, Any]) -> bool:
    """Whether a run has the parameters solved for the speedups of the paper's Table 1."""
    return "table1" in settings.values()


def _beside_paper(results: Results, name: str, title: str, values: Sequence[_Value], note: str) -> Table:
    chosen = results.where(lambda run: run.method == BASELINE or is_table1_preset(run.settings))
    measured: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in chosen.by_task.to_dict("records"):
        if row["level"] == "task":
            measured.setdefault((row["model"], row["suite"], row["task"], row["method"]), []).append(row)
    facts = _Facts(chosen, random_models(results))
    rows = []
    for model, column, suite in _sections(results):
        for task in SUITES[suite].all_tasks:
            for method in published(name)["method"].unique():
                key = {"model": model, "suite": suite, "paper_model": column, "task": task, "method": method}
                lines = measured.get((model, suite, task, method), [{}])
                rows += [key | facts.compared(key, line, values) for line in lines]
    columns = [
        f"{before}{value.name}{after}"
        for value in values
        for before, after in (_FORMS if value.paper is not None else _FORMS[:3])
    ]
    frame = pd.DataFrame(rows, columns=[*_KEYS, *columns])
    failed = sum(len(run.failures) for run in chosen.runs)
    failures = f" {failed} examples failed and are not counted (see failures.jsonl of their runs)." if failed else ""
    caption = (
        f"{note} Runs with the preset table1 and the baseline. The paper does not publish its parameters; ours are "
        "solved for its TTFT speedups. ±: half of the 95 % bootstrap interval over examples; both ends are in "
        "the CSV. Δ: measured minus paper, if every example of the task was run (no scores of random weights). "
        f"n: examples, with a note if only a part was run.{failures} unpaired: no baseline was run "
        "beside the method. -: the paper has no such model."
    )
    return Table(name, title, caption, frame, _cells(frame, values, results), keys=3)


def _sections(results: Results) -> Iterable[tuple[str, str | None, str]]:
    """(model, the paper's column, suite): the paper's models on LongBench, run or not, then all other runs."""
    there = {
        (run.model, run.paper_model if SUITES[suite].in_paper else None, suite)
        for run in results.runs
        for suite in {DATASETS[name].suite for name in run.datasets}
    }
    for column in PAPER_MODELS:
        yield from sorted(section for section in there if section[1] == column) or [(column, column, "longbench")]
    yield from sorted((section for section in there if section[1] is None), key=lambda section: section[::2])


class _Facts:
    """Facts about the runs.

    parameters: {(model, method, settings, dataset): JSON of a preset's parameters there}. sizes: {dataset: number of
    its examples, if a run has stored it}. dummies: models with random weights.
    """

    def __init__(self, results: Results, dummies: set[str]) -> None:
        self.parameters = {
            (run.model, run.method, json.dumps(run.settings, sort_keys=True), dataset): json.dumps(
                settings_in(resolved), sort_keys=True
            )
            for run in results.runs
            for dataset, resolved in (run.identity.get("parameters") or {}).items()
        }
        self.sizes = {name: size for run in results.runs for name, size in run.about.get("examples", {}).items()}
        self.dummies = dummies

    def compared(self, key: dict[str, Any], row: dict[str, Any], values: Sequence[_Value]) -> dict[str, Any]:
        """A line of measured values beside the paper's. row: empty if nothing was measured."""
        line: dict[str, Any] = {"status": "no run", "examples": 0, "datasets": 0, "seeds": 0}
        if row:
            line = {name: row[name] for name in ("settings", "label", "examples", "datasets", "seeds")}
            line |= {"score_seed_std": row["score_seed_std"], **self._status(key, row)}
        for value in values:
            known = paper_values().get((key["paper_model"], key["task"], key["method"], value.name), np.nan)
            for form in (value.name, f"{value.name}_low", f"{value.name}_high"):
                line[form] = row.get(form, np.nan)
            counts = line["status"] == "measured" and not (key["model"] in self.dummies and value.name == "score")
            if value.paper is not None:
                line[f"paper_{value.name}"] = known
                line[f"{value.name}_difference"] = line[value.name] - known if counts else np.nan
        return line

    def _status(self, key: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
        """How much of a task was run, and the parameters used."""
        place = (key["task"], key["suite"])
        names = [name for name, dataset in DATASETS.items() if (dataset.task, dataset.suite) == place]
        size = sum(self.sizes.get(name, 0) for name in names)
        status = "measured"
        if row["datasets"] < len(names):
            status = f"{row['datasets']} of {len(names)} datasets"
        elif key["paper_model"] and row["examples"] < size:
            status = f"of {size}"
        places = [(key["model"], key["method"], row["settings"], name) for name in names]
        # a task has one target, so all its datasets have the same parameters
        parameters = next((self.parameters[place] for place in places if place in self.parameters), None)
        return {"status": status, "parameters": parameters}


def _cells(frame: pd.DataFrame, values: Sequence[_Value], results: Results) -> pd.DataFrame:
    settings: Any = frame.groupby([*SECTION, "method"])["settings"].nunique()
    lines = []
    for row in frame.to_dict("records"):
        several = settings[row["model"], row["suite"], row["method"]] > 1
        absent = row["status"] == "no run"
        n = str(row["examples"]) if row["status"] == "measured" else f"{row['examples']} ({row['status']})"
        line = {
            "model": model_name(row, results),
            "task": row["task"],
            "method": row["label"] if several and not absent else row["method"],
            "n": "-" if absent else n,
        }
        for value in values:
            digits = value.digits
            if value.paper is None:
                line[value.heading] = shown(row, value.name, digits, missing="-")
                continue
            line[value.heading] = "no run" if absent else shown(row, value.name, digits)
            paper, difference = row[f"paper_{value.name}"], row[f"{value.name}_difference"]
            line[f"{value.heading}, paper"] = "-" if np.isnan(paper) else f"{paper:.{digits}f}"
            line[f"{value.heading}, Δ"] = "-" if np.isnan(difference) else f"{difference:+.{digits}f}"
        lines.append(line)
    return pd.DataFrame(lines)
