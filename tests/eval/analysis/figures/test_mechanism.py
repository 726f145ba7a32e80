from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import PathPatch
from tests.eval.paper.figures.made import redrawn, small_trace, stored, texts, with_traces

from eval.analysis.figures import FIGURES, mechanism, plot_mechanism
from eval.analysis.figures.mechanism import WINDOW, mechanism_frame
from eval.analysis.token_states import State, token_states
from eval.store.record import Trace
from eval.store.results import Results

FIGURE = FIGURES["mechanism"]


def long_trace() -> Trace:
    """A boundary after layer 2; the second step revives positions 70 to 79 and no others."""
    n, layers, steps = 120, 6, 5
    kept = [5, 70, n - 1]
    selected = [{2: kept}, {2: [*range(70, 80), n]}, *({2: [5, *range(n, n + step)]} for step in range(2, steps))]
    counts = [[n, 3], *([n, 12] for _ in range(steps - 1))]
    importance = [[1 / n] * n] * layers
    return Trace("lookup", "long", [f"w{i}" for i in range(n)], list("vwxyz"), importance, selected, [1, 3], counts)


def test_rows_are_the_states() -> None:
    trace = small_trace()
    frame = mechanism_frame(trace)
    states = token_states(trace)
    assert len(frame) == 2 * (3 + 4 + 5)  # generated tokens appear one by one
    for row in frame.itertuples():
        assert State[row.state.upper()] == states[row.step, row.layer - 1, row.position]
        assert row.group == row.layer  # the boundary lies between the two
        assert row.kind == ("prompt" if row.position < 3 else "generated")
    assert frame.drop_duplicates("position")["text"].tolist() == ["A", " $B$", "C\n", "D", "E"]
    assert frame.drop_duplicates(["step", "layer"])["computed"].tolist() == [3, 1, 3, 2, 3, 2]


def test_the_first_steps_are_shown_and_the_window_where_most_is_revived() -> None:
    frame = mechanism_frame(long_trace())
    assert sorted(set(frame["step"])) == [0, 1, 2, 3]
    assert sorted(set(frame.query("kind == 'generated'")["position"])) == [120, 121, 122]
    shown = sorted(set(frame.query("kind == 'prompt'")["position"]))
    assert len(shown) == WINDOW
    assert set(range(71, 80)) <= set(shown)  # 70 was computed in prefill
    assert mechanism._busiest(np.full((2, 3, WINDOW + 9), State.PRUNED)) == range(WINDOW)


def test_the_picture_shows_every_cell(tmp_path: Path) -> None:
    frame = FIGURE.data(Results([stored([], "static_pruning"), with_traces(stored([]), tmp_path, long_trace())]))
    picture = redrawn(FIGURE, frame)
    assert len(picture.axes) == 4
    for step, axes in enumerate(picture.axes):
        drawn = {
            patch.get_facecolor(): len(patch.get_path().codes) // 5
            for patch in axes.patches if isinstance(patch, PathPatch)
        }  # fmt: skip
        counted = frame[frame["step"] == step]["state"].value_counts()
        assert sorted(drawn.values()) == sorted(counted)
        assert sum(drawn.values()) == 6 * (WINDOW + step)
        assert [label.get_text() for label in axes.get_yticklabels()] == ["layers 1–2", "layers 3–6"]
    written = texts(picture)
    for text in ("Prefill", "Decoding step 1: the newest token is “v”", "prompt tokens computed so far, of 120", "120",
                 "3", "12", "w75", *mechanism._NAMES.values()):  # fmt: skip
        assert text in written


def test_any_token_can_be_written() -> None:
    picture = plot_mechanism(replace(small_trace(), generated=["$x_1$", "\n\t", "F"]))
    written = texts(picture)
    for text in ("A", "$B$", "C↵", "$x_1$", "↵⇥"):
        assert text in written
    assert mechanism._shown(" ") == "␣"
    assert mechanism._shown("abcdefghijklmnop") == "abcdefghijk…"
    assert mechanism._shown(float("nan")) == "␣"  # an empty text of a CSV


def test_states_differ_in_lightness_or_mark() -> None:
    lightness = {state: np.dot(to_rgb(fill), [0.2126, 0.7152, 0.0722]) for state, fill in mechanism._FILL.items()}
    for first, second in combinations(mechanism._NAMES, 2):
        marks = (first in mechanism._MARK) != (second in mechanism._MARK)
        assert marks or abs(lightness[first] - lightness[second]) > 0.2
