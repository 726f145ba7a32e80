import math
from typing import Any

import pytest

from eval.analysis.aux_cache import aux_cache
from eval.store.results import Results
from eval.store.visit import Visit
from tests.eval.analysis.made import ARM, example, line, stored
from tests.eval.store.made import alone

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
        "answers": len(answers),
        "pct_held": 100 * sum(held) / len(held),
        "aux_share": 100 * aux / reference,
        "pct_reviving": 100 * sum(one > 0 for one in revived) / len(revived) if revived else math.nan,
        "revived": sum(revived) / len(revived) if revived else math.nan,
    }


@pytest.mark.parametrize(("steps", "first", "last"), [("prefill", 0, 0), ("1", 1, 1), ("2-4", 2, 4), ("5-16", 5, 16)])
def test_aux_cache_beside_a_slow_count(steps: str, first: int, last: int) -> None:
    table = aux_cache(Results([stored(VISITS)]))
    assert table.frame["steps"].tolist() == ["prefill", "1", "2-4", "5-16"]
    found = line(table.frame, steps=steps)
    expected = slowly(VISITS, first, last)
    assert {name: found[name] for name in expected} == pytest.approx(expected, nan_ok=True)


def test_aux_cache_by_hand() -> None:
    shown = line(aux_cache(Results([stored(VISITS)])).cells, **{"decoding steps": "1"})
    # 11, 5 and 0 states of 6 bytes; the baseline stores 21, 11 and 11 tokens of 40 bytes
    assert shown["Aux Cache, % of the baseline's KV cache"] == f"{100 * 16 * 6 / (43 * 40):.2f}"
    assert shown["revived a step"] == f"{(5 + 3 + 5) / 3:.1f}"
    assert shown["steps that revive, %"] == "100.0"


def test_settings_without_an_aux_cache_are_left_out() -> None:
    none = [example("hops", "a", 20, aux_bytes=0, computed=[[20, 10], [20, 10]])]
    runs = [stored(none, settings={"revive": False}), stored([alone(visit) for visit in VISITS])]
    table = aux_cache(Results(runs))
    assert set(table.frame["label"]) == {"lazy, schedule=paper"}
    assert set(table.cells["Aux Cache, % of the baseline's KV cache"]) == {"-"}  # no baseline was run
