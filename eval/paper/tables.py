"""The paper's Tables 1 and 2 beside what was measured, and the tables that its reviewers asked for.

Every table is made from stored runs alone and joins by key: model, suite, method, settings, task.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks import SUITES
from eval.benchmarks.datasets import DATASETS, TASKS
from eval.paper.aggregate import by_task, with_baselines
from eval.paper.table import Table, cell
from eval.store.frame import StoredRun, as_frame, label_of

METHODS = ("baseline", "random_drop", "static_pruning", "prompt_compression", "lazy")  # in Table 1's order
PAPER_MODELS = ("llama2", "xgen")
_FOLDER = Path(__file__).parent / "published"
_ORDER = {method: number for number, method in enumerate(METHODS)}
_SECTION = ["model", "suite"]


@dataclass(frozen=True)
class _Value:
    """A column that the paper has too. name: as in `by_task`. paper: what follows `<model>_` in the paper's CSV."""

    name: str
    paper: str
    heading: str
    digits: int


_TABLE1 = (_Value("score", "score", "score", 2), _Value("ttft_speedup", "ttft_speedup", "TTFT speedup", 2))
_TABLE2 = (
    _Value("pct_computed", "prompt_tokens_computed_pct", "% tokens computed", 2),
    _Value("generation_speedup", "generation_speedup", "generation speedup", 2),
)


@cache
def paper_values() -> dict[tuple[str, str, str, str], float]:
    """{(llama2 or xgen, task, method, value): the paper's number}; value: a column of `by_task`."""
    found = {}
    for name, values in (("table1", _TABLE1), ("table2", _TABLE2)):
        for row in pd.read_csv(_FOLDER / f"{name}.csv").to_dict("records"):
            for model in PAPER_MODELS:
                for value in values:
                    # Table 2 is LazyLLM's alone
                    key = model, row["task"], row.get("method", "lazy"), value.name
                    found[key] = float(row[f"{model}_{value.paper}"])
    return found


# ----------------------------------------------------------------------------------------------------- Tables 1 and 2


def table1(runs: Sequence[StoredRun]) -> Table:
    """Score and TTFT speedup by model, task and method: measured, the paper's, the difference."""
    return _beside_paper(
        runs, "table1", "Table 1: score and TTFT speedup beside the paper's", METHODS, _TABLE1,
        "Scores 0 to 100; random_drop: the mean over its seeds, whose standard deviation is in the CSV.",
    )  # fmt: skip


def table2(runs: Sequence[StoredRun]) -> Table:
    """Share of prompt tokens computed and generation speedup of LazyLLM by model and task, beside the paper's."""
    return _beside_paper(
        runs, "table2", "Table 2: prompt tokens computed and generation speedup of LazyLLM, beside the paper's",
        ("lazy",), _TABLE2,
        "% tokens computed: by the end of generation, the mean over layers. Whole answers are compared, which may "
        "differ in length.",
    )  # fmt: skip


def is_table1_preset(settings: dict[str, Any]) -> bool:
    """Whether a run has the parameters that are to reach the speedups of the paper's Table 1."""
    return "table1" in (settings.get("schedule"), settings.get("keep"))


def _beside_paper(
    runs: Sequence[StoredRun],
    name: str,
    title: str,
    methods: Sequence[str],
    values: Sequence[_Value],
    note: str,
) -> Table:
    chosen = [run for run in runs if run.method == "baseline" or is_table1_preset(run.settings)]
    measured: Any = by_task(as_frame(chosen))
    measured = measured[measured["level"] == "task"]
    parameters, sizes, dummies = _parameters(chosen), _sizes(chosen), _dummies(runs)
    rows = []
    for model, column, suite in _sections(runs):
        section = measured[(measured["model"] == model) & (measured["suite"] == suite)]
        for task in TASKS:
            for method in methods:
                found = section[(section["task"] == task) & (section["method"] == method)].to_dict("records")
                for one in found or [{}]:
                    key = {"model": model, "suite": suite, "paper_model": column, "task": task, "method": method}
                    rows.append(key | _compared(key, one, values, parameters, sizes, model in dummies))
    columns = [*_KEYS, *(f"{before}{one.name}{after}" for one in values for before, after in _FORMS)]
    frame = pd.DataFrame(rows, columns=columns)
    caption = (
        f"{note} Runs with the preset table1 (parameters of ours, solved for the paper's TTFT speedups: it does not "
        "publish its own), and the baseline. ±: half of the 95 % bootstrap interval over examples; both ends are in "
        "the CSV. Δ: measured less the paper's, for tasks of which every example was run (no scores of random "
        f"weights). n: examples; a task that was run in part says so.{_failed(chosen)} unpaired: no baseline was run "
        "beside the method. -: the paper has no such model."
    )
    return Table(name, title, caption, frame, _beside_paper_cells(frame, values, dummies), keys=3)


_KEYS = [
    "model", "suite", "paper_model", "task", "method", "settings", "label", "parameters", "status", "examples",
    "datasets", "seeds", "score_seed_std",
]  # fmt: skip
_FORMS = (("", ""), ("", "_low"), ("", "_high"), ("paper_", ""), ("", "_difference"))


def _sections(runs: Sequence[StoredRun]) -> list[tuple[str, str | None, str]]:
    """(model, the paper's column, suite): the paper's models on LongBench, run or not, then what else was run."""
    there = {
        (run.model, run.paper_model if SUITES[suite].in_paper else None, suite)
        for run in runs
        for suite in {DATASETS[name].suite for name in run.datasets}
    }
    of_paper = [
        section
        for column in PAPER_MODELS
        for section in sorted(one for one in there if one[1] == column) or [(column, column, "longbench")]
    ]
    return [*of_paper, *sorted((one for one in there if one[1] is None), key=lambda one: (one[0], one[2]))]


def _parameters(runs: Sequence[StoredRun]) -> dict[tuple[str, str, str, str], str]:
    """{(model, method, settings, dataset): what a preset stood for there}, as JSON."""
    return {
        (run.model, run.method, json.dumps(run.settings, sort_keys=True), dataset): json.dumps(
            {key: value for key, value in resolved.items() if key not in ("name", "seed")}, sort_keys=True
        )
        for run in runs
        for dataset, resolved in (run.identity.get("parameters") or {}).items()
    }


def _sizes(runs: Sequence[StoredRun]) -> dict[str, int]:
    """{dataset: how many examples it has, where a run has written that down}."""
    return {name: size for run in runs for name, size in run.about.get("examples", {}).items()}


def _failed(runs: Sequence[StoredRun]) -> str:
    """A sentence about examples that could not be measured; "" where there are none."""
    failed = sum(len(run.failures) for run in runs)
    return f" {failed} examples failed and are in no number (failures.jsonl of their runs)." if failed else ""


def _compared(
    key: dict[str, Any],
    measured: dict[str, Any],
    values: Sequence[_Value],
    parameters: dict[tuple[str, str, str, str], str],
    sizes: dict[str, int],
    is_dummy: bool,
) -> dict[str, Any]:
    """One line: what was measured (nothing where `measured` is empty) beside the paper's numbers."""
    names = [one.name for one in DATASETS.values() if one.task == key["task"] and one.suite == key["suite"]]
    line: dict[str, Any] = {"status": "no run", "examples": 0, "datasets": 0, "seeds": 0}
    if measured:
        line = {name: measured[name] for name in ("settings", "label", "examples", "datasets", "seeds")}
        line["score_seed_std"] = measured["score_seed_std"]
        line["status"] = "measured"
        size = sum(sizes.get(name, 0) for name in names)
        if measured["datasets"] < len(names):
            line["status"] = f"{measured['datasets']} of {len(names)} datasets"
        elif key["paper_model"] and measured["examples"] < size:
            line["status"] = f"of {size}"
        where = [(key["model"], key["method"], measured["settings"], name) for name in names]
        # one task has one target, so all its datasets have the same parameters
        line["parameters"] = next((parameters[one] for one in where if one in parameters), None)
    for value in values:
        known = paper_values().get((key["paper_model"], key["task"], key["method"], value.name), np.nan)
        line |= {form: measured.get(form, np.nan) for form in (value.name, f"{value.name}_low", f"{value.name}_high")}
        line[f"paper_{value.name}"] = known
        counts = line["status"] == "measured" and not (is_dummy and value.name == "score")
        line[f"{value.name}_difference"] = line[value.name] - known if counts else np.nan
    return line


def _beside_paper_cells(frame: pd.DataFrame, values: Sequence[_Value], dummies: set[str]) -> pd.DataFrame:
    settings: Any = frame.groupby([*_SECTION, "method"])["settings"].nunique()
    lines = []
    for row in frame.to_dict("records"):
        several = settings[row["model"], row["suite"], row["method"]] > 1
        line = {
            "model": _model_name(row, dummies),
            "task": row["task"],
            "method": row["label"] if several and row["status"] != "no run" else row["method"],
            "n": {"no run": "-", "measured": str(row["examples"])}.get(
                row["status"], f"{row['examples']} ({row['status']})"
            ),
        }
        for value in values:
            digits = value.digits
            paper, difference = row[f"paper_{value.name}"], row[f"{value.name}_difference"]
            line[value.heading] = "no run" if row["status"] == "no run" else _shown(row, value.name, digits)
            line[f"{value.heading}, paper"] = "-" if np.isnan(paper) else f"{paper:.{digits}f}"
            line[f"{value.heading}, Δ"] = "-" if np.isnan(difference) else f"{difference:+.{digits}f}"
        lines.append(line)
    return pd.DataFrame(lines)


def _shown(row: dict[str, Any], name: str, digits: int, scale: float = 1) -> str:
    """A value with its interval; what is missing was not measured, for want of a baseline."""
    if np.isnan(row[name]):
        return "unpaired"
    return cell(row[name] / scale, row[f"{name}_low"] / scale, row[f"{name}_high"] / scale, digits)


def _model_name(row: dict[str, Any], dummies: set[str]) -> str:
    notes = [row["suite"]] if not SUITES[row["suite"]].in_paper else []
    notes += ["random weights"] if row["model"] in dummies else []
    return f"{row['model']} ({', '.join(notes)})" if notes else row["model"]


def _dummies(runs: Sequence[StoredRun]) -> set[str]:
    """Models that were run with random weights: their times count, their scores do not."""
    return {run.model for run in runs if run.identity.get("load_format") == "dummy"}


# -------------------------------------------------------------------------------------------- what the reviewers asked

_MB = 1e6


def memory(runs: Sequence[StoredRun]) -> Table:
    """KV cache, Aux Cache and peak memory of every setting, beside the paired baseline on the same examples."""
    found = _overall(as_frame(runs))
    columns = ["kv_bytes", "aux_bytes", "cache_bytes", "peak_bytes"]
    for name in ("cache", "peak"):
        found[f"{name}_ratio"] = found[f"{name}_bytes"] / found[f"baseline_{name}_bytes"]
    kept = [*_SECTION, "method", "settings", "label", "examples", "seeds"]
    forms = [f"{name}{end}" for name in columns for end in ("", "_low", "_high")]
    frame = found[[*kept, *forms, *(f"baseline_{name}" for name in columns), "cache_ratio", "peak_ratio"]]
    lines = []
    for row in frame.to_dict("records"):
        line = {"model": _model_name(row, _dummies(runs)), "method": row["label"], "n": str(row["examples"])}
        for name, heading in zip(columns[:3], ("KV cache, MB", "Aux Cache, MB", "both, MB"), strict=True):
            line[heading] = _shown(row, name, 3, _MB)
        line["both / baseline"] = _ratio(row["cache_ratio"])
        line["peak, MB"] = "not known" if np.isnan(row["peak_bytes"]) else _shown(row, "peak_bytes", 1, _MB)
        line["peak / baseline"] = _ratio(row["peak_ratio"])
        lines.append(line)
    cells = pd.DataFrame(lines)
    caption = (
        "Mean over tasks, MB = 10^6 bytes. KV cache and Aux Cache: held at the end of a generation. Ratios: to the "
        "paired baseline on the same examples. Peak: during a generation, weights included; what is allocated on a "
        "GPU, what is resident in the process (Python and its libraries too) on a CPU. ±: half of the 95 % bootstrap "
        "interval over examples. unpaired: no baseline was run beside the method."
    )
    return Table("memory", "Memory: KV cache, Aux Cache and peak by method", caption, frame, cells, keys=2)


def _ratio(value: float) -> str:
    return "unpaired" if np.isnan(value) else f"{value:.3f}"


def _overall(frame: pd.DataFrame) -> Any:
    """The mean over tasks of each setting, in the order of models, suites, methods and settings."""
    found: Any = by_task(frame)
    found = found[found["level"] == "all"]
    order = found["method"].map(lambda method: _ORDER.get(method, len(_ORDER)))
    return found.assign(order=order).sort_values([*_SECTION, "order", "label"]).reset_index(drop=True)


# prompts and answers of up to so many tokens; an answer's include the end token
_PROMPTS = (512, 1024, 2048, 4096, 8192)
_ANSWERS = (4, 16, 64, 256)


def ttft_share(runs: Sequence[StoredRun]) -> Table:
    """TTFT's share of the generation time by length of prompt and answer, for every setting."""
    frame = with_baselines(as_frame(runs))
    frame = frame.assign(
        prompt=_bucket(frame["prompt_tokens"], _PROMPTS),
        answer=_bucket(frame["tokens"], _ANSWERS),
    )
    keys = [*_SECTION, "method", "settings", "label"]
    frame = frame[[*keys, "id", "ttft_s", "total_s", "prompt", "answer"]]  # four times: no more than is counted
    parts = [
        frame.assign(**everything)
        for everything in ({}, {"prompt": "all"}, {"answer": "all"}, {"prompt": "all", "answer": "all"})
    ]
    grouped = pd.concat(parts).groupby([*keys, "prompt", "answer"], sort=False)
    shares: Any = grouped.agg(examples=("id", "size"), ttft_s=("ttft_s", "sum"), total_s=("total_s", "sum"))
    shares = shares.reset_index()
    shares["share"] = 100 * shares["ttft_s"] / shares["total_s"]
    shares["order"] = shares["method"].map(lambda method: _ORDER.get(method, len(_ORDER)))
    shares = shares.sort_values([*_SECTION, "order", "label"], kind="stable").drop(columns=["order"])
    shares = shares.rename(columns={"examples": "generations", "prompt": "prompt_tokens", "answer": "answer_tokens"})
    prompts = [one for one in _names(_PROMPTS) if one in set(shares["prompt_tokens"])]
    answers = [one for one in _names(_ANSWERS) if one in set(shares["answer_tokens"])]
    lines = []
    for _, group in shares.groupby(keys, sort=False):
        found = {
            (row["prompt_tokens"], row["answer_tokens"]): f"{row['share']:.1f}" for row in group.to_dict("records")
        }
        first = group.iloc[0].to_dict()
        lines.append(
            {"model": _model_name(first, _dummies(runs)), "method": first["label"], "all": found["all", "all"]}
            | {f"prompt {one}": found.get((one, "all"), "-") for one in prompts}
            | {f"answer {one}": found.get(("all", one), "-") for one in answers}
        )
    caption = (
        "Per cent of the generation time that passes before the first token: summed TTFT over summed generation time, "
        "of the generations whose prompt, or whose answer, has so many tokens (an answer's end token counts). Prompt "
        "by answer length, and how many generations, are in the CSV. -: none of that length."
    )
    return Table("ttft_share", "TTFT's share of the generation time", caption, shares, pd.DataFrame(lines), keys=2)


def _names(ends: Sequence[int]) -> list[str]:
    starts = [1, *(end + 1 for end in ends)]
    return [*(f"{start}-{end}" for start, end in zip(starts[:-1], ends, strict=True)), f"{starts[-1]}+"]


def _bucket(lengths: Any, ends: Sequence[int]) -> np.ndarray:
    """The name of each length's bucket."""
    return np.array(_names(ends), dtype=object)[np.searchsorted(ends, lengths.to_numpy(dtype=float), side="left")]


def sensitivity(runs: Sequence[StoredRun]) -> Table:
    """Score and TTFT speedup of every schedule of LazyLLM, and what the next lower keep ratio costs."""
    frame = _overall(as_frame([run for run in runs if run.method == "lazy"]))
    frame = frame[frame["method"] == "lazy"].copy()
    frame["score_change"] = frame["score"] - frame["baseline_score"]
    kept = [_kept(settings) for settings in frame["settings"]]
    frame = frame.join(pd.DataFrame(kept, index=frame.index, columns=["layers", "keep", "others"]))
    frame["score_change_per_0.1_keep"] = _slopes(frame)
    frame = frame.sort_values([*_SECTION, "ttft_speedup"], kind="stable").reset_index(drop=True)
    values = [f"{name}{end}" for name in ("score", "ttft_speedup", "pct_computed") for end in ("", "_low", "_high")]
    keys = [*_SECTION, "method", "settings", "label", "layers", "keep", "examples"]
    frame = frame[[*keys, *values, "baseline_score", "score_change", "score_change_per_0.1_keep"]]
    lines = [
        {
            "model": _model_name(row, _dummies(runs)),
            "schedule": row["label"].removeprefix("lazy, ").removeprefix("schedule="),
            "n": str(row["examples"]),
            "TTFT speedup": _shown(row, "ttft_speedup", 2),
            "score": _shown(row, "score", 2),
            "score - baseline": "unpaired" if np.isnan(row["score_change"]) else f"{row['score_change']:+.2f}",
            "% tokens computed": _shown(row, "pct_computed", 1),
            "points per 0.1 keep": "-"
            if np.isnan(row["score_change_per_0.1_keep"])
            else f"{row['score_change_per_0.1_keep']:+.2f}",
        }
        for row in frame.to_dict("records")
    ]
    caption = (
        "Every schedule of LazyLLM that was run ({layer: keep ratio}), by speedup; mean over tasks. Points per 0.1 "
        "keep: by how many points the score moves for each 0.1 less of the prompt behind a single pruning layer, "
        "against the next gentler ratio that was run after the same layer, or against keeping all (the baseline); - "
        "for schedules of several layers. ±: half of the 95 % bootstrap interval over examples."
    )
    title = "Sensitivity of score and speed to the schedule"
    return Table("sensitivity", title, caption, frame, pd.DataFrame(lines), keys=2)


def _kept(settings: str) -> dict[str, Any]:
    """Which layers prune, which share of the prompt the last layers keep, and the settings beside the schedule."""
    values = json.loads(settings)
    schedule = values.pop("schedule", None)
    others = label_of("", values)
    if not isinstance(schedule, dict):
        return {"layers": None, "keep": np.nan, "others": others}
    layers = " ".join(sorted(schedule, key=int))
    return {"layers": layers, "keep": float(np.prod(list(schedule.values()))), "others": others}


def _slopes(frame: pd.DataFrame) -> pd.Series:
    """Change of score (less the baseline's) per 0.1 of keep, against the next higher keep after the same layer, or 1.

    Of schedules with one pruning layer: where several ratios differ, there is no one slope.
    """
    slopes = pd.Series(np.nan, index=frame.index)
    single = frame["layers"].notna() & ~frame["layers"].astype(str).str.contains(" ")
    known: Any = frame[single & (frame["keep"] < 1)]
    for _, group in known.groupby([*_SECTION, "layers", "others"]):
        gentler_keep, gentler_change = 1.0, 0.0  # keeping all is the baseline
        for index, row in group.sort_values("keep", ascending=False).iterrows():
            slopes[index] = 0.1 * (row["score_change"] - gentler_change) / (gentler_keep - row["keep"])
            gentler_keep, gentler_change = row["keep"], row["score_change"]
    return slopes


TABLES: dict[str, Callable[[Sequence[StoredRun]], Table]] = {
    "table1": table1,
    "table2": table2,
    "memory": memory,
    "ttft_share": ttft_share,
    "sensitivity": sensitivity,
}
