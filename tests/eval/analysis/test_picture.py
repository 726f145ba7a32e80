"""The picture of a run: a point for each arm of its table, named, where the numbers put it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from eval.analysis import picture
from eval.analysis.run_table import run_table
from eval.store.results import Results
from tests.runs import measured, small_config

LABEL = "answer's KL, nats: lower is better"


def drawn(**columns: Any) -> Any:
    (axes,) = picture.draw_arms(pd.DataFrame(columns), LABEL, "tiny, two, lookup").axes
    return axes


def test_each_arm_stands_at_its_numbers_with_its_name_and_without_a_legend() -> None:
    kinds = ["baseline", "lazy", "static_pruning", "random_drop"]
    speedups, kls = [1.0, 1.5, 1.5, 0.5], [0.0, 0.1, 2.0, 2.1]
    axes = drawn(method=["baseline", "a", "b", "c"], kind=kinds, x=speedups, y=kls)
    points = [
        (*line.get_xdata(), *line.get_ydata()) for line in axes.lines if len(line.get_xdata()) == 1
    ]
    assert points == [*zip(speedups, kls, strict=True)]
    texts = {text.xy: text.get_text() for text in axes.texts}
    assert texts == {
        (1.0, 0.0): "baseline: 1.00x, KL 0.000",
        (1.5, 0.1): "a: 1.50x, KL 0.100",
        (1.5, 2.0): "b: 1.50x, KL 2.000",
        (0.5, 2.1): "c: 0.50x, KL 2.100",
    }
    assert axes.get_legend() is None
    assert axes.get_ylabel().startswith(LABEL)
    assert "TTFT speedup" in axes.get_xlabel()


def test_names_of_arms_at_one_place_do_not_overlap() -> None:
    names = [f"arm {number}" for number in range(30)]
    axes = drawn(method=names, kind=["lazy"] * 30, x=[2.0] * 30, y=[0.1] * 30)
    axes.figure.draw_without_rendering()
    boxes = sorted(text.get_window_extent().y0 for text in axes.texts)
    height = axes.texts[0].get_window_extent().height
    assert min(b - a for a, b in pairwise(boxes)) > 0.8 * height


def test_picture_has_the_arms_and_numbers_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = [{"name": "lazy", "schedule": {2: 0.5}}, {"name": "random_drop", "seeds": 2}]
    stored = measured(small_config(tmp_path, arms=arms, fidelity="answer", limit=2))
    frame = run_table(Results([stored]), "two").frame
    given = list[Any]()
    draw = picture.draw_arms
    monkeypatch.setattr(picture, "draw_arms", lambda *of: (given.append(of), draw(*of))[1])
    (file,) = picture.save_picture(stored, frame, "two", tmp_path / "picture")
    assert file.read_bytes().startswith(b"\x89PNG")
    ((rows, label, _),) = given
    whole = frame[frame["kind"] == "all"].set_index("method")
    assert rows["method"].tolist() == whole.index.tolist() == ["baseline", *whole.index[1:]]
    assert label == LABEL
    for row in rows.to_dict("records"):
        expected = whole.loc[row["method"]]
        kl = 0 if row["method"] == "baseline" else expected["answer_kl"]
        assert (row["x"], row["y"]) == (expected["ttft_speedup"], kl)
