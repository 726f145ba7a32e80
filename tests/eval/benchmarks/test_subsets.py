"""Splits: each dataset has one to tune on and one to report. Shards have about the same number of prompt tokens."""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.benchmarks.subsets import SPLITS, SUBSETS, in_split, in_subset, parse_shard, shard_numbers
from eval.benchmarks.suite import Example
from eval.run.run import prepare
from eval.store.results import Results
from lazyllm.errors import UserError
from tests.runs import measure, small_run

IDS = st.lists(st.text(max_size=8), unique=True, max_size=40)


def examples_of(ids: list[str]) -> list[Example]:
    return [Example("lookup", row_id, "", "", ("answer",), (), 1) for row_id in ids]


def ids_of(dataset: str, examples: list[Example], split: str | None) -> list[str]:
    return [example.id for example in in_split(dataset, examples, split)]


@given(IDS, st.sampled_from(["lookup", "hops"]))
def test_each_example_is_in_one_of_two_equal_splits(ids: list[str], dataset: str) -> None:
    examples = examples_of(ids)
    dev, test = (ids_of(dataset, examples, split) for split in SPLITS)
    assert not set(dev) & set(test)
    assert sorted(dev + test) == sorted(ids)
    assert abs(len(dev) - len(test)) <= 1
    assert dev == [row_id for row_id in ids if row_id in set(dev)]  # in the dataset's order
    assert ids_of(dataset, examples, None) == ids


@given(IDS, st.integers(0, 40))
def test_split_of_an_example_does_not_depend_on_the_limit(ids: list[str], limit: int) -> None:
    examples = examples_of(ids)
    for split in SPLITS:
        assert ids_of("lookup", examples[:limit], split) == [
            row_id for row_id in ids_of("lookup", examples, split) if row_id in ids[:limit]
        ]


def test_split_depends_on_the_hash_and_not_the_place() -> None:
    firsts = {in_split("lookup", examples_of([f"row-{number}", "second"]), "dev")[0].id for number in range(40)}
    assert "second" in firsts
    assert len(firsts) > 10
    splits = [tuple(ids_of(dataset, examples_of(list("abcdefgh")), "dev")) for dataset in ("lookup", "hops")]
    assert splits[0] != splits[1]


def test_run_takes_its_split_and_the_limit_counts_in_it(tmp_path: Path) -> None:
    whole = small_run(tmp_path)
    keys = {split: [case.key for case in prepare(whole.changed(limit=2, split=split)).cases] for split in SPLITS}
    assert {key[0] for split in SPLITS for key in keys[split]} == {"lookup", "shots"}
    assert [len(keys[split]) for split in SPLITS] == [4, 4]
    assert {*keys["dev"], *keys["test"]} == {case.key for case in prepare(whole.changed(limit=4)).cases}
    for split in SPLITS:
        assert len(prepare(whole.changed(dataset={"lookup": True}, limit=1, split=split)).cases) == 1


def test_splits_have_folders_of_their_own_and_share_no_table(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = small_run(tmp_path).changed(dataset={"lookup": True}, limit=1, out=None)
    runs = [config.changed(split=split) for split in SPLITS]
    for run in runs:
        measure(run, show=False)
    folders = {prepare(run).folder for run in runs}
    assert len(folders) == 2
    assert [len(Results.read([folder]).runs[0].visits) for folder in folders] == [1, 1]
    assert len({run.model for run in Results.read([tmp_path]).runs}) == 2
    with pytest.raises(UserError, match=r"holds a run that differs \(split: "):
        measure(config.changed(split="dev", out=str(prepare(config.changed(split="test")).folder)))


LENGTHS = st.lists(st.integers(1, 4000), max_size=40)


def keyed(lengths: list[int]) -> dict[tuple[str, str], int]:
    return {("qasper" if number % 2 else "trec", f"row-{number}"): length for number, length in enumerate(lengths)}


def fullest(tokens: dict[tuple[str, str], int], numbers: dict[tuple[str, str], int]) -> int:
    return max(sum(tokens[key] for key in numbers if numbers[key] == number) for number in numbers.values())


@given(LENGTHS, st.integers(1, 8), st.randoms(use_true_random=False))
def test_each_example_is_in_one_shard_whatever_their_order(lengths: list[int], count: int, rng: random.Random) -> None:
    tokens = keyed(lengths)
    numbers = shard_numbers(tokens, count)
    assert numbers.keys() == tokens.keys()
    assert set(numbers.values()) <= set(range(1, count + 1))
    shuffled = list(tokens.items())
    rng.shuffle(shuffled)
    assert shard_numbers(dict(shuffled), count) == numbers


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_shards_are_within_4_3_of_the_best_of_all_splits(lengths: list[int], count: int) -> None:
    tokens = keyed(lengths)
    choices = itertools.product(range(1, count + 1), repeat=len(tokens))
    best = min(fullest(tokens, dict(zip(tokens, choice, strict=True))) for choice in choices)
    assert 3 * fullest(tokens, shard_numbers(tokens, count)) <= 4 * best


def test_shards_by_hand() -> None:
    tokens = {("trec", "a"): 100, ("trec", "b"): 60, ("trec", "c"): 50, ("trec", "d"): 30}
    # a to the first; b to the second, now 60; c joins it, 110; d joins a, 130
    assert shard_numbers(keyed([3, 2, 1]), 10**12) == shard_numbers(keyed([3, 2, 1]), 3)  # further shards are empty
    assert shard_numbers(tokens, 2) == {("trec", "a"): 1, ("trec", "b"): 2, ("trec", "c"): 2, ("trec", "d"): 1}


def test_shard_is_read_and_written_and_refused_if_malformed() -> None:
    assert parse_shard("2/4") == (2, 4)
    assert parse_shard("10/10") == (10, 10)
    for text in ("", "2", "0/4", "5/4", "1/4/2", "1.0/4", " 1/4"):
        with pytest.raises(UserError, match="written i/n"):
            parse_shard(text)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 50), st.randoms())
def test_subset_by_length_has_the_lengths_of_the_whole_and_depends_on_no_order(
    lengths: list[int], count: int, rng: Any
) -> None:
    ids = [str(number) for number in range(len(lengths))]
    whole = [replace(one, length=length) for one, length in zip(examples_of(ids), lengths, strict=True)]
    chosen = in_subset(whole, count, "by_length", 0)
    assert len(chosen) == min(count, len(whole))
    assert [one for one in whole if one in chosen] == chosen  # in the dataset's order
    ranked = sorted(lengths)
    for part, length in enumerate(sorted(one.length for one in chosen)):
        low, high = (len(ranked) * end // len(chosen) for end in (part, part + 1))
        assert ranked[low] <= length <= ranked[min(high, len(ranked) - 1)]
    shuffled = in_subset(rng.sample(whole, len(whole)), count, "by_length", 0)
    assert {one.id for one in shuffled} == {one.id for one in chosen}


@given(IDS, st.integers(1, 40), st.integers(1, 40), st.sampled_from(SUBSETS[:2]))
def test_a_larger_subset_adds_to_a_smaller_one(ids: list[str], one: int, other: int, subset: str) -> None:
    small, large = (in_subset(examples_of(ids), count, subset, 3) for count in sorted((one, other)))
    assert {example.id for example in small} <= {example.id for example in large}
    assert [example.id for example in large] == [row_id for row_id in ids if row_id in {one.id for one in large}]


def test_random_subset_depends_on_the_seed() -> None:
    drawn = {tuple(one.id for one in in_subset(examples_of(list("abcdefgh")), 3, "random", seed)) for seed in range(9)}
    assert len(drawn) > 5


def test_subset_by_length_is_the_same_for_everyone_and_a_part_of_identity(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dataset": {"lookup": True}, "limit": 3, "subset": "by_length"}
    one, other = (small_run(tmp_path / name, seed=seed, **settings) for name, seed in (("a", 0), ("b", 7)))
    assert [case.key for case in prepare(one).cases] == [case.key for case in prepare(other).cases]
    assert prepare(one).identity["subset"] == prepare(other).identity["subset"]
    assert (
        prepare(small_run(tmp_path / "c", **settings | {"limit": 2})).identity["subset"]
        != prepare(one).identity["subset"]
    )
