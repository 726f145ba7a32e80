"""Every number of a run's table from its visits, by dictionaries and loops: slow, and written from
the definitions.

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
    "ttft_speedup": "ttft_s", "generation_speedup": "total_s",
    "equal_length_speedup": "equal_length_s",
    "step_speedup": "step_s", "ideal_ttft_speedup": "prefill_flops",
}  # fmt: skip
OF_PAIRS = (  # measured beside the baseline's answer
    "kl", "top1_agrees", "leading_tokens", "edit_similarity", "same_answer", "answer_kl",
    "answer_log_likelihood",
    "gold_kl", "gold_log_likelihood",
)  # fmt: skip
COMPARED = (
    "score",
    "kv_bytes",
    "aux_bytes",
    "peak_memory_bytes",
)  # values that stand beside the baseline's
BESIDE = ("cache_ratio", "peak_ratio", "reference_score", "score_difference", "relative_score")
PLAIN = (
    "score", "rouge_l", "ttft_s", "scoring_s", "scoring_tokens", "total_s", "step_s",
    "generated_tokens",
    "pct_prompt_tokens_computed", "kv_bytes", "aux_bytes", "peak_memory_bytes", "prefill_flops",
    "prefill_mfu", "attention_ceiling", "revived_tokens", *OF_PAIRS,
)  # fmt: skip
VALUES = (*PLAIN, "cache_bytes", *SPEEDUPS, *BESIDE)


@dataclass(frozen=True)
class Counted:
    """An arm's answer that counts, in its visit, and the baseline's of the same visit."""

    model: str
    method: str
    settings: str
    seed: int
    run: str
    arm: str
    visit: Visit
    own: Answer
    baseline: Answer | None

    @property
    def setting(self) -> tuple[str, str, str, str]:
        return self.model, self.method, self.settings, DATASETS[self.visit.dataset].suite


def number(visit: Visit, one: Answer, name: str) -> float:
    """A value as tables show it; NaN if it was not measured."""
    layers = [
        run
        for run, width in zip(one.computed[-1], one.group_layers, strict=True)
        for _ in range(width)
    ]
    computed = one.scoring_tokens + sum(layers) / len(layers)
    steps = one.decode_step_s
    derived: dict[str, Any] = {
        "total_s": None if steps is None else one.ttft_s + sum(steps),
        "step_s": sum(steps) / len(steps) if steps else None,
        "generated_tokens": len(one.token_ids),
        "pct_prompt_tokens_computed": 100 * computed / visit.prompt_tokens,
        "attention_ceiling": visit.attention_ceiling,
    }
    value = derived[name] if name in derived else getattr(one, name)
    return NAN if value is None else float(value) * (100 if name in PERCENT else 1)


def answers_of(run: StoredRun) -> list[Counted]:
    """Every arm's answers of the first visit that holds any, with the baseline's of that visit; arm
    by arm.

    The order decides which examples the bootstrap's random numbers draw.
    """
    identity = run.about["identity"]
    found: dict[Any, Counted] = {}
    for visit in run.visits:
        for arm, own in visit.arms.items():
            about = identity["arms"][arm]
            settings = {
                **about["method"],
                **({"speedup": about["speedup"]} if "speedup" in about else {}),
            }
            method, seed = settings.pop("name"), settings.pop("seed", identity["seed"])
            theirs = visit.arms.get(identity["baseline"])
            if isinstance(own, Answer):
                found.setdefault(
                    (visit.dataset, visit.id, arm),
                    Counted(
                        run.model, method, json.dumps(settings, sort_keys=True), seed,
                        str(run.folder), arm,
                        visit, own, theirs if isinstance(theirs, Answer) else None,
                    ),
                )  # fmt: skip
    return sorted(found.values(), key=lambda answer: [*identity["arms"]].index(answer.arm))


def answers_that_count(runs: Sequence[StoredRun]) -> list[Counted]:
    """The answers of all runs; of several runs of a setting and seed, a dataset's are those of one:
    the run with most examples, then the newest."""
    found = [answer for run in runs for answer in answers_of(run)]
    started = {str(run.folder): run.started for run in runs}
    candidates: dict[Any, dict[str, set[str]]] = {}
    for answer in found:
        key = (*answer.setting, answer.seed, answer.visit.dataset)
        candidates.setdefault(key, {}).setdefault(answer.run, set()).add(answer.visit.id)
    best = {
        key: max(by_run, key=lambda folder: (len(by_run[folder]), started[folder]))
        for key, by_run in candidates.items()
    }
    return [
        answer
        for answer in found
        if answer.run == best[*answer.setting, answer.seed, answer.visit.dataset]
    ]


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else NAN


def ratio(above: float, below: float) -> float:
    return NAN if below == 0 or math.isnan(below) else above / below


def to_token(one: Answer, k: int) -> float:
    """Seconds to the k-th token, from 1."""
    assert one.decode_step_s is not None
    time = one.ttft_s
    for step in one.decode_step_s[: k - 1]:
        time += step
    return time


def to_equal_length(own: Answer, theirs: Answer) -> tuple[float, float]:
    """Seconds of both answers to their k-th token: k is the length of the shorter one."""
    ours, others = own.decode_step_s, theirs.decode_step_s
    if ours is None or others is None:
        return NAN, NAN
    k = 1 + min(len(ours), len(others))
    return to_token(own, k), to_token(theirs, k)


class Example:
    """The answers to one example: seeds count as one."""

    def __init__(self, answers: list[Counted]) -> None:
        own = [(answer.visit, answer.own) for answer in answers]
        pairs = [
            (answer.visit, answer.own, answer.baseline)
            for answer in answers
            if answer.baseline is not None
        ]
        ours, theirs = (
            [(visit, one) for visit, one, _ in pairs],
            [(visit, one) for visit, _, one in pairs],
        )

        def values(of: list[tuple[Visit, Answer]], name: str) -> list[float]:
            return [number(visit, one, name) for visit, one in of]

        self.is_paired = bool(pairs)
        self.means = {name: mean(values(own, name)) for name in PLAIN}
        self.of_pairs = {name: mean(values(ours, name)) for name in OF_PAIRS}
        self.own = {name: mean(values(ours, name)) for name in COMPARED}
        self.theirs = {name: mean(values(theirs, name)) for name in COMPARED}
        clocks = [name for name in SPEEDUPS.values() if name != "equal_length_s"]
        self.own_time = {name: sum(values(ours, name)) for name in clocks}
        self.their_time = {name: sum(values(theirs, name)) for name in clocks}
        ends = [to_equal_length(one, other) for _, one, other in pairs]
        self.own_time["equal_length_s"] = sum(end for end, _ in ends)
        self.their_time["equal_length_s"] = sum(end for _, end in ends)


def of_dataset(drawn: list[Example], official: bool) -> dict[str, float]:
    """The values of a dataset, and the score and memory of both sides of the answers beside a
    baseline."""
    pairs = [example for example in drawn if example.is_paired]
    values = {name: mean(example.means[name] for example in drawn) for name in PLAIN}
    values |= {name: mean(example.of_pairs[name] for example in pairs) for name in OF_PAIRS}
    for speedup, clock in SPEEDUPS.items():
        values[speedup] = ratio(
            sum(example.their_time[clock] for example in pairs),
            sum(example.own_time[clock] for example in pairs),
        )
    for name in COMPARED:
        values[f"own {name}"] = mean(example.own[name] for example in pairs)
        values[f"their {name}"] = mean(example.theirs[name] for example in pairs)
    if official:
        values["score"] = dataset_score([example.means["score"] / 100 for example in drawn])
        if pairs:
            values["own score"] = dataset_score([example.own["score"] / 100 for example in pairs])
            values["their score"] = dataset_score(
                [example.theirs["score"] / 100 for example in pairs]
            )
    return with_ratios(values)


def with_ratios(values: dict[str, float]) -> dict[str, float]:
    """The values, with those that are made of others of the same row."""
    own_cache = values["own kv_bytes"] + values["own aux_bytes"]
    their_cache = values["their kv_bytes"] + values["their aux_bytes"]
    return values | {
        "cache_bytes": values["kv_bytes"] + values["aux_bytes"],
        "cache_ratio": ratio(own_cache, their_cache),
        "peak_ratio": ratio(values["own peak_memory_bytes"], values["their peak_memory_bytes"]),
        "reference_score": values["their score"],
        "score_difference": values["own score"] - values["their score"],
        "relative_score": ratio(100 * values["own score"], values["their score"]),
    }


def mean_of(parts: list[dict[str, float]]) -> dict[str, float]:
    return with_ratios({name: mean(part[name] for part in parts) for name in parts[0]})


def resamples(dataset: str, own: list[Example], of_task: list[Example]) -> list[list[Example]]:
    """A dataset's examples, then the documented draws of the bootstrap: n - 1 of n (Rao and Wu
    1988); a dataset's only example is replaced by any one of its task. of_task: in order of
    appearance."""
    rng = np.random.default_rng(list(dataset.encode()))
    if len(own) == 1:
        return [
            own,
            *([of_task[pick]] for pick in rng.integers(0, len(of_task), size=RESAMPLES).tolist()),
        ]
    draws = rng.integers(0, len(own), size=(RESAMPLES, len(own) - 1)).tolist()
    return [own, *([own[pick] for pick in picks] for picks in draws)]


def rows_of(answers: Sequence[Counted], intervals: bool = True) -> dict[str, dict[str, Any]]:
    """{"dataset NAME", "task NAME" or "all": its values} of one setting on one suite.

    Each has examples, datasets, seeds, score_seed_std, and `VALUES` as (value, low, high).
    """
    by_key: dict[tuple[str, str], list[Counted]] = {}
    by_dataset: dict[str, dict[str, list[Counted]]] = {}
    for answer in answers:
        by_key.setdefault((answer.visit.dataset, answer.visit.id), []).append(answer)
        by_dataset.setdefault(answer.visit.dataset, {}).setdefault(answer.visit.id, []).append(
            answer
        )
    examples = {key: Example(found) for key, found in by_key.items()}
    drawn, seeds = {}, {}
    for name, by_example in by_dataset.items():
        own = [example for (dataset, _), example in examples.items() if dataset == name]
        task = DATASETS[name].task
        of_task = [
            example for (dataset, _), example in examples.items() if DATASETS[dataset].task == task
        ]
        chosen = resamples(name, own, of_task)[: None if intervals else 1]
        drawn[name] = [of_dataset(one, place == 0) for place, one in enumerate(chosen)]
        seeds[name] = seed_scores(by_example)
    levels: dict[str, tuple[list[str], list[dict[str, float]], dict[int, float]]] = {}
    for name in drawn:
        levels[f"dataset {name}"] = [name], drawn[name], seeds[name]
    tasks = [task for task in TASKS if any(DATASETS[name].task == task for name in drawn)]
    for task in tasks:
        names = [name for name in drawn if DATASETS[name].task == task]
        values = [
            mean_of(list(parts)) for parts in zip(*(drawn[name] for name in names), strict=True)
        ]
        levels[f"task {task}"] = names, values, mean_by_seed([seeds[name] for name in names])
    of_tasks = [levels[f"task {task}"] for task in tasks]
    values = [
        mean_of(list(parts)) for parts in zip(*(values for _, values, _ in of_tasks), strict=True)
    ]
    levels["all"] = list(drawn), values, mean_by_seed([scores for _, _, scores in of_tasks])
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


def has_enough(by_dataset: dict[str, dict[str, list[Counted]]], names: list[str]) -> bool:
    """Five examples at least, and two of each task."""
    by_task: dict[str, int] = {}
    for name in names:
        by_task[DATASETS[name].task] = by_task.get(DATASETS[name].task, 0) + len(by_dataset[name])
    return sum(by_task.values()) >= 5 and all(count >= 2 for count in by_task.values())


def with_interval(
    name: str, values: list[dict[str, float]], enough: bool
) -> tuple[float, float, float]:
    if not enough or len(values) == 1:
        return values[0][name], NAN, NAN
    low, high = np.percentile([one[name] for one in values[1:]], [2.5, 97.5])
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
                [number(answer.visit, answer.own, "score") for answer in answers]
                for answers in by_seed
            ]
            found[seed] = dataset_score([mean(of_example) / 100 for of_example in scores])
    return found


def mean_by_seed(parts: list[dict[int, float]]) -> dict[int, float]:
    return {
        seed: mean(part[seed] for part in parts)
        for seed in parts[0]
        if all(seed in part for part in parts)
    }


def deviation(values: list[float]) -> float:
    if len(values) < 2:
        return NAN
    return math.sqrt(sum((value - mean(values)) ** 2 for value in values) / (len(values) - 1))


def table_of(
    runs: Sequence[StoredRun], intervals: bool = True
) -> dict[tuple[str, str, str, str, str], dict[str, Any]]:
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
    answered = {
        (visit.id, arm) for visit in run.visits if visit.dataset == dataset for arm in visit.answers
    }
    failed = {
        (visit.id, arm)
        for visit in run.visits
        if visit.dataset == dataset
        for arm in visit.failures
    }
    return len([1 for key in failed - answered if key[1] in arms])


def score_failed_as_zero(run: StoredRun, arms: Sequence[str], dataset: str) -> float:
    """The mean of a dataset's scores, 0 for those that failed."""
    answered = [one for one in answers_of(run) if one.visit.dataset == dataset and one.arm in arms]
    scores = [number(one.visit, one.own, "score") for one in answered]
    return mean([*scores, *[0] * failed_of(run, arms, dataset)])
