"""What revival is worth, by hand."""

import math
from statistics import mean

import pytest

from eval.analysis.revival import revival
from eval.store.results import Results
from tests.eval.made import stored
from tests.eval.store.visits import visit

ARMS = (  # method, settings
    ("lazy", {"speedup": 2.0}), ("lazy", {"speedup": 2.0, "revive": False}),
    ("static_pruning", {"speedup": 2.0, "layer": 2}), ("random_drop", {"speedup": 2.0}),
)  # fmt: skip
RATIOS = {  # {heading: its two arms}
    "LazyLLM / without revival": (0, 1), "without revival / static pruning": (1, 2),
    "LazyLLM / static pruning": (0, 2), "static pruning / random drop": (2, 3),
}  # fmt: skip
Kls = dict[tuple[int, str], tuple[float, ...]]
# {row: the answer's KL of each arm}; trec is a task of its own, the others are one task
KLS: Kls = {
    (1, "hotpotqa"): (0.1, 0.2, 0.8, 0.8), (2, "hotpotqa"): (0.1, 0.4, 0.8, 1.6),
    (1, "musique"): (0.3, 0.3, 0.6, 0.6), (1, "trec"): (0.2, 0.8, 0.4, 4.0),
    (2, "trec"): (0.2, 0.8, 0.4, 4.0),
}  # fmt: skip


def results_of(kls: Kls) -> Results:
    return Results([
        stored([visit(*row, answer_kl=values[place], kl=0.5) for row, values in kls.items()], *arm)
        for place, arm in enumerate(ARMS)
    ])  # fmt: skip


def test_ratios_are_geometric_means_over_datasets_and_tasks() -> None:
    frame = revival(results_of(KLS)).frame.set_index("kl")
    assert list(frame.index) == ["answer_kl", "kl"]
    found = frame.loc["answer_kl"]
    assert found["examples"] == 5
    for name, (first, second) in RATIOS.items():
        logs = [math.log(values[first] / values[second]) for values in KLS.values()]
        hotpotqa, musique, trec = logs[:2], logs[2], logs[3:]
        expected = math.exp(mean([mean([mean(hotpotqa), musique]), mean(trec)]))
        assert found[name] == pytest.approx(expected)
        assert found[f"{name}_low"] <= found[name] <= found[f"{name}_high"]
    # the least draw has the log of 1/4 everywhere; the greatest has 1/2 of hotpotqa and 1 of
    # musique
    most = math.exp(mean([mean([math.log(1 / 2), 0]), math.log(1 / 4)]))
    low, value, high = (found[f"LazyLLM / without revival{end}"] for end in ("_low", "", "_high"))
    assert 1 / 4 - 1e-9 <= low < value < high <= most + 1e-9


def test_a_kl_of_nothing_gives_no_ratio_and_few_rows_no_interval() -> None:
    cells = revival(
        results_of({(1, "trec"): (0.0, 0.8, 0.4, 4.0), (2, "trec"): (0.2, 0.8, 0.4, 4.0)})
    ).cells
    found = cells.set_index("KL of").loc["the baseline's answer"]
    assert found[["LazyLLM / without revival", "n"]].tolist() == ["0.25", "1"]


def test_without_the_ablation_there_is_no_table() -> None:
    runs = results_of(KLS).runs
    assert revival(Results([runs[0], *runs[2:]])).frame.empty
