from __future__ import annotations

import pandas as pd
from matplotlib.container import ErrorbarContainer
from tests.eval.paper.figures.made import texts

from eval.analysis.figures import plot_comparison
from lazyllm.methods import METHODS


def row(task: str, method: str, score: float, speedup: float, half: float | None) -> dict:
    ends = {
        f"{name}_{end}": None if half is None else value + sign * half
        for name, value in (("score", score), ("ttft_speedup", speedup))
        for end, sign in (("low", -1), ("high", 1))
    }
    return {"task": task, "method": method, "score": score, "ttft_speedup": speedup, **ends}


def test_tasks_are_small_and_the_mean_has_intervals() -> None:
    table = pd.DataFrame(
        [row("few_shot", "baseline", 50, 1, None), row("few_shot", "lazy", 40, 2, 0.1), row("code", "lazy", 20, 3, 0.1),
         row("mean over tasks", "baseline", 50, 1, None), row("mean over tasks", "lazy", 30, 2.5, 0.2)]
    )  # fmt: skip
    picture = plot_comparison(table, "tiny, demo")
    axes = picture.axes[0]
    assert [cloud.get_offsets().tolist() for cloud in axes.collections if len(cloud.get_offsets()) and
            type(cloud).__name__ == "PathCollection"] == [[[1, 50]], [[2, 40], [3, 20]]]  # fmt: skip
    means = [container for container in axes.containers if isinstance(container, ErrorbarContainer)]
    assert [(mean.lines[0].get_xdata().tolist(), mean.lines[0].get_ydata().tolist()) for mean in means] == [
        ([1], [50]), ([2.5], [30]),
    ]  # fmt: skip
    horizontal = means[1].lines[2][0].get_segments()[0]
    assert horizontal.round(6).tolist() == [[2.3, 30], [2.7, 30]]
    colours = [mean.lines[0].get_color() for mean in means]
    assert colours == [METHODS["baseline"].colour, METHODS["lazy"].colour]  # as in every other picture
    assert {"baseline", "lazy", "tiny, demo", "TTFT speedup over the paired baseline"} <= set(texts(picture))


def test_a_label_looks_as_its_method_does() -> None:
    """The first label of a method has its style; a second label and an ablation have unique styles."""
    labels = {
        "no revival": {"name": "lazy", "revive": False},
        "gentle": {"name": "lazy"}, "harsh": {"name": "lazy"}, "other": {"name": "static_pruning"},
    }  # fmt: skip
    table = pd.DataFrame([row("mean over tasks", label, 50, 2, 0.1) for label in labels])
    containers = plot_comparison(table, "", labels).axes[0].containers
    means = [container for container in containers if isinstance(container, ErrorbarContainer)]
    looks = {mean.get_label(): (mean.lines[0].get_color(), mean.lines[0].get_marker()) for mean in means}
    for label in ("gentle", "other"):
        kind = METHODS[labels[label]["name"]]
        assert looks[label] == (kind.colour, kind.marker)
    assert len(set(looks.values())) == 4
