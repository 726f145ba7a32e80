"""From examples to datasets, tasks and the mean over tasks, with 95 % percentile bootstrap intervals.

A dataset's scores, lengths, seconds and bytes are means over its examples; its speedups are the baseline's summed time
(or FLOPs) divided by the arm's, over answers of the same visits. A task's value is the mean over its datasets in every
column, as LongBench computes scores; the overall value is the mean over tasks.

The bootstrap draws examples within each dataset, the same ones for every column, so that an example stays paired with
its own baseline. Of n examples it draws n - 1, with which the variance of a dataset's mean is unbiased (Rao and Wu
1988). A dataset with a single example has no spread of its own: it draws one from all examples of its task. A value
has an interval if it is of at least `FEWEST` examples, and of `FEWEST_OF_TASK` of each of its tasks.
"""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.datasets import DATASETS, TASKS
from eval.benchmarks.metrics import dataset_score
from eval.store.runs import MEASURED

RESAMPLES = 2000
FEWEST, FEWEST_OF_TASK = 5, 2  # examples of a value that has an interval: fewer may well agree by chance
NO_INTERVAL = f"fewer than {FEWEST} examples or {FEWEST_OF_TASK} of a task"

# {speedup: the cost of which it is the ratio}
_SPEEDUPS = {
    "ttft_speedup": "ttft_s", "generation_speedup": "total_s", "equal_length_speedup": "equal_length_s",
    "step_speedup": "step_s", "ideal_ttft_speedup": "prefill_flops",
}  # fmt: skip
VALUES = (
    *MEASURED, "cache_bytes", *_SPEEDUPS,
    "cache_ratio", "peak_ratio", "reference_score", "score_difference", "relative_score", "answered_score",
)  # fmt: skip
# Means over the answers that have a baseline in their visit: each was measured beside its answer
_OF_PAIRS = (
    "kl", "top1_agrees", "leading_tokens", "edit_similarity", "same_answer", "answer_kl", "answer_log_likelihood",
    "gold_kl", "gold_log_likelihood",
)  # fmt: skip
# Means whose ratio or difference to the baseline's is a value
_COMPARED = ("score", "cache_bytes", "peak_memory_bytes")
_OF_BOTH = tuple(f"{side}_{name}" for name in _COMPARED for side in ("own", "reference"))
_COLUMN = {name: number for number, name in enumerate(dict.fromkeys((*VALUES, *_OF_BOTH)))}
_SETTING = ("model", "paper_model", "method", "settings", "label", "speedup", "suite")
_VISIT = ["folder", "dataset", "id", "visit"]  # what two answers share that may be compared

_FORMS = [f"{name}{end}" for name in VALUES for end in ("", "_low", "_high")]
COLUMNS = [*_SETTING, "seeds", "level", "name", "task", "examples", "datasets", "score_seed_std", *_FORMS]


def beside(rows: Any, among: Any) -> Any:
    """For each of these rows of `Results.frame`, the row of its run's baseline of the same visit.

    The only way from an arm's answers to the baseline's: two answers may be compared only if they were measured within
    seconds of each other, on the same prompt. among: the whole frame. The result has the index of `rows`, and NaN where
    the visit holds no baseline's answer.
    """
    wanted = pd.MultiIndex.from_frame(rows[_VISIT])
    found = among[among["is_baseline"]].set_index(_VISIT, drop=False).reindex(wanted)
    return found.set_axis(rows.index)


def by_task(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per setting and dataset, task ("task" rows) and suite ("all" rows, the mean over its tasks).

    frame: `eval.store.results.Results.frame`. Columns: model, paper_model, method, settings, label, speedup, suite, level
    ("dataset", "task" or "all"), name (of the dataset or task, or "all"), task ("all" at that level), seeds, examples,
    and datasets (their numbers), score_seed_std (sample standard deviation of the scores by
    seed, over the seeds with every example of the row; NaN for fewer than two), and v, v_low, v_high for each v of
    `VALUES`: the measured columns of the frame, and

    cache_bytes: KV and Aux Cache together.
    ttft_speedup, step_speedup: of the first token, of the mean decoding step. generation_speedup: of whole answers,
    whose lengths may differ. equal_length_speedup: of the time to the k-th token, k being the shorter answer's length.
    ideal_ttft_speedup: the ratio of the prefills' FLOPs.
    cache_ratio, peak_ratio: of the row's cache_bytes and peak_memory_bytes to the baseline's.
    reference_score: the baseline's, in the visits that hold both. score_difference: the row's score there minus it.
    relative_score: 100 * the row's score there / it.
    answered_score: 100 * score / pct_answered of the row: the score without empty answers, which score 0.

    What compares with the baseline is made from the answers that have one in the same visit (`beside`). A dataset's
    score is rounded as LongBench rounds it. Several seeds of an example count as one example: values are
    means over them, and speedups compare summed times. A value is NaN if an answer lacks it, or if a baseline's score
    is 0; both ends of an interval are NaN with too few examples (see above). The baseline's speedups are 1.
    """
    rows: list[dict[str, Any]] = []
    counting: Any = frame[frame["counts"]]
    for _, group in counting.groupby(["model", "method", "settings", "suite"], sort=False):
        setting = {name: group[name].iloc[0] for name in _SETTING} | {"seeds": group["seed"].nunique()}
        rows += [{**setting, **row} for row in rows_of(group, frame)]
    return pd.DataFrame(rows, columns=COLUMNS)


def rows_of(rows: Any, among: Any) -> list[dict[str, Any]]:
    """The rows of one setting on one suite, without its name: each task's datasets, then the task; "all" comes last.

    rows: the setting's answers that count. among: the frame that has their baselines. Columns and rules are those of
    `by_task`.
    """
    codes = rows.groupby(["dataset", "id"], sort=False).ngroup().to_numpy()
    examples = _per_example(rows, beside(rows, among), codes)
    sizes, drawn = dict[str, int](), dict[str, np.ndarray]()
    of_each = examples.pop("dataset")
    for name in dict.fromkeys(of_each):
        there = of_each == name
        sizes[name] = int(there.sum())
        drawn[name] = _dataset(name, of_each, examples)
    seeds = _seed_scores(rows, codes, sizes)
    found, task_draws, task_seeds = [], [], []
    for task in TASKS:
        names = [name for name in DATASETS if name in sizes and DATASETS[name].task == task]
        for name in names:
            found.append(_row("dataset", name, task, {name: sizes[name]}, drawn[name], seeds[name]))
        if names:
            task_draws.append(_with_ratios(np.mean([drawn[name] for name in names], axis=0)))
            task_seeds.append(seeds[names].mean(axis=1, skipna=False))
            of_task = {name: sizes[name] for name in names}
            found.append(_row("task", task, task, of_task, task_draws[-1], task_seeds[-1]))
    drawn_all, seeds_all = _with_ratios(np.mean(task_draws, axis=0)), pd.concat(task_seeds, axis=1)
    return [*found, _row("all", "all", "all", sizes, drawn_all, seeds_all.mean(axis=1, skipna=False))]


def _per_example(rows: Any, references: Any, codes: np.ndarray) -> dict[str, np.ndarray]:
    """Columns with a value for each example, in order of appearance: dataset, and means over its answers.

    For what compares with the baseline: `pairs`, the number of answers with one, `has_pair`, 1 if there is any, else 0,
    and over these answers `own_<value>` and `reference_<value>`: sums of costs, means of `_COMPARED`. Those of
    `_OF_PAIRS` are means over these too.

    references: [rows] the baselines of the same visits. codes: [rows] the number of each row's example, from 0 in order
    of appearance.
    """
    times = np.bincount(codes)
    first = np.unique(codes, return_index=True)[1]
    examples = {"dataset": rows["dataset"].to_numpy()[first]}

    equal_lengths = _equal_lengths(rows["token_s"], references["token_s"])
    rows, references = (
        frame.assign(equal_length_s=times) for frame, times in zip((rows, references), equal_lengths, strict=True)
    )

    def values_of(frame: Any, name: str) -> np.ndarray:
        names = ("kv_bytes", "aux_bytes") if name == "cache_bytes" else (name,)
        return sum(frame[one].to_numpy(dtype=float) for one in names)  # type: ignore[return-value]

    # bincount instead of pandas: a value missing in one answer must stay missing
    means = {name: np.bincount(codes, weights=values_of(rows, name)) / times for name in (*MEASURED, "cache_bytes")}
    is_pair = references["folder"].notna().to_numpy()
    sums: dict[str, Any] = {"pairs": np.bincount(codes, weights=is_pair)}
    for name in _OF_PAIRS:
        means[name] = np.bincount(codes, weights=np.where(is_pair, rows[name], 0)) / np.maximum(sums["pairs"], 1)
    for name in (*_SPEEDUPS.values(), *_COMPARED):
        for side, frame in (("own", rows), ("reference", references)):
            sums[f"{side}_{name}"] = np.bincount(codes, weights=np.where(is_pair, values_of(frame, name), 0))
    for name in _OF_BOTH:
        sums[name] /= np.maximum(sums["pairs"], 1)
    sums["has_pair"] = (sums["pairs"] > 0).astype(float)
    return examples | means | sums


def _equal_lengths(own: Any, theirs: Any) -> tuple[list[float], list[float]]:
    """Of each pair of answers, the seconds of both to their k-th token, where k is the shorter one's length.

    own, theirs: `token_s` of `Results.frame`. NaN if the steps of one were not timed, as those of batches.
    """
    both = [(np.nan, np.nan)] * len(own)
    for place, (one, other) in enumerate(zip(own, theirs, strict=True)):
        if isinstance(one, tuple) and isinstance(other, tuple):
            k = min(len(one), len(other))
            both[place] = one[k - 1], other[k - 1]
    return [one for one, _ in both], [other for _, other in both]


# Arrays are [1 + RESAMPLES, columns]: the first row holds the values, the others those of the resamples.


@lru_cache(maxsize=32)
def _weights(dataset: str, n: int) -> np.ndarray:
    """[1 + RESAMPLES, n] how often each of several examples is drawn: once in the first row, then n - 1 draws with
    replacement. Each dataset has its own seed, so that a row does not depend on the other rows.
    """
    picks = np.random.default_rng(list(dataset.encode())).integers(0, n, size=(RESAMPLES, n - 1))
    offsets = n * np.arange(RESAMPLES)[:, None]
    counts = np.bincount((picks + offsets).ravel(), minlength=RESAMPLES * n).reshape(RESAMPLES, n)
    return np.vstack([np.ones((1, n)), counts])


def _sums(name: str, datasets: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[1 + RESAMPLES, columns] sums over the examples of a dataset that each resample draws, and their number
    [1 + RESAMPLES, 1].

    datasets: [examples] the dataset of each. values: [examples, columns].
    """
    own = np.flatnonzero(datasets == name)
    if len(own) > 1:
        weights = _weights(name, len(own))
        return weights @ values[own], weights.sum(axis=1, keepdims=True)
    of_task = np.flatnonzero([DATASETS[one].task == DATASETS[name].task for one in datasets])
    picks = np.random.default_rng(list(name.encode())).integers(0, len(of_task), size=RESAMPLES)
    return values[[*own, *of_task[picks]]], np.ones((1 + RESAMPLES, 1))


def has_interval(sizes: Mapping[str, int]) -> bool:
    """Whether a value over so many examples of these datasets has an interval."""
    tasks = Counter[str]()
    for name, examples in sizes.items():
        tasks[DATASETS[name].task] += examples
    return tasks.total() >= FEWEST and min(tasks.values()) >= FEWEST_OF_TASK


def _dataset(name: str, datasets: np.ndarray, examples: Mapping[str, np.ndarray]) -> np.ndarray:
    """The columns of `_COLUMN` of one dataset. examples: those of `_per_example`; datasets: the dataset of each."""
    # a single product, as it dominates the cost
    products, counts = _sums(name, datasets, np.stack([*examples.values()], axis=1))
    sums = dict(zip(examples, products.T, strict=True))
    drawn = np.full((len(products), len(_COLUMN)), np.nan)
    for column in (*MEASURED, "cache_bytes"):
        drawn[:, _COLUMN[column]] = sums[column] / counts[:, 0]
    with np.errstate(invalid="ignore", divide="ignore"):  # no pair: NaN
        for speedup, cost in _SPEEDUPS.items():
            drawn[:, _COLUMN[speedup]] = sums[f"reference_{cost}"] / sums[f"own_{cost}"]
        for column in (*_OF_BOTH, *_OF_PAIRS):  # an example without a pair adds 0
            drawn[:, _COLUMN[column]] = sums[column] / sums["has_pair"]
    # the official score is rounded before it is averaged over datasets
    is_own = datasets == name
    drawn[0, _COLUMN["score"]] = dataset_score((examples["score"][is_own] / 100).tolist())
    is_paired = is_own & (examples["has_pair"] > 0)
    for column in ("own_score", "reference_score") if is_paired.any() else ():
        drawn[0, _COLUMN[column]] = dataset_score((examples[column][is_paired] / 100).tolist())
    return _with_ratios(drawn)


def _with_ratios(drawn: np.ndarray) -> np.ndarray:
    """With the values that are ratios or differences of other columns of the same row."""
    of = {name: drawn[:, number] for name, number in _COLUMN.items()}
    of["score_difference"][:] = of["own_score"] - of["reference_score"]
    for ratio, above, below, scale in (
        ("relative_score", "own_score", "reference_score", 100),
        ("answered_score", "score", "pct_answered", 100),
        ("cache_ratio", "own_cache_bytes", "reference_cache_bytes", 1),
        ("peak_ratio", "own_peak_memory_bytes", "reference_peak_memory_bytes", 1),
    ):
        of[ratio][:] = scale * of[above] / np.where(of[below] == 0, np.nan, of[below])
    return drawn


def _row(
    level: str, name: str, task: str, sizes: Mapping[str, int], drawn: np.ndarray, seed_scores: Any
) -> dict[str, Any]:
    """sizes: examples of each dataset. seed_scores: a series; missing where a seed lacks an example."""
    drawn = drawn[:, : len(VALUES)]
    low, high = np.percentile(drawn[1:], [2.5, 97.5], axis=0)
    if not has_interval(sizes):
        low, high = np.full((2, len(VALUES)), np.nan)
    return {
        "level": level,
        "name": name,
        "task": task,
        "examples": sum(sizes.values()),
        "datasets": len(sizes),
        "score_seed_std": seed_scores.std(),
        **dict(zip(_FORMS, np.stack([drawn[0], low, high], axis=1).ravel(), strict=True)),
    }


def on_common_examples(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """[examples, settings] a column of `Results.frame`, by dataset and id, and by label; means over seeds.

    Only examples for which every setting has a value.
    """
    means: Any = frame.groupby(["label", "dataset", "id"])[column].mean()  # a pivot table takes twice the time
    return means.dropna().unstack("label").dropna()


def drawn_means(values: pd.DataFrame) -> np.ndarray:
    """[1 + RESAMPLES, settings] means over tasks of the means over datasets: the value, then those of the resamples.

    values: from `on_common_examples`. All settings, and all columns of the same examples, are resampled together, so
    that differences are paired. The resamples are NaN with too few examples.
    """
    tasks: dict[str, list[np.ndarray]] = {}
    datasets = values.index.get_level_values("dataset").to_numpy()
    sizes = Counter(datasets.tolist())
    for name in sizes:
        sums, counts = _sums(name, datasets, values.to_numpy())
        tasks.setdefault(DATASETS[name].task, []).append(sums / counts)
    drawn = np.mean([np.mean(drawn, axis=0) for drawn in tasks.values()], axis=0)
    if not has_interval(sizes):
        drawn[1:] = np.nan
    return drawn


def drawn_mean(values: np.ndarray) -> np.ndarray:
    """[1 + RESAMPLES] the mean of values, then those of the resamples, which are NaN below `FEWEST` values."""
    drawn = np.full((RESAMPLES, 1), np.nan)
    if len(values) >= FEWEST:
        drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values) - 1))
    return np.append(values.mean(), drawn.mean(axis=1))


def _seed_scores(frame: pd.DataFrame, codes: np.ndarray, sizes: dict[str, int]) -> Any:
    """[seeds, datasets] official scores; missing where a seed lacks an example. codes: as in `_per_example`."""
    score: Any = frame["score"]
    means = score.groupby([frame["seed"], frame["dataset"], codes], sort=False).mean()
    answers = means.groupby(level=[0, 1], sort=False)
    scores = answers.agg(lambda one: dataset_score((one / 100).to_list()))
    is_whole = answers.size() == scores.index.get_level_values(1).map(sizes)
    return scores.where(is_whole).unstack()
