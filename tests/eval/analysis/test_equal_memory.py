import math

import pytest

from eval.analysis.equal_memory import equal_memory
from eval.store.results import Results
from eval.store.runs import StoredRun
from tests.eval.analysis.made import example, line, stored

pytestmark = pytest.mark.usefixtures("two_have_an_interval")

GOLD = [{"gold_log_likelihood": [-0.2, -0.4]}, {"gold_log_likelihood": [-0.1, -0.6]}]
BASELINE = {"kv_bytes": 1000, "aux_bytes": 0}


def run(method: str, keep: str, bytes_: tuple[int, int], **own: list[float]) -> StoredRun:
    """Two examples; own: the value of each."""
    visits = [
        example("hops", row, baseline=BASELINE, kv_bytes=bytes_[0], aux_bytes=bytes_[1],
                **{name: values[number] for name, values in own.items()})
        for number, row in enumerate("ab")
    ]  # fmt: skip
    return stored(visits, method, {"schedule" if method == "lazy" else "keep": keep})


def test_equal_memory_by_hand() -> None:
    runs = [
        run("lazy", "1.5x", (700, 100), score=[1.0, 0.5], answer_kl=[0.1, 0.3], kl=[0.5, 0.5], **GOLD[0]),
        run("lazy", "3.0x", (300, 100), score=[0.0, 0.0], answer_kl=[0.9, 0.9], kl=[0.1, 0.1]),
        run("static_pruning", "1.2x", (820, 0), score=[0.5, 0.5], answer_kl=[0.2, 0.3], kl=[0.1, 0.1], **GOLD[1]),
        run("random_drop", "2.0x", (600, 0), score=[0.0, 1.0], answer_kl=[2.0, 2.0]),
    ]
    table = equal_memory(Results(runs))
    assert table.frame[["method", "cache_ratio"]].to_numpy().tolist() == [
        ["lazy", 0.4], ["random_drop", 0.6], ["lazy", 0.8], ["static_pruning", 0.82],
    ]  # fmt: skip
    static = line(table.frame, method="static_pruning")
    assert static["lazy"] == "schedule=1.5x"
    # the answer's KL decides, not the first token's: 0.25 - 0.2, by example 0.1 and 0
    assert static["lead_kl"] == pytest.approx(0.05)
    assert (static["lead_kl_low"], static["lead_kl_high"]) == (pytest.approx(0), pytest.approx(0.1))
    assert static["lead_score"] == 25
    assert static["lead_log_likelihood"] == pytest.approx(0.05)  # -0.3 against -0.35
    assert math.isnan(line(table.frame, method="random_drop")["lead_kl"])  # 0.2 of the baseline's bytes away
    assert line(table.cells, method="random_drop, keep=2x")["LazyLLM at these bytes"] == "-"
    assert "answer's KL" in table.cells
    assert "gold KL" not in table.cells
