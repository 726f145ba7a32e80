"""Subsets: their lengths, that larger ones add to smaller ones, and what they depend on."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eval.benchmarks.subsets import in_subset
from eval.benchmarks.suite import Example
from eval.run.prepare import prepare
from tests.runs import small_config

IDS = st.lists(st.text(max_size=8), unique=True, max_size=40)


def row(name: str, length: int = 1) -> Example:
    return Example("lookup", name, "", "", ("answer",), length=length)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 50), st.randoms())
def test_subset_by_length_has_the_lengths_of_the_whole_in_any_order(
    lengths: list[int], count: int, rng: Any
) -> None:
    whole = [row(str(number), length) for number, length in enumerate(lengths)]
    chosen = in_subset(whole, count, "by_length", 0)
    assert len(chosen) == min(count, len(whole))
    assert [each for each in whole if each in chosen] == chosen
    ranked = sorted(lengths)
    for part, length in enumerate(sorted(each.length for each in chosen)):
        low, high = (len(ranked) * end // len(chosen) for end in (part, part + 1))
        assert ranked[low] <= length <= ranked[min(high, len(ranked) - 1)]
    shuffled = in_subset(rng.sample(whole, len(whole)), count, "by_length", 0)
    assert {each.id for each in shuffled} == {each.id for each in chosen}


@given(IDS, st.integers(1, 40), st.integers(1, 40), st.sampled_from(["first", "random"]))
def test_a_larger_subset_adds_to_a_smaller_one(
    ids: list[str], first: int, second: int, subset: str
) -> None:
    counts = sorted((first, second))
    small, large = (in_subset([*map(row, ids)], count, subset, 3) for count in counts)
    assert {each.id for each in small} <= {each.id for each in large}
    names = [each.id for each in large]
    assert names == [name for name in ids if name in names]


def test_random_subset_depends_on_the_seed() -> None:
    rows = [*map(row, "abcdefgh")]
    drawn = {tuple(each.id for each in in_subset(rows, 3, "random", seed)) for seed in range(9)}
    assert len(drawn) > 5


def test_subset_by_length_is_the_same_for_every_seed_and_a_part_of_identity() -> None:
    def run(seed: int, limit: int = 3) -> Any:
        settings = {"dataset": ["lookup"], "subset": "by_length", "seed": seed, "limit": limit}
        return prepare(small_config(None, **settings))

    first, second = run(0), run(7)
    assert [prompt.key for prompt in first.prompts] == [prompt.key for prompt in second.prompts]
    assert first.identity["subset"] == second.identity["subset"] != run(0, 2).identity["subset"]
