from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.run.shards import Shard, parse_shard, split

LENGTHS = st.lists(st.integers(1, 4000), max_size=40)


def keyed(lengths: list[int]) -> dict[tuple[str, str], int]:
    return {("qasper" if number % 2 else "trec", f"row-{number}"): length for number, length in enumerate(lengths)}


def fullest(tokens: dict[tuple[str, str], int], numbers: dict[tuple[str, str], int]) -> int:
    filled: Counter[int] = Counter()
    for key, number in numbers.items():
        filled[number] += tokens[key]
    return max(filled.values())


@given(LENGTHS, st.integers(1, 8))
def test_each_example_is_in_one_shard(lengths: list[int], count: int) -> None:
    tokens = keyed(lengths)
    numbers = split(tokens, count)
    assert numbers.keys() == tokens.keys()
    assert set(numbers.values()) <= set(range(1, count + 1))


@given(LENGTHS, st.integers(1, 8), st.randoms(use_true_random=False))
def test_the_order_of_the_examples_does_not_matter(lengths: list[int], count: int, rng: random.Random) -> None:
    tokens = keyed(lengths)
    shuffled = list(tokens.items())
    rng.shuffle(shuffled)
    assert split(dict(shuffled), count) == split(tokens, count)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_shards_are_within_4_3_of_the_best_of_all_splits(lengths: list[int], count: int) -> None:
    tokens = keyed(lengths)
    choices = itertools.product(range(1, count + 1), repeat=len(tokens))
    best = min(fullest(tokens, dict(zip(tokens, choice, strict=True))) for choice in choices)
    assert 3 * fullest(tokens, split(tokens, count)) <= 4 * best


def test_more_shards_than_examples_cost_nothing() -> None:
    assert split(keyed([3, 2, 1]), 10**12) == split(keyed([3, 2, 1]), 3)
    assert split({}, 10**12) == {}


def test_a_split_by_hand() -> None:
    tokens = {("trec", "a"): 100, ("trec", "b"): 60, ("trec", "c"): 50, ("trec", "d"): 30}
    # a to the first; b to the second, now 60; c joins it, 110; d joins a, 130
    assert split(tokens, 2) == {("trec", "a"): 1, ("trec", "b"): 2, ("trec", "c"): 2, ("trec", "d"): 1}


def test_a_shard_is_read_and_written() -> None:
    assert parse_shard("2/4") == Shard(2, 4)
    assert str(parse_shard("2/4")) == "2/4"
    assert parse_shard("10/10").file_part == "-10-of-10"


@pytest.mark.parametrize("text", ["", "2", "0/4", "5/4", "1/0", "-1/4", "1/4/2", "a/b", "1.0/4", " 1/4"])
def test_other_shards_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="written i/n"):
        parse_shard(text)
