from __future__ import annotations

import math
from typing import Any

import pytest

from eval.analysis.verdicts import CLAIMS, Claim, step_cost, verdicts
from eval.store.results import Results
from tests.eval.analysis.made import LONG, SHORT, example, line, preset, stored, swept


@pytest.mark.parametrize(
    ("rule", "value", "verdict"),
    [
        ("> 99", (99.5, 99.1, 99.9), "holds"),
        ("> 99", (99.5, 98.0, 99.9), "cannot be seen"),
        ("> 99", (98.0, 97.0, 98.9), "does not hold"),
        ("> 0", (0.0, 0.0, 0.0), "does not hold"),  # no gain is no gain
        ("<= 100", (100.0, 100.0, 100.0), "holds"),
        ("< 1", (0.5, math.nan, math.nan), "cannot be seen"),
        ("< 1", None, "no run"),
    ],
)
def test_verdict_needs_the_whole_interval(rule: str, value: Any, verdict: str) -> None:
    assert Claim("1", "", "", rule, "", 1, lambda _: value).verdict(value) == verdict


def values(results: Results, part: str) -> dict[str, Any]:
    """The row of the only claim whose text contains the part."""
    (claim,) = [claim.text for claim in CLAIMS if part in claim.text]
    return line(verdicts(results).frame, claim=claim)


def test_claims_of_time_by_hand() -> None:
    # baseline: 0.4 s to the first token, 0.1 s a step, 0.8 s in total; LazyLLM twice as fast, then slower on trec
    tasks = {"hotpotqa": 0.4, "trec": 1.6}
    records = [example(name, row, ttft_s=0.2, total_s=total) for name, total in tasks.items() for row in "ab"]
    results = Results([preset("lazy", records)])
    assert values(results, "decoding steps")["value"] == pytest.approx(4)
    assert values(results, "% of the baseline's generation time")["value"] == pytest.approx(50)
    assert values(results, "TTFT speedup (slowest")["value"] == pytest.approx(2)
    slower = values(results, "Never slower")
    assert (slower["value"], slower["verdict"]) == (pytest.approx(0.5), "does not hold")
    assert values(results, "Generation speedup (mean")["value"] == pytest.approx((2 + 0.5) / 2)
    assert values(results, "Prompt compression's")["verdict"] == "no run"


def test_claims_of_tokens_by_hand() -> None:
    counts = [[[100, 60], [100, 70]], [[100, 40], [100, 90]]]  # of 100 prompt tokens: by the end 30 and 10 fewer
    records = [example("trec", str(row), computed=computed) for row, computed in enumerate(counts)]
    results = Results([stored(records)])
    assert values(results, "First layers compute more")["value"] == pytest.approx(20)
    assert values(results, "No token twice")["verdict"] == "holds"
    twice = Results([stored([example("trec", "a", computed=[[100, 60], [100, 101]])])])
    assert values(twice, "No token twice")["verdict"] == "does not hold"


def test_claims_of_speed_and_score_by_hand() -> None:
    fast = [example("hotpotqa", row, score=0.97, ttft_s=0.4 / speed) for row, speed in (("a", 3), ("b", 3))]
    results = Results([stored(fast, settings={"schedule": "3.0x"})])
    assert values(results, "at 2.34x")["value"] == pytest.approx(97)
    assert (values(results, "at 2.34x")["verdict"], values(results, "at 3x")["verdict"]) == ("does not hold", "holds")


def test_claims_compare_methods_at_equal_speedups_on_the_same_examples() -> None:
    runs = [
        swept("lazy", "1.5x", [0.1, 0.2], [1.0, 0.5]),
        swept("static_pruning", "1.5x", [0.4, 0.3], [0.5, 0.5]),
        swept("lazy", "2.0x", [0.1, 0.1], [0.9, 0.9]),
        swept("static_pruning", "2.0x", [0.2, 0.2], [0.9, 0.9]),
        swept("static_pruning", "3.0x", [9.0, 9.0], [0.0, 0.0]),  # LazyLLM has no such run
    ]
    points, kl = (values(Results(runs), f"static pruning at one speedup, {unit}") for unit in ("points", "nats"))
    assert points["value"] == pytest.approx((25 + 0) / 2)
    assert kl["value"] == pytest.approx((0.2 + 0.1) / 2)
    assert (kl["verdict"], points["verdict"]) == ("holds", "cannot be seen")


def test_claims_of_single_layers_by_hand() -> None:
    scores = {(2, 0.1): 0.2, (2, 0.9): 0.6, (6, 0.1): 0.4, (6, 0.9): 1.0}
    runs = [
        stored([example("trec", row, score=score) for row in "ab"], settings={"schedule": {str(layer): keep}})
        for (layer, keep), score in scores.items()
    ]
    assert values(Results(runs), "Keeping most better than fewest, points")["value"] == pytest.approx((40 + 60) / 2)
    assert values(Results(runs), "Pruning latest better than earliest, points")["value"] == pytest.approx((20 + 40) / 2)


def test_step_cost_is_recovered_from_the_other_tasks() -> None:
    records = []
    for number, (dataset, revived, tokens) in enumerate(
        [("trec", 0, 2), ("trec", 8, 4), ("qasper", 2, 3), ("qasper", 6, 6), ("hotpotqa", 4, 5), ("hotpotqa", 1, 9)]
    ):
        total = 0.2 + 0.15 * (tokens - 1) + 0.03 * revived  # 1.5 and 0.3 baseline steps
        records.append(
            example(dataset, str(number), token_ids=[1] * tokens, total_s=total, revived_tokens=float(revived))
        )
    table = step_cost(Results([stored(records)]))
    assert list(table.frame["step_cost"]) == pytest.approx([1.5] * 3)
    assert list(table.frame["token_cost"]) == pytest.approx([0.3] * 3)
    assert list(table.frame["predicted"]) == pytest.approx(list(table.frame["generation_speedup"]))
    few_shot = line(table.frame, task="few_shot")
    assert few_shot["prefill_token_cost"] == pytest.approx(0.4 / 100 / 0.1)
    assert (few_shot["prefill_saved"], few_shot["revived_a_step"]) == (pytest.approx(2), 8 / 4)


def test_claims_count_an_example_of_two_runs_once() -> None:
    saved = values(Results([stored([LONG]), stored([LONG, SHORT])]), "First layers compute more")
    assert saved["value"] == pytest.approx((40 + 50) / 2)
