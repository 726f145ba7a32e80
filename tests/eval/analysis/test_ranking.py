from __future__ import annotations

import pytest

from eval.analysis.ranking import ranking
from eval.store.results import Results
from eval.store.runs import StoredRun
from tests.eval.analysis.made import example, line, stored, swept


def test_ranking_by_hand() -> None:
    runs = [
        swept("lazy", "1.5x", [0.1, 0.3, 0.2], [1, 1, 0.5]),
        swept("static_pruning", "1.5x", [0.2, 0.4, 0.3], [1, 0, 0.5], layer=2),
        swept("random_drop", "1.5x", [0.9, 0.1], [0, 1]),
        swept("lazy", "2.0x", [0.5, 0.7], [1, 1]),
        stored([example("hops", "0", kl=0.0)]),  # its speedup is not given
    ]
    table = ranking(Results(runs))
    columns = ["target", "rank", "method", "examples", "kl", "kl_difference", "score", "score_difference"]
    assert table.frame[columns].to_numpy().tolist() == [
        [1.5, 1, "lazy", 2, pytest.approx(0.2), 0, 100, 0],  # on the two examples that all three have
        [1.5, 2, "static_pruning", 2, pytest.approx(0.3), pytest.approx(0.1), 50, -50],
        [1.5, 3, "random_drop", 2, pytest.approx(0.5), pytest.approx(0.3), 50, -50],
        [2.0, 1, "lazy", 2, pytest.approx(0.6), 0, 100, 0],
    ]
    static, drop = (line(table.frame, target=1.5, rank=rank) for rank in (2, 3))
    assert (static["kl_low"], static["kl_high"]) == (pytest.approx(0.2), pytest.approx(0.4))
    # paired: always 0.1 worse, whatever is drawn
    assert (static["kl_difference_low"], static["kl_difference_high"]) == (pytest.approx(0.1), pytest.approx(0.1))
    assert (drop["kl_difference_low"], drop["kl_difference_high"]) == (pytest.approx(-0.2), pytest.approx(0.8))
    cells = line(table.cells, method="static_pruning, layer=2")
    assert cells["KL - first's"] == "+0.10000 (+0.10000, +0.10000)"
    assert table.cells["KL - first's"].tolist()[0] == "-"


def test_ranking_puts_the_score_before_kl() -> None:
    """A method may hit the first token's distribution and lose the answer after it."""
    runs = [swept("static_pruning", "2x", [0.0, 0.0], [1, 0], layer=2), swept("lazy", "2x", [0.2, 0.2], [1, 1])]
    assert ranking(Results(runs)).frame["method"].tolist() == ["lazy", "static_pruning"]


def test_ranking_leaves_out_diagnostics_and_missed_speedups() -> None:
    def run(method: str, kls: list[float], ideal: float) -> StoredRun:
        flops = [
            example("hops", str(row), kl=kl, prefill_flops=1000, baseline={"prefill_flops": round(1000 * ideal)})
            for row, kl in enumerate(kls)
        ]
        return stored(flops, method, {"keep": "2x"})

    runs = [
        run("fastkv", [0.3, 0.5], 1.85),
        run("random_drop", [0.9], 2.3),
        run("asl", [0.0], 1.0),  # it never cut: nothing was saved, and nothing lost
        run("oracle", [0.1], 2.0),
    ]
    table = ranking(Results(runs))
    assert table.frame[["rank", "method", "examples"]].to_numpy().tolist() == [[1, "fastkv", 1], [2, "random_drop", 1]]
    notes = " Not ranked: asl, keep=2x, whose prefills had an ideal speedup of 1.00; oracle, keep=2x (diagnostic)."
    assert table.notes.endswith(notes)
    assert "Not ranked" not in ranking(Results(runs[:2])).notes
