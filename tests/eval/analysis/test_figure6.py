from typing import Any

import pytest

from eval.analysis.figure6 import data, plot
from eval.store.results import Results
from eval.store.runs import StoredRun
from tests.eval.made import drawn, stored, texts
from tests.eval.store.visits import visit


def single(
    layer: int, keep: float, scores: tuple[float, float] = (0.5, 1.0), **changes: Any
) -> StoredRun:
    visits = [
        visit(1, name, score=score, **changes)
        for name, score in zip(("qasper", "trec"), scores, strict=True)
    ]
    return stored(visits, settings={"schedule": {str(layer): keep}})


RUNS = [
    single(4, 0.5, (0.6, 0.8)), single(2, 0.5, (0.2, 0.4)), single(2, 0.1, (0.0, 0.1)),
    single(4, 0.1, (0.5, 0.5)),
]  # fmt: skip
POINTS = [[2, 0.1, 5], [4, 0.1, 50], [2, 0.5, 30], [4, 0.5, 70]]  # layer, keep, score


def test_figure6_has_the_settings_of_one_layer() -> None:
    others = [
        stored([visit()]),  # Figure 4's schedule
        stored([visit()], settings={"schedule": {"2": 0.5, "4": 0.5}}),
        stored([visit()], "static_pruning", {"layer": 2, "keep": 0.5}),
    ]
    frame = data(Results([*RUNS, *others]))
    assert frame[["layer", "keep", "score"]].to_numpy().tolist() == [
        pytest.approx(point) for point in POINTS
    ]
    assert data(Results(others)).empty


def test_figure6_draws_a_curve_for_each_share() -> None:
    picture = drawn(plot, data(Results(RUNS)))
    (axes,) = picture.axes
    curves = [bars.lines[0].get_xydata().tolist() for bars in axes.containers]
    assert curves == [
        [pytest.approx([layer, score]) for layer, _, score in part]
        for part in (POINTS[:2], POINTS[2:])
    ]
    assert len({bars.lines[0].get_marker() for bars in axes.containers}) == 2
    written = texts(picture)
    for text in ("keep 10 %", "keep 50 %", "baseline", "layer after which tokens are pruned, once",
                 "score (0 to 100)", "2 examples"):  # fmt: skip
        assert text in written
    assert any(text.endswith("mean over tasks: tiny, longbench") for text in written)


def test_figure6_draws_every_kl_that_was_measured_on_a_log_scale() -> None:
    run = single(2, 0.5, kl=0.02, answer_kl=0.2)
    picture = drawn(plot, data(Results([run])))
    assert [axes.get_yscale() for axes in picture.axes] == ["linear", "log", "log"]
    points = [axes.containers[0].lines[0].get_xydata().tolist() for axes in picture.axes[1:]]
    assert points == [[[2, 0.2]], [[2, 0.02]]]
    assert {"answer's KL, nats: lower is better", "first token's KL, nats: lower is better"} <= {
        *texts(picture)
    }
