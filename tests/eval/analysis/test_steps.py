import pytest

from eval.analysis.steps import steps
from eval.store.results import Results
from tests.eval.made import line, stored
from tests.eval.store.visits import visit


def test_ttft_in_steps_and_its_share_of_the_time() -> None:
    visits = [
        visit(1, "hops", prompt_tokens=512, ttft_s=0.1, decode_step_s=[0.1] * 3, token_ids=[1] * 4),
        visit(2, "hops", prompt_tokens=513, ttft_s=0.3, decode_step_s=[0.1], token_ids=[1] * 4),
        visit(3, "hops", prompt_tokens=1000, ttft_s=0.1, decode_step_s=[0.7], token_ids=[1] * 5),
    ]
    table = steps(Results([stored(visits)]))
    shares = [name for name in table.frame if name.startswith(("prompt ", "answer "))]
    assert shares == ["prompt 1-512", "prompt 513-1024", "answer 1-4", "answer 5-16"]
    assert line(table.cells, method="lazy, schedule=paper") == {
        "model": "tiny (embedded)", "method": "lazy, schedule=paper", "task": "all", "n": "3",
        "TTFT, steps": "1.4",  # the mean of 1, 3 and 1/7
        "TTFT, % of the time": "31.2",  # 0.5 s of 1.6 s
        "prompt 1-512": "25.0", "prompt 513-1024": "33.3",  # 0.1 s of 0.4 s, 0.4 s of 1.2 s
        "answer 1-4": "50.0", "answer 5-16": "12.5",  # 0.4 s of 0.8 s, 0.1 s of 0.8 s
    }  # fmt: skip
    baseline = line(table.cells, method="baseline")
    assert (baseline["TTFT, % of the time"], baseline["TTFT, steps"]) == (
        "80.0",
        "4.0",
    )  # 0.4 s, then 0.1 s


def test_step_cost_is_recovered_from_the_other_tasks() -> None:
    rows = [
        ("trec", 0, 2),
        ("trec", 8, 4),
        ("qasper", 2, 3),
        ("qasper", 6, 6),
        ("hotpotqa", 4, 5),
        ("hotpotqa", 1, 9),
    ]
    visits = [
        visit(
            number, dataset, ttft_s=0.2, token_ids=[1] * tokens, revived_tokens=float(revived),
            # 1.5 and 0.3 of the baseline's steps, of 0.1 s
            decode_step_s=[0.15 + 0.03 * revived / (tokens - 1)] * (tokens - 1),
        )
        for number, (dataset, revived, tokens) in enumerate(rows)
    ]  # fmt: skip
    frame = steps(Results([stored(visits, settings={"speedup": "table1"})])).frame
    assert frame["task"].tolist() == ["all", "all", "few_shot", "single_doc_qa", "multi_doc_qa"]
    frame = frame[frame["task"] != "all"]
    assert list(frame["step_cost"]) == pytest.approx([1.5] * 3)
    assert list(frame["token_cost"]) == pytest.approx([0.3] * 3)
    assert list(frame["predicted"]) == pytest.approx(list(frame["generation_speedup"]))
    few_shot = line(frame, task="few_shot")
    prefill = 0.4 / 100 / 0.1  # the baseline's TTFT by prompt token, in its steps
    found = [
        few_shot[name]
        for name in ("prefill_token_cost", "revived_in_prefill", "prefill_saved", "revived_a_step")
    ]
    assert found == pytest.approx([prefill, 0.3 / prefill, 2, 8 / 4])
