"""The space and its arithmetic, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from eval.tune.space import Candidate, Ideal, Space, references
from lazyllm.methods import Lazy

SHAPE = SimpleNamespace(
    num_hidden_layers=8, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    intermediate_size=32, vocab_size=64,
)  # fmt: skip


def flops(counts: list[int]) -> int:
    """q and o 16 x 16, k and v 16 x 8, the MLP three times 16 x 32; 4 * 16 a causal pair; one row of logits."""
    weights = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32
    return sum(2 * weights * n + 4 * 16 * n * (n + 1) // 2 for n in counts) + 2 * 16 * 64


def test_ideal_speedups_are_put_together_as_measured_ones_are() -> None:
    prompts = [("lookup", 100), ("lookup", 100), ("lookup", 200), ("hops", 40)]
    schedule = {2: 0.5, 6: 0.3}
    counts = {n: [n] * 2 + [n // 2] * 4 + [-(-n // 2 * 3 // 10)] * 2 for n in (100, 200, 40)}
    assert counts[100][-1] == 15
    whole, pruned = ({n: flops(layers_of(n)) for n in counts} for layers_of in (lambda n: [n] * 8, counts.get))
    lookup = (2 * whole[100] + whole[200]) / (2 * pruned[100] + pruned[200])
    assert Ideal.of(SHAPE, prompts, Lazy()).speedup(schedule) == pytest.approx((lookup + whole[40] / pruned[40]) / 2)
    one = Ideal.of(SHAPE, [("lookup", 100)], Lazy())
    assert one.speedup(schedule) == pytest.approx(Lazy(schedule).ideal_speedup(SHAPE, 100))


def test_datasets_of_one_task_count_as_one() -> None:
    of = {
        name: Ideal.of(SHAPE, [(name, n)], Lazy()).speedup({2: 0.5})
        for name, n in (("qasper", 10), ("narrativeqa", 999))
    }
    trec = Ideal.of(SHAPE, [("trec", 100)], Lazy()).speedup({2: 0.5})
    all_of_them = Ideal.of(SHAPE, [("qasper", 10), ("narrativeqa", 999), ("trec", 100)], Lazy()).speedup({2: 0.5})
    assert all_of_them == pytest.approx(((of["qasper"] + of["narrativeqa"]) / 2 + trec) / 2)


def test_the_fastest_is_the_fastest() -> None:
    space, ideal = Space(5, 2, 20, 80, 20), Ideal.of(SHAPE, [("lookup", 100)], Lazy())
    every = [((a, k), (b, j)) for a in range(1, 5) for b in range(a + 1, 5) for k in space.ratios for j in space.ratios]
    best = max(every, key=lambda cuts: ideal.speedup(Candidate(cuts).schedule))
    assert Candidate(best) == space.fastest == Candidate(((1, 20), (2, 20)))


def test_references_reach_the_target_and_no_more() -> None:
    space, ideal = Space(8, 3), Ideal.of(SHAPE, [("lookup", 512)], Lazy())
    plain = references(space, ideal, None)
    assert plain["paper"].schedule == {2: 0.7, 4: 0.7, 7: 0.7}  # 30, 60, 90 % of 8
    assert plain["uniform"].schedule == {2: 0.7, 4: 0.7, 6: 0.7}
    for candidate in references(space, ideal, 2.0).values():
        slower = {layer: ratio + 0.01 for layer, ratio in candidate.schedule.items()}
        assert ideal.speedup(slower) < 2.0 <= ideal.speedup(candidate.schedule)
    assert references(space, ideal, 99.0) == {}


def test_references_begin_earlier_where_they_must() -> None:
    space, ideal = Space(8, 3), Ideal.of(SHAPE, [("lookup", 512)], Lazy())
    late = max(ideal.speedup(dict.fromkeys(layers, 0.05)) for layers in ((2, 4, 7), (2, 4, 6)))
    found = references(space, ideal, late + 0.01)
    assert list(found["paper"].schedule) == [1, 4, 6]  # 20, 50, 80 % of 8
    assert list(found["uniform"].schedule) == [1, 3, 4, 6]  # fifths of 8
    assert space.holds(found["paper"])
    assert not space.holds(found["uniform"])


def test_a_candidate_is_its_own_parameters() -> None:
    candidate = Candidate(((2, 30), (5, 50)))
    assert candidate.parameters == {"cuts": 2, "layer_1": 2, "keep_1": 30, "layer_2": 5, "keep_2": 50}
    assert (candidate.name, candidate.clashes, candidate.schedule) == ("2_30-5_50", 0, {2: 0.3, 5: 0.5})
    assert Candidate(((2, 30), (2, 50), (5, 5))).clashes == 1
    assert Space(8, 2).holds(candidate)
    assert not Space(8, 1).holds(candidate)
    assert not Space(8, 2, 5, 95, 20).holds(candidate)


def test_a_fitted_candidate_prunes_as_little_as_reaches_the_target() -> None:
    space, ideal = Space(8, 3), Ideal.of(SHAPE, [("lookup", 512), ("hops", 100)], Lazy())
    for cuts in (((2, 50),), ((2, 5), (5, 95)), ((3, 95), (4, 90), (6, 70)), ((1, 40), (2, 40), (3, 40))):
        for target in (1.3, 1.8, 2.0):
            found = space.fitted(Candidate(cuts), ideal, target)
            assert [layer for layer, _ in found.cuts] == [layer for layer, _ in cuts]
            assert target <= ideal.speedup(found.schedule) < 1.03 * target
            ratios = [keep for _, keep in found.cuts]
            order = sorted(range(len(cuts)), key=lambda index: cuts[index][1])
            assert [ratios[index] for index in order] == sorted(ratios)  # the shape is kept
            assert all(space.lowest <= keep <= space.highest for keep in ratios)
    equal = space.fitted(Candidate(((2, 30), (4, 30), (7, 30))), ideal, 1.8)
    assert equal == references(space, ideal, 1.8)["paper"]


def test_layers_that_cannot_reach_the_target_prune_most_and_are_refused_for_it() -> None:
    space, ideal = Space(8, 3), Ideal.of(SHAPE, [("lookup", 512)], Lazy())
    found = space.fitted(Candidate(((6, 50), (7, 95))), ideal, 3.0)
    assert found == Candidate(((6, 5), (7, 5)))
    assert ideal.speedup(found.schedule) < 3
