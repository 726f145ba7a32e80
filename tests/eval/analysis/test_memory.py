import math
from typing import Any

import pytest

from eval.analysis.memory import memory
from eval.store.results import Results
from eval.store.runs import StoredRun
from eval.store.visit import Visit
from tests.eval.analysis.made import ARM, example, line, over, stored
from tests.eval.store.made import alone

pytestmark = pytest.mark.usefixtures("two_have_an_interval")

STATE, TOKEN = 6, 40  # bytes of a hidden state, and of a token in all layers of the KV cache


def answered(name: str, n: int, computed: list[list[int]], generated: int) -> Visit:
    """An answer of LazyLLM, with bytes as the engine counts them; the baseline generated as many tokens."""
    baseline = {"kv_bytes": TOKEN * (n + generated - 1), "aux_bytes": 0, "token_ids": [1] * generated}
    return example(
        "hops", name, n, baseline, group_starts=[1, 4, 9], computed=computed,
        aux_bytes=STATE * (n - computed[-1][-1]), token_ids=[1] * len(computed),
    )  # fmt: skip


VISITS = [
    answered("a", 20, [[20, 10, 4], [20, 13, 9], [20, 13, 9], [20, 14, 9], [20, 14, 9], [20, 15, 10]], 6),
    answered("b", 10, [[10, 6, 3], [10, 9, 5]], 4),  # shorter than the baseline's answer
    answered("c", 10, [[10, 5, 5], [10, 10, 10]], 2),  # all revived: its Aux Cache is empty
]


def slowly(visits: list[Visit], first: int, last: int) -> dict[str, Any]:
    """What the table shows of steps first to last, one token at a time."""
    held, aux, reference, revived, answers = [], 0, 0, [], set()
    for visit in visits:
        n, computed = visit.turns[0].tokens, visit.answers[ARM][0].cost.computed  # type: ignore[union-attr]
        for step in range(first, min(last, len(computed) - 1) + 1):
            answers.add(visit.id)
            waiting = [token for token in range(n) if token >= computed[step][-1]]
            held.append(len(waiting) / n)
            aux += sum(STATE for _ in waiting)
            reference += sum(TOKEN for _ in range(n + step))
            if step:
                revived.append(
                    max(now - before for now, before in zip(computed[step], computed[step - 1], strict=True))
                )
    return {
        "examples": len(answers),
        "pct_held": 100 * sum(held) / len(held),
        "aux_share": 100 * aux / reference,
        "pct_reviving": 100 * sum(one > 0 for one in revived) / len(revived) if revived else math.nan,
        "revived": sum(revived) / len(revived) if revived else math.nan,
    }


@pytest.mark.parametrize(("steps", "first", "last"), [("prefill", 0, 0), ("1", 1, 1), ("2-4", 2, 4), ("5-16", 5, 16)])
def test_aux_cache_beside_a_slow_count(steps: str, first: int, last: int) -> None:
    frame = memory(Results([stored(VISITS)])).frame
    frame = frame[frame["method"] == "lazy"]
    assert frame["steps"].tolist() == ["end", "prefill", "1", "2-4", "5-16"]
    found = line(frame, steps=steps)
    expected = slowly(VISITS, first, last)
    assert {name: found[name] for name in expected} == pytest.approx(expected, nan_ok=True)


def test_aux_cache_by_hand() -> None:
    shown = line(memory(Results([stored(VISITS)])).cells, **{"decoding steps": "1"})
    # 11, 5 and 0 states of 6 bytes; the baseline stores 21, 11 and 11 tokens of 40 bytes
    assert shown["Aux Cache, % of the baseline's KV cache"] == f"{100 * 16 * 6 / (43 * 40):.2f}"
    assert shown["revived a step"] == f"{(5 + 3 + 5) / 3:.1f}"
    assert shown["steps that revive, %"] == "100.0"


def test_settings_without_an_aux_cache_have_no_steps() -> None:
    none = [example("hops", "a", 20, aux_bytes=0, computed=[[20, 10], [20, 10]])]
    runs = [stored(none, settings={"revive": False}), stored([alone(visit) for visit in VISITS])]
    table = memory(Results(runs))
    by_step = table.frame["steps"] != "end"
    assert set(table.frame["label"][by_step]) == {"lazy, schedule=paper"}
    assert set(table.frame["label"]) == {"baseline", "lazy, schedule=paper", "lazy, schedule=paper, revive=false"}
    assert "Aux Cache, % of the baseline's KV cache" not in table.cells  # no baseline was run


def test_memory_by_hand() -> None:
    baseline = {"kv_bytes": 2_000_000, "aux_bytes": 0, "peak_memory_bytes": 10_000_000}
    measured = {"kv_bytes": 1_000_000, "aux_bytes": 500_000, "peak_memory_bytes": 9_000_000}
    records = [
        *(example("hops", row, baseline=baseline, **measured) for row in "ab"),
        *(example("lookup", row, baseline=baseline | {"kv_bytes": 4_000_000}, **measured) for row in "ab"),
    ]
    table = memory(Results([stored(records)]))
    found = line(table.frame, method="lazy", steps="end")
    assert (found["kv_bytes"], found["aux_bytes"], found["cache_bytes"]) == (1e6, 5e5, 1.5e6)
    assert line(table.frame, method="baseline")["cache_bytes"] == 3e6  # the mean of two tasks
    assert (found["cache_ratio"], found["peak_ratio"]) == (0.5, 0.9)
    assert line(table.frame, method="baseline")["cache_ratio"] == 1
    assert list(dict.fromkeys(table.cells["method"])) == ["lazy, schedule=paper", "baseline"]  # by bytes
    cells = line(table.cells, **{"method": "lazy, schedule=paper", "decoding steps": "end"})
    assert list(cells.values())[3:10] == [
        "4", "1.000 ±0.000", "0.500 ±0.000", "1.500 ±0.000", "0.500 ±0.000", "9.0 ±0.0", "0.900",
    ]  # fmt: skip
    visits = [alone(visit) for visit in over(("hops",))]
    cells = line(memory(Results([stored(visits)])).cells, **{"method": "lazy, schedule=paper", "decoding steps": "end"})
    assert {cells[name] for name in ("both / baseline", "peak / baseline", "peak, MB")} == {"-"}


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


def test_methods_at_equal_bytes_by_hand() -> None:
    runs = [
        run("lazy", "1.5x", (700, 100), score=[1.0, 0.5], answer_kl=[0.1, 0.3], kl=[0.5, 0.5], **GOLD[0]),
        run("lazy", "3.0x", (300, 100), score=[0.0, 0.0], answer_kl=[0.9, 0.9], kl=[0.1, 0.1]),
        run("static_pruning", "1.2x", (820, 0), score=[0.5, 0.5], answer_kl=[0.2, 0.3], kl=[0.1, 0.1], **GOLD[1]),
        run("random_drop", "2.0x", (600, 0), score=[0.0, 1.0], answer_kl=[2.0, 2.0]),
    ]
    table = memory(Results(runs))
    ends = table.frame[table.frame["steps"] == "end"]
    assert ends[["method", "cache_ratio"]].to_numpy().tolist() == [
        ["lazy", 0.4], ["random_drop", 0.6], ["lazy", 0.8], ["static_pruning", 0.82], ["baseline", 1],
    ]  # fmt: skip
    assert ends[["lazy", "lead_kl", "lead_score"]][ends["method"].isin(["lazy", "baseline"])].isna().all(None)
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
