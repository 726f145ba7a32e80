from typing import Any

import pytest

from eval.analysis.figure6 import data, plot
from eval.store.results import Results
from tests.eval.analysis.made import drawn, example, stored, texts


def single(layer: int, keep: float, scores: tuple[float, float] = (0.5, 1.0), **where: Any):
    visits = [example("hotpotqa", "a", score=scores[0], ttft_s=0.2), example("trec", "a", score=scores[1], ttft_s=0.1)]
    return stored(visits, settings={"schedule": {str(layer): keep}}, **where)


RUNS = [
    single(4, 0.5, (0.6, 0.8)), single(2, 0.5, (0.2, 0.4)), single(2, 0.1, (0.0, 0.1)), single(4, 0.1, (0.5, 0.5)),
]  # fmt: skip


def test_figure6_by_hand() -> None:
    others = [
        stored([example("hotpotqa", "a")]),  # Figure 4's schedule
        stored([example("hotpotqa", "a")], settings={"schedule": {"2": 0.5, "4": 0.5}}),
        stored([example("hotpotqa", "a")], settings={"schedule": {"2": 0.5}, "revive": False}),
        stored([example("hotpotqa", "a")], settings={"schedule": {"2": 0.5}, "prune_generated": True}),
        stored([example("hotpotqa", "a")], "static_pruning", {"layer": 2, "keep": 0.5}),
    ]
    frame = data(Results([*RUNS, *others]))
    columns = ["model", "suite", "layer", "keep", "examples", "score", "relative_score", "ttft_speedup"]
    assert frame[columns].to_numpy().tolist() == [
        ["tiny", "longbench", 2, 0.1, 2, 5, 5, 3], ["tiny", "longbench", 4, 0.1, 2, 50, 50, 3],
        ["tiny", "longbench", 2, 0.5, 2, pytest.approx(30), pytest.approx(30), 3],
        ["tiny", "longbench", 4, 0.5, 2, pytest.approx(70), pytest.approx(70), 3],
    ]  # fmt: skip
    assert data(Results(others)).empty


def test_figure6_draws_a_curve_for_each_share() -> None:
    frame = data(Results([*RUNS, single(2, 0.5, model="llama2", paper="llama2")]))
    picture = drawn(plot, frame)
    assert len(picture.axes) == 2
    axes = next(panel for panel in picture.axes if len(panel.containers) == 2)
    curves = [bars.lines[0].get_xydata().tolist() for bars in axes.containers]
    assert curves[0] == [[2, 5], [4, 50]]
    assert curves[1] == [[2, pytest.approx(30)], [4, pytest.approx(70)]]
    assert len({bars.lines[0].get_marker() for bars in axes.containers}) == 2
    written = texts(picture)
    for text in ("keep 10 %", "keep 50 %", "baseline", "layer after which tokens are pruned, once",
                 "score (0 to 100)", "2 examples"):  # fmt: skip
        assert text in written
    assert any(text.endswith("mean over tasks: tiny, longbench") for text in written)


def test_figure6_draws_kl_on_a_log_scale() -> None:
    run = stored([example("hotpotqa", "a", kl=0.02), example("trec", "a", kl=0.04)], settings={"schedule": {"2": 0.5}})
    frame = data(Results([run]))
    assert frame["kl"].tolist() == [pytest.approx(0.03)]
    picture = drawn(plot, frame)
    scores, divergences = picture.axes
    assert (scores.get_yscale(), divergences.get_yscale()) == ("linear", "log")
    assert divergences.containers[0].lines[0].get_xydata().tolist() == [[2, pytest.approx(0.03)]]
