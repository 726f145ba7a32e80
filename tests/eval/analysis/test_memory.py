import math
from typing import Any

import pytest

from eval.analysis.memory import memory
from eval.store.record import Visit
from eval.store.results import Results
from eval.store.runs import StoredRun
from tests.eval.made import line, over, stored
from tests.eval.store.visits import only, visit

pytestmark = pytest.mark.usefixtures("two_have_an_interval")

STATE, TOKEN = 6, 40  # bytes of a hidden state, and of a token in all layers of the KV cache


def answered(row: str, n: int, computed: list[list[int]], generated: int, **changes: Any) -> Visit:
    """An answer of LazyLLM, with bytes as the engine counts them; the baseline generated as many
    tokens."""
    baseline = {
        "kv_bytes": TOKEN * (n + generated - 1),
        "aux_bytes": 0,
        "token_ids": [1] * generated,
    }
    values: dict[str, Any] = {"group_layers": [3, 5, 4], "token_ids": [1] * len(computed)}
    values |= {
        "computed": computed,
        "aux_bytes": STATE * (n - computed[-1][-1]),
        "prompt_tokens": n,
    }
    return visit(row, "hops", baseline, **values | changes)


VISITS = [
    answered(
        "a", 20, [[20, 10, 4], [20, 13, 9], [20, 13, 9], [20, 14, 9], [20, 14, 9], [20, 15, 10]], 6
    ),
    answered("b", 10, [[10, 6, 3], [10, 9, 5]], 4),  # shorter than the baseline's answer
    answered("c", 10, [[10, 5, 5], [10, 10, 10]], 2),  # all revived: its Aux Cache is empty
]


def slowly(first: int, last: int) -> dict[str, Any]:
    """What the table shows of steps first to last, one token at a time."""
    held, aux, reference, revived, answers = [], 0, 0, [], set()
    for example in VISITS:
        n, computed = example.prompt_tokens, example.answers["lazy"].computed
        for step in range(first, min(last, len(computed) - 1) + 1):
            answers.add(example.id)
            waiting = [token for token in range(n) if token >= computed[step][-1]]
            held.append(len(waiting) / n)
            aux += sum(STATE for _ in waiting)
            reference += sum(TOKEN for _ in range(n + step))
            if step:
                pairs = zip(computed[step], computed[step - 1], strict=True)
                revived.append(max(now - before for now, before in pairs))
    return {
        "examples": len(answers),
        "pct_held": 100 * sum(held) / len(held),
        "aux_share": 100 * aux / reference,
        "pct_reviving": 100 * sum(count > 0 for count in revived) / len(revived)
        if revived
        else math.nan,
        "revived": sum(revived) / len(revived) if revived else math.nan,
    }


def test_aux_cache_step_by_step() -> None:
    table = memory(Results([stored(VISITS)]))
    frame = table.frame[table.frame["method"] == "lazy"]
    ranges = {"prefill": (0, 0), "1": (1, 1), "2-4": (2, 4), "5-16": (5, 16)}
    assert frame["steps"].tolist() == ["end", *ranges]
    for steps, ends in ranges.items():
        found, expected = line(frame, steps=steps), slowly(*ends)
        assert {name: found[name] for name in expected} == pytest.approx(expected, nan_ok=True)
    row = line(table.cells, **{"decoding steps": "1"})
    # 11, 5 and 0 states of 6 bytes; the baseline stores 21, 11 and 11 tokens of 40 bytes
    assert row["Aux Cache, % of the baseline's KV cache"] == f"{100 * 16 * 6 / (43 * 40):.2f}"
    assert row["revived a step"] == f"{(5 + 3 + 5) / 3:.1f}"
    assert row["steps that revive, %"] == "100.0"


def test_settings_without_an_aux_cache_have_no_steps() -> None:
    none = answered("a", 20, [[20, 10, 10]], 2, aux_bytes=0)
    alone = stored([only(example, "lazy") for example in VISITS])
    table = memory(Results([stored([none], settings={"revive": False}), alone]))
    by_step = table.frame["steps"] != "end"
    assert set(table.frame["label"][by_step]) == {"lazy, schedule=paper"}
    named = {"baseline", "lazy, schedule=paper", "lazy, schedule=paper, revive=false"}
    assert set(table.frame["label"]) == named
    assert "Aux Cache, % of the baseline's KV cache" not in table.cells  # no baseline was run


def test_memory_at_the_end() -> None:
    baseline = {"kv_bytes": 2_000_000, "aux_bytes": 0, "peak_memory_bytes": 10_000_000}
    lazy = {"kv_bytes": 1_000_000, "aux_bytes": 500_000, "peak_memory_bytes": 9_000_000}
    table = memory(Results([stored(over(("hops", "lookup"), baseline=baseline, **lazy))]))
    # by bytes
    assert list(dict.fromkeys(table.cells["method"])) == ["lazy, schedule=paper", "baseline"]
    cells = line(table.cells, **{"method": "lazy, schedule=paper", "decoding steps": "end"})
    assert list(cells.values())[3:10] == [
        "4", "1.000 ±0.000", "0.500 ±0.000", "1.500 ±0.000", "0.750 ±0.000", "9.0 ±0.0", "0.900",
    ]  # fmt: skip
    alone = memory(Results([stored(over(("hops",), baseline=None))])).cells
    cells = line(alone, **{"method": "lazy, schedule=paper", "decoding steps": "end"})
    assert {cells[name] for name in ("both / baseline", "peak / baseline", "peak, MB")} == {"-"}


def run(method: str, speedup: float, kv: int, aux: int = 0, **values: list[float]) -> StoredRun:
    """Two examples; values: of each."""
    visits = [
        visit(row, "hops", {"kv_bytes": 1000, "aux_bytes": 0}, kv_bytes=kv, aux_bytes=aux,
              **{name: pair[row] for name, pair in values.items()})
        for row in (0, 1)
    ]  # fmt: skip
    return stored(visits, method, {"speedup": speedup})


def test_methods_at_equal_bytes() -> None:
    runs = [
        run("lazy", 1.5, 700, 100, score=[1.0, 0.5], answer_kl=[0.1, 0.3], kl=[0.5, 0.5],
            gold_log_likelihood=[-0.2, -0.4]),
        run("lazy", 3.0, 300, 100, score=[0.0, 0.0], answer_kl=[0.9, 0.9], kl=[0.1, 0.1]),
        run("static_pruning", 1.2, 820, score=[0.5, 0.5], answer_kl=[0.2, 0.3], kl=[0.1, 0.1],
            gold_log_likelihood=[-0.1, -0.6]),
        run("random_drop", 2.0, 600, score=[0.0, 1.0], answer_kl=[2.0, 2.0]),
    ]  # fmt: skip
    table = memory(Results(runs))
    ends = table.frame[table.frame["steps"] == "end"]
    assert ends[["method", "cache_ratio"]].to_numpy().tolist() == [
        ["lazy", 0.4], ["random_drop", 0.6], ["lazy", 0.8], ["static_pruning", 0.82],
        ["baseline", 1],
    ]  # fmt: skip
    leads = ends[["lazy", "lead_kl", "lead_score"]]
    assert leads[ends["method"].isin(["lazy", "baseline"])].isna().all(axis=None)
    static = line(table.frame, method="static_pruning")
    assert (static["lazy"], static["lead_score"]) == ("speedup=1.5x", 25)
    # the answer's KL decides, not the first token's: 0.25 - 0.2, by example 0.1 and 0
    ends_of_lead = [static[f"lead_kl{end}"] for end in ("", "_low", "_high")]
    assert ends_of_lead == pytest.approx([0.05, 0, 0.1])
    assert static["lead_log_likelihood"] == pytest.approx(0.05)  # -0.3 against -0.35
    drop = line(table.cells, method="random_drop, speedup=2x")  # 0.2 of the baseline's bytes away
    assert (drop["LazyLLM at these bytes"], drop["LazyLLM's lead, nats"]) == ("-", "-")
    assert ("answer's KL" in table.cells, "gold KL" in table.cells) == (True, False)
