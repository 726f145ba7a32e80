"""From examples to datasets, tasks and the mean over tasks, with 95 % percentile bootstrap intervals.

A dataset's scores, lengths, seconds and bytes are means over its examples; its speedups are the baseline's summed time
(or FLOPs) divided by the method's, on the same examples. A task's value is the mean over its datasets in every column,
as LongBench computes scores; the overall value is the mean over tasks. The bootstrap draws examples within each
dataset, the same ones for every column, so that an example stays paired with its own baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.datasets import DATASETS, TASKS
from eval.benchmarks.metrics import dataset_score
from eval.store.record import MEASURED

RESAMPLES = 2000

_BOTH = (*MEASURED, *(f"baseline_{name}" for name in MEASURED))  # the method's, then its paired baseline's
_SPEEDUPS = {
    "ttft_speedup": "ttft_s", "generation_speedup": "total_s", "step_speedup": "step_s",
    "ideal_ttft_speedup": "prefill_flops",
}  # fmt: skip
VALUES = (*_BOTH, "cache_bytes", "baseline_cache_bytes", *_SPEEDUPS, "relative_score", "answered_score")
_COLUMN = {name: number for number, name in enumerate(VALUES)}
_SETTING = ("model", "paper_model", "method", "settings", "label", "suite")
_FORMS = [f"{name}{end}" for name in VALUES for end in ("", "_low", "_high")]
COLUMNS = [*_SETTING, "seeds", "level", "name", "task", "examples", "datasets", "score_seed_std", *_FORMS]


def by_task(frame: pd.DataFrame, known: dict[Any, list[dict[str, Any]]] | None = None) -> pd.DataFrame:
    """One row per setting and dataset, task ("task" rows) and suite ("all" rows, the mean over its tasks).

    frame: as `eval.store.results.as_frame` makes it. known: a cache of rows by setting, for calls with the same
    examples; this call adds its own. Columns: model, paper_model, method, settings, label, suite, level ("dataset",
    "task" or "all"), name (of the dataset or task, or "all"), task ("all" at that level), seeds, examples and datasets
    (their numbers), score_seed_std (sample standard deviation of the scores by seed, over the seeds with every example
    of the row; NaN for fewer than two), and v, v_low, v_high for each v of `VALUES`: the measured columns of `as_frame`
    and of the paired baseline, and

    cache_bytes, baseline_cache_bytes: KV and Aux Cache together.
    ttft_speedup, generation_speedup: of whole answers, whose lengths may differ. step_speedup: of mean decoding steps.
    ideal_ttft_speedup: the ratio of the prefills' FLOPs.
    relative_score: 100 * score / baseline_score of the row.
    answered_score: 100 * score / pct_answered of the row: the score without empty answers, which score 0.

    A dataset's score is rounded as LongBench rounds it. Several seeds of an example count as one example: values are
    means over seeds, and speedups compare summed times. A value is NaN if an example lacks it, or if a baseline's score
    is 0; both ends of an interval are NaN if a dataset has only one example.

    The setting `baseline` holds the runs of that method. Examples without such a run take the paired baselines of the
    other methods' runs, pooled like seeds. It is compared with itself: its speedups are 1.
    """
    rows, known = [], {} if known is None else known
    key: Any
    for key, group in with_baselines(frame).groupby(["model", "method", "settings", "suite"], sort=False):
        setting = {name: group[name].iloc[0] for name in _SETTING} | {"seeds": group["seed"].nunique()}
        if key[1] == "baseline":  # its examples depend on the other settings
            found = rows_of(group)
        else:
            found = known[key] = known.get(key) or rows_of(group)
        rows += [{**setting, **row} for row in found]
    return pd.DataFrame(rows, columns=COLUMNS)


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of one setting on one suite, without its name: each task's datasets, then the task; "all" comes last.

    Columns and rules are those of `by_task`; frame needs dataset, id, seed and the measured columns.
    """
    codes = frame.groupby(["dataset", "id"], sort=False).ngroup().to_numpy()
    examples = _per_example(frame, codes)
    groups = {str(name): group for name, group in examples.groupby("dataset", sort=False)}
    sizes = {name: len(group) for name, group in groups.items()}
    drawn = {name: _dataset(name, group) for name, group in groups.items()}
    seeds = _seed_scores(frame, codes, sizes)
    rows, task_draws, task_seeds = [], [], []
    for task in TASKS:
        names = [name for name in DATASETS if name in sizes and DATASETS[name].task == task]
        for name in names:
            rows.append(_row("dataset", name, task, [sizes[name]], drawn[name], seeds[name]))
        if names:
            task_draws.append(_with_ratios(np.mean([drawn[name] for name in names], axis=0)))
            task_seeds.append(_mean_of_common([seeds[name] for name in names]))
            rows.append(_row("task", task, task, [sizes[name] for name in names], task_draws[-1], task_seeds[-1]))
    drawn_all = _with_ratios(np.mean(task_draws, axis=0))
    return [*rows, _row("all", "all", "all", list(sizes.values()), drawn_all, _mean_of_common(task_seeds))]


def with_baselines(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with a `baseline` setting that holds every example with a measured baseline."""
    theirs = {f"baseline_{name}": name for name in MEASURED}
    is_own = frame["method"] == "baseline"
    own, others = frame[is_own], frame[~is_own]
    example = ["model", "dataset", "id"]
    known = frame.set_index(example).index.isin(own.set_index(example).index)
    paired: Any = frame[~is_own & ~known & frame["baseline_score"].notna()]
    paired = paired.drop(columns=list(MEASURED)).rename(columns=theirs)
    paired = paired.assign(method="baseline", settings="{}", label="baseline", seed=0)  # the same model for all seeds
    baselines: Any = pd.concat([own.drop(columns=list(theirs)), paired])
    baselines = baselines.assign(**{beside: baselines[name] for beside, name in theirs.items()})
    return pd.concat([baselines, others], ignore_index=True)  # type: ignore[return-value]


def _per_example(frame: pd.DataFrame, codes: np.ndarray) -> pd.DataFrame:
    """One row per example, in order of appearance: dataset, means over seeds, and `<time>_sum` for the speedups.

    codes: [rows] the number of each row's example, from 0 in order of appearance.
    """
    times = np.bincount(codes)
    # bincount instead of pandas: a value missing in one seed must stay missing
    sums = {name: np.bincount(codes, weights=frame[name].to_numpy(dtype=float)) for name in _BOTH}
    examples = pd.DataFrame({"dataset": frame["dataset"].to_numpy()[np.unique(codes, return_index=True)[1]]})
    means = pd.DataFrame({name: total / times for name, total in sums.items()})
    for prefix in ("", "baseline_"):
        means[f"{prefix}cache_bytes"] = means[f"{prefix}kv_bytes"] + means[f"{prefix}aux_bytes"]
    clocks = [f"{prefix}{clock}" for clock in _SPEEDUPS.values() for prefix in ("", "baseline_")]
    totals = pd.DataFrame({f"{clock}_sum": sums[clock] for clock in clocks})
    return pd.concat([examples, means, totals], axis=1)


# Arrays are [1 + RESAMPLES, columns of VALUES]: the first row holds the values, the others those of the resamples.


@lru_cache(maxsize=32)
def _weights(dataset: str, n: int) -> np.ndarray:
    """[1 + RESAMPLES, n] how often each example is drawn: once in the first row, then at random with replacement.

    Each dataset has its own seed, so that a row does not depend on the other rows.
    """
    picks = np.random.default_rng(list(dataset.encode())).integers(0, n, size=(RESAMPLES, n))
    offsets = n * np.arange(RESAMPLES)[:, None]
    counts = np.bincount((picks + offsets).ravel(), minlength=RESAMPLES * n).reshape(RESAMPLES, n)
    return np.vstack([np.ones((1, n)), counts])


def _dataset(name: str, examples: pd.DataFrame) -> np.ndarray:
    columns = list(examples.columns.drop("dataset"))
    weights = _weights(name, len(examples))
    products = weights @ examples[columns].to_numpy()  # a single one, as it dominates the cost
    sums = dict(zip(columns, products.T, strict=True))
    drawn = np.full((len(weights), len(VALUES)), np.nan)
    for column in sums.keys() & _COLUMN:
        drawn[:, _COLUMN[column]] = sums[column] / len(examples)
    for speedup, clock in _SPEEDUPS.items():
        drawn[:, _COLUMN[speedup]] = sums[f"baseline_{clock}_sum"] / sums[f"{clock}_sum"]
    for column in ("score", "baseline_score"):
        # the official score is rounded before it is averaged over datasets
        drawn[0, _COLUMN[column]] = dataset_score((examples[column] / 100).to_list())
    return _with_ratios(drawn)


def _with_ratios(drawn: np.ndarray) -> np.ndarray:
    for ratio, below in (("relative_score", "baseline_score"), ("answered_score", "pct_answered")):
        divisor = drawn[:, _COLUMN[below]]
        drawn[:, _COLUMN[ratio]] = 100 * drawn[:, _COLUMN["score"]] / np.where(divisor == 0, np.nan, divisor)
    return drawn


def _row(
    level: str, name: str, task: str, sizes: Sequence[int], drawn: np.ndarray, seed_scores: dict[int, float]
) -> dict[str, Any]:
    low, high = np.full((2, len(VALUES)), np.nan)
    if min(sizes) > 1:  # a single example of a dataset has no spread
        low, high = np.percentile(drawn[1:], [2.5, 97.5], axis=0)
    return {
        "level": level,
        "name": name,
        "task": task,
        "examples": sum(sizes),
        "datasets": len(sizes),
        "score_seed_std": np.std(list(seed_scores.values()), ddof=1) if len(seed_scores) > 1 else float("nan"),
        **dict(zip(_FORMS, np.stack([drawn[0], low, high], axis=1).ravel(), strict=True)),
    }


def on_common_examples(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """[examples, settings] a column of `as_frame`, by dataset and id, and by label; means over seeds.

    Only examples for which every setting has a value.
    """
    means: Any = frame.groupby(["label", "dataset", "id"])[column].mean()  # a pivot table takes twice the time
    return means.dropna().unstack("label").dropna()


def drawn_means(values: pd.DataFrame) -> np.ndarray:
    """[1 + RESAMPLES, settings] means over tasks of the means over datasets: the value, then those of the resamples.

    values: from `on_common_examples`. All settings, and all columns of the same examples, are resampled together, so
    that differences are paired.
    """
    tasks: dict[str, list[np.ndarray]] = {}
    for name, rows in values.groupby(level="dataset", sort=False):
        drawn = _weights(str(name), len(rows)) @ rows.to_numpy() / len(rows)
        if len(rows) == 1:
            drawn[1:] = np.nan  # a single example of a dataset has no spread
        tasks.setdefault(DATASETS[str(name)].task, []).append(drawn)
    return np.mean([np.mean(drawn, axis=0) for drawn in tasks.values()], axis=0)


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Both ends of the 95 % interval of the mean; NaN for a single value."""
    if len(values) < 2:
        return float("nan"), float("nan")
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values))).mean(axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def _seed_scores(frame: pd.DataFrame, codes: np.ndarray, sizes: dict[str, int]) -> dict[str, dict[int, float]]:
    """{dataset: {seed: official score}}, seeds with every example of the dataset only. codes: as in `_per_example`."""
    seeds: dict[str, dict[int, float]] = {name: {} for name in sizes}
    keys: Any
    values: Any = frame["score"]
    means = values.groupby([frame["dataset"], frame["seed"], codes], sort=False).mean()
    for keys, scores in means.groupby(level=[0, 1], sort=False):
        dataset, seed = keys
        if len(scores) == sizes[dataset]:
            seeds[dataset][seed] = dataset_score((scores / 100).to_list())
    return seeds


def _mean_of_common(parts: Sequence[dict[int, float]]) -> dict[int, float]:
    """{seed: mean over the parts}, for the seeds that all parts have."""
    return {seed: float(np.mean([part[seed] for part in parts])) for seed in parts[0] if all(seed in p for p in parts)}
