"""The statistics of tables: by hand where one can, and equal to a slow second derivation for any
run."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from eval.analysis.run_table import arm_groups, run_table
from eval.benchmarks.datasets import DATASETS
from eval.store.record import SCALES, Answer, Visit
from eval.store.results import Results
from eval.store.runs import StoredRun
from eval.store.summary import COLUMNS, by_task, match_baselines
from eval.store.summary import VALUES as TABLE_VALUES
from tests.eval.made import LAZY, stored
from tests.eval.store import join_oracle as oracle
from tests.eval.store.visits import FAILED, answer, visit
from tests.helpers import slow

DATASETS_HERE = ("hotpotqa", "musique", "trec", "hops")  # two tasks of LongBench, and another suite
ARMS: dict[str, dict[str, Any]] = {
    "baseline": {"method": {"name": "baseline"}},
    "lazy": {"method": {"name": "lazy", **LAZY}},
    **{
        f"drop seed {seed}": {"method": {"name": "random_drop", "keep": 0.5, "seed": seed}}
        for seed in range(3)
    },
    "fastkv": {"method": {"name": "fastkv", "layer": 3}, "speedup": 1.5},
}


def run_of(visits: list[Visit], arms: list[str], started: str = "1") -> StoredRun:
    identity: Any = {name: ARMS[name] for name in arms}
    return stored(visits, provenance={"started": started}, arms=identity)


# ---- the oracle and the tables by hand


def values_of(
    *visits: Visit, arms: Sequence[str] = ("baseline", "lazy"), method: str = "lazy"
) -> dict[str, Any]:
    table = checked_table([run_of(list(visits), [*arms])], intervals=True)
    return {level: values for (_, name, _, _, level), values in table.items() if name == method}


def test_a_dataset() -> None:
    rows = values_of(
        visit(1, baseline={"score": 0.5, "ttft_s": 3.0}, score=1.0, ttft_s=1.0, kl=0.25),
        visit(2, baseline={"score": 0.25, "ttft_s": 1.0}, score=0.0, ttft_s=1.0, kl=0.75),
        visit(3, baseline={"score": 0.0, "ttft_s": 2.0}, score=0.0, ttft_s=1.0, kl=0.5),
    )
    found = rows["dataset hotpotqa"]
    assert (found["examples"], found["datasets"], found["seeds"]) == (3, 1, 1)
    assert found["score"][0] == 33.33  # as LongBench rounds it
    assert found["ttft_speedup"][0] == 2  # 6 s of 3 s, not the mean of 3, 1 and 2
    assert found["kl"][0] == 0.5
    assert found["score_difference"][0] == pytest.approx(33.33 - 25)
    assert found["relative_score"][0] == pytest.approx(100 * 33.33 / 25)
    # 100 and 50 of 100 tokens in two layers each
    assert found["pct_prompt_tokens_computed"][0] == 75
    assert found["total_s"][0] == pytest.approx(1.1)
    assert all(math.isnan(end) for end in found["score"][1:])  # fewer than five examples
    assert rows["all"]["score"][0] == found["score"][0]


def test_an_interval() -> None:
    found = values_of(*(visit(row, score=float(row == 0)) for row in range(6)))["dataset hotpotqa"][
        "score"
    ]
    # 5 draws of six: none is the right one in 40 % of them, 3 or more in 3.6 %, 4 or more in 0.3 %
    assert found == (16.67, 0, 60)


def test_examples_of_several_datasets_share_an_interval() -> None:
    """Two rows of each dataset, as `limit=2`: each task of three datasets has an interval, and so
    has their mean."""
    names = ("hotpotqa", "2wikimqa", "musique", "trec", "triviaqa", "samsum")
    rows = values_of(*(visit(row, name, score=float(row)) for name in names for row in (0, 1)))
    assert all(math.isnan(end) for end in rows["dataset trec"]["score"][1:])  # two examples
    # each dataset draws one of two: 0, 33.3, 66.7 or 100, both ends with a chance of 12.5 %
    assert rows["task few_shot"]["score"] == (50, 0, pytest.approx(100))
    assert 0 < rows["all"]["score"][1] < 50 < rows["all"]["score"][2] < 100
    # without a second example of a task nothing shows how its examples differ
    rows = values_of(*(visit(0, name) for name in (*names, "qasper")))
    assert not math.isnan(rows["task few_shot"]["score"][0])
    assert all(math.isnan(end) for end in rows["all"]["score"][1:])


def test_a_dataset_with_one_example_draws_from_its_task() -> None:
    right = [visit(row, score=1.0) for row in range(6)]
    found = values_of(*right, visit(0, "musique", score=0.0))["task multi_doc_qa"]["score"]
    # hotpotqa is always 100, the other a draw of six right and one wrong: its chance of 1 in 7 is
    # in the interval
    assert found == (50, 50, 100)


def test_answers_are_compared_at_equal_length() -> None:
    long: dict[str, Any] = {"ttft_s": 1.0, "decode_step_s": [1.0] * 9}  # the baseline's ten tokens
    # three tokens, which take the baseline 3 s too
    short = {"ttft_s": 0.5, "decode_step_s": [1.0, 1.5]}
    found = values_of(visit(1, baseline=long, **short))["dataset hotpotqa"]
    assert found["generation_speedup"][0] == pytest.approx(10 / 3)
    assert found["equal_length_speedup"][0] == 1
    found = values_of(visit(1, baseline=long, **short), visit(2, baseline=short, **long))[
        "dataset hotpotqa"
    ]
    assert found["equal_length_speedup"][0] == (3 + 3) / (3 + 3)
    # answers that decode in a batch have no time of their own
    found = values_of(visit(1, baseline=long, ttft_s=0.5, decode_step_s=None))["dataset hotpotqa"]
    assert math.isnan(found["equal_length_speedup"][0])


def test_tasks_are_means_of_datasets_and_the_whole_is_the_mean_of_tasks() -> None:
    rows = values_of(
        visit(1, "hotpotqa", {"score": 0.5, "ttft_s": 8.0}, score=0.5, ttft_s=1.0),
        visit(1, "musique", {"score": 0.5, "ttft_s": 2.0}, score=0.0, ttft_s=1.0),
        visit(1, "trec", {"score": 1.0, "ttft_s": 1.0}, score=1.0, ttft_s=1.0),
    )
    for level, expected in {
        "task multi_doc_qa": (25, 5, 50),
        "all": (62.5, 3, 100 * 62.5 / 75),
    }.items():
        found = [rows[level][name][0] for name in ("score", "ttft_speedup", "relative_score")]
        assert found == pytest.approx(expected)
    assert math.isnan(rows["all"]["score"][1])  # one example of a dataset has no spread


def test_rows_are_in_the_order_of_tables() -> None:
    table = by_task(
        Results([stored([visit(1, name) for name in ("trec", "musique", "hotpotqa")])]).frame
    )
    assert list(table.columns) == list(by_task(Results([]).frame).columns) == COLUMNS
    lazy = table[table["method"] == "lazy"]
    assert lazy[["level", "name", "task"]].to_numpy().tolist() == [
        ["dataset", "hotpotqa", "multi_doc_qa"], ["dataset", "musique", "multi_doc_qa"],
        ["task", "multi_doc_qa", "multi_doc_qa"], ["dataset", "trec", "few_shot"],
        ["task", "few_shot", "few_shot"],
        ["all", "all", "all"],
    ]  # fmt: skip


def test_an_arm_that_failed_and_came_back() -> None:
    first = visit(1, arms={"baseline": answer(score=0.5, ttft_s=9.0), "lazy": FAILED})
    again = visit(1, baseline={"score": 0.0, "ttft_s": 3.0}, score=1.0, ttft_s=1.0)
    # a second answer counts for nothing
    visits = [first, again, visit(1, baseline=None, score=0.0, ttft_s=50.0)]
    lazy, baseline = (
        values_of(*visits, method=name)["dataset hotpotqa"] for name in ("lazy", "baseline")
    )
    assert (lazy["score"][0], lazy["ttft_speedup"][0], lazy["score_difference"][0]) == (100, 3, 100)
    assert (baseline["score"][0], baseline["ttft_s"][0], baseline["ttft_speedup"][0]) == (50, 9, 1)
    run = stored([visit(2, baseline=None, score=0.5), first])
    assert oracle.failed_of(run, ["lazy"], "hotpotqa") == 1
    assert oracle.score_failed_as_zero(run, ["lazy"], "hotpotqa") == 25
    assert oracle.failed_of(stored(visits), ["lazy"], "hotpotqa") == 0


# ---- the tables against the oracle


def drawn_answer(rng: random.Random, is_unpaired: bool, is_bare: bool) -> Answer:
    """Every number at random. is_bare: without what some answers lack."""
    values: dict[str, Any] = {
        name: rng.random() * (1 if scale == 100 else 9) for name, scale in SCALES.items()
    }
    whole = (
        "kv_bytes",
        "aux_bytes",
        "peak_memory_bytes",
        "prefill_flops",
        "scoring_tokens",
        "leading_tokens",
    )
    values |= {name: rng.randrange(1, 1000) for name in whole}
    values |= {name: rng.randrange(2) for name in ("same_answer", "top1_agrees")}
    values |= {
        "score": rng.choice([0.0, rng.random()]),
        "text": rng.choice(["", "word", "word", "word"]),
    }
    values |= {"decode_step_s": [rng.random() for _ in range(rng.randrange(5))]}
    values |= {
        "token_ids": [0] * rng.randrange(5),
        "group_layers": [rng.randrange(1, 5), rng.randrange(1, 5)],
    }
    values |= {"computed": [[100, rng.randrange(100)] for _ in range(rng.randrange(1, 4))]}
    lacking = {"decode_step_s", "kl", "text", "peak_memory_bytes"} if is_bare else set()
    lacking |= set(oracle.OF_PAIRS) if is_unpaired else set()
    return answer(**values | dict.fromkeys(lacking))


def drawn_run(
    rng: random.Random, started: str = "1", arms: list[str] | None = None, bare: float = 0.0,
    datasets: tuple[str, ...] = DATASETS_HERE,
) -> StoredRun:  # fmt: skip
    """A run with random arms, datasets and failures; a failed arm is visited again, with the
    baseline or not."""
    arms = arms or ["baseline", *rng.sample([*ARMS][1:], rng.randrange(1, len(ARMS)))]
    # as in real runs, what an answer lacks depends on the dataset and the arm
    lacks = {(name, arm) for name in DATASETS_HERE for arm in arms if rng.random() < bare}
    visits: list[Visit] = []
    for dataset in rng.sample(datasets, rng.randrange(1, len(datasets) + 1)):
        for row in rng.sample(range(20), rng.randrange(1, 6)):
            ceiling, missing = rng.choice([None, rng.uniform(1, 2)]), list(arms)
            while missing:
                tried = [
                    arm
                    for arm in arms
                    if arm in missing or (arm == "baseline" and rng.random() < 0.9)
                ]
                rng.shuffle(tried)
                failed = {arm for arm in tried if rng.random() < 0.2}
                unpaired = set(tried) if "baseline" not in {*tried} - failed else {"baseline"}
                outcomes = {
                    arm: FAILED if arm in failed
                    else drawn_answer(rng, arm in unpaired, (dataset, arm) in lacks)
                    for arm in tried
                }  # fmt: skip
                about = {"attention_ceiling": ceiling, "prompt_tokens": 100 + row}
                visits.append(visit(row, dataset, arms=outcomes, **about))
                missing = [arm for arm in missing if not isinstance(outcomes.get(arm), Answer)]
                if rng.random() < 0.3:
                    break  # the run ends with failures
    if rng.random() < 0.5:  # visits come in any order
        rng.shuffle(visits)
    return run_of(visits, arms, started)


def close(value: float, expected: float) -> bool:
    return value == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)


def assert_row(row: Any, expected: dict[str, Any], intervals: bool) -> None:
    assert row["examples"] == expected["examples"]
    for name in oracle.VALUES:
        for end, value in zip(
            ("", "_low", "_high") if intervals else ("",), expected[name], strict=False
        ):
            assert close(row[f"{name}{end}"], value), (name, end, row[f"{name}{end}"], value)


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
        assert (row["seeds"], row["datasets"]) == (
            expected[key]["seeds"],
            expected[key]["datasets"],
        )
        assert close(row["score_seed_std"], expected[key]["score_seed_std"])
        assert (row["speedup"] == 1.5) == (row["method"] == "fastkv")
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
    runs = [drawn_run(rng, started) for started in "abc"]
    checked_table(runs, intervals=False)
    frame = Results(runs).frame
    visits = frame[["folder", "dataset", "id", "visit"]].apply(tuple, axis=1)
    times = dict(
        zip(visits[frame["is_baseline"]], frame.loc[frame["is_baseline"], "ttft_s"], strict=True)
    )
    assert match_baselines(frame, frame)["ttft_s"].equals(visits.map(times))


@pytest.mark.parametrize("seed", [*range(8), *slow(*range(8, 40))])
def test_the_table_of_a_run_is_the_oracles(seed: int) -> None:
    run = drawn_run(random.Random(300 + seed), bare=0.1 * (seed % 2), datasets=DATASETS_HERE[:3])
    frame: Any = run_table(Results([run]), "a run").frame
    found: dict[tuple[str, str], Any] = {}
    for row in frame.to_dict("records"):
        key = row["method"], "all" if row["kind"] == "all" else f"{row['kind']} {row['name']}"
        assert key not in found
        found[key] = row
    expected = {}
    for name, labels in arm_groups(run).items():
        answers = [counted for counted in oracle.answers_of(run) if counted.arm in labels]
        for level, values in (oracle.rows_of(answers, intervals=False) if answers else {}).items():
            expected[name, level] = labels, values
    # rows that would repeat others are left out: a task's only dataset in every arm, and the mean
    # of one task
    datasets: dict[str, set[str]] = {}
    for entry in run.visits:
        if entry.answers:
            datasets.setdefault(DATASETS[entry.dataset].task, set()).add(entry.dataset)
    left_out = {
        f"dataset {name}" for names in datasets.values() if len(names) == 1 for name in names
    }
    left_out |= {"all"} if len(datasets) == 1 else set()
    assert found.keys() == {(name, level) for name, level in expected if level not in left_out}
    for (name, level), row in found.items():
        labels, values = expected[name, level]
        assert_row(row, values, intervals=False)
        within = {entry.dataset for entry in run.visits}
        if level != "all":
            within = {
                dataset for dataset in within if row["name"] in (dataset, DATASETS[dataset].task)
            }
        assert row["failed"] == sum(oracle.failed_of(run, labels, dataset) for dataset in within)
        if level.startswith("dataset"):
            zeroed = oracle.score_failed_as_zero(run, labels, row["name"])
            # rounded as scores are
            assert row["score_failed_as_zero"] == pytest.approx(zeroed, abs=0.006)
