"""From examples to datasets, tasks and the mean over tasks, with 95 % percentile bootstrap
intervals.

A dataset's scores, lengths, seconds and bytes are means over its examples; its speedups are the
baseline's summed time (or FLOPs) divided by the arm's, over answers of the same visits. A task's
value is the mean over its datasets in every column, as LongBench computes scores; the overall value
is the mean over tasks.

The bootstrap draws examples within each dataset, the same ones for every column, so that an example
stays paired with its own baseline. Of n examples it draws n - 1, with which the variance of a
dataset's mean is unbiased (Rao and Wu 1988). A dataset with a single example has no spread of its
own: it draws one from all examples of its task. A value has an interval if it is of at least
`FEWEST` examples, and of `FEWEST_OF_TASK` of each of its tasks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.datasets import DATASETS, TASKS
from eval.benchmarks.metrics import dataset_score
from eval.store.frame import MEASURED

RESAMPLES = 2000
FEWEST, FEWEST_OF_TASK = 5, 2  # examples of a value that has an interval: fewer may agree by chance
NO_INTERVAL = f"fewer than {FEWEST} examples or {FEWEST_OF_TASK} of a task"

_VISIT = ["folder", "dataset", "id", "visit"]  # what two answers share that may be compared
_SETTING = ("model", "paper_model", "method", "settings", "label", "speedup", "suite")
# {speedup: the cost of which it is the ratio}
_SPEEDUPS = {
    "ttft_speedup": "ttft_s",
    "generation_speedup": "total_s",
    "equal_length_speedup": "equal_length_s",
    "step_speedup": "step_s",
    "ideal_ttft_speedup": "prefill_flops",
}
# Means over the answers that have a baseline in their visit: each was measured beside its answer
_OF_PAIRS = [
    "kl", "top1_agrees", "leading_tokens", "edit_similarity", "same_answer", "answer_kl",
    "answer_log_likelihood",
    "gold_kl", "gold_log_likelihood",
]  # fmt: skip
# Means whose ratio or difference to the baseline's is a value
_COMPARED = ("score", "cache_bytes", "peak_memory_bytes")
_RATIOS = ("cache_ratio", "peak_ratio", "reference_score", "score_difference", "relative_score")
VALUES = (*MEASURED, "cache_bytes", *_SPEEDUPS, *_RATIOS)

_FORMS = [f"{name}{end}" for name in VALUES for end in ("", "_low", "_high")]
COLUMNS = [
    *_SETTING, "seeds", "level", "name", "task", "examples", "datasets", "score_seed_std", *_FORMS,
]  # fmt: skip


def match_baselines(rows: Any, frame: Any) -> Any:
    """For each of these rows of `Results.frame`, the row of its run's baseline of the same visit.

    The only way from an arm's answers to the baseline's: two answers may be compared only if they
    were measured within seconds of each other, on the same prompt. frame: all rows. The result has
    the index of `rows`, and NaN where the visit holds no baseline's answer.
    """
    baselines = frame[frame["is_baseline"]].set_index(_VISIT)
    return baselines.reindex(pd.MultiIndex.from_frame(rows[_VISIT])).set_axis(rows.index)


def by_task(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per setting and dataset, task, and suite ("all" rows, the mean over its tasks).

    frame: `eval.store.results.Results.frame`. Columns: model, paper_model, method, settings, label,
    speedup, suite, level ("dataset", "task" or "all"), name (of the dataset or task, or "all"),
    task ("all" at that level), seeds, examples and datasets (their numbers), score_seed_std (sample
    standard deviation of the scores by seed, over the seeds with every example of the row; NaN for
    fewer than two), and v, v_low, v_high for each v of `VALUES`: the measured columns of the frame,
    and

    cache_bytes: KV and Aux Cache together.
    ttft_speedup, step_speedup: of the first token, of the mean decoding step. generation_speedup:
    of whole answers, whose lengths may differ. equal_length_speedup: of the time to the k-th token,
    k being the shorter answer's length. ideal_ttft_speedup: the ratio of the prefills' FLOPs.
    cache_ratio, peak_ratio: of the row's cache_bytes and peak_memory_bytes to the baseline's.
    reference_score: the baseline's, in the visits that hold both. score_difference: the row's score
    there minus it. relative_score: 100 * the row's score there / it.

    What compares with the baseline is made from the answers that have one in the same visit
    (`match_baselines`). A dataset's score is rounded as LongBench rounds it. Several seeds of an
    example count as one example: values are means over them, and speedups compare summed times. A
    value is NaN if an answer lacks it, or if a baseline's score is 0; both ends of an interval are
    NaN with too few examples (see above). The baseline's speedups are 1.
    """
    rows = list[dict[str, Any]]()
    counting: Any = frame[frame["counts"]]
    for _, group in counting.groupby(["model", "method", "settings", "suite"], sort=False):
        setting = {name: group[name].iloc[0] for name in _SETTING}
        setting["seeds"] = group["seed"].nunique()
        rows += [{**setting, **row} for row in summarise(group, frame)]
    return pd.DataFrame(rows, columns=COLUMNS)


def summarise(rows: Any, frame: Any) -> list[dict[str, Any]]:
    """The rows of one setting on one suite: each task's datasets, then the task; "all" comes last.

    rows: the setting's answers that count. frame: has their baselines. Columns and rules are those
    of `by_task`, without the setting's name.
    """
    examples, seeds = _average_examples(rows, frame), _score_seeds(rows)
    sizes = Counter(examples.index.get_level_values("dataset"))
    found, tasks = list[dict[str, Any]](), list[Draws]()
    task_seeds = list[Any]()
    for task in TASKS:
        names = [name for name in DATASETS if name in sizes and DATASETS[name].task == task]
        if not names:
            continue
        datasets = [_draw_dataset(examples, name) for name in names]
        for name, drawn in zip(names, datasets, strict=True):
            found.append(_row("dataset", name, task, {name: sizes[name]}, drawn, seeds[name]))
        tasks.append(_average(datasets))
        task_seeds.append(seeds[names].mean(axis=1, skipna=False))
        within = {name: sizes[name] for name in names}
        found.append(_row("task", task, task, within, tasks[-1], task_seeds[-1]))
    whole = _average(tasks)
    whole_seeds = pd.concat(task_seeds, axis=1).mean(axis=1, skipna=False)
    return [*found, _row("all", "all", "all", sizes, whole, whole_seeds)]


def _average_examples(rows: Any, frame: Any) -> pd.DataFrame:
    """A row for each example, in order of appearance: means over its answers.

    For what compares with the baseline: `has_pair`, 1 if an answer has one, else 0, and over these
    answers `own_<value>` and `reference_<value>`: sums of costs, means of `_COMPARED`; `_OF_PAIRS`
    are means over these too.
    """
    references = match_baselines(rows, frame)
    rows, references = _with_costs(rows, references), _with_costs(references, rows)
    keys = rows.groupby(["dataset", "id"], sort=False)
    codes, paired = keys.ngroup().to_numpy(), references["is_baseline"].notna().to_numpy()

    def add(values: Any) -> np.ndarray:
        """Sums over each example's answers; one missing value makes the sum missing."""
        return np.bincount(codes, weights=np.asarray(values, dtype=float))

    answers, pairs = np.bincount(codes), add(paired)
    columns = {name: add(rows[name]) / answers for name in (*MEASURED, "cache_bytes")}
    divisor = np.maximum(pairs, 1)
    columns |= {name: add(np.where(paired, rows[name], 0)) / divisor for name in _OF_PAIRS}
    for side, values in (("own", rows), ("reference", references)):
        for name in (*_SPEEDUPS.values(), *_COMPARED):
            total = add(np.where(paired, values[name], 0))
            columns[f"{side}_{name}"] = total / divisor if name in _COMPARED else total
    columns["has_pair"] = (pairs > 0).astype(float)
    first = np.unique(codes, return_index=True)[1]
    index = pd.MultiIndex.from_frame(rows[["dataset", "id"]].iloc[first])
    return pd.DataFrame(columns, index=index)


def _with_costs(rows: Any, others: Any) -> Any:
    """With both caches together, and the seconds to the last token of the shorter of two answers.

    The seconds are NaN if the steps of one were not timed, as those of batches.
    """
    seconds = [
        token_s[min(len(token_s), len(other_s)) - 1]
        if isinstance(token_s, tuple) and isinstance(other_s, tuple)
        else np.nan
        for token_s, other_s in zip(rows["token_s"], others["token_s"], strict=True)
    ]
    return rows.assign(cache_bytes=rows["kv_bytes"] + rows["aux_bytes"], equal_length_s=seconds)


Draws = dict[str, np.ndarray]  # {column: [1 + RESAMPLES] its value, then those of the resamples}


@lru_cache(maxsize=32)
def _weights(dataset: str, n: int) -> np.ndarray:
    """[1 + RESAMPLES, n] how often each of several examples is drawn: once in the first row, then
    n - 1 draws with replacement. Each dataset has its own seed, so that a row does not depend on
    the other rows.
    """
    random = np.random.default_rng(list(dataset.encode()))
    picks = random.integers(0, n, size=(RESAMPLES, n - 1)) + n * np.arange(RESAMPLES)[:, None]
    counts = np.bincount(picks.ravel(), minlength=RESAMPLES * n).reshape(RESAMPLES, n)
    return np.vstack([np.ones((1, n)), counts])


def _draw(values: np.ndarray, datasets: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Sums over the examples of a dataset that each resample draws, and their number [.., 1].

    values: [examples, columns]. datasets: [examples] the dataset of each.
    """
    indices = np.flatnonzero(datasets == name)
    if len(indices) > 1:
        weights = _weights(name, len(indices))
        return weights @ values[indices], weights.sum(axis=1, keepdims=True)
    task_indices = np.flatnonzero(
        [DATASETS[other].task == DATASETS[name].task for other in datasets]
    )
    picks = np.random.default_rng(list(name.encode())).integers(
        0, len(task_indices), size=RESAMPLES
    )
    return values[[*indices, *task_indices[picks]]], np.ones((1 + RESAMPLES, 1))


def _draw_dataset(examples: pd.DataFrame, name: str) -> Draws:
    """Compute a dataset's values and their resamples; speedups are ratios of summed costs.

    examples: of `_average_examples`.
    """
    datasets = examples.index.get_level_values("dataset").to_numpy()
    products, counts = _draw(examples.to_numpy(), datasets, name)  # one product: it costs most
    sums = dict(zip(examples, products.T, strict=True))
    compared = [f"{side}_{value}" for side in ("own", "reference") for value in _COMPARED]
    drawn = {column: sums[column] / counts[:, 0] for column in (*MEASURED, "cache_bytes")}
    with np.errstate(invalid="ignore", divide="ignore"):  # without any pair: NaN
        for column in (*_OF_PAIRS, *compared):  # an example without a pair adds 0
            drawn[column] = sums[column] / sums["has_pair"]
        for speedup, cost in _SPEEDUPS.items():
            drawn[speedup] = sums[f"reference_{cost}"] / sums[f"own_{cost}"]
    # the official score is rounded before it is averaged over datasets
    rows = examples[datasets == name]
    paired = rows[rows["has_pair"] > 0]
    drawn["score"][0] = dataset_score((rows["score"] / 100).tolist())
    for column in ("own_score", "reference_score") if len(paired) else ():
        drawn[column][0] = dataset_score((paired[column] / 100).tolist())
    return _with_ratios(drawn)


def _average(draws: Sequence[Draws]) -> Draws:
    """The means over datasets, or tasks."""
    return _with_ratios(
        {name: np.mean([draw[name] for draw in draws], axis=0) for name in draws[0]}
    )


def _with_ratios(drawn: Draws) -> Draws:
    """With the values that are ratios or differences of others."""
    reference, score = drawn["reference_score"], drawn["own_score"]
    ratios = {
        "score_difference": score - reference,
        "relative_score": 100 * score / np.where(reference == 0, np.nan, reference),
    }
    for ratio, name in (("cache_ratio", "cache_bytes"), ("peak_ratio", "peak_memory_bytes")):
        below = drawn[f"reference_{name}"]
        ratios[ratio] = drawn[f"own_{name}"] / np.where(below == 0, np.nan, below)
    return drawn | ratios


def has_interval(sizes: Mapping[str, int]) -> bool:
    """Whether a value over so many examples of these datasets has an interval."""
    tasks = Counter[str]()
    for name, examples in sizes.items():
        tasks[DATASETS[name].task] += examples
    return tasks.total() >= FEWEST and min(tasks.values()) >= FEWEST_OF_TASK


def _row(
    level: str, name: str, task: str, sizes: Mapping[str, int], drawn: Draws, seeds: Any
) -> dict[str, Any]:
    """sizes: examples of each dataset. seeds: scores, missing where a seed lacks an example."""
    values = np.stack([drawn[value] for value in VALUES], axis=1)
    ends = np.percentile(values[1:], [2.5, 97.5], axis=0)
    if not has_interval(sizes):
        ends = np.full_like(ends, np.nan)
    cells = np.stack([values[0], *ends], axis=1).ravel()
    return {
        "level": level,
        "name": name,
        "task": task,
        "examples": sum(sizes.values()),
        "datasets": len(sizes),
        "score_seed_std": seeds.std(),
        **dict(zip(_FORMS, cells, strict=True)),
    }


def _score_seeds(rows: Any) -> Any:
    """[seeds, datasets] official scores; missing where a seed lacks an example."""
    means = rows.groupby(["seed", "dataset", "id"], sort=False)["score"].mean()
    answers = means.groupby(level=["seed", "dataset"], sort=False)
    scores = answers.agg(lambda scores: dataset_score((scores / 100).to_list()))
    sizes = rows.groupby("dataset")["id"].nunique()
    is_whole = answers.size() == scores.index.get_level_values("dataset").map(sizes)
    return scores.where(is_whole).unstack()


def on_common_examples(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """[examples, settings] a column of `Results.frame`, by dataset and id, and by label.

    Means over seeds, of examples for which every setting has a value.
    """
    # a pivot table takes twice the time
    means: Any = frame.groupby(["label", "dataset", "id"])[column].mean()
    return means.dropna().unstack("label").dropna()


def drawn_means(values: pd.DataFrame) -> np.ndarray:
    """[1 + RESAMPLES, settings] means over tasks of the means over datasets.

    values: from `on_common_examples`. All settings, and all columns of the same examples, are
    resampled together, so that differences are paired. The resamples are NaN with too few examples.
    """
    tasks: dict[str, list[np.ndarray]] = {}
    datasets = values.index.get_level_values("dataset").to_numpy()
    sizes = Counter(datasets.tolist())
    for name in sizes:
        sums, counts = _draw(values.to_numpy(), datasets, name)
        tasks.setdefault(DATASETS[name].task, []).append(sums / counts)
    drawn = np.mean([np.mean(drawn, axis=0) for drawn in tasks.values()], axis=0)
    if not has_interval(sizes):
        drawn[1:] = np.nan
    return drawn


def drawn_mean(values: np.ndarray) -> np.ndarray:
    """[1 + RESAMPLES] means of values; the resamples are NaN below `FEWEST` values."""
    drawn = np.full((RESAMPLES, 1), np.nan)
    if len(values) >= FEWEST:
        drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values) - 1))
    return np.append(values.mean(), drawn.mean(axis=1))
