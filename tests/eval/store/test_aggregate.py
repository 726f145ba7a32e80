from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pandas as pd
import pytest

from eval.benchmarks.datasets import DATASETS
from eval.store.aggregate import COLUMNS, RESAMPLES, VALUES, by_task
from eval.store.record import MEASURED
from eval.store.results import COLUMNS as FRAME_COLUMNS

NAN = float("nan")


def example(dataset: str, name: str, method: str = "lazy", seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A row of `as_frame`: half the baseline's score, twice its speed, unless changed."""
    row: dict[str, Any] = dict.fromkeys(FRAME_COLUMNS, NAN)
    row |= dict(model="tiny", paper_model=None, method=method, settings="{}", label=method, seed=seed, run="r",
                folder="f", paired=True, dataset=dataset, id=name, task=DATASETS[dataset].task,
                suite=DATASETS[dataset].suite, prompt_tokens=10)  # fmt: skip
    row |= dict(score=50.0, ttft_s=1.0, scoring_s=0.0, scoring_tokens=0, total_s=2.0, step_s=0.5, generated_tokens=3,
                pct_prompt_tokens_computed=80.0, kv_bytes=60, aux_bytes=20, peak_memory_bytes=1000)  # fmt: skip
    baseline = dict(score=100.0, ttft_s=2.0, scoring_s=0.0, scoring_tokens=0, total_s=4.0, step_s=1.0,
                    generated_tokens=3, pct_prompt_tokens_computed=100.0, kv_bytes=100, aux_bytes=0,
                    peak_memory_bytes=1200)  # fmt: skip
    row |= {f"baseline_{name}": value for name, value in baseline.items()}
    assert set(changes) <= set(row)
    return row | changes


def frame(*rows: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=FRAME_COLUMNS)


def unpaired(row: dict[str, Any]) -> dict[str, Any]:
    return row | {f"baseline_{name}": NAN for name in MEASURED} | {"paired": False}


def row_of(table: pd.DataFrame, name: str, method: str = "lazy") -> Any:
    found = table[(table["name"] == name) & (table["method"] == method)]
    assert len(found) == 1
    return found.iloc[0]


def test_means_and_speedups_are_those_by_hand() -> None:
    table = by_task(
        frame(
            example("hotpotqa", "a", score=100.0, baseline_score=50.0, ttft_s=1.0, baseline_ttft_s=3.0),
            example("hotpotqa", "b", score=0.0, baseline_score=50.0, ttft_s=1.0, baseline_ttft_s=1.0),
            example("musique", "a", score=100 / 3, baseline_score=0.0, ttft_s=1.0, baseline_ttft_s=4.0, total_s=8.0),
            example("trec", "a", score=100.0, step_s=NAN, rouge_l=7.0),
        )
    )
    assert list(table.columns) == list(by_task(frame()).columns) == COLUMNS
    lazy = table[table["method"] == "lazy"]
    assert lazy[["level", "name", "task", "examples", "datasets"]].to_numpy().tolist() == [
        ["dataset", "hotpotqa", "multi_doc_qa", 2, 1],
        ["dataset", "musique", "multi_doc_qa", 1, 1],
        ["task", "multi_doc_qa", "multi_doc_qa", 3, 2],
        ["dataset", "trec", "few_shot", 1, 1],
        ["task", "few_shot", "few_shot", 1, 1],
        ["all", "all", "all", 4, 3],
    ]
    assert row_of(table, "hotpotqa")["ttft_speedup"] == 2  # (3 + 1) / (1 + 1)
    assert row_of(table, "musique")["score"] == 33.33  # the official rounding
    assert math.isnan(row_of(table, "musique")["relative_score"])  # the baseline scores 0
    task = row_of(table, "multi_doc_qa")
    assert task["score"] == pytest.approx((50 + 33.33) / 2)
    assert task["baseline_score"] == 25
    assert task["relative_score"] == pytest.approx(100 * (50 + 33.33) / 2 / 25)
    assert task["ttft_speedup"] == 3
    assert task["generation_speedup"] == pytest.approx((2 + 0.5) / 2)
    assert task["step_speedup"] == 2
    assert (task["cache_bytes"], task["baseline_cache_bytes"]) == (80, 100)
    assert row_of(table, "trec")["rouge_l"] == 7
    overall = row_of(table, "all")
    assert overall["score"] == pytest.approx(((50 + 33.33) / 2 + 100) / 2)
    assert overall["ttft_speedup"] == 2.5
    assert math.isnan(overall["step_speedup"])  # one answer has one token only
    assert math.isnan(overall["rouge_l"])  # most datasets have none
    assert not math.isnan(row_of(table, "hotpotqa")["score_low"])
    for name in ("musique", "multi_doc_qa", "all"):  # one example has no interval, nor do means that include it
        assert math.isnan(row_of(table, name)["score_low"])


def test_seeds_count_as_one_example() -> None:
    table = by_task(
        frame(
            example("hotpotqa", "a", seed=0, score=0.0, ttft_s=1.0, baseline_ttft_s=2.0),
            example("hotpotqa", "a", seed=1, score=100.0, ttft_s=3.0, baseline_ttft_s=2.0),
            example("hotpotqa", "b", seed=0, score=20.0, ttft_s=1.0, baseline_ttft_s=8.0),
            example("hotpotqa", "b", seed=1, score=40.0, ttft_s=1.0, baseline_ttft_s=6.0),
            example("musique", "a", seed=0, score=50.0),
            example("musique", "a", seed=1, score=50.0),
            example("musique", "a", seed=2, score=80.0),
        )
    )
    row = row_of(table, "hotpotqa")
    assert (row["seeds"], row["examples"]) == (3, 2)
    assert row["score"] == 40  # of 50 and 30
    assert row["ttft_s"] == 1.5  # of 2 and 1
    assert row["ttft_speedup"] == 3  # (2 + 2 + 8 + 6) / (1 + 3 + 1 + 1)
    assert row["score_seed_std"] == pytest.approx(math.sqrt(1800))  # 10 and 70, two of which one is free
    # seed 2 lacks hotpotqa: the task's are (10 + 50) / 2 and (70 + 50) / 2
    assert row_of(table, "multi_doc_qa")["score_seed_std"] == pytest.approx(math.sqrt(450))
    assert row_of(table, "musique")["score"] == 60
    assert (row["score_low"], row["score_high"]) == (30, 50)  # two examples: every mean of two is between them
    lone = by_task(frame(example("hotpotqa", "a"), example("hotpotqa", "b")))
    assert math.isnan(row_of(lone, "hotpotqa")["score_seed_std"])


def test_deviation_leaves_out_seeds_without_all_examples() -> None:
    rows = [example("hotpotqa", name, seed=seed, score=10.0 * seed) for name in "ab" for seed in range(3)]
    table = by_task(frame(*rows[:-1]))  # seed 2 lacks b
    assert row_of(table, "hotpotqa")["score_seed_std"] == pytest.approx(math.sqrt(50))  # of 0 and 10


def test_baseline_is_its_run_or_the_paired_one() -> None:
    paired = [example("hotpotqa", name, baseline_score=score) for name, score in (("a", 40.0), ("b", 60.0))]
    again = example("hotpotqa", "a", method="random_drop", baseline_score=50.0, baseline_ttft_s=4.0)
    table = by_task(frame(*paired, again))
    row = row_of(table, "hotpotqa", "baseline")
    assert (row["settings"], row["label"], row["examples"]) == ("{}", "baseline", 2)
    assert row["score"] == row["baseline_score"] == 52.5  # of (40 + 50) / 2 and 60
    assert row["ttft_s"] == 2.5  # of 3 and 2
    assert (row["ttft_speedup"], row["ttft_speedup_low"], row["relative_score"]) == (1, 1, 100)
    own = unpaired(example("hotpotqa", "a", method="baseline", score=10.0))
    row = row_of(by_task(frame(*paired, again, own)), "hotpotqa", "baseline")
    assert row["score"] == 35  # from its own run 10, and the paired 60
    assert row_of(by_task(frame(own)), "hotpotqa", "baseline")["score"] == 10


def test_comparisons_are_missing_without_a_baseline() -> None:
    table = by_task(frame(*(unpaired(example("hotpotqa", name)) for name in "ab")))
    assert list(table["method"].unique()) == ["lazy"]
    row = row_of(table, "hotpotqa")
    assert row["score"] == 50
    for column in ("baseline_score", "relative_score", "ttft_speedup", "step_speedup", "baseline_kv_bytes"):
        assert math.isnan(row[column])
        assert math.isnan(row[f"{column}_low"])
    half = by_task(frame(example("hotpotqa", "a"), unpaired(example("hotpotqa", "b"))))
    assert math.isnan(row_of(half, "hotpotqa")["ttft_speedup"])  # not every example has a baseline


def test_settings_models_and_suites_stay_apart() -> None:
    table = by_task(
        frame(
            example("hotpotqa", "a", score=10.0),
            example("hotpotqa", "a", score=20.0, settings='{"keep": 0.5}', label="lazy, keep=0.5"),
            example("hotpotqa", "a", score=30.0, model="llama2", paper_model="llama2"),
            example("hops", "a", score=40.0),
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


MEANS = {*MEASURED, *(f"baseline_{name}" for name in MEASURED)}
RATIOS = {
    "ttft_speedup": "ttft_s", "generation_speedup": "total_s", "step_speedup": "step_s",
    "ideal_ttft_speedup": "prefill_flops",
}  # fmt: skip


def slow_value(column: str, examples: list[list[dict[str, float]]]) -> float:
    """A dataset's value. examples: the rows of each example's seeds."""
    if column in RATIOS:
        clock = RATIOS[column]
        baseline = sum(row[f"baseline_{clock}"] for seeds in examples for row in seeds)
        return baseline / sum(row[clock] for seeds in examples for row in seeds)
    if column.endswith("cache_bytes"):
        prefix = column.removesuffix("cache_bytes")
        return slow_value(f"{prefix}kv_bytes", examples) + slow_value(f"{prefix}aux_bytes", examples)
    means = [sum(row[column] for row in seeds) / len(seeds) for seeds in examples]
    return sum(means) / len(means)


def slow_task(column: str, datasets: list[list[list[dict[str, float]]]], official: bool) -> float:
    if column == "relative_score":
        return 100 * slow_task("score", datasets, official) / slow_task("baseline_score", datasets, official)
    if column == "answered_score":
        return 100 * slow_task("score", datasets, official) / slow_task("pct_answered", datasets, official)
    values = [slow_value(column, examples) for examples in datasets]
    if official and column in ("score", "baseline_score"):
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
    rows = {
        name: [
            [{column: rng.uniform(1, 100) for column in MEANS} for _ in range(seeds)] for _ in range(sizes[name])
        ]
        for name in sizes
    }  # fmt: skip
    table = by_task(
        frame(
            *(
                example(name, str(number), seed=seed, **rows[name][number][seed])
                for name in sizes
                for number in range(sizes[name])
                for seed in range(seeds)
            )
        )
    )
    # the same resamples: only the random draws are taken from there
    picks = {
        name: np.random.default_rng(list(name.encode())).integers(0, n, size=(RESAMPLES, n)).tolist()
        for name, n in sizes.items()
    }
    for row_name, names in {"hotpotqa": ["hotpotqa"], "musique": ["musique"], "multi_doc_qa": list(sizes)}.items():
        row = row_of(table, row_name)
        for column in VALUES:
            assert row[column] == pytest.approx(slow_task(column, [rows[name] for name in names], True)), column
            if column not in {"score", "baseline_ttft_s", "cache_bytes", "relative_score", "answered_score", *RATIOS}:
                continue  # resampled like the score, which is a mean too
            drawn = [
                slow_task(column, [[rows[name][pick] for pick in picks[name][number]] for name in names], False)
                for number in range(RESAMPLES)
            ]
            assert row[f"{column}_low"] == pytest.approx(slow_percentile(drawn, 0.025)), column
            assert row[f"{column}_high"] == pytest.approx(slow_percentile(drawn, 0.975)), column
