from __future__ import annotations

from typing import Any

import pytest
from tests.eval.paper.figures.made import example, redrawn, stored, texts

from eval.analysis.figures import FIGURES
from eval.store.results import Results

FIGURE = FIGURES["figure6"]


def single(layer: int, keep: float, scores: tuple[float, float] = (0.5, 1.0), **where: Any):
    settings = {"schedule": {str(layer): keep}, "prune_generated": False, "revive": True}
    records = [
        example("hotpotqa", "a", score=scores[0], ttft_s=0.2), example("trec", "a", score=scores[1], ttft_s=0.1),
    ]  # fmt: skip
    return stored(records, settings=settings, **where)


RUNS = [
    single(4, 0.5, (0.6, 0.8)), single(2, 0.5, (0.2, 0.4)), single(2, 0.1, (0.0, 0.1)), single(4, 0.1, (0.5, 0.5)),
]  # fmt: skip


def test_by_hand() -> None:
    others = [
        stored([example("hotpotqa", "a")]),  # Figure 4's schedule
        stored([example("hotpotqa", "a")], settings={"schedule": {"2": 0.5, "4": 0.5}}),
        stored([example("hotpotqa", "a")], settings={"schedule": {"2": 0.5}, "revive": False}),
        stored([example("hotpotqa", "a")], settings={"schedule": {"2": 0.5}, "prune_generated": True}),
        stored([example("hotpotqa", "a")], "static_pruning", {"layer": 2, "keep": 0.5}),
    ]
    frame = FIGURE.data(Results([*RUNS, *others]))
    columns = ["model", "suite", "layer", "keep", "examples", "score", "relative_score", "ttft_speedup"]
    assert frame[columns].to_numpy().tolist() == [
        ["tiny", "longbench", 2, 0.1, 2, 5, 5, 3], ["tiny", "longbench", 4, 0.1, 2, 50, 50, 3],
        ["tiny", "longbench", 2, 0.5, 2, pytest.approx(30), pytest.approx(30), 3],
        ["tiny", "longbench", 4, 0.5, 2, pytest.approx(70), pytest.approx(70), 3],
    ]  # fmt: skip
    assert FIGURE.data(Results(others)).empty


def test_the_picture() -> None:
    frame = FIGURE.data(Results([*RUNS, single(2, 0.5, model="llama2", paper="llama2")]))
    picture = redrawn(FIGURE, frame)
    assert len(picture.axes) == 2
    axes = next(panel for panel in picture.axes if panel.get_title(loc="left").startswith("tiny"))
    curves = [bars.lines[0].get_xydata().tolist() for bars in axes.containers]
    assert curves[0] == [[2, 5], [4, 50]]
    assert curves[1] == [[2, pytest.approx(30)], [4, pytest.approx(70)]]
    assert len({bars.lines[0].get_marker() for bars in axes.containers}) == 2
    written = texts(picture)
    for text in ("keep 10 %", "keep 50 %", "baseline", "layer after which tokens are pruned, once",
                 "score (0 to 100)", "tiny, longbench: mean over tasks, 2 examples"):  # fmt: skip
        assert text in written


def test_kl_stands_below_the_scores_on_a_log_scale() -> None:
    run = stored([example("hotpotqa", "a", kl=0.02), example("trec", "a", kl=0.04)], settings=single(2, 0.5).settings)
    frame = FIGURE.data(Results([run]))
    assert frame["kl"].tolist() == [pytest.approx(0.03)]
    picture = redrawn(FIGURE, frame)
    scores, divergences = picture.axes
    assert (scores.get_yscale(), divergences.get_yscale()) == ("linear", "log")
    assert divergences.containers[0].lines[0].get_xydata().tolist() == [[2, pytest.approx(0.03)]]
    maps = redrawn(FIGURES["sensitivity"], frame)
    assert [text.get_text() for axes in maps.axes for text in axes.texts] == ["50", "2.00", "0.03"]


def test_sensitivity_shows_each_point_and_where_there_is_none() -> None:
    figure = FIGURES["sensitivity"]
    picture = redrawn(figure, figure.data(Results([*RUNS, single(6, 0.1, (0.9, 0.9))])))
    scores, speedups = ([text.get_text() for text in axes.texts] for axes in picture.axes)
    assert scores == ["5", "50", "90", "30", "70", "no run"]  # row by row, the smallest share first
    assert speedups == ["3.00"] * 5 + ["no run"]
    written = texts(picture)
    for text in ("pruned after layer", "kept share", "10 %", "50 %", "6"):
        assert text in written
    assert figure.data(Results([stored([example("trec", "a")])])).empty
    lone = single(2, 0.5, model="big")  # one cell is no map
    assert set(figure.data(Results([*RUNS, lone]))["model"]) == {"tiny"}
    assert figure.data(Results([lone])).empty
