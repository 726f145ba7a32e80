import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.analysis.run_table import arm_groups, run_table
from eval.benchmarks.datasets import DATASETS
from eval.store.aggregate import COLUMNS, beside, by_task
from eval.store.aggregate import VALUES as TABLE_VALUES
from eval.store.results import Results, with_variants
from eval.store.runs import StoredRun
from eval.store.visit import SCALES, Answer, Failure, Visit
from tests.eval.store import join_oracle as oracle
from tests.eval.store.visits import measurement, turn
from tests.helpers import slow

DATASETS_HERE = ("hotpotqa", "musique", "trec", "hops")  # two tasks of LongBench, and another suite
TURNS = {"hotpotqa": 1, "musique": 2, "trec": 1, "hops": 3}
FAILED = Failure(reason="out of memory", traceback="...")
METHODS: dict[str, dict[str, Any]] = {
    "baseline": {"name": "baseline"},
    "lazy": {"name": "lazy", "schedule": {"2": 0.5}, "prune_generated": False, "revive": True},
    "drop seed 0": {"name": "random_drop", "keep": 0.5, "seed": 0},
    "drop seed 1": {"name": "random_drop", "keep": 0.5, "seed": 1},
    "drop seed 2": {"name": "random_drop", "keep": 0.5, "seed": 2},
    "fastkv": {"name": "fastkv", "layer": 3},
}


def run_of(
    visits: list[Visit], arms: list[str], folder: str = "run", baseline: str | None = "baseline", started: str = "1"
) -> StoredRun:
    about = {
        "fingerprint": folder,
        "identity": {
            "arms": {name: {"method": METHODS[name], "code": "1"} for name in arms}, "baseline": baseline,
            "seed": 0, "data": {}, "model": "tiny", "load_format": "auto",
        },
        "config": {"model": {"name": "tiny", "paper": None}},
        "provenance": {"started": started, "machine": {}},
    }  # fmt: skip
    return StoredRun(Path(folder), about, visits)


def visit(dataset: str, name: str, answers: dict[str, list[Answer]], failed: list[str] | None = None) -> Visit:
    turns = [turn(number) for number in range(max((len(found) for found in answers.values()), default=1))]
    failures = dict.fromkeys(failed or [], FAILED)
    return Visit(dataset=dataset, id=name, turns=turns, order=[*answers, *failures], answers=answers, failures=failures)


def one(dataset: str, name: str, **arms: dict[str, Any]) -> Visit:
    return visit(dataset, name, {arm: [measurement(**changes)] for arm, changes in arms.items()})


# ---- the oracle and the tables by hand


def values_of(*visits: Visit, arms: tuple[str, ...] = ("baseline", "lazy"), method: str = "lazy") -> dict[str, Any]:
    table = checked_table([run_of(list(visits), list(arms))], intervals=True)
    return {level: values for (_, name, _, _, level), values in table.items() if name == method}


def test_by_hand_a_dataset() -> None:
    rows = values_of(
        one("hotpotqa", "a", baseline=dict(score=0.5, ttft_s=3.0), lazy=dict(score=1.0, ttft_s=1.0, kl=0.25)),
        one("hotpotqa", "b", baseline=dict(score=0.25, ttft_s=1.0), lazy=dict(score=0.0, ttft_s=1.0, kl=0.75)),
        one("hotpotqa", "c", baseline=dict(score=0.0, ttft_s=2.0), lazy=dict(score=0.0, ttft_s=1.0, kl=0.5)),
    )
    found = rows["dataset hotpotqa"]
    assert (found["examples"], found["turns"], found["datasets"], found["seeds"]) == (3, 3, 1, 1)
    assert found["score"][0] == 33.33  # as LongBench rounds it
    assert found["ttft_speedup"][0] == 2  # 6 s of 3 s, not the mean of 3, 1 and 2
    assert found["kl"][0] == 0.5
    assert found["score_difference"][0] == pytest.approx(33.33 - 25)
    assert found["relative_score"][0] == pytest.approx(100 * 33.33 / 25)
    assert all(math.isnan(end) for end in found["score"][1:])  # fewer than five examples
    assert rows["all"]["score"][0] == found["score"][0]


def test_by_hand_an_interval() -> None:
    right = [one("hotpotqa", str(number), lazy=dict(score=float(number == 0))) for number in range(6)]
    found = values_of(*right)["dataset hotpotqa"]["score"]
    # 5 draws of six: none is the right one in 40 % of them, 3 or more in 3.6 %, 4 or more in 0.3 %
    assert found == (16.67, 0, 60)


def test_by_hand_examples_of_several_datasets_share_an_interval() -> None:
    """Two rows of each dataset, as `limit=2`: each task of three datasets has an interval, and so has their mean."""
    names = ("hotpotqa", "2wikimqa", "musique", "trec", "triviaqa", "samsum")
    rows = values_of(*(one(name, row, lazy=dict(score=float(row == "a"))) for name in names for row in "ab"))
    assert all(math.isnan(end) for end in rows["dataset trec"]["score"][1:])  # two examples
    # each dataset draws one of two: 0, 33.3, 66.7 or 100, both ends with a chance of 12.5 %
    assert rows["task few_shot"]["score"] == (50, 0, pytest.approx(100))
    assert 0 < rows["all"]["score"][1] < 50 < rows["all"]["score"][2] < 100
    # without a second example of a task nothing shows how its examples differ
    rows = values_of(*(one(name, "a", lazy={}) for name in names), *(one("qasper", "a", lazy={}) for _ in "a"))
    assert not math.isnan(rows["task few_shot"]["score"][0])
    assert all(math.isnan(end) for end in rows["all"]["score"][1:])


def test_by_hand_a_dataset_with_one_example_draws_from_its_task() -> None:
    right = [one("hotpotqa", str(row), lazy=dict(score=1.0)) for row in range(6)]
    found = values_of(*right, one("musique", "a", lazy=dict(score=0.0)))["task multi_doc_qa"]["score"]
    # hotpotqa is always 100, the other a draw of six right and one wrong: its chance of 1 in 7 is in the interval
    assert found == (50, 50, 100)


def test_by_hand_answers_are_compared_at_equal_length() -> None:
    long = {"ttft_s": 1.0, "decode_step_s": [1.0] * 9, "total_s": 10.0}  # the baseline's ten tokens
    short = {
        "ttft_s": 0.5,
        "decode_step_s": [1.0, 1.5],
        "total_s": 3.0,
    }  # three tokens, which take the baseline 3 s too
    visits = [one("hotpotqa", "a", baseline=long, lazy=short)]
    found = values_of(*visits)["dataset hotpotqa"]
    assert found["generation_speedup"][0] == pytest.approx(10 / 3)
    assert found["equal_length_speedup"][0] == 1
    found = values_of(*visits, one("hotpotqa", "b", baseline=short, lazy=long))["dataset hotpotqa"]
    assert found["equal_length_speedup"][0] == (3 + 3) / (3 + 3)
    # answers that decode in a batch have no time of their own
    batch = [one("hotpotqa", "a", baseline=long, lazy=short | {"decode_step_s": None, "total_s": None})]
    assert math.isnan(values_of(*batch)["dataset hotpotqa"]["equal_length_speedup"][0])


def test_by_hand_tasks_are_means_of_datasets_and_the_whole_is_the_mean_of_tasks() -> None:
    rows = values_of(
        one("hotpotqa", "a", baseline={"score": 0.5, "ttft_s": 8.0}, lazy={"score": 0.5, "ttft_s": 1.0}),
        one("musique", "a", baseline={"score": 0.5, "ttft_s": 2.0}, lazy={"score": 0.0, "ttft_s": 1.0}),
        one("trec", "a", baseline={"score": 1.0, "ttft_s": 1.0}, lazy={"score": 1.0, "ttft_s": 1.0}),
    )
    assert rows["task multi_doc_qa"]["score"][0] == 25
    assert rows["task multi_doc_qa"]["ttft_speedup"][0] == 5
    assert rows["task multi_doc_qa"]["relative_score"][0] == 50
    assert rows["all"]["score"][0] == 62.5
    assert rows["all"]["ttft_speedup"][0] == 3
    assert rows["all"]["relative_score"][0] == pytest.approx(100 * 62.5 / 75)
    assert math.isnan(rows["all"]["score"][1])  # one example of a dataset has no spread


def test_rows_are_in_the_order_of_tables() -> None:
    visits = [one(name, "a", baseline={}, lazy={"rouge_l": 0.5}) for name in ("trec", "musique", "hotpotqa")]
    table = Results([run_of(visits, ["baseline", "lazy"])]).by_task
    assert list(table.columns) == list(by_task(Results([]).frame).columns) == COLUMNS
    lazy = table[table["method"] == "lazy"]
    assert lazy[["level", "name", "task"]].to_numpy().tolist() == [
        ["dataset", "hotpotqa", "multi_doc_qa"], ["dataset", "musique", "multi_doc_qa"],
        ["task", "multi_doc_qa", "multi_doc_qa"], ["dataset", "trec", "few_shot"], ["task", "few_shot", "few_shot"],
        ["all", "all", "all"],
    ]  # fmt: skip


def test_by_hand_seeds_and_turns_are_one_example() -> None:
    visits = [
        visit("hotpotqa", "a", {
            "baseline": [measurement(score=0.5, ttft_s=4.0), measurement(score=1.0, ttft_s=2.0)],
            "drop seed 0": [measurement(score=0.0, ttft_s=1.0), measurement(score=0.5, ttft_s=1.0)],
            "drop seed 1": [measurement(score=1.0, ttft_s=2.0), measurement(score=0.5, ttft_s=2.0)],
        })
    ]  # fmt: skip
    rows = values_of(*visits, arms=("baseline", "drop seed 0", "drop seed 1"), method="random_drop")
    found = rows["dataset hotpotqa"]
    assert (found["examples"], found["turns"], found["seeds"]) == (1, 2, 2)
    assert found["score"][0] == 50
    assert found["ttft_speedup"][0] == 2  # (4 + 2 + 4 + 2) / (1 + 1 + 2 + 2)
    assert found["score_difference"][0] == -25
    assert found["score_seed_std"] == pytest.approx(math.sqrt(1250))  # of 25 and 75


def test_by_hand_an_arm_that_failed_and_came_back() -> None:
    visits = [
        visit("hotpotqa", "a", {"baseline": [measurement(score=0.5, ttft_s=9.0)]}, failed=["lazy"]),
        one("hotpotqa", "a", baseline={"score": 0.0, "ttft_s": 3.0}, lazy={"score": 1.0, "ttft_s": 1.0}),
        one("hotpotqa", "a", lazy={"score": 0.0, "ttft_s": 50.0}),  # counts for nothing: the second answer
    ]
    lazy, baseline = (values_of(*visits, method=name)["dataset hotpotqa"] for name in ("lazy", "baseline"))
    assert (lazy["score"][0], lazy["ttft_speedup"][0], lazy["score_difference"][0]) == (100, 3, 100)
    assert (baseline["score"][0], baseline["ttft_s"][0], baseline["ttft_speedup"][0]) == (50, 9, 1)
    run = run_of([one("hotpotqa", "b", lazy={"score": 0.5}), *visits[:1]], ["baseline", "lazy"])
    assert oracle.failed_of(run, ["lazy"], "hotpotqa") == 1
    assert oracle.score_failed_as_zero(run, ["lazy"], "hotpotqa") == 25
    assert oracle.failed_of(run_of(visits, ["baseline", "lazy"]), ["lazy"], "hotpotqa") == 0


def test_by_hand_an_answer_without_a_baseline_is_in_no_comparison() -> None:
    found = values_of(
        one("hotpotqa", "a", baseline={"score": 0.8, "ttft_s": 6.0}, lazy={"score": 0.6, "ttft_s": 2.0, "kl": 0.5}),
        one("hotpotqa", "b", lazy={"score": 0.0, "ttft_s": 9.0}),
    )["dataset hotpotqa"]
    assert found["kl"][0] == 0.5  # measured beside the only baseline
    assert (found["score"][0], found["ttft_s"][0], found["ttft_speedup"][0]) == (30, 5.5, 3)
    assert [found[name][0] for name in ("reference_score", "score_difference", "relative_score")] == [80, -20, 75]


# ---- the tables against the oracle


def drawn_measurement(rng: random.Random, is_bare: bool) -> Answer:
    """Every number at random. is_bare: without what some answers lack."""
    percent = {name for name, scale in SCALES.items() if scale == 100}
    values: dict[str, Any] = {name: rng.random() if name in percent else rng.uniform(0.1, 9) for name in SCALES}
    whole = ("kv_bytes", "aux_bytes", "peak_memory_bytes", "prefill_flops", "scoring_tokens", "leading_tokens")
    values |= {name: rng.randrange(1, 1000) for name in whole}
    values |= {"score": rng.choice([0.0, rng.random()]), "text": rng.choice(["", "word", "word", "word"])}
    values |= {"same_answer": rng.randrange(2), "top1_agrees": rng.randrange(2)}
    values |= {
        "decode_step_s": [rng.random() for _ in range(rng.randrange(5))],
        "token_ids": list(range(rng.randrange(5))),
    }
    if is_bare:
        values |= {"decode_step_s": None, "kl": None, "prefill_flops": None, "aux_bytes": None}
    return measurement(**values)


def drawn_run(
    rng: random.Random, folder: str = "run", arms: list[str] | None = None, bare: float = 0.0,
    datasets: tuple[str, ...] = DATASETS_HERE,
) -> StoredRun:  # fmt: skip
    """A run with random arms, datasets and failures; a failed arm is visited again, with the baseline or not."""
    arms = arms or ["baseline", *rng.sample([*METHODS][1:], rng.randrange(1, len(METHODS)))]
    # as in real runs, what an answer lacks depends on the dataset and the arm
    lacks = {(name, arm) for name in DATASETS_HERE for arm in arms if rng.random() < bare}
    visits: list[Visit] = []
    for dataset in rng.sample(datasets, rng.randrange(1, len(datasets) + 1)):
        turns = TURNS[dataset]
        for number in rng.sample(range(20), rng.randrange(1, 6)):
            missing = list(arms)
            while missing:
                tried = [arm for arm in arms if arm in missing or (arm == "baseline" and rng.random() < 0.9)]
                rng.shuffle(tried)
                failed = [arm for arm in tried if rng.random() < 0.2]
                answers = {
                    arm: [drawn_measurement(rng, (dataset, arm) in lacks) for _ in range(turns)]
                    for arm in tried
                    if arm not in failed
                }
                for arm in answers if "baseline" not in answers else ("baseline",):
                    answers[arm] = [replace(one, fidelity=None) for one in answers[arm]]
                visits.append(visit(dataset, str(number), answers, failed))
                missing = [arm for arm in missing if arm not in answers]
                if rng.random() < 0.3:
                    break  # the run ends with failures
    if rng.random() < 0.5:  # visits come in any order
        rng.shuffle(visits)
    return run_of(visits, arms, folder, started=folder)


def close(value: float, expected: float) -> bool:
    return value == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)


def assert_row(row: Any, expected: dict[str, Any], intervals: bool) -> None:
    for name in ("examples", "turns"):
        assert row[name] == expected[name], name
    for name in oracle.VALUES:
        value, low, high = expected[name]
        assert close(row[name], value), (name, row[name], value)
        if intervals:
            assert close(row[f"{name}_low"], low), (name, "low")
            assert close(row[f"{name}_high"], high), (name, "high")


def checked_table(runs: list[StoredRun], intervals: bool) -> dict[Any, dict[str, Any]]:
    """The oracle's table, which `by_task` must equal."""
    expected = oracle.table_of(runs, intervals)
    rows = {}
    for row in Results(runs).by_task.to_dict("records"):
        level = "all" if row["level"] == "all" else f"{row['level']} {row['name']}"
        key = (row["model"], row["method"], row["settings"], row["suite"], level)
        assert key not in rows
        rows[key] = row
    assert rows.keys() == expected.keys()
    for key, row in rows.items():
        assert_row(row, expected[key], intervals)
        assert (row["seeds"], row["datasets"]) == (expected[key]["seeds"], expected[key]["datasets"])
        assert close(row["score_seed_std"], expected[key]["score_seed_std"])
    return expected


def test_the_oracle_has_every_value_of_the_tables() -> None:
    assert set(oracle.VALUES) == set(TABLE_VALUES)


@pytest.mark.parametrize("seed", [*range(8), *slow(*range(8, 40))])
def test_values_of_a_run_are_the_oracles(seed: int) -> None:
    checked_table([drawn_run(random.Random(seed), bare=0.2 * (seed % 2))], intervals=False)


@pytest.mark.parametrize("seed", [38, *slow(0, 1, 4, 9, 34)])
def test_intervals_of_a_run_are_the_oracles(seed: int) -> None:
    arms = ["baseline", "lazy", "drop seed 0", "drop seed 1"]
    checked_table([drawn_run(random.Random(100 + seed), arms=arms, bare=0.1)], intervals=True)


@pytest.mark.parametrize("seed", [*range(6), *slow(*range(6, 20))])
def test_of_several_runs_one_counts_and_no_ratio_mixes_them(seed: int) -> None:
    rng = random.Random(200 + seed)
    runs = with_variants([drawn_run(rng, folder) for folder in ("a", "b", "c")])
    checked_table(runs, intervals=False)
    frame = Results(runs).frame
    other = beside(frame, frame)
    both = other["ttft_s"].notna()
    for name in ("folder", "dataset", "id", "turn", "visit"):
        assert (frame.loc[both, name] == other.loc[both, name]).all()


@pytest.mark.parametrize("seed", [*range(8), *slow(*range(8, 40))])
def test_the_table_of_a_run_is_the_oracles(seed: int) -> None:
    run = drawn_run(random.Random(300 + seed), bare=0.1 * (seed % 2), datasets=DATASETS_HERE[:3])
    frame: Any = run_table(Results([run]), "a run").frame
    found: dict[tuple[str, str], Any] = {}
    for row in frame[frame["kind"] != "length"].to_dict("records"):
        key = row["method"], "all" if row["kind"] == "all" else f"{row['kind']} {row['name']}"
        assert key not in found
        found[key] = row
    expected = {}
    for name, labels in arm_groups(run).items():
        answers = [answer for answer in oracle.answers_of(run) if answer.arm in labels]
        for level, values in (oracle.rows_of(answers, intervals=False) if answers else {}).items():
            expected[name, level] = labels, values
    # rows that would repeat others are left out: a task's only dataset in every arm, and the mean of one task
    datasets: dict[str, set[str]] = {}
    for visit in run.visits:
        if visit.answers:
            datasets.setdefault(DATASETS[visit.dataset].task, set()).add(visit.dataset)
    left_out = {f"dataset {name}" for names in datasets.values() if len(names) == 1 for name in names}
    left_out |= {"all"} if len(datasets) == 1 else set()
    assert found.keys() == {(name, level) for name, level in expected if level not in left_out}
    for (name, level), row in found.items():
        labels, values = expected[name, level]
        assert_row(row, values, intervals=False)
        within = {visit.dataset for visit in run.visits}
        if level != "all":
            within = {one for one in within if row["name"] in (one, DATASETS[one].task)}
        assert row["failed"] == sum(oracle.failed_of(run, labels, one) for one in within)
        if level.startswith("dataset"):
            zeroed = oracle.score_failed_as_zero(run, labels, row["name"])
            assert row["score_failed_as_zero"] == pytest.approx(zeroed, abs=0.006)  # rounded as scores are
