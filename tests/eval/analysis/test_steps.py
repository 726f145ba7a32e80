import pytest

from eval.analysis.steps import steps
from eval.store.results import Results
from tests.eval.analysis.made import example, line, stored


def test_ttft_share_by_hand() -> None:
    records = [
        example("hops", "a", prompt_tokens=512, ttft_s=0.1, total_s=0.4, token_ids=[1] * 4),
        example("hops", "b", prompt_tokens=513, ttft_s=0.3, total_s=0.4, token_ids=[1] * 4),
        example("hops", "c", prompt_tokens=1000, ttft_s=0.1, total_s=0.8, token_ids=[1] * 5),
    ]
    table = steps(Results([stored(records)]))
    found = line(table.frame, method="lazy")
    expected = {
        "TTFT, % of the time": 100 * 0.5 / 1.6, "prompt 1-512": 25, "prompt 513-1024": 100 * 0.4 / 1.2,
        "answer 1-4": 50, "answer 5-16": 12.5,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert [name for name in table.frame if name.startswith(("prompt ", "answer "))] == list(expected)[1:]
    assert line(table.cells, method="baseline")["TTFT, % of the time"] == "50.0"  # 0.4 s of 0.8 s
    assert line(table.cells, method="baseline")["TTFT, steps"] == "4.0"  # of 0.1 s
    assert line(table.cells, method="lazy, schedule=paper") == {
        "model": "tiny (embedded)", "method": "lazy, schedule=paper", "task": "all", "n": "3", "TTFT, steps": "1.7",
        "TTFT, % of the time": "31.2", "prompt 1-512": "25.0", "prompt 513-1024": "33.3", "answer 1-4": "50.0",
        "answer 5-16": "12.5",
    }  # fmt: skip


def test_step_cost_is_recovered_from_the_other_tasks() -> None:
    visits = []
    for number, (dataset, revived, tokens) in enumerate(
        [("trec", 0, 2), ("trec", 8, 4), ("qasper", 2, 3), ("qasper", 6, 6), ("hotpotqa", 4, 5), ("hotpotqa", 1, 9)]
    ):
        total = 0.2 + 0.15 * (tokens - 1) + 0.03 * revived  # 1.5 and 0.3 baseline steps
        own = {"token_ids": [1] * tokens, "total_s": total, "revived_tokens": float(revived)}
        visits.append(example(dataset, str(number), ttft_s=0.2, **own))
    frame = steps(Results([stored(visits, "lazy", {"schedule": "table1"})])).frame
    assert frame["task"].tolist() == [
        "all",
        "all",
        "few_shot",
        "single_doc_qa",
        "multi_doc_qa",
    ]
    frame = frame[frame["task"] != "all"]
    assert list(frame["step_cost"]) == pytest.approx([1.5] * 3)
    assert list(frame["token_cost"]) == pytest.approx([0.3] * 3)
    assert list(frame["predicted"]) == pytest.approx(list(frame["generation_speedup"]))
    (few_shot,) = frame[frame["task"] == "few_shot"].to_dict("records")
    assert few_shot["prefill_token_cost"] == pytest.approx(0.4 / 100 / 0.1)
    assert few_shot["revived_in_prefill"] == pytest.approx(few_shot["token_cost"] / few_shot["prefill_token_cost"])
    assert (few_shot["prefill_saved"], few_shot["revived_a_step"]) == (pytest.approx(2), 8 / 4)
