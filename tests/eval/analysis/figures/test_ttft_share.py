from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.eval.paper.figures.made import example, redrawn, stored, texts

from eval.analysis.figures import FIGURES
from eval.analysis.figures.ttft_share import _answer
from eval.store.results import Results

FIGURE = FIGURES["ttft_share"]


def timed(name: str, prompt: int, ttft: float, tokens: int, baseline: tuple[float, int]) -> Any:
    """Generation times of one second."""
    return example(
        "hotpotqa", name, prompt, ttft_s=ttft, total_s=1.0, token_ids=[1] * tokens,
        baseline={"ttft_s": baseline[0], "total_s": 1.0, "token_ids": [1] * baseline[1]},
    )  # fmt: skip


RECORDS = [
    timed("a", 500, 0.2, 3, (0.6, 4)), timed("b", 530, 0.4, 4, (0.8, 5)), timed("c", 1100, 0.3, 70, (0.5, 70)),
]  # fmt: skip


def test_by_hand() -> None:
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


@pytest.mark.parametrize(("tokens", "name"), [(1, "1-4"), (4, "1-4"), (5, "5-16"), (64, "17-64"), (1025, "1025+")])
def test_answers_are_put_together_by_length(tokens: int, name: str) -> None:
    assert _answer(tokens) == name


@pytest.mark.parametrize(("model", "paper"), [("tiny", None), ("llama2", "llama2"), ("xgen", "xgen")])
def test_the_picture(model: str, paper: str | None) -> None:
    picture = redrawn(FIGURE, FIGURE.data(Results([stored(RECORDS, model=model, paper=paper)])))
    left, right = picture.axes
    assert left.containers[0].lines[0].get_xydata().tolist() == [[500, 60]]
    assert right.containers[0].lines[0].get_xydata().tolist() == [[515, pytest.approx(30)]]
    hollow = [line for line in left.lines if line.get_markerfacecolor() == "none"]
    written = texts(picture)
    if model == "xgen":  # the paper says it of Llama 2 only
        assert not hollow
    else:
        assert [line.get_xydata().tolist() for line in hollow] == [[[3376, 23]]]
        assert "paper, Llama 2 7B:\n68 tokens" in written
    for text in ("1–4 tokens", "65–256 tokens", f"{model}: baseline", f"{model}: lazy, schedule=paper", "prompt tokens",
                 "TTFT, % of the generation time"):  # fmt: skip
        assert text in written


def test_without_a_baseline_there_is_one_panel() -> None:
    frame = FIGURE.data(Results([stored([replace(record, baseline=None) for record in RECORDS])]))
    assert set(frame["label"]) == {"lazy, schedule=paper"}
    assert [axes.axison for axes in redrawn(FIGURE, frame).axes] == [True, False]
