from __future__ import annotations

from typing import Any

import pytest
from tests.eval.paper.figures.made import example, redrawn, stored, texts

from eval.analysis.figures import FIGURES
from eval.store.results import Results

FIGURE = FIGURES["field"]
BASELINE = {"prefill_flops": 600}


def runs() -> list:
    """LazyLLM at two targets, FastKV at another setting, a diagnostic, and an old run without FLOPs."""
    return [
        stored([example("trec", "a", score=0.9, ttft_s=0.2, prefill_flops=250, baseline=BASELINE)],
               settings={"schedule": "2x", "revive": True}),
        stored([example("trec", "a", score=0.6, ttft_s=0.1, prefill_flops=100, baseline=BASELINE)],
               settings={"schedule": "6x", "revive": True}),
        stored([example("trec", "a", score=0.8, ttft_s=0.25, prefill_flops=400, baseline=BASELINE)],
               "fastkv", {"keep": 0.2, "retain": 0.1}),
        stored([example("trec", "a", score=1.0, ttft_s=0.2, prefill_flops=300, baseline=BASELINE)],
               "oracle", {"keep": "2x"}),
        stored([example("trec", "a", score=0.5, ttft_s=0.2)], "random_drop", {"keep": 0.5}),
    ]  # fmt: skip


def test_by_hand() -> None:
    frame: Any = FIGURE.data(Results(runs()))
    found = frame.set_index("label")[["relative_score", "ttft_speedup", "ideal_ttft_speedup", "on_curve"]]
    assert found.loc["lazy, schedule=2x"].tolist() == pytest.approx([90, 2.0, 2.4, True])
    assert found.loc["lazy, schedule=6x"].tolist() == pytest.approx([60, 4.0, 6.0, True])
    assert found.loc["fastkv, keep=0.2, retain=0.1"].tolist() == pytest.approx([80, 1.6, 1.5, False])
    assert found.loc["random_drop, keep=0.5"].isna().tolist() == [False, False, True, False]
    assert "oracle, keep=2x (diagnostic)" in found.index
    assert "baseline" not in set(frame["method"])


def test_curves_ideals_and_the_diagnostic() -> None:
    picture = redrawn(FIGURE, FIGURE.data(Results(runs())))
    scores, ideals, _ = picture.axes
    curves = {tuple(map(tuple, bars.lines[0].get_xydata().round(6))): bars.lines[0] for bars in scores.containers}
    assert ((2.0, 90.0), (4.0, 60.0)) in curves
    hollow = [points for points, line in curves.items() if line.get_markerfacecolor() == "white"]
    assert hollow == [((2.0, 100.0),)]
    points = sorted(xy for bars in ideals.containers for xy in map(tuple, bars.lines[0].get_xydata().round(6)))
    assert points == [(1.5, 1.6), (2.0, 2.0), (2.4, 2.0), (6.0, 4.0)]
    written = " ".join(texts(picture))
    assert "oracle (diagnostic):\nits price is not in its TTFT" in written
    assert "faint: other settings" in written


def test_without_a_baseline_there_is_nothing_to_draw() -> None:
    assert FIGURE.data(Results([stored([example("trec", "a")], "baseline")])).empty
