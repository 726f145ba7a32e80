from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pandas as pd
import pytest

from eval.benchmarks.datasets import DATASETS
from eval.store.aggregate import COLUMNS, RESAMPLES, VALUES, by_task
from eval.store.results import COLUMNS as FRAME_COLUMNS
from eval.store.visit import MEASURED

NAN = float("nan")
BASELINE = dict(score=100.0, ttft_s=2.0, scoring_s=0.0, scoring_tokens=0, total_s=4.0, step_s=1.0,
                generated_tokens=3, pct_prompt_tokens_computed=100.0, kv_bytes=100, aux_bytes=0,
                peak_memory_bytes=1200)  # fmt: skip
METHOD = dict(score=50.0, ttft_s=1.0, scoring_s=0.0, scoring_tokens=0, total_s=2.0, step_s=0.5, generated_tokens=3,
              pct_prompt_tokens_computed=80.0, kv_bytes=60, aux_bytes=20, peak_memory_bytes=1000)  # fmt: skip


def row(dataset: str, name: str, method: str, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(FRAME_COLUMNS, NAN)
    values |= dict(model="tiny", paper_model=None, method=method, arm=method, settings="{}", label=method, seed=0,
                   run="r", folder="f", is_baseline=method == "baseline", dataset=dataset, id=name,
                   task=DATASETS[dataset].task, suite=DATASETS[dataset].suite, prompt_tokens=10, turn=1, visit=0,
                   counts=True)  # fmt: skip
    values |= BASELINE if method == "baseline" else METHOD
    assert set(changes) <= set(values)
    return values | changes


def visit(dataset: str, name: str, baseline: dict[str, Any] | None = None, **changes: Any) -> list[dict[str, Any]]:
    """The rows of a visit: the baseline, and lazy with half its score and twice its speed, unless changed."""
    lazy = row(dataset, name, "lazy", **changes)
    place = {key: lazy[key] for key in ("folder", "model", "paper_model", "visit", "turn")}
    return [row(dataset, name, "baseline", **place | (baseline or {})), lazy]


def frame(*visits: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame([row for rows in visits for row in rows], columns=FRAME_COLUMNS).astype(
        {"counts": bool, "is_baseline": bool}
    )


def row_of(table: pd.DataFrame, name: str, method: str = "lazy") -> Any:
    found = table[(table["name"] == name) & (table["method"] == method)]
    assert len(found) == 1
    return found.iloc[0]


def test_means_and_speedups_are_those_by_hand() -> None:
    table = by_task(
        frame(
            visit("hotpotqa", "a", {"score": 50.0, "ttft_s": 3.0}, score=100.0, ttft_s=1.0),
            visit("hotpotqa", "b", {"score": 50.0, "ttft_s": 1.0}, score=0.0, ttft_s=1.0),
            visit("musique", "a", {"score": 0.0, "ttft_s": 4.0}, score=100 / 3, ttft_s=1.0, total_s=8.0),
            visit("trec", "a", score=100.0, step_s=NAN, rouge_l=7.0),
        )
    )
    assert list(table.columns) == list(by_task(frame()).columns) == COLUMNS
    lazy = table[table["method"] == "lazy"]
    assert lazy[["level", "name", "task", "examples", "turns", "datasets"]].to_numpy().tolist() == [
        ["dataset", "hotpotqa", "multi_doc_qa", 2, 2, 1],
        ["dataset", "musique", "multi_doc_qa", 1, 1, 1],
        ["task", "multi_doc_qa", "multi_doc_qa", 3, 3, 2],
        ["dataset", "trec", "few_shot", 1, 1, 1],
        ["task", "few_shot", "few_shot", 1, 1, 1],
        ["all", "all", "all", 4, 4, 3],
    ]
    assert row_of(table, "hotpotqa")["ttft_speedup"] == 2  # (3 + 1) / (1 + 1)
    assert row_of(table, "musique")["score"] == 33.33  # the official rounding
    assert math.isnan(row_of(table, "musique")["relative_score"])  # the baseline scores 0
    task = row_of(table, "multi_doc_qa")
    assert task["score"] == pytest.approx((50 + 33.33) / 2)
    assert task["score_difference"] == pytest.approx((50 + 33.33) / 2 - 25)
    assert task["relative_score"] == pytest.approx(100 * (50 + 33.33) / 2 / 25)
    assert task["ttft_speedup"] == 3
    assert task["generation_speedup"] == pytest.approx((2 + 0.5) / 2)
    assert task["step_speedup"] == 2
    assert (task["cache_bytes"], task["cache_ratio"], task["peak_ratio"]) == (80, 0.8, pytest.approx(1000 / 1200))
    assert row_of(table, "trec")["rouge_l"] == 7
    overall = row_of(table, "all")
    assert overall["score"] == pytest.approx(((50 + 33.33) / 2 + 100) / 2)
    assert overall["ttft_speedup"] == 2.5
    assert math.isnan(overall["step_speedup"])  # one answer has one token only
    assert math.isnan(overall["rouge_l"])  # most datasets have none
    assert not math.isnan(row_of(table, "hotpotqa")["score_low"])
    for name in ("musique", "multi_doc_qa", "all"):  # one example has no interval, nor do means that include it
        assert math.isnan(row_of(table, name)["score_low"])
    baseline = row_of(table, "multi_doc_qa", "baseline")
    assert (baseline["score"], baseline["ttft_s"]) == (25, pytest.approx((2 + 4) / 2))
    assert (baseline["ttft_speedup"], baseline["score_difference"], baseline["cache_ratio"]) == (1, 0, 1)


def test_seeds_count_as_one_example_each_with_the_baseline_of_its_visit() -> None:
    seeds = [
        ("hotpotqa", "a", 0, 0.0, 1.0, 2.0), ("hotpotqa", "a", 1, 100.0, 3.0, 2.0),
        ("hotpotqa", "b", 0, 20.0, 1.0, 8.0), ("hotpotqa", "b", 1, 40.0, 1.0, 6.0),
        ("musique", "a", 0, 50.0, 1.0, 2.0), ("musique", "a", 1, 50.0, 1.0, 2.0), ("musique", "a", 2, 80.0, 1.0, 2.0),
    ]  # fmt: skip
    rows = [
        visit(dataset, name, {"ttft_s": theirs}, seed=seed, score=score, ttft_s=own, folder=f"run {seed}")
        for dataset, name, seed, score, own, theirs in seeds
    ]
    table = by_task(frame(*rows))
    found = row_of(table, "hotpotqa")
    assert (found["seeds"], found["examples"], found["turns"]) == (3, 2, 2)
    assert found["score"] == 40  # of 50 and 30
    assert found["ttft_s"] == 1.5  # of 2 and 1
    assert found["ttft_speedup"] == 3  # (2 + 2 + 8 + 6) / (1 + 3 + 1 + 1)
    assert found["score_seed_std"] == pytest.approx(math.sqrt(1800))  # 10 and 70, two of which one is free
    # seed 2 lacks hotpotqa: the task's are (10 + 50) / 2 and (70 + 50) / 2
    assert row_of(table, "multi_doc_qa")["score_seed_std"] == pytest.approx(math.sqrt(450))
    assert row_of(table, "musique")["score"] == 60
    assert (found["score_low"], found["score_high"]) == (30, 50)  # two examples: every mean of two is between them
    lone = by_task(frame(visit("hotpotqa", "a"), visit("hotpotqa", "b")))
    assert math.isnan(row_of(lone, "hotpotqa")["score_seed_std"])


def test_deviation_leaves_out_seeds_without_all_examples() -> None:
    rows = [
        visit("hotpotqa", name, seed=seed, score=10.0 * seed, folder=f"{seed}") for name in "ab" for seed in range(3)
    ]
    table = by_task(frame(*rows[:-1]))  # seed 2 lacks b
    assert row_of(table, "hotpotqa")["score_seed_std"] == pytest.approx(math.sqrt(50))  # of 0 and 10


def test_turns_are_part_of_their_example() -> None:
    rows = [visit("hotpotqa", name, turn=turn, score=10.0 * turn, ttft_s=turn) for name in "ab" for turn in (1, 2, 3)]
    found = row_of(by_task(frame(*rows)), "hotpotqa")
    assert (found["examples"], found["turns"], found["score"]) == (2, 6, 20)
    assert found["ttft_speedup"] == 1  # 12 s of both


def test_comparisons_are_missing_without_a_baseline() -> None:
    table = by_task(frame(*(visit("hotpotqa", name)[1:] for name in "ab")))
    assert list(table["method"].unique()) == ["lazy"]
    found = row_of(table, "hotpotqa")
    assert found["score"] == 50
    for column in ("score_difference", "relative_score", "ttft_speedup", "step_speedup", "cache_ratio"):
        assert math.isnan(found[column])
        assert math.isnan(found[f"{column}_low"])


def test_an_answer_whose_baseline_failed_counts_but_not_in_comparisons() -> None:
    whole = visit("hotpotqa", "a", {"score": 80.0, "ttft_s": 6.0}, score=60.0, ttft_s=2.0)
    half = visit("hotpotqa", "b", score=0.0, ttft_s=9.0)[1:]
    found = row_of(by_task(frame(whole, half)), "hotpotqa")
    assert (found["examples"], found["score"], found["ttft_s"]) == (2, 30, 5.5)
    assert (found["ttft_speedup"], found["score_difference"], found["relative_score"]) == (3, -20, 75)


def test_a_second_visit_gives_the_clock_of_what_it_measured_and_no_second_answer() -> None:
    first = visit("hotpotqa", "a", {"ttft_s": 100.0})[:1]  # lazy failed
    second = visit("hotpotqa", "a", {"ttft_s": 3.0, "visit": 1, "counts": False}, ttft_s=1.0, visit=1)
    table = by_task(frame(first, second))
    assert row_of(table, "hotpotqa")["ttft_speedup"] == 3
    assert row_of(table, "hotpotqa", "baseline")["ttft_s"] == 100
    assert row_of(table, "hotpotqa", "baseline")["examples"] == 1


def test_settings_models_and_suites_stay_apart() -> None:
    table = by_task(
        frame(
            visit("hotpotqa", "a", score=10.0, folder="1"),
            visit("hotpotqa", "a", score=20.0, settings='{"keep": 0.5}', label="lazy, keep=0.5", folder="2"),
            visit("hotpotqa", "a", score=30.0, model="llama2", paper_model="llama2", folder="3"),
            visit("hops", "a", score=40.0, folder="4"),
        )
    )
    found = table[(table["method"] == "lazy") & (table["name"] == "multi_doc_qa")]
    found = found.assign(paper_model=found["paper_model"].fillna("-"))
    assert found[["model", "paper_model", "label", "suite", "score"]].to_numpy().tolist() == [
        ["tiny", "-", "lazy", "longbench", 10],
        ["tiny", "-", "lazy, keep=0.5", "longbench", 20],
        ["llama2", "llama2", "lazy", "longbench", 30],
        ["tiny", "-", "lazy", "embedded", 40],
    ]


SPEEDUPS = {
    "ttft_speedup": "ttft_s", "generation_speedup": "total_s", "step_speedup": "step_s",
    "ideal_ttft_speedup": "prefill_flops",
}  # fmt: skip
Pair = tuple[dict[str, float], dict[str, float]]  # an answer, and the baseline's


def slow_value(column: str, examples: list[list[Pair]], side: int = 0) -> float:
    """A dataset's value. examples: the answers of each example's seeds."""
    if column in SPEEDUPS:
        theirs, own = (sum(pair[place][SPEEDUPS[column]] for seeds in examples for pair in seeds) for place in (1, 0))
        return theirs / own
    if column == "cache_bytes":
        return slow_value("kv_bytes", examples, side) + slow_value("aux_bytes", examples, side)
    means = [sum(pair[side][column] for pair in seeds) / len(seeds) for seeds in examples]
    return sum(means) / len(means)


def slow_task(column: str, datasets: list[list[list[Pair]]], official: bool, side: int = 0) -> float:
    def of(name: str, place: int = 0) -> float:
        return slow_task(name, datasets, official, place)

    match column:
        case "relative_score":
            return 100 * of("score") / of("score", 1)
        case "score_difference":
            return of("score") - of("score", 1)
        case "answered_score":
            return 100 * of("score") / of("pct_answered")
        case "cache_ratio":
            return of("cache_bytes") / of("cache_bytes", 1)
        case "peak_ratio":
            return of("peak_memory_bytes") / of("peak_memory_bytes", 1)
    values = [slow_value(column, examples, side) for examples in datasets]
    if official and column == "score":
        values = [round(value, 2) for value in values]
    return sum(values) / len(values)


def slow_percentile(values: list[float], share: float) -> float:
    """Linear between the two nearest ranks."""
    ordered, place = sorted(values), share * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


@pytest.mark.parametrize("seeds", [1, 3])
def test_values_and_intervals_equal_a_slow_version(seeds: int) -> None:
    rng = random.Random(seeds)
    sizes = {"hotpotqa": 4, "musique": 3}

    def drawn_values() -> dict[str, float]:
        return {column: rng.uniform(1, 100) for column in MEASURED}

    rows = {
        name: [[(drawn_values(), drawn_values()) for _ in range(seeds)] for _ in range(size)]
        for name, size in sizes.items()
    }
    table = by_task(
        frame(
            *(
                visit(name, str(number), rows[name][number][seed][1], seed=seed, folder=str(seed),
                      **rows[name][number][seed][0])
                for name in sizes
                for number in range(sizes[name])
                for seed in range(seeds)
            )
        )
    )  # fmt: skip
    # the same resamples: only the random draws are taken from there
    picks = {
        name: np.random.default_rng(list(name.encode())).integers(0, n, size=(RESAMPLES, n)).tolist()
        for name, n in sizes.items()
    }
    for row_name, names in {"hotpotqa": ["hotpotqa"], "musique": ["musique"], "multi_doc_qa": list(sizes)}.items():
        found = row_of(table, row_name)
        for column in VALUES:
            assert found[column] == pytest.approx(slow_task(column, [rows[name] for name in names], True)), column
            if column in MEASURED and column not in {"score", "ttft_s"}:
                continue  # resampled like the score, which is a mean too
            resampled = [
                slow_task(column, [[rows[name][pick] for pick in picks[name][number]] for name in names], False)
                for number in range(RESAMPLES)
            ]
            assert found[f"{column}_low"] == pytest.approx(slow_percentile(resampled, 0.025)), column
            assert found[f"{column}_high"] == pytest.approx(slow_percentile(resampled, 0.975)), column
