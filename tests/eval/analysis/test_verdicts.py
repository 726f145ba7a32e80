import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from eval.analysis.claims import PAPER_SUITE, Claim, claims, sections
from eval.analysis.paper_tables import paper_values
from eval.analysis.table import figures, tables
from eval.analysis.verdicts import verdicts
from eval.store.results import Results
from eval.store.runs import StoredRun
from tests.eval.made import SIX, small_trace, stored, with_traces
from tests.eval.store.visits import FAILED, visit

NAN = math.nan
TABLE1 = {"lazy": {"speedup": "table1"}}
SWEEP = {"lazy": {"speedup": 2.0}, "static_pruning": {"speedup": 2.0, "layer": 2}}
BETTER = "Better than static pruning at each speedup, task by task, "


def claim(**values: Any) -> Claim:
    usual: dict[str, Any] = {"paper": {}, "tolerance": "", "holds": "", "digits": 1, "widest": None}
    return replace(claims()[0], **usual | values)


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
        # one task is enough, whatever the mean
        ("> 1", [(1.2, 1.1, 1.3), (0.9, 0.8, 0.95)], "does not hold"),
        # of two, at 97.5 %: 2.2414 standard errors instead of 1.96 are 1.1436 times as far
        ("> 1", [(1.2, 1.1, 1.3), (0.9, 0.8, 0.9874)], "does not hold"),
        ("> 1", [(1.2, 1.1, 1.3), (0.9, 0.8, 0.9875)], "undecided"),
        ("> 1", [], "not run"),
    ],
)
def test_a_direction_needs_every_interval(holds: str, parts: Any, verdict: str) -> None:
    assert claim(holds=holds).verdict(parts, None) == verdict


@pytest.mark.parametrize(
    ("parts", "rows"),
    [
        ([(2.0, 1.0, 3.0)], NAN),  # is decided
        ([(1.0, -1.0, 3.0)], 400),  # twice as wide as far from 0: four times the rows
        ([(1.0, -1.0, 3.0), (0.5, -1.0, 2.0), (3.0, 2.0, 4.0)], 900),  # all must obey
        # one is enough, with 2.3940 standard errors: 1 - 0.05 / 3 of a normal mean
        ([(1.0, -3.0, 5.0), (-1.0, -2.5, 0.5), (-1.0, -3.0, 1.0)], 225 * (2.39398 / 1.959964) ** 2),
        ([(0.0, -1.0, 1.0)], NAN),  # no number of rows decides a tie
        ([(0.5, NAN, NAN)], NAN),
    ],
)
def test_rows_that_decide_narrow_the_interval(parts: Any, rows: float) -> None:
    needed = claim(holds="> 0").rows_to_decide(parts, 100)
    assert needed == pytest.approx(rows, nan_ok=True)


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
def test_a_reproduction_compares_the_interval_with_the_number(
    tolerance: str, value: Any, verdict: str
) -> None:
    reproduction = claim(tolerance=tolerance, paper={"llama2": 23})
    assert reproduction.verdict([value], "llama2") == verdict
    # it has no number of it
    assert reproduction.verdict([value], "xgen") == reproduction.verdict([value], None) == "-"


def test_the_papers_own_values_agree() -> None:
    assert sum(len(entry.paper) for entry in claims() if entry.tolerance) >= 10
    for entry in claims():
        for model, number in entry.paper.items():
            assert entry.verdict([(number,) * 3], model) == (
                "agrees" if entry.tolerance else "holds"
            ), entry.claim


@pytest.mark.parametrize("model", ["llama2", "xgen"])
def test_numbers_are_those_of_the_papers_tables(model: str) -> None:
    values = paper_values()
    tasks = sorted({task for name, task, *_ in values if name == model})

    def column(name: str, method: str = "lazy") -> list[float]:
        return [values[model, task, method, name] for task in tasks]

    expected = {
        "Score kept": 100 * sum(column("score")) / sum(column("score", "baseline")),
        "TTFT speedup (mean": mean(column("ttft_speedup")),
        "Faster to the first": min(column("ttft_speedup")),
        "Prompt compression's": max(column("ttft_speedup", "prompt_compression")),
        "Prompt tokens computed": mean(column("pct_prompt_tokens_computed")),
        "Generation speedup": mean(column("equal_length_speedup")),
        "Never slower": min(column("equal_length_speedup")),
    }
    for words, number in expected.items():
        stated = next(
            entry
            for entry in claims()
            if entry.claim.startswith(words) and "measured" not in entry.claim
        )
        assert stated.paper[model] == pytest.approx(number, abs=0.005), words


def row(results: Results | list[Results], start: str, model: str = "tiny") -> dict[str, Any]:
    """The row of the only claim that begins with these words."""
    frame = verdicts(*(results if isinstance(results, list) else [results])).frame
    (found,) = frame[(frame["model"] == model) & frame["claim"].str.startswith(start)].to_dict(
        "records"
    )
    return found


def verdict(results: Results, start: str) -> tuple[int, str]:
    """How many values it is of, and the verdict."""
    found = row(results, start)
    return found["parts"], found["verdict"]


def results_of(
    methods: dict[str, dict[str, Any]], changes: Callable[..., dict[str, Any]],
    datasets: Any = SIX, rows: int = 6, **about: Any,
) -> Results:  # fmt: skip
    """Six rows of each dataset for each method. changes: of the answers to a label and dataset,
    which are as good and as slow as the baseline's."""
    usual = {"score": 1.0, "ttft_s": 0.4}
    return Results([
        stored([visit(number, dataset, **usual | changes(label, dataset)) for dataset in datasets
                for number in range(rows)], label.split()[0], settings, **about)
        for label, settings in methods.items()
    ])  # fmt: skip


def test_claims_of_time_by_hand() -> None:
    # the baseline's second token comes after 0.5 s: twice as fast, then half as fast
    totals = dict.fromkeys(SIX, 0.25) | {"trec": 1.0}
    results = results_of(
        TABLE1, lambda _, name: {"ttft_s": 0.2, "decode_step_s": [totals[name] - 0.2]}
    )
    for start, value in {
        "TTFT, in decoding steps": 4, "TTFT, % of": 80, "TTFT speedup (mean": 2,
        "Generation speedup (mean": 10.5 / 6,
    }.items():  # fmt: skip
        assert row(results, start)["value"] == pytest.approx(value), start
    # task by task: the mean of 1.75 hides it
    assert verdict(results, "Never slower") == (6, "does not hold")
    assert verdict(results, "Faster to the first") == (6, "holds")
    assert verdict(results, "Prompt compression's") == (0, "not run")
    few = results_of(TABLE1, lambda *_: {"ttft_s": 0.2}, rows=1)
    assert verdict(few, "Faster to the first") == (6, "undecided")


def test_of_groups_the_largest_that_can_decide_a_claim_counts() -> None:
    """Whole answers in one; twice as many examples of short ones in another; most, without
    LazyLLM's Table 1."""
    about = {"model": "llama2", "paper": "llama2"}
    whole = results_of(TABLE1, lambda *_: {"ttft_s": 0.1, "score": 0.9}, **about)
    short = results_of(TABLE1, lambda *_: {"ttft_s": 0.2}, rows=12, max_new_tokens=6, **about)
    most = results_of(
        {"lazy": {"speedup": 1.5}}, lambda *_: {"ttft_s": 0.4}, rows=18, max_new_tokens=1, **about
    )
    for groups in ([whole, short, most], [most, short, whole]):
        assert [len(found) for found in sections(groups).values()] == [3]
        # the short one's
        assert row(groups, "TTFT speedup (mean", "llama2")["value"] == pytest.approx(2)
        kept = row(groups, "Score kept, %", "llama2")
        assert (kept["value"], kept["lacking"]) == (pytest.approx(90), "")
        assert set(verdicts(*groups).frame["model"]) == {"llama2", "xgen"}
    alone = row([short, most], "Score kept, %", "llama2")
    assert (alone["verdict"], alone["value"]) == ("not run", pytest.approx(100))
    assert alone["lacking"] == "needs whole answers, has max_new_tokens=6"
    random = stored([visit()], model="other", load_format="dummy")
    assert "other (random weights)" in set(verdicts(whole, Results([random])).cells["model"])


def test_every_claim_names_what_there_is(tmp_path: Path) -> None:
    """Runs with all that claims need give each a value; a name that is not there is an error, or
    leaves one out."""
    values = {"kl": 0.2, "answer_kl": 0.1, "ttft_s": 0.1}
    arms = [("lazy", TABLE1["lazy"]), ("prompt_compression", {"speedup": "table1", "keep": 0.5})]
    arms += [
        (name, {"speedup": speedup})
        for name in ("lazy", "static_pruning", "random_drop")
        for speedup in (2.5, 3.0)
    ]
    arms += [("lazy", {"schedule": {layer: keep}}) for layer in "24" for keep in (0.3, 0.5)]
    runs = [stored([visit(0, name, **values) for name in SIX], *arm) for arm in arms]
    results = Results([with_traces(runs[0], tmp_path, small_trace()), *runs[1:]])
    section = sections([results])["tiny", PAPER_SUITE]
    exhibits = tables().keys() | figures().keys()
    for entry in claims():
        assert entry.judged(section).decides, entry.claim
        assert entry.exhibit in exhibits, entry.claim
        assert bool(entry.tolerance) != bool(entry.holds), entry.claim
        assert not entry.tolerance or (
            entry.paper and entry.tolerance.split()[1] in ("%", "points", "point")
        ), entry.claim
    assert len({entry.claim for entry in claims()}) == len(claims())


def test_another_setting_is_not_judged_as_table_1s() -> None:
    methods = {"lazy": {"speedup": 1.2}, "prompt_compression": {"keep": 0.2}}
    results = results_of(methods, lambda *_: {"ttft_s": 0.3})
    for start in ("Score kept, %", "Prompt compression's"):
        assert row(results, start)["verdict"] == "not run"


def test_what_was_run_without_a_number_cannot_be_seen() -> None:
    # in batches
    found = row(results_of(TABLE1, lambda *_: {"decode_step_s": None}), "Never slower")
    assert (found["verdict"], found["lacking"]) == (
        "not run",
        "needs times of single steps: batch_size=1",
    )
    zero = results_of(TABLE1, lambda *_: {"baseline": {"score": 0.0}})
    assert row(zero, "Score kept, %")["verdict"] == "-"
    text = claim(holds="> 1").ours([(1.5, 1.4, 1.6), (NAN,) * 3])
    assert text == "1.5 to 1.5: 1 of 2 hold, 0 do not"


def test_speed_that_is_only_ideal_does_not_count() -> None:
    sweep = {"lazy": {"speedup": 3.0}}
    start = "Score kept at a measured 3x"
    ideal = results_of(sweep, lambda *_: {"ttft_s": 0.2, "prefill_flops": 1})  # measured 2x
    assert row(ideal, start)["verdict"] == "undecided"
    fast = row(results_of(sweep, lambda *_: {"ttft_s": 0.4 / 3, "score": 0.97}), start)
    assert (fast["value"], fast["verdict"]) == (pytest.approx(97), "holds")


def test_better_is_judged_task_by_task_in_each_measure() -> None:
    values = {
        "lazy": {"kl": 0.3, "answer_kl": 0.1, "score": 1.0},
        "static_pruning": {"kl": 0.1, "answer_kl": 0.2},
    }
    trec = {"lazy": 0.5, "static_pruning": 0.6}
    results = results_of(
        SWEEP,
        lambda label, name: (
            {"score": 0.2} | values[label] | ({"score": trec[label]} if name == "trec" else {})
        ),
    )
    # +80 and once -10, which the mean hides
    assert verdict(results, f"{BETTER}points") == (6, "does not hold")
    assert verdict(results, f"{BETTER}nats of KL") == (6, "does not hold")
    assert verdict(results, f"{BETTER}nats of the") == (6, "holds")
    bare = row(
        results_of(SWEEP, lambda *_: {"kl": 0.1}),
        BETTER.replace("static pruning", "random token drop") + "nats of the",
    )
    assert (bare["verdict"], bare["lacking"]) == ("not run", "needs fidelity=answer")


def test_each_speedup_is_judged_by_itself() -> None:
    """Far better at 1.5x and worse at 3x: the mean over speedups is better in every task."""
    arms = {
        f"{method} {speedup}": {"speedup": speedup}
        for method in ("lazy", "static_pruning")
        for speedup in (1.5, 3.0)
    }
    kls = {"lazy 1.5": 0.1, "static_pruning 1.5": 2.1, "lazy 3.0": 0.5, "static_pruning 3.0": 0.4}
    found = row(results_of(arms, lambda label, _: {"kl": kls[label]}), f"{BETTER}nats of KL")
    assert (found["parts"], found["verdict"]) == (12, "does not hold")


def test_two_settings_of_a_method_are_not_averaged() -> None:
    """Against one setting it does not hold, against the other it does: of both, nothing is said."""
    kls = {"lazy": 0.2, "static_pruning 2": 0.1, "static_pruning 10": 0.9}
    arms = {"lazy": {"speedup": 2.0}} | {
        f"static_pruning {layer}": {"speedup": 2.0, "layer": layer} for layer in (2, 10)
    }
    start = f"{BETTER}nats of KL"

    def found(*labels: str) -> dict[str, Any]:
        chosen = {label: arms[label] for label in labels}
        return row(results_of(chosen, lambda label, _: {"kl": kls[label]}), start)

    assert found("lazy", "static_pruning 2")["verdict"] == "does not hold"
    assert found("lazy", "static_pruning 10")["verdict"] == "holds"
    both = found(*arms)
    assert (both["verdict"], both["parts"]) == ("not run", 0)
    assert both["lacking"] == (
        "needs one setting of static_pruning, has static_pruning, layer=10 and static_pruning, "
        "layer=2"
    )
    # nor is the first of several a claim's: each keeps another share of the score
    variants = {"lazy": {"speedup": "table1"}, "lazy k": {"speedup": "table1", "kernel": 5}}
    kept = row(results_of(variants, lambda *_: {"score": 0.9}), "Score kept, %")
    assert (kept["verdict"], kept["parts"]) == ("not run", 0)


@pytest.mark.parametrize("fails", ["lazy", "baseline"])
def test_failed_answers_are_counted_and_more_than_two_percent_decide_nothing(fails: str) -> None:
    """LazyLLM, or the baseline beside it, failed where LazyLLM is worst: what is left keeps more of
    the score than the whole."""

    def kept(rows: int, bad: int) -> tuple[dict[str, Any], str]:
        visits = [
            visit(number, name, score=0.5 if number < bad else 1.0)
            for name in SIX
            for number in range(rows)
        ]
        for example in visits:
            if example.answers["lazy"].score == 0.5:
                example.arms[fails] = FAILED
        about = {"model": "llama2", "paper": "llama2"}
        table = verdicts(Results([stored(visits, settings=TABLE1["lazy"], **about)]))
        place = table.frame.index[table.frame["claim"].str.startswith("Score kept, %")][0]
        return table.frame.loc[place].to_dict(), table.cells.loc[place, "verdict"]

    half, text = kept(6, 3)
    assert (half["verdict"], half["failed"]) == ("not run", 18)
    assert text == "not run: needs 98 % of the rows, failed on 18 of 36"
    few, text = kept(50, 1)
    # 100 % against the paper's 98.89 %
    assert (few["verdict"], few["failed"], few["value"]) == ("differs (higher)", 6, 100)
    assert text == "differs (higher) (6 rows failed)"
    over, _ = kept(48, 1)
    assert over["verdict"] == "not run"


def test_a_row_that_one_arm_failed_counts_for_none() -> None:
    """Static pruning's failure also takes the row from LazyLLM at that and at other speedups, and
    what another run answered did not fail."""
    arms = [("lazy", 2.0), ("lazy", 3.0), ("static_pruning", 2.0), ("static_pruning", 3.0)]

    def run(method: str, speedup: float, failing: bool = False) -> StoredRun:
        visits = [visit(number, name, kl=0.2) for name in SIX for number in range(60)]
        if failing:
            visits[0].arms["lazy"] = FAILED
        return stored(visits, method, {"speedup": speedup})

    runs = [run(*arm) for arm in arms[:3]] + [run(*arms[3], failing=True)]
    (section,) = sections([Results(runs)]).values()
    judged = next(entry for entry in claims() if entry.claim.startswith(f"{BETTER}nats of KL"))
    found = judged.judged(section)
    assert (found.failed, found.examples, found.decides) == (1, 360, True)
    (section,) = sections([Results([*runs, run(*arms[3])])]).values()
    assert judged.judged(section).failed == 0


def test_monotony_is_judged_step_by_step() -> None:
    def along(kl: dict[int, float]) -> tuple[int, str]:
        layers = {f"lazy {layer}": {"schedule": {str(layer): 0.5}} for layer in kl}
        results = results_of(layers, lambda label, _: {"kl": kl[int(label.split()[1])]})
        return verdict(results, "Pruning later is better, layer by layer, nats of KL")

    # from layer 4 to 6, though the ends fall
    assert along({2: 0.5, 4: 0.01, 6: 0.02, 8: 0.0}) == (3, "does not hold")
    assert along({layer: 1 / layer for layer in (2, 4, 6, 8)}) == (3, "holds")


def test_claims_of_tokens_by_hand() -> None:
    more, less = [[100, 60], [100, 70]], [[100, 40], [100, 90]]
    results = results_of(TABLE1, lambda _, name: {"computed": less if name in SIX[:3] else more})
    assert row(results, "First layers compute more")["value"] == pytest.approx((30 + 10) / 2)
    assert row(results, "No token twice")["verdict"] == "holds"
    twice = results_of(TABLE1, lambda *_: {"computed": [[100, 60], [100, 101]]})
    assert row(twice, "No token twice")["verdict"] == "does not hold"


def test_each_paper_model_has_its_own_numbers_and_is_there_if_it_was_not_run() -> None:
    results = results_of(TABLE1, lambda *_: {"ttft_s": 0.4 / 3.03}, model="xgen", paper="xgen")
    found = [row(results, "TTFT speedup (mean", model) for model in ("xgen", "llama2")]
    assert [(finding["verdict"], finding["paper"]) for finding in found] == [
        ("agrees", "3.03"),
        ("not run", "2.03"),
    ]


STARTS = {
    "TTFT, in", "TTFT, %", "Prompt tokens, mean", "Generated", "Score kept, %", "TTFT speedup",
    "Prompt tokens computed", "Generation",
}  # fmt: skip
OF_ANSWERS = {"Score kept, %", "Prompt tokens computed", "Generation"}  # whatever the prompts


@pytest.mark.parametrize(
    ("datasets", "most_new", "most_prompt", "judged"),
    [
        # what a first look at one dataset, with short answers to short prompts, may say of the
        # paper
        (("hotpotqa",), 6, 1500, set()),
        (SIX, 6, 3500, {"TTFT, in", "Prompt tokens, mean", "TTFT speedup"}),
        (SIX, None, 1500, OF_ANSWERS),
        (SIX[1:], None, 3500, set()),
        (SIX, None, 3500, STARTS),
    ],
)
def test_part_of_an_experiment_decides_no_number(
    datasets: Any, most_new: Any, most_prompt: int, judged: Any
) -> None:
    about = {
        "max_new_tokens": most_new,
        "max_prompt_tokens": most_prompt,
        "model": "llama2",
        "paper": "llama2",
    }
    results = results_of(TABLE1, lambda *_: {"ttft_s": 0.2}, datasets, **about)
    found = {start: row(results, start, "llama2") for start in STARTS}
    assert {start for start, finding in found.items() if finding["verdict"] != "not run"} == judged
    assert {start for start, finding in found.items() if not finding["lacking"]} == judged
    if len(datasets) == 1:
        assert found["Generated"]["lacking"] == (
            "needs the paper's 6 tasks, has multi_doc_qa; needs max_prompt_tokens=3500, has "
            "max_prompt_tokens=1500; needs whole answers, has max_new_tokens=6"
        )
        assert row(results, "Never slower", "llama2")["verdict"] == "not run"


# 50 ±33
@pytest.mark.parametrize(("scores", "start"), [([1.0, 0.9, 1.0, 0.9], "95.0 ±"), ([1.0, 0.0], "?")])
def test_share_of_the_score_is_no_number_if_it_is_hardly_known(
    scores: list[float], start: str
) -> None:
    visits = [
        visit(number, name, score=score) for name in SIX for number, score in enumerate(scores)
    ]
    cells = verdicts(Results([stored(visits, settings=TABLE1["lazy"])])).cells
    (share,) = cells[
        (cells["model"] == "tiny") & (cells["claim"] == "Score kept, % (mean over tasks)")
    ]["ours"]
    assert share.startswith(start)


def test_one_traced_prompt_decides_what_is_counted_on_it(tmp_path: Path) -> None:
    trace = small_trace(dataset="hotpotqa")
    traced = with_traces(stored([visit(1, "hotpotqa")]), tmp_path, trace)
    # means of 0.4, 0.35 and 0.25: one of three below a third
    found = row(Results([traced]), "Most prompt tokens")
    assert (found["parts"], found["value"], found["verdict"]) == (
        1,
        pytest.approx(100 / 3),
        "does not hold",
    )
