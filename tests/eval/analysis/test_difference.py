from __future__ import annotations

import random
from dataclasses import replace

import pytest
from scipy.stats import binomtest

from eval.analysis.run_table import binomial, difference, passes, run_table
from eval.run.job import parse_gate
from eval.store.results import Results
from lazyllm.errors import UserError
from tests.eval.analysis.made import example, stored


def results(scores: list[float], baseline: float = 0.5, ttft_s: float = 0.1, **method) -> Results:
    """A run on one dataset, each baseline with the same score and a TTFT of 0.2 s."""
    theirs = {"score": baseline, "ttft_s": 0.2}
    records = [
        example("hops", str(number), baseline=theirs, score=score, ttft_s=ttft_s, **method)
        for number, score in enumerate(scores)
    ]
    return Results([stored(records)])


def test_binomial_is_the_exact_test() -> None:
    rng = random.Random(0)
    for _ in range(50):
        better, worse = rng.randrange(60), rng.randrange(60)
        exact = binomtest(better, better + worse).pvalue if better + worse else 1
        assert binomial(better, worse) == pytest.approx(exact)


def test_difference_counts_pairs_and_has_their_interval() -> None:
    found = difference(results([0.5, 0.75, 0.25, 0.25, 0.5], same_answer=0))
    assert found is not None
    assert [found[name] for name in ("examples", "better", "worse", "p", "changed")] == [5, 1, 2, 1.0, 5]
    assert found["score"] == pytest.approx(-5)
    assert found["score_low"] < -5 < found["score_high"]
    assert (found["ttft"], found["ttft_low"], found["ttft_high"]) == pytest.approx((2, 2, 2))
    same = difference(results([0.75] * 5, same_answer=1))
    assert same is not None
    assert [same[name] for name in ("score", "score_low", "score_high", "changed")] == [25, 25, 25, 0]
    assert difference(Results([stored([replace(example("hops", "a"), baseline=None)])])) is None


def test_table_shows_the_difference_and_that_by_chance() -> None:
    control = results([0.5] * 5, ttft_s=0.2, same_answer=1)
    caption = run_table(Results(results([0.75] * 5).runs, control), "").caption
    assert "score +25.00 (95 % interval +25.00 to +25.00), 5 examples better and 0 worse (p = 0.062)" in caption
    assert "the baseline beside itself: score +0.00" in caption
    assert "TTFT speedup 1.00 (1.00 to 1.00); 0 of 5 answers differ" in caption
    assert "nan" not in run_table(results([0.75]), "").caption  # one example has no interval


@pytest.mark.parametrize(
    ("gate", "passed"),
    [("score>=20 ttft>=1.9", True), ("score>=26", False), ("ttft>=2.1 score>=0", False), ("score>=-1", True)],
)
def test_gate_needs_the_whole_interval_of_every_method(gate: str, passed: bool) -> None:
    better, same = difference(results([0.75] * 5)), difference(results([0.5] * 5))
    assert passes([better], parse_gate(gate)) == passed
    assert not passes([better, same], parse_gate("score>=20"))
    assert not passes([better, None], parse_gate(gate))
    assert not passes([], parse_gate(gate))
    assert not passes([difference(results([0.75] * 4))], parse_gate("score>=0"))  # too few for an interval


@pytest.mark.parametrize("gate", ["", "score>1", "speed>=2", "score>=x", "score>=1,ttft>=2"])
def test_gate_refuses_other_bounds(gate: str) -> None:
    with pytest.raises(UserError, match="expected bounds such as"):
        parse_gate(gate)
