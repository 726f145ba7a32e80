from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from eval.analysis.paper_tables import paper_values
from eval.analysis.verdicts import _MEASURES, Claim, claims, step_cost, verdicts
from eval.benchmarks.datasets import DATASETS
from eval.store.results import Results
from eval.store.runs import StoredRun
from eval.store.visit import Measurement, Turn, Visit
from tests.eval.store.visits import measurement

NAN = math.nan
TABLE1 = {"schedule": "table1"}


def claim(**values: Any) -> Claim:
    return Claim("1", "", "overall", "table1", "", 1, **values)


@pytest.mark.parametrize(
    ("holds", "parts", "verdict"),
    [
        ("> 99", [(99.5, 99.1, 99.9)], "holds"),
        ("> 99", [(99.5, 98.0, 99.9)], "cannot be seen"),
        ("> 99", [(98.0, 97.0, 98.9)], "does not hold"),
        ("> 0", [(0.0, 0.0, 0.0)], "does not hold"),  # no gain is no gain
        (">= 0", [(0.0, 0.0, 0.0)], "holds"),
        ("<= 100", [(100.0, 100.0, 100.0)], "holds"),
        ("> 1", [(0.5, NAN, NAN)], "cannot be seen"),
        ("> 1", [(1.2, 1.1, 1.3), (1.0, 0.9, 1.1)], "cannot be seen"),
        ("> 1", [(1.2, 1.1, 1.3), (0.9, 0.8, 0.95)], "does not hold"),  # one task is enough, whatever the mean
        ("> 1", [], "not run"),
    ],
)
def test_a_direction_needs_every_interval(holds: str, parts: Any, verdict: str) -> None:
    assert claim(holds=holds).verdict(parts, None) == verdict


@pytest.mark.parametrize(
    ("tolerance", "value", "verdict"),
    [
        ("5 points", (23.0, 22.0, 24.0), "agrees"),
        ("5 points", (78.2, 77.0, 79.0), "differs (higher)"),  # "about 23 %" is not "> 23 %"
        ("10 %", (20.0, 19.0, 20.6), "differs (lower)"),
        ("10 %", (21.0, 18.0, 24.0), "cannot be seen"),
        ("10 %", (23.0, NAN, NAN), "cannot be seen"),
        ("0 %", (23.0, 23.0, 23.0), "agrees"),
    ],
)
def test_a_reproduction_compares_the_interval_with_the_number(tolerance: str, value: Any, verdict: str) -> None:
    reproduction = claim(tolerance=tolerance, paper={"llama2": 23})
    assert reproduction.verdict([value], "llama2") == verdict
    assert reproduction.verdict([value], "xgen") == reproduction.verdict([value], None) == "-"  # it has no number of it


def test_the_papers_own_values_agree() -> None:
    reproductions = [(one, model) for one in claims() if one.tolerance for model in one.paper]
    assert len(reproductions) >= 10
    for one, model in reproductions:
        assert one.verdict([(one.paper[model],) * 3], model) == "agrees", one.claim


def test_directions_that_the_paper_gives_a_number_for_hold_for_it() -> None:
    for one in claims():
        if one.holds:
            for model, number in one.paper.items():
                assert one.verdict([(number,) * 3], model) == "holds", one.claim


@pytest.mark.parametrize("model", ["llama2", "xgen"])
def test_numbers_are_those_of_the_papers_tables(model: str) -> None:
    values = paper_values()
    tasks = sorted({task for of, task, *_ in values if of == model})
    of = {
        (method, column): [values[model, task, method, column] for task in tasks]
        for method, column in {(method, column) for of, _, method, column in values if of == model}
    }
    expected = {
        "Score kept": 100 * sum(of["lazy", "score"]) / sum(of["baseline", "score"]),
        "TTFT speedup (mean": mean(of["lazy", "ttft_speedup"]),
        "Faster to the first": min(of["lazy", "ttft_speedup"]),
        "Prompt compression's": max(of["prompt_compression", "ttft_speedup"]),
        "Prompt tokens computed": mean(of["lazy", "pct_prompt_tokens_computed"]),
        "Generation speedup": mean(of["lazy", "generation_speedup"]),
        "Never slower": min(of["lazy", "generation_speedup"]),
    }
    for words, number in expected.items():
        stated = next(one for one in claims() if one.claim.startswith(words) and "measured" not in one.claim)
        assert stated.paper[model] == pytest.approx(number, abs=0.005), words


def test_every_measure_is_used_and_known() -> None:
    assert {one.measure for one in claims()} == {*_MEASURES}


def run_of(
    arms: dict[str, dict[str, Any]],
    answers: dict[tuple[str, str], dict[str, Measurement]],
    model: str = "tiny",
    paper: str | None = None,
    tokens: int = 100,
) -> StoredRun:
    """A run in memory. arms: {label: method}. answers: {(dataset, id): {label: measurement}}."""
    everything = {"baseline": {"name": "baseline"}} | arms
    identity = {
        "arms": {label: {"method": method} for label, method in everything.items()},
        "baseline": "baseline", "seed": 0, "data": {},
    }  # fmt: skip
    visits = [
        Visit(
            dataset=dataset,
            id=example,
            turns=[Turn(sha256="0", tokens=tokens, tokens_before_truncation=tokens)],
            order=list(of),
            answers={label: [answer] for label, answer in of.items()},
        )
        for (dataset, example), of in answers.items()
    ]
    about = {"identity": identity, "config": {"model": {"name": model, "paper": paper}}, "fingerprint": "0"}
    return StoredRun(Path("none"), about, visits)


def base(**changes: Any) -> Measurement:
    return measurement(**{"score": 1.0, "ttft_s": 0.4, "total_s": 0.8, "decode_step_s": [0.1]} | changes)


def row(results: Results, part: str, model: str = "tiny") -> dict[str, Any]:
    """The row of the only claim that begins with these words."""
    frame = verdicts(results).frame
    (found,) = frame[(frame["model"] == model) & frame["claim"].str.startswith(part)].to_dict("records")
    return found


EXAMPLES = [str(number) for number in range(6)]


def beside_baseline(arms: dict[str, dict[str, Any]], of: Any, datasets: Any = ("hotpotqa",), **about: Any) -> Results:
    """Results of a run: of(label, dataset, number) gives an arm's measurement."""
    answers = {
        (dataset, example): {"baseline": base(), **{label: of(label, dataset, int(example)) for label in arms}}
        for dataset in datasets
        for example in EXAMPLES
    }
    return Results([run_of(arms, answers, **about)])


def test_claims_of_time_by_hand() -> None:
    totals = {"hotpotqa": 0.4, "trec": 1.6}  # twice as fast, then half as fast
    results = beside_baseline(
        {"lazy": {"name": "lazy", **TABLE1}},
        lambda label, dataset, number: base(ttft_s=0.2, total_s=totals[dataset]),
        totals,
    )
    assert row(results, "TTFT, in decoding steps")["value"] == pytest.approx(4)
    assert row(results, "TTFT, % of")["value"] == pytest.approx(50)
    assert row(results, "TTFT speedup (mean")["value"] == pytest.approx(2)
    assert row(results, "Generation speedup (mean")["value"] == pytest.approx((2 + 0.5) / 2)
    slower = row(results, "Never slower")
    assert (slower["parts"], slower["verdict"]) == (2, "does not hold")  # task by task: the mean of 1.25 hides it
    assert row(results, "Faster to the first")["verdict"] == "holds"
    assert row(results, "Prompt compression's")["verdict"] == "not run"


def test_a_mild_setting_is_not_judged_as_table_1s() -> None:
    results = beside_baseline({"lazy": {"name": "lazy", "schedule": "1.2x"}}, lambda *_: base(ttft_s=0.3))
    assert row(results, "Score kept, %")["verdict"] == "not run"
    compression = {"lazy": {"name": "lazy", **TABLE1}, "pc": {"name": "prompt_compression", "keep": 0.2}}
    results = beside_baseline(compression, lambda *_: base(ttft_s=0.5))
    assert row(results, "Prompt compression's")["verdict"] == "not run"


def test_speed_that_is_only_ideal_does_not_count() -> None:
    arms = {"lazy": {"name": "lazy", "schedule": "3.0x"}}

    def slow(*_: Any) -> Measurement:
        return base(ttft_s=0.2, prefill_flops=1)  # measured 2x

    ideal = beside_baseline(arms, slow)
    for part in ideal.runs[0].visits:
        assert part.answers
    assert row(ideal, "Score kept at a measured 3x")["verdict"] == "cannot be seen"
    fast = beside_baseline(arms, lambda *_: base(ttft_s=0.4 / 3, score=0.97))
    assert row(fast, "Score kept at a measured 3x")["value"] == pytest.approx(97)
    assert row(fast, "Score kept at a measured 3x")["verdict"] == "holds"


def test_better_is_judged_task_by_task() -> None:
    arms = {"lazy": {"name": "lazy", "schedule": "2.0x"}, "sp": {"name": "static_pruning", "layer": 2, "keep": "2.0x"}}
    scores = {("lazy", "hotpotqa"): 1.0, ("sp", "hotpotqa"): 0.2, ("lazy", "trec"): 0.5, ("sp", "trec"): 0.6}
    results = beside_baseline(
        arms, lambda label, dataset, number: base(score=scores[label, dataset], kl=0.1), ("hotpotqa", "trec")
    )
    found = row(results, "Better than static pruning at one speedup, task by task, points")
    assert (found["parts"], found["verdict"]) == (2, "does not hold")  # +80 and -10: the mean of +35 hides it


def test_monotony_is_judged_step_by_step() -> None:
    kl = {2: 0.5, 4: 0.01, 6: 0.02, 8: 0.0}  # rises from layer 4 to 6, though the ends fall
    arms = {f"lazy {layer}": {"name": "lazy", "schedule": {str(layer): 0.5}} for layer in kl}
    results = beside_baseline(arms, lambda label, dataset, number: base(kl=kl[int(label.split()[1])] + 0))
    found = row(results, "Pruning later is better, layer by layer, nats")
    assert (found["parts"], found["verdict"]) == (3, "does not hold")
    falling = beside_baseline(arms, lambda label, dataset, number: base(kl=1 / int(label.split()[1])))
    assert row(falling, "Pruning later is better, layer by layer, nats")["verdict"] == "holds"


def test_claims_of_tokens_by_hand() -> None:
    counts = [[[100, 60], [100, 70]], [[100, 40], [100, 90]]]  # of 100 prompt tokens: by the end 30 and 10 fewer
    results = beside_baseline(
        {"lazy": {"name": "lazy", **TABLE1}}, lambda label, dataset, number: base(computed=counts[number % 2])
    )
    assert row(results, "First layers compute more")["value"] == pytest.approx(20)
    assert row(results, "No token twice")["verdict"] == "holds"
    twice = beside_baseline({"lazy": {"name": "lazy", **TABLE1}}, lambda *_: base(computed=[[100, 60], [100, 101]]))
    assert row(twice, "No token twice")["verdict"] == "does not hold"


def test_each_paper_model_has_its_own_numbers_and_is_there_if_it_was_not_run() -> None:
    names = [name for name, dataset in DATASETS.items() if dataset.suite == "longbench"][:1]
    results = beside_baseline(
        {"lazy": {"name": "lazy", **TABLE1}}, lambda *_: base(ttft_s=0.4 / 3.03), names, model="xgen", paper="xgen"
    )
    assert row(results, "TTFT speedup (mean", "xgen")["verdict"] == "agrees"
    assert row(results, "TTFT speedup (mean", "xgen")["paper"] == "3.03"
    assert row(results, "TTFT speedup (mean", "llama2")["verdict"] == "not run"
    assert row(results, "TTFT speedup (mean", "llama2")["paper"] == "2.03"


def test_few_examples_have_no_interval() -> None:
    results = beside_baseline({"lazy": {"name": "lazy", **TABLE1}}, lambda *_: base(ttft_s=0.1))
    few = Results([replace(run, given=run.visits[:4]) for run in results.runs])
    assert row(results, "Faster to the first")["verdict"] == "holds"
    assert row(few, "Faster to the first")["verdict"] == "cannot be seen"


def test_step_cost_is_recovered_from_the_other_tasks() -> None:
    answers = {}
    for number, (dataset, revived, tokens) in enumerate(
        [("trec", 0, 2), ("trec", 8, 4), ("qasper", 2, 3), ("qasper", 6, 6), ("hotpotqa", 4, 5), ("hotpotqa", 1, 9)]
    ):
        total = 0.2 + 0.15 * (tokens - 1) + 0.03 * revived  # 1.5 and 0.3 baseline steps
        lazy = base(ttft_s=0.2, token_ids=[1] * tokens, total_s=total, revived_tokens=float(revived))
        answers[dataset, str(number)] = {"baseline": base(), "lazy": lazy}
    table = step_cost(Results([run_of({"lazy": {"name": "lazy", **TABLE1}}, answers)]))
    assert list(table.frame["step_cost"]) == pytest.approx([1.5] * 3)
    assert list(table.frame["token_cost"]) == pytest.approx([0.3] * 3)
    assert list(table.frame["predicted"]) == pytest.approx(list(table.frame["generation_speedup"]))
    (few_shot,) = table.frame[table.frame["task"] == "few_shot"].to_dict("records")
    assert few_shot["prefill_token_cost"] == pytest.approx(0.4 / 100 / 0.1)
    assert (few_shot["prefill_saved"], few_shot["revived_a_step"]) == (pytest.approx(2), 8 / 4)
