"""Every number of a run's table, by dictionaries and loops: slow, and from the definitions.

It shares with the code under test only the list of datasets, the official mean of a dataset's
scores and numpy's random numbers and percentiles.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.benchmarks.datasets import DATASETS, TASKS
from eval.benchmarks.metrics import dataset_score
from eval.store.record import Answer, Visit
from eval.store.runs import StoredRun

NAN = float("nan")
RESAMPLES = 2000
PERCENT = {"score", "rouge_l", "prefill_mfu", "top1_agrees", "edit_similarity", "same_answer"}
SPEEDUPS = {
    "ttft_speedup": "ttft_s", "generation_speedup": "total_s", "step_speedup": "step_s",
    "equal_length_speedup": "equal_length_s", "ideal_ttft_speedup": "prefill_flops",
}  # fmt: skip
OF_PAIRS = (  # measured beside the baseline's answer
    "kl", "top1_agrees", "leading_tokens", "edit_similarity", "same_answer", "answer_kl",
    "answer_log_likelihood", "gold_kl", "gold_log_likelihood",
)  # fmt: skip
COMPARED = ("score", "cache_bytes", "peak_memory_bytes")  # values that stand beside the baseline's
PLAIN = (
    "score", "rouge_l", "ttft_s", "scoring_s", "scoring_tokens", "total_s", "step_s",
    "generated_tokens",
    "pct_prompt_tokens_computed", "kv_bytes", "aux_bytes", "cache_bytes", "prefill_flops",
    "peak_memory_bytes", "prefill_mfu", "attention_ceiling", "revived_tokens",
)  # fmt: skip
OF_BOTH = ("cache_ratio", "peak_ratio", "reference_score", "score_difference", "relative_score")
VALUES = (*PLAIN, *OF_PAIRS, *SPEEDUPS, *OF_BOTH)


@dataclass(frozen=True)
class Counted:
    """An arm's answer that counts, in its visit, and the baseline's of the same visit.

    setting: model, method, settings and suite.
    """

    setting: tuple[str, str, str, str]
    seed: int
    run: str
    arm: str
    visit: Visit
    answer: Answer
    baseline: Answer | None


def number(visit: Visit, answer: Answer, name: str) -> float:
    """A value as tables show it; NaN if it was not measured."""
    groups = zip(answer.computed[-1], answer.group_layers, strict=True)
    layers = [computed for computed, width in groups for _ in range(width)]
    computed = answer.scoring_tokens + sum(layers) / len(layers)
    steps = answer.decode_step_s
    derived: dict[str, Any] = {
        "total_s": None if steps is None else answer.ttft_s + sum(steps),
        "step_s": sum(steps) / len(steps) if steps else None,
        "generated_tokens": len(answer.token_ids),
        "pct_prompt_tokens_computed": 100 * computed / visit.prompt_tokens,
        "cache_bytes": answer.kv_bytes + answer.aux_bytes,
        "attention_ceiling": visit.attention_ceiling,
    }
    value = derived[name] if name in derived else getattr(answer, name)
    return NAN if value is None else float(value) * (100 if name in PERCENT else 1)


def answers_of(run: StoredRun) -> list[Counted]:
    """Every arm's answers of the first visit that holds any, with the baseline's; arm by arm.

    The order decides which examples the bootstrap's random numbers draw.
    """
    identity = run.about["identity"]
    found: dict[Any, Counted] = {}
    for visit in run.visits:
        theirs = visit.arms.get(identity["baseline"])
        baseline = theirs if isinstance(theirs, Answer) else None
        for arm, outcome in visit.arms.items():
            settings = {**identity["arms"][arm]["method"]}
            if (speedup := identity["arms"][arm].get("speedup")) is not None:
                settings["speedup"] = speedup
            method, seed = settings.pop("name"), settings.pop("seed", identity["seed"])
            text, suite = json.dumps(settings, sort_keys=True), DATASETS[visit.dataset].suite
            if isinstance(outcome, Answer):
                about = (run.model, method, text, suite), seed, str(run.folder), arm
                answer = Counted(*about, visit, outcome, baseline)
                found.setdefault((visit.dataset, visit.id, arm), answer)
    return sorted(found.values(), key=lambda answer: [*identity["arms"]].index(answer.arm))


def answers_that_count(runs: Sequence[StoredRun]) -> list[Counted]:
    """The answers that count.

    Of several runs of a setting and seed, a dataset's are those of the run with most examples, then
    of the newest.
    """
    found = [answer for run in runs for answer in answers_of(run)]
    started = {str(run.folder): run.started for run in runs}
    candidates: dict[Any, dict[str, set[str]]] = {}
    for answer in found:
        by_run = candidates.setdefault((answer.setting, answer.seed, answer.visit.dataset), {})
        by_run.setdefault(answer.run, set()).add(answer.visit.id)
    best = {
        key: max(by_run, key=lambda folder: (len(by_run[folder]), started[folder]))
        for key, by_run in candidates.items()
    }
    return [
        answer
        for answer in found
        if answer.run == best[answer.setting, answer.seed, answer.visit.dataset]
    ]


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else NAN


def ratio(above: float, below: float) -> float:
    return NAN if below == 0 or math.isnan(below) else above / below


def to_equal_length(answer: Answer, baseline: Answer) -> tuple[float, float]:
    """Seconds of both answers to their k-th token: k is the length of the shorter one."""
    ours, others = answer.decode_step_s, baseline.decode_step_s
    if ours is None or others is None:
        return NAN, NAN
    steps = min(len(ours), len(others))
    return answer.ttft_s + sum(ours[:steps]), baseline.ttft_s + sum(others[:steps])


class Example:
    """The answers to one example: seeds count as one."""

    def __init__(self, answers: list[Counted]) -> None:
        all_answers = [(counted.visit, counted.answer) for counted in answers]
        pairs = [
            (counted.visit, counted.answer, counted.baseline)
            for counted in answers
            if counted.baseline is not None
        ]
        sides = {"own": [(visit, ours) for visit, ours, _ in pairs]}
        sides["their"] = [(visit, theirs) for visit, _, theirs in pairs]

        def values(side: list[tuple[Visit, Answer]], name: str) -> list[float]:
            return [number(visit, answer, name) for visit, answer in side]

        self.is_paired = bool(pairs)
        self.means = {name: mean(values(all_answers, name)) for name in PLAIN}
        self.paired_means = {name: mean(values(sides["own"], name)) for name in OF_PAIRS}
        self.compared = {
            f"{side} {name}": mean(values(of, name))
            for side, of in sides.items()
            for name in COMPARED
        }
        clocks = [name for name in SPEEDUPS.values() if name != "equal_length_s"]
        self.times = {
            f"{side} {name}": sum(values(of, name)) for side, of in sides.items() for name in clocks
        }
        ends = [to_equal_length(ours, theirs) for _, ours, theirs in pairs]
        self.times["own equal_length_s"] = sum(end for end, _ in ends)
        self.times["their equal_length_s"] = sum(end for _, end in ends)


def average_dataset(drawn: list[Example], official: bool) -> dict[str, float]:
    """The values of a dataset, and those of both sides of the answers beside a baseline."""
    pairs = [example for example in drawn if example.is_paired]
    values = {name: mean(example.means[name] for example in drawn) for name in PLAIN}
    values |= {name: mean(example.paired_means[name] for example in pairs) for name in OF_PAIRS}
    compared = [f"{side} {name}" for side in ("own", "their") for name in COMPARED]
    values |= {name: mean(example.compared[name] for example in pairs) for name in compared}
    for speedup, clock in SPEEDUPS.items():
        theirs, ours = (
            sum(example.times[f"{side} {clock}"] for example in pairs) for side in ("their", "own")
        )
        values[speedup] = ratio(theirs, ours)
    if official:
        values["score"] = dataset_score([example.means["score"] / 100 for example in drawn])
        for name in ("own score", "their score") if pairs else ():
            values[name] = dataset_score([example.compared[name] / 100 for example in pairs])
    return with_ratios(values)


def with_ratios(values: dict[str, float]) -> dict[str, float]:
    """The values, with those that are made of others of the same row."""
    return values | {
        "cache_ratio": ratio(values["own cache_bytes"], values["their cache_bytes"]),
        "peak_ratio": ratio(values["own peak_memory_bytes"], values["their peak_memory_bytes"]),
        "reference_score": values["their score"],
        "score_difference": values["own score"] - values["their score"],
        "relative_score": ratio(100 * values["own score"], values["their score"]),
    }


def mean_of(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    return with_ratios({name: mean(part[name] for part in parts) for name in parts[0]})


def resamples(
    dataset: str, examples: list[Example], task_examples: list[Example]
) -> list[list[Example]]:
    """A dataset's examples, then the documented draws: n - 1 of n (Rao and Wu 1988).

    A dataset's only example is replaced by any one of its task. task_examples: in order of
    appearance.
    """
    rng = np.random.default_rng(list(dataset.encode()))
    if len(examples) == 1:
        picks = rng.integers(0, len(task_examples), size=RESAMPLES).tolist()
        return [examples, *([task_examples[pick]] for pick in picks)]
    draws = rng.integers(0, len(examples), size=(RESAMPLES, len(examples) - 1)).tolist()
    return [examples, *([examples[pick] for pick in picks] for picks in draws)]


def rows_of(answers: Sequence[Counted], intervals: bool = True) -> dict[str, dict[str, Any]]:
    """{"dataset NAME", "task NAME" or "all": its values} of one setting on one suite.

    Each has examples, datasets, seeds, score_seed_std, and `VALUES` as (value, low, high).
    """
    by_dataset: dict[str, dict[str, list[Counted]]] = {}
    by_key: dict[tuple[str, str], list[Counted]] = {}
    for answer in answers:
        dataset, name = answer.visit.dataset, answer.visit.id
        by_key.setdefault((dataset, name), []).append(answer)
        by_dataset.setdefault(dataset, {}).setdefault(name, []).append(answer)
    examples = {key: Example(found) for key, found in by_key.items()}
    task_examples: dict[str, list[Example]] = {}
    for (dataset, _), example in examples.items():
        task_examples.setdefault(DATASETS[dataset].task, []).append(example)
    levels: dict[str, tuple[list[str], list[dict[str, float]], dict[int, float]]] = {}
    for name, by_example in by_dataset.items():
        members = [examples[name, row] for row in by_example]
        chosen = resamples(name, members, task_examples[DATASETS[name].task])[
            : None if intervals else 1
        ]
        values = [average_dataset(sample, place == 0) for place, sample in enumerate(chosen)]
        levels[f"dataset {name}"] = [name], values, seed_scores(by_example)
    tasks = [task for task in TASKS if task in task_examples]
    for task in tasks:
        names = [name for name in by_dataset if DATASETS[name].task == task]
        levels[f"task {task}"] = mean_level([levels[f"dataset {name}"] for name in names])
    levels["all"] = mean_level([levels[f"task {task}"] for task in tasks])
    return {
        level: {
            "examples": sum(len(by_dataset[name]) for name in names),
            "datasets": len(names),
            "seeds": len({answer.seed for answer in answers}),
            "score_seed_std": deviation(list(by_seed.values())),
            **{name: with_interval(name, values, has_enough(by_dataset, names)) for name in VALUES},
        }
        for level, (names, values, by_seed) in levels.items()
    }


def mean_level(parts: list[Any]) -> tuple[list[str], list[dict[str, float]], dict[int, float]]:
    """The datasets, the mean values and the mean scores by seed of several datasets or tasks."""
    names = [name for part in parts for name in part[0]]
    values = [mean_of(drawn) for drawn in zip(*(part[1] for part in parts), strict=True)]
    scores = [part[2] for part in parts]
    common = [seed for seed in scores[0] if all(seed in by_seed for by_seed in scores)]
    return names, values, {seed: mean(by_seed[seed] for by_seed in scores) for seed in common}


def has_enough(by_dataset: dict[str, dict[str, Any]], names: list[str]) -> bool:
    """Five examples at least, and two of each task."""
    by_task: dict[str, int] = {}
    for name in names:
        task = DATASETS[name].task
        by_task[task] = by_task.get(task, 0) + len(by_dataset[name])
    return sum(by_task.values()) >= 5 and all(count >= 2 for count in by_task.values())


def with_interval(
    name: str, values: list[dict[str, float]], enough: bool
) -> tuple[float, float, float]:
    if not enough or len(values) == 1:
        return values[0][name], NAN, NAN
    low, high = np.percentile([drawn[name] for drawn in values[1:]], [2.5, 97.5])
    return values[0][name], float(low), float(high)


def seed_scores(by_example: dict[str, list[Counted]]) -> dict[int, float]:
    """{seed: a dataset's score}, of the seeds that answered every example."""
    found = {}
    for seed in {answer.seed for answers in by_example.values() for answer in answers}:
        by_seed = [
            [answer for answer in answers if answer.seed == seed] for answers in by_example.values()
        ]
        if all(by_seed):
            scores = [
                [number(counted.visit, counted.answer, "score") for counted in answers]
                for answers in by_seed
            ]
            found[seed] = dataset_score([mean(example_scores) / 100 for example_scores in scores])
    return found


def deviation(values: list[float]) -> float:
    if len(values) < 2:
        return NAN
    return math.sqrt(sum((value - mean(values)) ** 2 for value in values) / (len(values) - 1))


def table_of(
    runs: Sequence[StoredRun], intervals: bool = True
) -> dict[tuple[str, ...], dict[str, Any]]:
    """{(model, method, settings, suite, level): its values} of all runs together."""
    settings: dict[Any, list[Counted]] = {}
    for answer in answers_that_count(runs):
        settings.setdefault(answer.setting, []).append(answer)
    return {
        (*setting, level): values
        for setting, answers in settings.items()
        for level, values in rows_of(answers, intervals).items()
    }


def failed_of(run: StoredRun, arms: Sequence[str], dataset: str) -> int:
    """How many answers of these arms a dataset lacks because they failed in every visit."""
    visits = [visit for visit in run.visits if visit.dataset == dataset]
    answered = {(visit.id, arm) for visit in visits for arm in visit.answers}
    failed = {(visit.id, arm) for visit in visits for arm in visit.failures}
    return len([1 for key in failed - answered if key[1] in arms])


def score_failed_as_zero(run: StoredRun, arms: Sequence[str], dataset: str) -> float:
    """The mean of a dataset's scores, 0 for those that failed."""
    answered = [
        counted
        for counted in answers_of(run)
        if counted.visit.dataset == dataset and counted.arm in arms
    ]
    scores = [number(counted.visit, counted.answer, "score") for counted in answered]
    return mean([*scores, *[0] * failed_of(run, arms, dataset)])
