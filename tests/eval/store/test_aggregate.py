"""By hand; `test_join_oracle.py` compares every value and interval with a slow version, on random runs."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from eval.benchmarks.datasets import DATASETS
from eval.store.aggregate import COLUMNS, by_task
from eval.store.results import COLUMNS as FRAME_COLUMNS

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


def test_comparisons_are_missing_without_a_baseline() -> None:
    table = by_task(frame(*(visit("hotpotqa", name)[1:] for name in "ab")))
    assert list(table["method"].unique()) == ["lazy"]
    found = row_of(table, "hotpotqa")
    assert found["score"] == 50
    for column in ("score_difference", "relative_score", "ttft_speedup", "step_speedup", "cache_ratio"):
        assert math.isnan(found[column])
        assert math.isnan(found[f"{column}_low"])


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
