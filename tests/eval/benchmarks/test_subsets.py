"""Subsets: their lengths, that larger ones add to smaller ones, and what they depend on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eval.benchmarks.subsets import SUBSETS, in_subset
from eval.benchmarks.suite import Example
from eval.run.run import prepare
from tests.runs import small_run

IDS = st.lists(st.text(max_size=8), unique=True, max_size=40)


def examples_of(ids: list[str]) -> list[Example]:
    return [Example("lookup", row_id, "", "", ("answer",), (), 1) for row_id in ids]


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
