from pathlib import Path

import numpy as np
import pytest

from eval.analysis.figure2 import COLUMNS, data, importance_frame, plot
from eval.store.results import Results
from tests.eval.made import drawn, small_trace, stored, texts, with_traces


def test_figure2_by_hand(tmp_path: Path) -> None:
    frame = data(Results([with_traces(stored([]), tmp_path, small_trace())]))
    about = frame[["model", "dataset", "id", "prompt_tokens", "width"]].drop_duplicates()
    assert about.to_numpy().tolist() == [["tiny", "lookup", "a", 3, 1]]
    columns = frame[frame["part"] == "map"]
    assert columns[["layer", "position", "importance"]].to_numpy().tolist() == [
        [1, 0, 0.2], [1, 1, 0.3], [1, 2, 0.5], [2, 0, 0.6], [2, 1, 0.4], [2, 2, 0.0],
    ]  # fmt: skip
    means = frame[frame["part"] == "mean"]
    assert means["position"].tolist() == [0, 1, 2]
    assert means["importance"].tolist() == pytest.approx([0.4, 0.35, 0.25])
    assert means["layer"].isna().all()


def test_figure2_columns_show_the_peaks_of_many_tokens() -> None:
    n = 2 * COLUMNS + 1
    peaked = np.full(n, 0.1 / n)
    peaked[777] = 0.9
    trace = small_trace(tokens=["a"] * n, importance=[peaked.tolist(), (peaked / 2).tolist()])
    frame = importance_frame(trace)
    columns = frame[frame["part"] == "map"]
    assert set(frame["width"]) == {3}
    assert columns.groupby("layer").size().tolist() == [467, 467]  # 1401 tokens in threes
    peaks = columns.loc[columns["importance"] > 0.1, ["layer", "position"]]
    assert peaks.to_numpy().tolist() == [[1, 777], [2, 777]]
    assert (frame["part"] == "mean").sum() == n


def test_figure2_draws_map_and_score_by_token(tmp_path: Path) -> None:
    importance = np.random.default_rng(0).dirichlet(np.full(40, 0.1), size=12)
    trace = small_trace(tokens=["a"] * 40, importance=importance.tolist())
    picture = drawn(plot, data(Results([with_traces(stored([]), tmp_path, trace)])))
    left, right = picture.axes[:2]
    np.testing.assert_allclose(left.images[0].get_array(), importance)
    assert left.images[0].get_extent() == [0.5, 40.5, 12.5, 0.5]  # layer 1 on top, tokens from 1
    means = importance.mean(axis=0)
    for place, count in ((right, 40), (right.child_axes[0], 30)):
        ends = np.array(place.collections[0].get_segments())[:, 1]
        np.testing.assert_allclose(ends, np.stack([np.arange(1, count + 1), means[:count]], 1))
    written = " ".join(texts(picture))
    assert f"{100 * (means < 1 / 40).mean():.0f} % of the tokens get less" in written
    assert f"the top 10 % get {100 * np.sort(means)[-4:].sum():.0f} %" in written
    for text in (
        "layer",
        "prompt token",
        "mean score over the layers",
        "first 30 tokens",
        "tiny, lookup",
    ):
        assert text in written
