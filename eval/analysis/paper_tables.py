"""Measured values beside the paper's: its Tables 1 and 2."""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from eval.analysis.columns import BASELINE, PAPER_SPEEDUP, SECTION, STUDIED
from eval.analysis.table import (
    FIDELITY,
    KL,
    MODEL,
    Cell,
    Column,
    Rows,
    Table,
    as_table,
    cells,
    forms,
    measured,
    model_name,
    random_models,
)
from eval.benchmarks import SUITES
from eval.benchmarks.datasets import DATASETS, TASKS
from eval.store.results import Results
from eval.store.runs import canonical_json, counted, is_ablation

PUBLISHED = Path(__file__).parent / "published"
MODEL_NAMES: dict[str | None, str] = {"llama2": "Llama 2 7B", "xgen": "XGen 7B"}
PAPER_MODELS = ("llama2", "xgen")
# Captions
_SOLVED = (
    "The baseline and arms with the preset table1: the paper does not publish its parameters; ours "
    "are solved for its TTFT speedups."
)
AS_PRINTED = "Ours (the paper's); -: not run; n: examples; *: only a part of the task was run."
_KEYS = [
    "model", "suite", "paper_model", "task", "method", "settings", "label", "parameters", "status",
    "examples",
    "datasets", "seeds", "score_seed_std",
]  # fmt: skip
# {value, a column of `by_task`: its name in the paper's CSV after `<model>_`}
_PAPER = {
    "score": "score", "ttft_speedup": "ttft_speedup", "equal_length_speedup": "generation_speedup",
    "pct_prompt_tokens_computed": "prompt_tokens_computed_pct",
}  # fmt: skip
_TABLE1 = (
    Column("score", "score", 2, missing="unpaired"),
    Column("ttft_speedup", "TTFT speedup", 2, missing="unpaired"),
    KL,
    *FIDELITY,
)
_TABLE2 = (
    Column("pct_prompt_tokens_computed", "% tokens computed", 2, missing="unpaired"),
    Column("equal_length_speedup", "generation speedup", 2, missing="unpaired"),
    Column("generation_speedup", "whole-answer speedup", 2, missing="unpaired"),
)


@cache
def paper_values() -> dict[tuple[str, str, str, str], float]:
    """{(llama2 or xgen, task, method, value): the paper's number}; value: a column of `by_task`."""
    return {
        (model, row["task"], row.get("method", STUDIED), value): float(row[f"{model}_{column}"])
        for name in ("table1", "table2")
        for row in pd.read_csv(PUBLISHED / f"{name}.csv").to_dict("records")
        for model in PAPER_MODELS
        for value, column in _PAPER.items()
        if f"{model}_{column}" in row
    }


@as_table(
    70,
    title="Table 1: score and TTFT speedup beside the paper's",
    caption=_SOLVED,
    notes=(
        "Scores 0 to 100, mean over seeds; their standard deviation is in the CSV. Prompt "
        "compression keeps half of its context, as no share has the paper's speedup. Δ: measured "
        "minus paper, if every example of the task was run (no scores of random weights). n: "
        "examples, with a note if only a part was run.{failures} -: the paper has no such model."
    ),
    command="python run.py -m experiment=table1 model=llama2,xgen",
)
def table1(results: Results) -> Rows:
    """Score and TTFT speedup by model, task and method: measured, the paper's, the difference."""
    return _with_published(results, _TABLE1)


@as_table(
    80,
    title="Table 2: prompt tokens computed and generation speedup of LazyLLM, beside the paper's",
    caption=_SOLVED,
    notes=(
        "% tokens computed: by the end of generation. Generation speedup: to the last token of the "
        "shorter answer; whole-answer speedup: to the last token of each. Δ: measured minus paper, "
        "if every example of the task was run (no scores of random weights). n: examples, with a "
        "note if only a part was run.{failures} -: the paper has no such model."
    ),
    command="python run.py -m experiment=table2 model=llama2,xgen",
)
def table2(results: Results) -> Rows:
    """Share of prompt tokens computed and generation speedup of LazyLLM by model and task, with
    the paper's.
    """
    return _with_published(results, _TABLE2)


def _measured(results: Results, methods: Collection[str]) -> list[dict[str, Any]]:
    """Collect the means over tasks of the methods, with their parameters and status."""
    parameters = {
        (run.model, arm.method, arm.settings, dataset): canonical_json(resolved)
        for run in results.runs
        for arm in run.arms.values()
        for dataset, resolved in (run.identity["arms"][arm.name].get("parameters") or {}).items()
    }
    sizes = {
        name: size for run in results.runs for name, size in run.about.get("examples", {}).items()
    }
    means: Any = results.by_task
    is_preset = means["speedup"] == PAPER_SPEEDUP
    # the baseline stands next to the arms that were solved for the paper's speedups, or alone
    has_preset = is_preset.groupby(means["model"]).transform("any")
    is_alone = means.groupby("model")["method"].transform("nunique") == 1
    is_shown = is_preset | ((means["label"] == BASELINE) & (has_preset | is_alone))
    is_asked = (means["level"] == "task") & means["method"].isin(methods)
    rows = []
    for row in means[is_asked & is_shown.astype(bool)].to_dict("records"):
        task = (row["task"], row["suite"])
        names = [name for name, of in DATASETS.items() if (of.task, of.suite) == task]
        if row["paper_model"] not in PAPER_MODELS or SUITES[row["suite"]].published is None:
            row["paper_model"] = None
        # a task has one target, so all its datasets have the same parameters
        places = ((row["model"], row["method"], row["settings"], name) for name in names)
        row["parameters"] = next(filter(None, map(parameters.get, places)), None)
        examples = sum(sizes.get(name, 0) for name in names)  # 0 if no run has stored them
        if row["datasets"] < len(names):
            row["status"] = f"{row['datasets']} of {len(names)} datasets"
        else:
            row["status"] = "measured" if row["examples"] >= examples else f"of {examples}"
        rows.append(row)
    return rows


def _with_published(results: Results, values: Sequence[Column]) -> Rows:
    both = [value for value in values if value.name in _PAPER]
    published: Any = (
        pd.Series(paper_values()).unstack().rename_axis(["paper_model", "task", "method"])
    )
    published = (
        published[[value.name for value in both]]
        .dropna(how="all")
        .add_prefix("paper_")
        .reset_index()
    )
    rows = _measured(results, set(published["method"]))
    columns = [*_KEYS, *forms(*(value.name for value in values))]
    frame: Any = pd.DataFrame(rows, columns=columns).merge(
        published, "left", ["paper_model", "task", "method"]
    )
    has_no_score = frame["model"].isin(random_models(results))
    for value in both:
        is_whole = frame["status"].eq("measured") & ~(has_no_score & (value.name == "score"))
        difference = frame[value.name] - frame[f"paper_{value.name}"]
        frame[f"{value.name}_difference"] = difference.where(is_whole)
        place = columns.index(f"{value.name}_high") + 1
        columns[place:place] = [f"paper_{value.name}", f"{value.name}_difference"]
    # the paper's models first, tasks and methods as in the paper
    order = {name: number for number, name in enumerate((*TASKS, *_METHOD_NAMES))}
    frame = frame.sort_values(
        ["paper_model", *SECTION, "task", "method"],
        key=lambda names: names.map(order) if names.name in ("task", "method") else names,
        ignore_index=True,
    )[columns]
    failed = sum(
        arm.method == BASELINE or arm.speedup == PAPER_SPEEDUP
        for run in results.runs
        for arm in (run.arms[label] for _, _, label in run.failed)
    )
    failures = f" Failed, not counted: {counted(failed, 'answer')}." if failed else ""
    return Rows(frame, _cells(frame, values, results), keys=3, values={"failures": failures})


def _cells(frame: pd.DataFrame, values: Sequence[Column], results: Results) -> pd.DataFrame:
    counts: Any = frame.groupby([*SECTION, "method"])["settings"].transform("nunique")
    sizes = zip(frame["examples"], frame["status"], strict=True)
    display = frame.assign(
        method=frame["label"].where(counts > 1, frame["method"]),
        n=[
            str(number) if status == "measured" else f"{number} ({status})"
            for number, status in sizes
        ],
    )
    columns = [
        MODEL,
        Column("task", "task"),
        Column("method", "method"),
        Column("n", "n", sorted_by="examples"),
    ]
    for value in measured(values, frame):
        columns.append(value)
        if value.name in _PAPER:
            columns.append(Column(f"paper_{value.name}", f"{value.heading}, paper", value.digits))
            columns.append(
                Column(f"{value.name}_difference", f"{value.heading}, Δ", value.digits, sign="+")
            )
    return cells(display, columns, results)


TASK_NAMES = {
    "single_doc_qa": "Single-Document QA", "multi_doc_qa": "Multi-Document QA",
    "summarization": "Summarization",
    "few_shot": "Few-shot Learning", "synthetic": "Synthetic", "code": "Code Completion",
}  # fmt: skip
_METHOD_NAMES = {
    "baseline": "Baseline", "random_drop": "Random Token Drop",
    "static_pruning": "Static Token Pruning",
    "prompt_compression": "Prompt Compression", "lazy": "LazyLLM",
}  # fmt: skip


@as_table(
    50,
    title="Table 1 as the paper prints it",
    caption=AS_PRINTED,
    notes=(
        "Means over seeds. Our parameters are solved for the paper's TTFT speedups, as it does not "
        "publish its own: scores compare. Table 1 of all runs has intervals and differences."
    ),
    command="python run.py -m experiment=table1 model=llama2,xgen",
)
def table1_paper(results: Results) -> Rows:
    """Table 1 as the paper prints it: 30 rows, with score and TTFT speedup of each model."""
    return _as_printed(table1(results), _TABLE1[:2], results)


@as_table(
    60,
    title="Table 2 as the paper prints it",
    caption=AS_PRINTED,
    notes=(
        "Means over seeds. Parameters are those of Table 1, solved for its TTFT speedups. Table 2 "
        "of all runs has intervals and differences."
    ),
    command="python run.py -m experiment=table2 model=llama2,xgen",
)
def table2_paper(results: Results) -> Rows:
    """Table 2 as the paper prints it: a row for each task, with two values of each model."""
    return _as_printed(table2(results), _TABLE2[:2], results)


def _as_printed(table: Table, values: Sequence[Column], results: Results) -> Rows:
    """The paper's two models side by side, ours before its numbers, then each other model that
    was run.
    """
    key = ["task", "method"]
    ablations = table.frame["settings"].map(json.loads).map(is_ablation)
    ran: Any = table.frame[~ablations.astype(bool)]
    first = PAPER_MODELS[0], values[0].name  # each value has the same lines
    places = [
        (task, method) for model, task, method, value in paper_values() if (model, value) == first
    ]
    if ran[ran["method"] != BASELINE].empty:  # the paper's numbers alone are no table of these runs
        places = []
    lines: Any = pd.DataFrame(places, columns=key)
    texts = {"Tasks": lines["task"].map(TASK_NAMES), "Method": lines["method"].map(_METHOD_NAMES)}
    texts = texts if texts["Method"].nunique() > 1 else {"Tasks": texts["Tasks"]}
    keys = len(texts)
    sides: list[tuple[str, str, Any]] = [
        (MODEL_NAMES[column], column, ran[ran["paper_model"] == column]) for column in PAPER_MODELS
    ]
    others = ran[~ran["paper_model"].isin(PAPER_MODELS)].groupby(["model", "suite"], sort=False)
    for (model, suite), rows in others:
        sides.append((model_name({"model": model, "suite": suite}, results), "", rows))
    for name, column, ours in sides:
        rows = lines[key].merge(ours.drop_duplicates(key), "left", key).to_dict("records")
        if len(ours):
            lines[f"{name}: n"] = [row["examples"] for row in rows]
            texts[f"{name}: n"] = [
                "-" if pd.isna(row["examples"]) else f"{row['examples']:.0f}" for row in rows
            ]
        for value in values:
            paper = [
                paper_values().get((column, row["task"], row["method"], value.name)) for row in rows
            ]
            lines[f"{name}: {value.name}"] = [row[value.name] for row in rows]
            if column:
                lines[f"{name}: paper_{value.name}"] = paper
            texts[f"{name}: {value.heading}"] = [
                _both(*pair, value) for pair in zip(rows, paper, strict=True)
            ]
    return Rows(lines, pd.DataFrame(texts), keys)


def _both(row: Mapping[Any, Any], paper: float | None, value: Column) -> Cell:
    """`25.30 (25.59)`, with `-` for a value that was not measured. paper: None if the paper has
    no such model.
    """
    is_missing = pd.isna(row[value.name])
    ours = "-" if is_missing else f"{row[value.name]:.{value.digits}f}"
    ours += "" if is_missing or row["status"] == "measured" else "*"
    text = ours if paper is None else f"{ours} ({paper:.{value.digits}f})"
    return Cell(text, None if is_missing else row[value.name])
