"""Measured values with published ones: the paper's Tables 1 and 2, and what the authors of other methods report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.columns import MODEL, SECTION, Column, cells, forms, model_name, overall, random_models
from eval.analysis.known_methods import BASELINE, STUDIED, place_of
from eval.analysis.table import COMPUTED, Table
from eval.benchmarks import SUITES
from eval.benchmarks.datasets import DATASETS, TASKS
from eval.store.results import Results
from eval.store.runs import is_ablation, settings_in

PUBLISHED = Path(__file__).parent / "published"
PAPER_MODELS = ("llama2", "xgen")

# ----------------------------------------------------------------------------------------------------- Tables 1 and 2

_KEYS = [
    "model", "suite", "paper_model", "task", "method", "settings", "label", "parameters", "status", "examples",
    "datasets", "seeds", "score_seed_std",
]  # fmt: skip


@dataclass(frozen=True)
class _Value:
    """A value. name: as in `by_task`. paper: its name in the paper's CSV after `<model>_`; None if it is not there."""

    name: str
    paper: str | None
    heading: str
    digits: int

    @property
    def forms(self) -> list[str]:
        """Its columns."""
        return [*forms(self.name), *([f"paper_{self.name}", f"{self.name}_difference"] if self.paper else [])]

    @property
    def columns(self) -> list[Column]:
        """Its columns as shown."""
        if self.paper is None:
            return [Column(self.name, self.heading, self.digits)]
        return [
            Column(self.name, self.heading, self.digits, missing="unpaired"),
            Column(f"paper_{self.name}", f"{self.heading}, paper", self.digits),
            Column(f"{self.name}_difference", f"{self.heading}, Δ", self.digits, sign="+"),
        ]


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
        "Scores 0 to 100, mean over seeds; their standard deviation is in the CSV. Prompt compression keeps half "
        "of its context, as no share has the paper's speedup. "
        "KL: of the first token's distribution from the paired baseline's; - if it was not measured."
    )
    return _with_published(results, "table1", title, _TABLE1, note)


def table2(results: Results) -> Table:
    """Share of prompt tokens computed and generation speedup of LazyLLM by model and task, with the paper's."""
    title = "Table 2: prompt tokens computed and generation speedup of LazyLLM, beside the paper's"
    note = (
        f"% tokens computed: by the end of generation, mean over layers; {COMPUTED}. Generation speedup compares whole "
        "answers, which may differ in length."
    )
    return _with_published(results, "table2", title, _TABLE2, note)


def is_table1_preset(settings: dict[str, Any]) -> bool:
    """Whether a run has the parameters solved for the speedups of the paper's Table 1."""
    return "table1" in settings.values()


def _with_published(results: Results, name: str, title: str, values: Sequence[_Value], note: str) -> Table:
    runs = results.where(lambda run: run.method == BASELINE or is_table1_preset(run.settings))
    methods = list(published(name)["method"].unique())
    parameters, dummies = _parameters(runs), random_models(results)
    sizes = {name: size for run in runs.runs for name, size in run.about.get("examples", {}).items()}
    rows = []
    means: Any = runs.by_task
    for row in means[means["level"] == "task"].to_dict("records"):
        names = [name for name, of in DATASETS.items() if (of.task, of.suite) == (row["task"], row["suite"])]
        if row["paper_model"] not in PAPER_MODELS or not SUITES[row["suite"]].in_paper:
            row["paper_model"] = None
        # a task has one target, so all its datasets have the same parameters
        places = ((row["model"], row["method"], row["settings"], name) for name in names)
        row["parameters"] = next(filter(None, map(parameters.get, places)), None)
        row["status"] = _status(row, names, sizes)
        if row["method"] in methods:
            rows.append(row | _compared(row, values, row["model"] in dummies))
    rows.sort(key=_place)
    frame = pd.DataFrame(rows, columns=[*_KEYS, *(form for value in values for form in value.forms)])
    failed = sum(len(run.failures) for run in runs.runs)
    failures = f" {failed} examples failed and are not counted (see failures.jsonl of their runs)." if failed else ""
    caption = (
        f"{note} Runs with the preset table1 and the baseline. The paper does not publish its parameters; ours are "
        "solved for its TTFT speedups. ±: half of the 95 % bootstrap interval over examples; both ends are in "
        "the CSV. Δ: measured minus paper, if every example of the task was run (no scores of random weights). "
        f"n: examples, with a note if only a part was run.{failures} unpaired: no baseline was run "
        "beside the method. -: the paper has no such model."
    )
    return Table(name, title, caption, frame, _cells(frame, values, results), keys=3)


def _place(row: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Sort keys: the paper's models first, tasks and methods as in the paper."""
    model = [*PAPER_MODELS, None].index(row["paper_model"])
    return model, row["model"], row["suite"], TASKS.index(row["task"]), list(_METHOD_NAMES).index(row["method"])


def _compared(line: Mapping[Any, Any], values: Sequence[_Value], is_random: bool) -> dict[str, float]:
    """The paper's numbers, and the differences to them of a task that was run as a whole."""
    compared = {}
    for value in values:
        paper = paper_values().get((line["paper_model"], line["task"], line["method"], value.name), np.nan)
        counts = line["status"] == "measured" and not (is_random and value.name == "score")
        difference = line[value.name] - paper if counts else np.nan
        compared |= {f"paper_{value.name}": paper, f"{value.name}_difference": difference}
    return compared


def _parameters(results: Results) -> dict[tuple[str, ...], str]:
    """{(model, method, settings, dataset): JSON of a preset's parameters there}."""
    return {
        (run.model, run.method, json.dumps(run.settings, sort_keys=True), dataset): json.dumps(
            settings_in(resolved), sort_keys=True
        )
        for run in results.runs
        for dataset, resolved in (run.identity.get("parameters") or {}).items()
    }


def _status(row: Mapping[Any, Any], names: Sequence[str], sizes: Mapping[str, int]) -> str:
    """How much of a task was run. names: its datasets. sizes: their numbers of examples, if a run has stored them."""
    size = sum(sizes.get(name, 0) for name in names)
    if row["datasets"] < len(names):
        return f"{row['datasets']} of {len(names)} datasets"
    return f"of {size}" if row["paper_model"] and row["examples"] < size else "measured"


def _cells(frame: pd.DataFrame, values: Sequence[_Value], results: Results) -> pd.DataFrame:
    counts: Any = frame.groupby([*SECTION, "method"])["settings"].transform("nunique")
    counted = zip(frame["examples"], frame["status"], strict=True)
    shown = frame.assign(
        method=frame["label"].where(counts > 1, frame["method"]),
        n=[str(number) if status == "measured" else f"{number} ({status})" for number, status in counted],
    )
    keys = [MODEL, Column("task", "task"), Column("method", "method"), Column("n", "n")]
    return cells(shown, [*keys, *(column for value in values for column in value.columns)], results)


# ---------------------------------------------------------------------------------------------- in the paper's shape

_TASK_NAMES = {
    "single_doc_qa": "Single-Document QA", "multi_doc_qa": "Multi-Document QA", "summarization": "Summarization",
    "few_shot": "Few-shot Learning", "synthetic": "Synthetic", "code": "Code Completion",
}  # fmt: skip
_METHOD_NAMES = {
    "baseline": "Baseline", "random_drop": "Random Token Drop", "static_pruning": "Static Token Pruning",
    "prompt_compression": "Prompt Compression", "lazy": "LazyLLM (Ours)",
}  # fmt: skip
MODEL_NAMES: dict[str | None, str] = {"llama2": "Llama 2 7B", "xgen": "XGen 7B"}


def table1_paper(results: Results) -> Table:
    """Table 1 as the paper prints it: 30 rows, and score and TTFT speedup of two models."""
    return _as_printed(table1(results), "Table 1", _TABLE1[:2], results)


def table2_paper(results: Results) -> Table:
    """Table 2 as the paper prints it: a row for each task, and two values of two models."""
    return _as_printed(table2(results), "Table 2", _TABLE2, results)


def _as_printed(table: Table, title: str, values: Sequence[_Value], results: Results) -> Table:
    """Two models side by side: the paper's, or the first two that were run if none of the paper's was."""
    key, names = ["task", "method"], ["model", "suite", "paper_model"]
    ablations = [is_ablation(json.loads(settings)) for settings in table.frame["settings"]]
    ran: Any = table.frame[~np.array(ablations, dtype=bool)]
    sides: Any = ran.drop_duplicates(names)[names].to_numpy().tolist()
    theirs = {column: [model, suite, column] for model, suite, column in reversed(sides) if column in PAPER_MODELS}
    if theirs or not sides:
        sides = [theirs.get(column, [column, "longbench", column]) for column in PAPER_MODELS]
    lines: Any = published(table.name)[key]
    cells: Any = pd.DataFrame({"Tasks": lines["task"].map(_TASK_NAMES), "Method": lines["method"].map(_METHOD_NAMES)})
    cells = cells if cells["Method"].nunique() > 1 else cells[["Tasks"]]
    keys = len(cells.columns)
    chosen = [(str(model), suite, column) for model, suite, column in sides[:2]]
    for (model, suite, column), value in product(chosen, values):
        rows = ran[(ran["model"] == model) & (ran["suite"] == suite)].drop_duplicates(key)
        rows = lines[key].merge(rows, "left", key).to_dict("records")
        paper = [paper_values().get((column, row["task"], row["method"], value.name), np.nan) for row in rows]
        lines = lines.assign(
            **{f"{model}_{value.name}": [row[value.name] for row in rows], f"{model}_paper_{value.name}": paper}
        )
        name = model_name({"model": model, "suite": suite}, results).replace(model, MODEL_NAMES.get(column, model))
        cells = cells.assign(
            **{f"{name}: {value.heading}": [_both(*pair, value) for pair in zip(rows, paper, strict=True)]}
        )
    others = sorted(set(ran["model"]) - {model for model, *_ in chosen})
    caption = (
        "Each cell: ours (the paper's); blank: not run, or not in the paper. *: only a part of the task was run. Means "
        f"over seeds. {table.title.partition(':')[0]} of all runs has intervals, numbers of examples and differences."
    ) + (f" Not here: {', '.join(others)}; `--where` chooses the runs." if others else "")
    return Table(f"{table.name}_paper", f"{title} as the paper prints it", caption, lines, cells, keys)


def _both(row: Mapping[Any, Any], paper: float, value: _Value) -> str:
    """`25.30 (25.59)`; either may be missing."""
    ours = "" if pd.isna(row[value.name]) else f"{row[value.name]:.{value.digits}f}"
    ours += "*" if ours and row["status"] != "measured" else ""
    return f"{ours} ({paper:.{value.digits}f})".strip() if np.isfinite(paper) else ours


# ------------------------------------------------------------------------------------------------------- other methods

_MEASURED = forms("measured_score", "measured_baseline_score", "measured_ttft_speedup")
_CLAIMS = (
    Column("name", "method"),
    Column("setting", "setting"),
    MODEL,
    Column("score", "score", 2),
    Column("full_score", "full", 2),
    Column("ttft_speedup", "TTFT speedup", 2),
    Column("measured_score", "score, ours", 2, missing="unpaired"),
    Column("measured_baseline_score", "full, ours", 2, missing="unpaired"),
    Column("measured_ttft_speedup", "TTFT speedup, ours", 2, missing="unpaired"),
    Column("scale", "of"),
    Column("differs", "why they differ"),
)


def claims(results: Results) -> Table:
    """Published numbers for each model that was run on LongBench, with ours if these settings were run."""
    whole: Any = overall(results)
    measured = [row for row in whole.to_dict("records") if SUITES[row["suite"]].in_paper]
    models = {_name_of(row) for row in measured}
    claimed: Any = pd.read_csv(PUBLISHED / "field.csv")
    rows = []
    for claim in claimed[claimed["model"].isin(models)].to_dict("records"):
        same: Any = [row for row in measured if _is_of(claim, row)]
        ours = max(same, key=lambda row: row["examples"], default={})
        rows.append(claim | {form: ours.get(form.removeprefix("measured_"), np.nan) for form in _MEASURED})
    frame: Any = pd.DataFrame(rows, columns=[*claimed.columns, *_MEASURED])
    settings = [", ".join(f"{key}={value}" for key, value in json.loads(text).items()) for text in frame["settings"]]
    table = cells(frame.assign(name=[place_of(name)[1] for name in frame["method"]], setting=settings), _CLAIMS)
    table.loc[frame["measured_score"].isna(), ["score, ours", "full, ours", "TTFT speedup, ours"]] = "no run"
    caption = (
        "Numbers as published, each measured with its authors' own harness. full: the unpruned model there; for the "
        "same model it differs by 13 points between papers. Ours: the mean over LongBench's tasks with the same "
        "settings, and the paired baseline. why they differ: what the published run did differently. -: not published."
    )
    return Table("claims", "What their authors report", caption, frame, table, keys=3)


def _name_of(row: Mapping[str, Any]) -> str:
    """The model's name as papers write it, without the publisher's prefix."""
    return row["model"].removeprefix("Meta-")


def _is_of(claim: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether a measured row has the claim's model and settings."""
    settings = json.loads(row["settings"])
    if settings.get("sound"):  # our own variant
        return False
    same = all(settings.get(key) == value for key, value in json.loads(claim["settings"]).items())
    return same and claim["method"] == row["method"] and _name_of(row) == claim["model"]
