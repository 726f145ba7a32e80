import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from eval.analysis.claims import CLAIMS, Claim, sections
from eval.analysis.paper_tables import paper_values, table1, table1_paper
from eval.analysis.verdicts import verdicts
from eval.store.results import Results, with_variants
from tests.eval.analysis.made import example, small_trace, stored, with_traces

NAN = math.nan
TABLE1 = {"schedule": "table1"}


def claim(**values: Any) -> Claim:
    return Claim("1", "", lambda section, rows: [], "table1", "", **{"digits": 1} | values)


@pytest.mark.parametrize(
    ("holds", "parts", "verdict"),
    [
        ("> 99", [(99.5, 99.1, 99.9)], "holds"),
        ("> 99", [(99.5, 98.0, 99.9)], "undecided"),
        ("> 99", [(98.0, 97.0, 98.9)], "does not hold"),
        ("> 0", [(0.0, 0.0, 0.0)], "undecided"),  # a tie, as of two full scores
        (">= 0", [(0.0, 0.0, 0.0)], "holds"),
        ("<= 100", [(100.0, 100.0, 100.0)], "holds"),
        ("> 1", [(0.5, NAN, NAN)], "undecided"),
        ("> 1", [(1.2, 1.1, 1.3), (1.0, 0.9, 1.1)], "undecided"),
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
        ("10 %", (21.0, 18.0, 24.0), "undecided"),
        ("10 %", (23.0, NAN, NAN), "undecided"),
        ("0 %", (23.0, 23.0, 23.0), "agrees"),
    ],
)
def test_a_reproduction_compares_the_interval_with_the_number(tolerance: str, value: Any, verdict: str) -> None:
    reproduction = claim(tolerance=tolerance, paper={"llama2": 23})
    assert reproduction.verdict([value], "llama2") == verdict
    assert reproduction.verdict([value], "xgen") == reproduction.verdict([value], None) == "-"  # it has no number of it


def test_the_papers_own_values_agree() -> None:
    assert sum(len(one.paper) for one in CLAIMS if one.tolerance) >= 10
    for one in CLAIMS:
        for model, number in one.paper.items():
            assert one.verdict([(number,) * 3], model) == ("agrees" if one.tolerance else "holds"), one.claim


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
        "Generation speedup": mean(of["lazy", "equal_length_speedup"]),
        "Never slower": min(of["lazy", "equal_length_speedup"]),
    }
    for words, number in expected.items():
        stated = next(one for one in CLAIMS if one.claim.startswith(words) and "measured" not in one.claim)
        assert stated.paper[model] == pytest.approx(number, abs=0.005), words


def row(results: Results, part: str, model: str = "tiny") -> dict[str, Any]:
    """The row of the only claim that begins with these words."""
    frame = verdicts(results).frame
    (found,) = frame[(frame["model"] == model) & frame["claim"].str.startswith(part)].to_dict("records")
    return found


SIX = ("qasper", "hotpotqa", "gov_report", "trec", "passage_count", "lcc")  # a dataset of each of the paper's tasks


def beside_baseline(
    methods: dict[str, dict[str, Any]], of: Callable[..., dict[str, Any]], datasets: Any = SIX, **about: Any
) -> Results:
    """Results of a run for each method. of(label, dataset, number): what an answer has other than the baseline's."""
    usual = {"score": 1.0, "ttft_s": 0.4, "total_s": 0.8}
    return Results([
        stored([example(dataset, str(number), **usual | of(label, dataset, number)) for dataset in datasets
                for number in range(6)], label.split()[0], settings, **about)
        for label, settings in methods.items()
    ])  # fmt: skip


def test_claims_of_time_by_hand() -> None:
    # the baseline's second token comes after 0.5 s: twice as fast, then half as fast
    totals = dict.fromkeys(SIX, 0.25) | {"trec": 1.0}
    results = beside_baseline(
        {"lazy": TABLE1},
        lambda label, dataset, number: {"ttft_s": 0.2, "decode_step_s": [totals[dataset] - 0.2]},
        totals,
    )
    assert row(results, "TTFT, in decoding steps")["value"] == pytest.approx(4)
    assert row(results, "TTFT, % of")["value"] == pytest.approx(50)
    assert row(results, "TTFT speedup (mean")["value"] == pytest.approx(2)
    assert row(results, "Generation speedup (mean")["value"] == pytest.approx((5 * 2 + 0.5) / 6)
    slower = row(results, "Never slower")
    assert (slower["parts"], slower["verdict"]) == (6, "does not hold")  # task by task: the mean of 1.75 hides it
    assert row(results, "Faster to the first")["verdict"] == "holds"
    assert row(results, "Prompt compression's")["verdict"] == "not run"


def test_each_claim_takes_the_variant_of_its_experiment() -> None:
    """Table 1 at one limit of prompts, and twice another experiment at another one, which is then the usual limit."""
    visits = [example(dataset, str(number), ttft_s=0.2) for dataset in SIX for number in range(6)]
    runs = [
        stored(visits, "lazy", {"schedule": "table1"}, max_prompt_tokens=2000),
        stored(visits, "lazy", {"schedule": "1.5x"}, max_prompt_tokens=1000),
        stored(visits, "static_pruning", {"layer": 2, "keep": "1.5x"}, max_prompt_tokens=1000),
    ]
    results = Results(with_variants(runs))
    whole = "tiny (max_prompt_tokens=2000)"
    assert [one.model for one in sections(results)] == ["tiny"]
    assert row(results, "Faster to the first", whole)["verdict"] == "holds"
    assert row(results, "Better than static pruning at one speedup, task by task, points")["parts"] == 6
    assert set(verdicts(results).frame["model"]) == {"tiny", whole, "llama2", "xgen"}
    shown = table1(results).cells
    assert set(shown["model"]) == {whole}  # the baseline of the others has no row
    assert "tiny: n" in table1_paper(results).cells  # a column has no room for the variant


def test_a_mild_setting_is_not_judged_as_table_1s() -> None:
    results = beside_baseline({"lazy": {"schedule": "1.2x"}}, lambda *_: {"ttft_s": 0.3})
    assert row(results, "Score kept, %")["verdict"] == "not run"
    compression = {"lazy": TABLE1, "prompt_compression": {"keep": 0.2}}
    results = beside_baseline(compression, lambda *_: {"ttft_s": 0.5})
    assert row(results, "Prompt compression's")["verdict"] == "not run"


def test_what_was_run_without_a_number_cannot_be_seen() -> None:
    results = beside_baseline({"lazy": TABLE1}, lambda *_: {"decode_step_s": None, "ttft_s": 0.2})  # in batches
    found = row(results, "Never slower")
    assert (found["verdict"], found["lacking"]) == ("not run", "needs times of single steps: batch_size=1")
    zero = stored(
        [example(name, str(number), score=0.5, baseline={"score": 0.0}) for name in SIX for number in range(6)],
        "lazy",
        TABLE1,
    )
    assert row(Results([zero]), "Score kept, %")["verdict"] == "-"
    assert claim(holds="> 1", digits=1).ours([(1.5, 1.4, 1.6), (NAN,) * 3]) == "1.5 to 1.5: 1 of 2 hold, 0 do not"


def test_speed_that_is_only_ideal_does_not_count() -> None:
    sweep = {"lazy": {"schedule": "3.0x"}}
    ideal = beside_baseline(sweep, lambda *_: {"ttft_s": 0.2, "prefill_flops": 1})  # measured 2x
    assert row(ideal, "Score kept at a measured 3x")["verdict"] == "undecided"
    fast = beside_baseline(sweep, lambda *_: {"ttft_s": 0.4 / 3, "score": 0.97})
    assert row(fast, "Score kept at a measured 3x")["value"] == pytest.approx(97)
    assert row(fast, "Score kept at a measured 3x")["verdict"] == "holds"


def test_better_is_judged_task_by_task() -> None:
    sweep = {"lazy": {"schedule": "2.0x"}, "static_pruning": {"layer": 2, "keep": "2.0x"}}
    scores = {
        "lazy": dict.fromkeys(SIX, 1.0) | {"trec": 0.5},
        "static_pruning": dict.fromkeys(SIX, 0.2) | {"trec": 0.6},
    }
    results = beside_baseline(sweep, lambda method, dataset, number: {"score": scores[method][dataset], "kl": 0.1})
    found = row(results, "Better than static pruning at one speedup, task by task, points")
    assert (found["parts"], found["verdict"]) == (6, "does not hold")  # +80 and once -10, which the mean hides


def test_monotony_is_judged_step_by_step() -> None:
    def along(kl: dict[int, float]) -> dict[str, Any]:
        layers = {f"lazy {layer}": {"schedule": {str(layer): 0.5}} for layer in kl}
        results = beside_baseline(layers, lambda label, dataset, number: {"kl": kl[int(label.split()[1])]})
        return row(results, "Pruning later is better, layer by layer, nats of KL")

    rising = along({2: 0.5, 4: 0.01, 6: 0.02, 8: 0.0})  # from layer 4 to 6, though the ends fall
    assert (rising["parts"], rising["verdict"]) == (3, "does not hold")
    assert along({layer: 1 / layer for layer in (2, 4, 6, 8)})["verdict"] == "holds"


def test_claims_of_tokens_by_hand() -> None:
    counts = [[[100, 60], [100, 70]], [[100, 40], [100, 90]]]  # of 100 prompt tokens: by the end 30 and 10 fewer
    results = beside_baseline({"lazy": TABLE1}, lambda label, dataset, number: {"computed": counts[number % 2]})
    assert row(results, "First layers compute more")["value"] == pytest.approx(20)
    assert row(results, "No token twice")["verdict"] == "holds"
    twice = beside_baseline({"lazy": TABLE1}, lambda *_: {"computed": [[100, 60], [100, 101]]})
    assert row(twice, "No token twice")["verdict"] == "does not hold"


def test_each_paper_model_has_its_own_numbers_and_is_there_if_it_was_not_run() -> None:
    results = beside_baseline({"lazy": TABLE1}, lambda *_: {"ttft_s": 0.4 / 3.03}, model="xgen", paper="xgen")
    assert row(results, "TTFT speedup (mean", "xgen")["verdict"] == "agrees"
    assert row(results, "TTFT speedup (mean", "xgen")["paper"] == "3.03"
    assert row(results, "TTFT speedup (mean", "llama2")["verdict"] == "not run"
    assert row(results, "TTFT speedup (mean", "llama2")["paper"] == "2.03"


def test_few_examples_have_no_interval() -> None:
    results = beside_baseline({"lazy": TABLE1}, lambda *_: {"ttft_s": 0.1})
    few = Results([replace(run, given=run.visits[::6]) for run in results.runs])  # one of each task
    assert row(results, "Faster to the first")["verdict"] == "holds"
    assert row(few, "Faster to the first")["verdict"] == "undecided"


@pytest.mark.parametrize(
    ("datasets", "identity", "judged"),
    [
        # what a first look at one dataset, with short answers to short prompts, may say of the paper
        (("hotpotqa",), {"max_new_tokens": 6, "max_prompt_tokens": 1500}, set()),
        (SIX, {"max_new_tokens": 6, "max_prompt_tokens": 3500}, {"TTFT, in", "Prompt tokens, mean", "TTFT speedup"}),
        (SIX, {"max_new_tokens": None, "max_prompt_tokens": 1500},
         {"Score kept, %", "Prompt tokens computed", "Generation"}),
        (SIX[1:], {"max_new_tokens": None, "max_prompt_tokens": 3500}, set()),
        (SIX, {"max_new_tokens": None, "max_prompt_tokens": 3500},
         {"TTFT, in", "TTFT, %", "Prompt tokens, mean", "Generated", "Score kept, %", "TTFT speedup",
          "Prompt tokens computed", "Generation"}),
    ],
)  # fmt: skip
def test_part_of_an_experiment_decides_no_number(datasets: Any, identity: dict[str, Any], judged: set[str]) -> None:
    results = beside_baseline(
        {"lazy": TABLE1}, lambda *_: {"ttft_s": 0.2}, datasets, model="llama2", paper="llama2", **identity
    )
    starts = ("TTFT, in", "TTFT, %", "Prompt tokens, mean", "Generated", "Score kept, %", "TTFT speedup",
              "Prompt tokens computed", "Generation")  # fmt: skip
    found = {start: row(results, start, "llama2") for start in starts}
    assert {start for start, one in found.items() if one["verdict"] != "not run"} == judged
    for start, one in found.items():
        assert bool(one["lacking"]) == (start not in judged)
    if len(datasets) == 1:
        assert found["Generated"]["lacking"] == (
            "needs the paper's 6 tasks, has multi_doc_qa; needs max_prompt_tokens=3500, has 1500; needs whole answers, "
            "has max_new_tokens=6"
        )
        assert row(results, "Never slower", "llama2")["verdict"] == "not run"


def test_share_of_the_score_is_no_number_if_it_is_hardly_known() -> None:
    def kept(scores: list[float]) -> str:
        visits = [example(name, str(number), score=score) for name in SIX for number, score in enumerate(scores)]
        table = verdicts(Results([stored(visits, "lazy", TABLE1)]))
        return table.cells[table.cells["claim"] == "Score kept, % (mean over tasks)"]["ours"].iloc[0]

    assert kept([1.0, 0.9, 1.0, 0.9]).startswith("95.0 ±")
    assert kept([1.0, 0.0]) == "?"  # 50 ±33


def test_one_traced_prompt_decides_what_is_counted_on_it(tmp_path: Path) -> None:
    run = stored([example("hops", "a")], folder=tmp_path)
    traced = with_traces(run, tmp_path, small_trace())  # means of 0.4, 0.35 and 0.25: one of three below a third
    found = row(Results([traced]), "Most prompt tokens")
    assert (found["parts"], found["value"], found["verdict"]) == (1, pytest.approx(100 / 3), "does not hold")


def test_answers_kl_has_claims_of_its_own() -> None:
    sweep = {"lazy": {"schedule": "2.0x"}, "static_pruning": {"layer": 2, "keep": "2.0x"}}
    kls = {"lazy": {"kl": 0.3, "answer_kl": 0.1}, "static_pruning": {"kl": 0.1, "answer_kl": 0.2}}
    results = beside_baseline(sweep, lambda method, *_: kls[method])
    assert (
        row(results, "Better than static pruning at one speedup, task by task, nats of KL")["verdict"]
        == "does not hold"
    )
    assert row(results, "Better than static pruning at one speedup, task by task, nats of the")["verdict"] == "holds"
    bare = row(
        beside_baseline(sweep, lambda *_: {"kl": 0.1}),
        "Better than random token drop at one speedup, task by task, nats of the",
    )
    assert (bare["verdict"], bare["lacking"]) == ("not run", "needs fidelity=answer")
