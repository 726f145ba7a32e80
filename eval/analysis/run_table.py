"""The table of a run: its arms by task, beside the baseline of the same visits (numbers:
`eval.store.summary`).
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.columns import kind_of, range_of, ranges_in, unsolved
from eval.analysis.table import (
    EXAMPLES,
    FIDELITY,
    KL,
    UNFORCED,
    Column,
    Table,
    cells,
    forms,
    has_values,
)
from eval.benchmarks.datasets import DATASETS, format_value
from eval.store.record import Visit
from eval.store.results import Results
from eval.store.runs import StoredArm, StoredRun, counted
from eval.store.summary import NO_INTERVAL, VALUES, summarise
from lazyllm.machine import accelerator
from lazyllm.methods import Baseline, Sparse, by_name, settings_of

MANY = 12  # settings: with more, a terminal shows their means over tasks only
# The most important come first: a narrow terminal shows as many as it has room for
SHOWN = (
    Column("score", "score", 2),
    Column("ttft_speedup", "TTFT speedup", 2),
    *(replace(column, interval=False) for column in (FIDELITY[0], KL)),
    Column("pct_prompt_tokens_computed", "% tokens computed", 1),
    *(replace(column, interval=False) for column in FIDELITY[1:]),
    Column("equal_length_speedup", "generation speedup", 2),
    Column("ttft_s", "TTFT, ms", 1, scale=1e-3, interval=False),
    Column("prefill_mfu", "MFU, %", 1, interval=False),
    Column("generation_speedup", "whole-answer speedup", 2),
)
# Of prompts without a score, which measure time and memory
SHOWN_OF_SPEED = (
    Column("ttft_s", "TTFT, ms", 1, scale=1e-3, interval=False),
    Column("ttft_speedup", "TTFT speedup", 2),
    Column("ideal_ttft_speedup", "ideal", 2, interval=False),
    Column("share_of_ideal", "share of ideal", 2, interval=False),
    Column("prefill_mfu", "MFU, %", 1, interval=False),
    Column("step_ratio", "step / baseline's", 2, interval=False),
    Column("answer_ratio", "answer / baseline's", 2, interval=False),
    Column("revived_tokens", "revived", 1, interval=False),
    Column("cache_ratio", "stored / baseline's", 2, interval=False),
    Column("peak_memory_bytes", "peak, GB", 2, scale=1e9, interval=False),
)
_OF_FAILED = (Column("failed", "failed"), Column("score_failed_as_zero", "score, failed as 0", 2))
_COLUMNS = [
    "run", "name", "kind", "task", "method", "examples",
    *(column.name for column in _OF_FAILED), *forms(*VALUES),
]  # fmt: skip


def run_table(results: Results, title: str) -> Table:
    """The arms of each run by task; each task follows its datasets. Seeds of one setting are one
    row.

    frame: run (its folder's name), name, kind ("dataset", "task", "all", or "length": a range of
    prompt tokens, if there are several), task, method (the arm, for people), examples, failed
    (answers that are missing; no other column counts them), score_failed_as_zero (the score if they
    count as 0), and the columns of `eval.store.summary.by_task`.
    """
    rows = [row for run in results.runs for row in _rows(run)]
    frame: Any = pd.DataFrame(rows, columns=_COLUMNS)
    several = [Column("shown_run", "run")] if len(results.runs) > 1 else []
    failed = [*_OF_FAILED] if frame["failed"].any() else []
    names = {
        (run.folder.name, name): _with_speedup(run, name)
        for run in results.runs
        for name in arm_groups(run)
    }
    display = _with_ratios(frame).assign(
        shown_run=frame["run"].map(_run_names(results.runs)),
        shown_method=[
            names[key] for key in frame[["run", "method"]].itertuples(index=False, name=None)
        ],
        shown_name=np.where(frame["kind"] == "dataset", frame["name"], "**" + frame["name"] + "**"),
    )
    columns = [
        *several,
        Column("shown_name", "**task**, dataset"),
        Column("shown_method", "method"),
    ]
    first, *others = shown_in(display)
    text = cells(display, [*columns, EXAMPLES, first, *failed, *others])
    is_long = frame.groupby(["run", "name"], sort=False)["method"].nunique().max() > MANY
    brief: Any = text[_whole(frame)] if is_long else None
    return Table(
        "summary", title, _caption(results, frame), frame, text, keys=len(columns), brief=brief
    )


def shown_in(values: Any) -> list[Column]:
    """The columns of `SHOWN` that any row has, the score first; without any score those of
    `SHOWN_OF_SPEED`.

    values: a frame of these columns.
    """
    columns = SHOWN if has_values(values, "score") or values.empty else SHOWN_OF_SPEED
    return [
        column for column in columns if column.name == "score" or has_values(values, column.name)
    ]


def _with_ratios(frame: Any) -> Any:
    """With the columns of `SHOWN_OF_SPEED` that are ratios of others."""
    return frame.assign(
        share_of_ideal=frame["ttft_speedup"] / frame["ideal_ttft_speedup"],
        step_ratio=1 / frame["step_speedup"],
        answer_ratio=1 / frame["generation_speedup"],
    )


def _run_names(runs: Sequence[StoredRun]) -> dict[str, str]:
    """{folder's name: it, with the run's seed if the runs differ in it}."""
    seeds = {run.folder.name: run.identity["seed"] for run in runs}
    is_shown = len({*seeds.values()}) > 1
    return {name: f"{name}, seed {seed}" if is_shown else name for name, seed in seeds.items()}


def _whole(frame: Any) -> Any:
    """Which rows are of a whole run: the mean over its tasks, or its only task."""
    several = frame["run"].isin(frame.loc[frame["kind"] == "all", "run"])
    return frame["kind"].eq(several.map({True: "all", False: "task"}))


def run_json(table: Table, about: Mapping[str, Any]) -> str:
    """A run's table at full precision, after `about`. A value: mean and both ends of its
    interval, null if missing.
    """
    rows = table.frame.to_dict("records")
    for row in rows:
        for name in VALUES:
            mean, low, high = (row.pop(form) for form in forms(name))
            row[name] = None if pd.isna(mean) else {"mean": mean, "low": low, "high": high}
    text = json.dumps({"rows": rows, **about}, sort_keys=True, default=str)
    # NaN is no JSON
    return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=2) + "\n"


def row_name(arm: StoredArm) -> str:
    """An arm's name in tables of its run, without its seed."""
    return arm.name.removesuffix(f" seed {arm.seed}")


def _with_speedup(run: StoredRun, name: str) -> str:
    """An arm's name and the speedup that it is solved for, unless the name has it."""
    speedup = run.arms[arm_groups(run)[name][0]].speedup
    text = f"{speedup:g}x" if isinstance(speedup, float | int) else str(speedup or "")
    return name if text in name else f"{name} {text}"


def arm_groups(run: StoredRun) -> dict[str, list[str]]:
    """{`row_name`: labels} of a run's arms; those that differ in the seed only are one."""
    groups: dict[str, list[str]] = {}
    for arm in run.arms.values():
        groups.setdefault(row_name(arm), []).append(arm.name)
    return groups


def _rows(run: StoredRun) -> list[dict[str, Any]]:
    """The rows of one run, by dataset or task, then by arm."""
    frame: Any = Results([run]).frame
    frame = frame.assign(range=range_of(frame["prompt_tokens"]))
    by_name: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for name, labels in arm_groups(run).items():
        rows: Any = frame[frame["arm"].isin(labels) & frame["counts"]]
        if rows.empty:
            continue
        for row in _with_failures(
            summarise(rows, frame), rows, _failures(run, labels)
        ) + _by_length(rows, frame):
            row |= {"run": run.folder.name, "method": name}
            by_name.setdefault((row["kind"], row["name"]), []).append(row)
    one_task = sum(kind == "task" for kind, _ in by_name) == 1
    datasets = Counter(DATASETS[name].task for kind, name in by_name if kind == "dataset")
    return [
        row
        for (kind, name), rows in by_name.items()
        for row in rows
        # a task's only dataset has the task's numbers, and one task those of the mean
        if not (kind == "all" and one_task)
        and not (kind == "dataset" and datasets[DATASETS[name].task] == 1)
    ]


def _failures(run: StoredRun, labels: Sequence[str]) -> Counter[str]:
    """{dataset: how many answers of these arms failed}, among planned examples."""
    failed = [(dataset, example) for dataset, example, arm in run.failed if arm in labels]
    return Counter(key[0] for key in failed if run.planned is None or key in run.planned)


def _with_failures(
    rows: list[dict[str, Any]], answers: Any, failures: Counter[str]
) -> list[dict[str, Any]]:
    """The rows of an arm with `kind`, and how many of its answers failed.

    answers: rows of the frame. failures: by dataset. Both are of all its seeds.
    """
    zeroed: dict[str, float] = dict.fromkeys(failures, 0.0)
    for name, scores in answers.groupby("dataset")["score"]:
        zeroed[name] = round(scores.sum() / (len(scores) + failures[name]), 2)
    by_task: dict[str, list[float]] = {}
    for name, score in zeroed.items():
        by_task.setdefault(DATASETS[name].task, []).append(score)
    zeroed |= {task: float(np.mean(scores)) for task, scores in by_task.items()}
    zeroed["all"] = float(np.mean([zeroed[task] for task in by_task]))
    for row in rows:
        within = [
            count
            for name, count in failures.items()
            if row["name"] in (name, DATASETS[name].task, "all")
        ]
        row |= {
            "kind": row["level"],
            "failed": sum(within),
            "score_failed_as_zero": zeroed[row["name"]],
        }
    rows[-1]["name"] = "mean over tasks"
    return rows


def _by_length(rows: Any, among: Any) -> list[dict[str, Any]]:
    """A row for each range of prompt tokens; none if all (`among`) are in
    one. Without failures.
    """
    if len(ranges_in(among["range"])) < 2:
        return []
    more = {"kind": "length", "failed": 0, "score_failed_as_zero": np.nan}
    return [
        summarise(rows[rows["range"] == name], among)[-1] | more | {"name": f"{name} prompt tokens"}
        for name in ranges_in(rows["range"])
    ]


def _caption(results: Results, frame: Any) -> str:
    """Two sentences about the numbers, then one line for each warning or note about these runs."""
    scores = "Scores 0 to 100. " if has_values(frame, "score") else "Random tokens: no score. "
    lines = [
        f"{scores}{NO_INTERVAL.capitalize()} have no interval.",
        _explain_speedups(frame),
        *([f"{UNFORCED}."] if is_unforced(frame) else []),
        *filter(None, [unsolved(results.frame)]),
    ]
    lines += list(_hardware_notes(results.runs))
    prompts = {(run.folder, *visit.key): visit for run in results.runs for visit in run.visits}
    cut = sum(visit.prompt_tokens < visit.uncut_tokens for visit in prompts.values())
    if cut:
        share = f"{cut} of {counted(len(prompts), 'prompt')}"
        lines.append(
            f"Longer than model.max_prompt_tokens: {share}, whose middle is cut out, as in "
            "LongBench."
        )
    lines += [
        note for run in results.runs for note in _notes(run, _where(results, run.folder.name))
    ]
    for row in frame[_whole(frame) & frame["failed"].gt(0)].to_dict("records"):
        lines.append(
            f"{_where(results, row['run'])}{row['method']}: {counted(row['failed'], 'answer')} "
            f"failed, left out here; counted as 0, the score is {row['score_failed_as_zero']:.2f}."
        )
    for run in results.runs:
        answered, where = set[str]().union(*run.answered.values()), _where(results, run.folder.name)
        for name, labels in arm_groups(run).items():
            count = _failures(run, labels).total()
            if count and answered.isdisjoint(labels):
                lines.append(
                    f"{where}{name}: no answer, so it has no row: {counted(count, 'answer')} "
                    "failed."
                )
    return "\n".join(lines)


def _notes(run: StoredRun, where: str) -> Iterator[str]:
    """Lines about answers in another way, and those that say nothing of a method: it left nothing
    out, or no thought came to its end."""
    for name, labels in arm_groups(run).items():
        answered = [
            (visit, label) for visit in run.visits for label in labels if label in visit.answers
        ]
        arm = run.arms[labels[0]]
        prompt_count = len({visit.key for visit, _ in answered})
        whole = {visit.key for visit, label in answered if _is_whole_prompt(visit, label)}
        if whole and _drops_tokens(arm):
            yield (
                f"{where}{name} kept all tokens of {len(whole)} of "
                f"{counted(prompt_count, 'prompt')}{_target_of(arm)}."
            )
        dense = {
            visit.key
            for visit, label in answered
            if _is_dense(visit, label, run.identity["baseline"])
        }
        if dense and _is_sparse(arm):
            yield (
                f"{where}{name} skipped no attention in {len(dense)} of "
                f"{counted(prompt_count, 'prompt')}."
            )
        thoughts = [
            visit.answers[label].text
            for visit, label in answered
            if run.about["config"]["model"].get("thinking_tokens")
            and DATASETS[visit.dataset].chat_wrap
        ]
        if count := thoughts.count(""):
            of = counted(len(thoughts), "answer")
            yield (
                f"{where}{name}: no end of thought (</think>), or no text after it, in {count} of "
                f"{of}."
            )


def _target_of(arm: StoredArm) -> str:
    """` (keep=1024)`: the parameter that says how many tokens stay; "" if the method has no such
    one.
    """
    kind = by_name(arm.method)
    name = kind.target_parameter or next(iter(kind.keep_all), None)
    return (
        ""
        if name is None
        else f" ({name}={format_value(arm.values.get(name, settings_of(kind)[name]))})"
    )


def _drops_tokens(arm: StoredArm) -> bool:
    """Whether the arm's method is meant to leave prompt tokens out."""
    kind = kind_of(arm.method)
    return not (kind is None or kind is Baseline or issubclass(kind, Sparse))


def _is_sparse(arm: StoredArm) -> bool:
    """Whether the arm's method is meant to leave attention out."""
    kind = kind_of(arm.method)
    return kind is not None and issubclass(kind, Sparse)


def _is_dense(visit: Visit, label: str, baseline: str | None) -> bool:
    """Whether an arm's prefill took the FLOPs of the baseline's; False if the visit has no
    baseline.
    """
    costs = [visit.answers[name] for name in (label, baseline) if name in visit.answers]
    return len(costs) == 2 and len({cost.prefill_flops for cost in costs}) == 1


def _is_whole_prompt(visit: Visit, label: str) -> bool:
    """Whether an arm's prefill computed all tokens of the visit's prompt in every layer."""
    cost = visit.answers[label]
    return min(cost.computed[0]) >= visit.prompt_tokens


def is_unforced(values: Any) -> bool:
    """Whether the first token's KL was measured alone."""
    return bool(values["kl"].notna().any() and values["answer_kl"].isna().all())


def _explain_speedups(frame: Any) -> str:
    """What the speedups compare."""
    if frame["ttft_speedup"].isna().all():
        return "No speedup: no baseline was measured beside the arms."
    if frame["equal_length_speedup"].isna().all():
        return (
            "Speedups compare answers of the same visit; answers of batches have no generation "
            "speedup."
        )
    return (
        "Speedups compare answers of the same visit; the generation speedup ends at the last token "
        "of the shorter answer, the whole-answer speedup at the last token of each."
    )


def _where(results: Results, folder: str) -> str:
    """What tells an arm of this run from the same arm of another run: nothing for a single run."""
    return f"{folder}, " if len(results.runs) > 1 else ""


def _hardware_notes(runs: Sequence[StoredRun]) -> Iterator[str]:
    """Lines about the baselines' speed: the attention kernels that ran, what MFU is, and what
    flatters speedups.
    """
    if kernels := ", ".join(dict.fromkeys(kernel for run in runs for kernel in run.kernels)):
        yield f"Attention kernel of the baseline, by its operators: {kernels}."
    for clock in dict.fromkeys(run.identity["clock"] for run in runs if "clock" in run.identity):
        yield f"Times: {clock}."
    timed: Any = [run for run in runs if bool(run.rows["prefill_mfu"].notna().to_numpy().any())]
    for device in dict.fromkeys(run.device for run in timed):
        peak = (
            "its maker's dense peak"
            if accelerator(device)
            else "the rate of a matrix product measured here"
        )
        yield f"MFU: model FLOPs utilisation of the prefill, FLOPs / TTFT over {peak} ({device})."
    for sentence in dict.fromkeys(sentence for run in runs for sentence in run.warnings):
        yield f"Caution: {sentence}."
