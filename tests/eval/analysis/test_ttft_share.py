from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eval.analysis.ttft_share import FIGURE, ttft_share
from eval.store.results import Results
from tests.eval.analysis.made import drawn, example, line, stored, texts


def test_ttft_share_by_hand() -> None:
    records = [
        example("hops", "a", prompt_tokens=512, ttft_s=0.1, total_s=0.4, token_ids=[1] * 4),
        example("hops", "b", prompt_tokens=513, ttft_s=0.3, total_s=0.4, token_ids=[1] * 4),
        example("hops", "c", prompt_tokens=1000, ttft_s=0.1, total_s=0.8, token_ids=[1] * 5),
    ]
    table = ttft_share(Results([stored(records)]))
    frame = table.frame[table.frame["method"] == "lazy"]
    found = {
        (row["prompt_tokens"], row["answer_tokens"]): (row["generations"], row["share"])
        for row in frame.to_dict("records")
    }
    expected = {
        ("1-512", "1-4"): (1, 25), ("513-1024", "1-4"): (1, 75), ("513-1024", "5-16"): (1, 12.5),
        ("1-512", "all"): (1, 25), ("513-1024", "all"): (2, 100 * 0.4 / 1.2), ("all", "1-4"): (2, 50),
        ("all", "5-16"): (1, 12.5), ("all", "all"): (3, 100 * 0.5 / 1.6),
    }  # fmt: skip
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value)
    assert line(table.cells, method="baseline")["all"] == "50.0"  # 0.4 s of 0.8 s
    assert line(table.cells, method="baseline")["in steps"] == "4.0"  # of 0.1 s
    assert line(table.cells, method="lazy, schedule=paper") == {
        "model": "tiny (embedded)", "method": "lazy, schedule=paper", "in steps": "1.7", "all": "31.2",
        "prompt 1-512": "25.0", "prompt 513-1024": "33.3", "answer 1-4": "50.0", "answer 5-16": "12.5",
    }  # fmt: skip


def timed(name: str, prompt: int, ttft: float, tokens: int, baseline: tuple[float, int]) -> Any:
    """Generation times of one second."""
    return example(
        "hotpotqa", name, prompt, ttft_s=ttft, total_s=1.0, token_ids=[1] * tokens,
        baseline={"ttft_s": baseline[0], "total_s": 1.0, "token_ids": [1] * baseline[1]},
    )  # fmt: skip


RECORDS = [
    timed("a", 500, 0.2, 3, (0.6, 4)), timed("b", 530, 0.4, 4, (0.8, 5)), timed("c", 1100, 0.3, 70, (0.5, 70)),
]  # fmt: skip


def test_ttft_share_figure_by_hand() -> None:
    frame = FIGURE.data(Results([stored(RECORDS), stored(RECORDS[:1], settings={"schedule": {"2": 0.5}})]))
    columns = ["label", "answer", "prompt", "examples", "prompt_tokens", "generated_tokens", "ttft_share"]
    assert frame[columns].to_numpy().tolist() == [
        ["baseline", "1-4", 512, 1, 500, 4, 60],
        ["baseline", "5-16", 512, 1, 530, 5, 80],
        ["baseline", "65-256", 1024, 1, 1100, 70, 50],
        ["lazy, schedule=paper", "1-4", 512, 2, 515, 3.5, pytest.approx(30)],
        ["lazy, schedule=paper", "65-256", 1024, 1, 1100, 70, 30],
    ]
    assert FIGURE.data(Results([stored(RECORDS, "static_pruning")])).empty


@pytest.mark.parametrize(("model", "paper"), [("tiny", None), ("llama2", "llama2"), ("xgen", "xgen")])
def test_ttft_share_figure_draws_the_papers_share_for_its_model_only(model: str, paper: str | None) -> None:
    picture = drawn(FIGURE, FIGURE.data(Results([stored(RECORDS, model=model, paper=paper)])))
    left, right = picture.axes
    assert left.containers[0].lines[0].get_xydata().tolist() == [[500, 60]]
    assert right.containers[0].lines[0].get_xydata().tolist() == [[515, pytest.approx(30)]]
    hollow = [line for line in left.lines if line.get_markerfacecolor() == "none"]
    written = texts(picture)
    if model == "xgen":  # the paper says it of Llama 2 only
        assert not hollow
    else:
        assert [line.get_xydata().tolist() for line in hollow] == [[[3376, 23]]]
        assert "paper, Llama 2 7B:\n68 tokens; the first\ntakes 21 steps" in written
    for text in ("1–4 tokens", "65–256 tokens", f"{model}: baseline", f"{model}: lazy, schedule=paper", "prompt tokens",
                 "TTFT, % of the generation time"):  # fmt: skip
        assert text in written


def test_ttft_share_figure_without_baseline_has_one_panel() -> None:
    frame = FIGURE.data(Results([stored([replace(record, baseline=None) for record in RECORDS])]))
    assert set(frame["label"]) == {"lazy, schedule=paper"}
    assert [axes.axison for axes in drawn(FIGURE, frame).axes] == [True, False]
