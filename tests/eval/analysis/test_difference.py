import math
import random
from dataclasses import replace
from math import comb

import pytest

from eval.analysis.run_table import Comparison, binomial, comparisons, gate_failures, run_table
from eval.analysis.screen import summary
from eval.run.job import parse_gate
from eval.store.results import Results
from lazyllm.errors import UserError
from tests.eval.analysis.made import ARM, conversation, example, stored
from tests.eval.store.made import alone


def results(scores: list[float], baseline: float = 0.5, ttft_s: float = 0.1, **own) -> Results:
    """A run on one dataset, each baseline with the same score and a TTFT of 0.2 s."""
    theirs = {"score": baseline, "ttft_s": 0.2}
    visits = [
        example("hops", str(number), baseline=theirs, score=score, ttft_s=ttft_s, **own)
        for number, score in enumerate(scores)
    ]
    return Results([stored(visits)])


def compared(scores: list[float], **own) -> Comparison:
    (found,) = comparisons(results(scores, **own))
    return found


def test_binomial_is_the_exact_test() -> None:
    rng = random.Random(0)
    for _ in range(50):
        better, worse = rng.randrange(60), rng.randrange(60)
        n, less = better + worse, min(better, worse)
        exact = min(1, 2 * sum(comb(n, k) for k in range(less + 1)) / 2**n)
        assert binomial(better, worse) == pytest.approx(exact)


def test_comparison_counts_pairs_and_has_their_interval() -> None:
    found = compared([0.5, 0.75, 0.25, 0.25, 0.5], same_answer=0)
    assert (found.name, found.examples, found.better, found.worse, found.p) == (ARM, 5, 1, 2, 1.0)
    assert (found.changed, found.answers) == (5, 5)
    assert replace(found, changed=1).text.endswith("; 1 of 5 answers differs")
    score, low, high = found.score
    assert score == pytest.approx(-5)
    assert low < -5 < high
    assert found.ttft == pytest.approx((2, 2, 2))
    same = compared([0.75] * 5, same_answer=1)
    assert (same.score, same.changed) == ((25, 25, 25), 0)
    assert comparisons(Results([stored([alone(example("hops", "a"))])])) == []


def test_comparison_counts_the_answers_of_all_turns() -> None:
    turns = [{"score": 0.5, "same_answer": 0}, {"score": 1.0, "same_answer": 0}, {"score": 0.0, "same_answer": 1}]
    visits = [conversation("hops", str(number), [9, 9, 9], turns, [{"score": 0.25}] * 3) for number in range(2)]
    (found,) = comparisons(Results([stored(visits)]))
    assert (found.examples, found.changed, found.answers) == (2, 4, 6)
    assert "4 of 6 answers differ" in run_table(Results([stored(visits)]), "").caption


def test_table_shows_the_comparison_and_that_by_chance() -> None:
    run = results([0.75] * 5).runs[0]
    visits = [replace(visit, answers=visit.answers | {"again": visit.answers["baseline"]}) for visit in run.visits]
    run = replace(run, given=visits)
    run.identity["arms"]["again"] = run.identity["arms"]["baseline"]
    caption = run_table(Results([run]), "").caption
    assert "score +25.00 (95 % interval +25.00 to +25.00), 5 examples better and 0 worse (p = 0.062)" in caption
    assert "again beside the baseline: score +0.00" in caption
    assert "TTFT speedup 1.00 (1.00 to 1.00)" in caption
    assert [one.is_aa_test for one in comparisons(Results([run]))] == [False, True]
    assert summary(Results([run]))["label"].tolist()[:2] == ["baseline", "again"]
    assert gate_failures(comparisons(Results([run])), {"ttft": 1.5}) == []  # chance need not pass
    assert "nan" not in run_table(results([0.75]), "").caption  # one example has no interval


@pytest.mark.parametrize(
    ("gate", "passed"),
    [("score>=20 ttft>=1.9", True), ("score>=26", False), ("ttft>=2.1 score>=0", False), ("score>=-1", True)],
)
def test_gate_needs_the_whole_interval_of_every_arm(gate: str, passed: bool) -> None:
    better, same = compared([0.75] * 200), compared([0.5] * 200)
    assert (gate_failures([better], parse_gate(gate)) == []) == passed
    assert gate_failures([better, same], parse_gate("score>=20")) == [
        f"{ARM}: the interval of score begins at -1.83, below 20"  # 1.83 % wrong answers: none of 200 in 2.5 % of draws
    ]
    assert gate_failures([], parse_gate(gate)) == ["no arm has answers beside the baseline"]
    few = compared([0.75] * 4)
    assert math.isnan(few.score[1])
    (why,) = gate_failures([few], parse_gate("score>=0"))
    assert "without an interval: fewer than 5 examples" in why
    (why,) = gate_failures([compared([0.5] * 5)], parse_gate("score>=-1"))
    assert why == f"{ARM}: the interval of score begins at -52.18, below -1"


@pytest.mark.parametrize("gate", ["", "score>1", "speed>=2", "score>=x", "score>=1,ttft>=2"])
def test_gate_refuses_other_bounds(gate: str) -> None:
    with pytest.raises(UserError, match="expected bounds such as"):
        parse_gate(gate)
