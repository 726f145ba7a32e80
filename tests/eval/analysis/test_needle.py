"""The map of needles."""

from typing import Any

from eval.analysis.table import figures
from eval.store.results import Results
from tests.eval.made import stored
from tests.eval.store.visits import visit


def test_map_shows_each_methods_misses() -> None:
    visits = [
        visit(depth, "needle", score=score, groups=["length=256", f"depth={depth}"])
        for depth, score in ((0, 1.0), (50, 0.0), (100, 1.0))
    ]
    figure = figures()["needle"]
    frame: Any = figure.data(Results([stored(visits)]))
    assert list(dict.fromkeys(frame["method"])) == ["baseline", "lazy"]
    rows = frame[frame["method"] == "lazy"].to_dict("records")
    scores = {(row["length"], row["depth"]): row["score"] for row in rows}
    assert scores == {(256, 0): 100, (256, 50): 0, (256, 100): 100}
    panels = [axes for axes in figure.plot(frame).axes if axes.get_visible()]
    assert len(panels) == 3  # two methods and the scale
    assert [text.get_text() for text in panels[0].get_yticklabels()] == ["0", "50", "100"]
    assert panels[0].get_ylim() == (3, 0)  # depth 0 on top
