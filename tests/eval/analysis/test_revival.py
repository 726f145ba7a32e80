"""What revival is worth, by hand."""

import math
from statistics import mean

import pytest

from eval.analysis.revival import revival
from eval.store.results import Results
from tests.eval.analysis.made import example, stored

ARMS = {  # {arm: method, settings}
    "with": ("lazy", {"schedule": "2x"}),
    "without": ("lazy", {"schedule": "2x", "revive": False}),
    "static": ("static_pruning", {"layer": 2, "keep": "2x"}),
    "random": ("random_drop", {"keep": "2x"}),
}
KLS = {  # {(dataset, row): the answer's KL of each arm}; trec is a task of its own, the others are one task
    ("hotpotqa", "a"): (0.1, 0.2, 0.8, 0.8), ("hotpotqa", "b"): (0.1, 0.4, 0.8, 1.6),
    ("musique", "a"): (0.3, 0.3, 0.6, 0.6), ("trec", "a"): (0.2, 0.8, 0.4, 4.0), ("trec", "b"): (0.2, 0.8, 0.4, 4.0),
}  # fmt: skip


def made(kls: dict[tuple[str, str], tuple[float, ...]]) -> Results:
    return Results([
        stored([example(*row, answer_kl=values[place], kl=0.5) for row, values in kls.items()], *arm)
        for place, arm in enumerate(ARMS.values())
    ])  # fmt: skip


def by_hand(first: int, second: int) -> float:
    logs = {row: math.log(values[first] / values[second]) for row, values in KLS.items()}
    hotpotqa, musique = mean([logs["hotpotqa", "a"], logs["hotpotqa", "b"]]), logs["musique", "a"]
    return math.exp(mean([mean([hotpotqa, musique]), mean([logs["trec", "a"], logs["trec", "b"]])]))


def test_ratios_are_geometric_means_over_datasets_and_tasks() -> None:
    frame = revival(made(KLS)).frame.set_index("kl")
    assert list(frame.index) == ["answer_kl", "kl"]
    answer = frame.loc["answer_kl"]
    assert answer["examples"] == 5
    for name, (first, second) in {
        "LazyLLM / without revival": (0, 1), "without revival / static pruning": (1, 2),
        "LazyLLM / static pruning": (0, 2), "static pruning / random drop": (2, 3),
    }.items():  # fmt: skip
        assert answer[name] == pytest.approx(by_hand(first, second))
        assert answer[f"{name}_low"] <= answer[name] <= answer[f"{name}_high"]
    # the least draw has the log of 1/4 everywhere; the greatest has 1/2 of hotpotqa and 1 of musique
    most = math.exp(mean([mean([math.log(1 / 2), 0]), math.log(1 / 4)]))
    low, value, high = (answer[f"LazyLLM / without revival{end}"] for end in ("_low", "", "_high"))
    assert 1 / 4 - 1e-9 <= low < value < high <= most + 1e-9


def test_a_kl_of_nothing_gives_no_ratio_and_few_rows_no_interval() -> None:
    zero = {("trec", "a"): (0.0, 0.8, 0.4, 4.0), ("trec", "b"): (0.2, 0.8, 0.4, 4.0)}
    cells = revival(made(zero)).cells.set_index("KL of")
    assert cells.loc["the baseline's answer", "LazyLLM / without revival"] == "0.25"
    assert cells.loc["the baseline's answer", "n"] == "1"


def test_without_the_ablation_there_is_no_table() -> None:
    results = made(KLS)
    assert revival(Results([results.runs[0], *results.runs[2:]])).frame.empty
