from itertools import combinations
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from eval.analysis.style import (
    MOST,
    around,
    log_scale,
    new_figure,
    panels_of,
    save,
    shown_label,
    styled,
    styles_of,
)
from lazyllm.methods import METHODS
from tests.eval.made import texts

DEUTERANOPIA = [
    [0.367322, 0.860646, -0.227968],
    [0.280085, 0.672501, 0.047413],
    [-0.011820, 0.042940, 0.968881],
]
PROTANOPIA = [
    [0.152286, 1.052583, -0.204868],
    [0.114503, 0.786281, 0.099216],
    [-0.003882, -0.048116, 1.051998],
]


def simulated(colour: str, matrix: list[list[float]]) -> np.ndarray:
    """The colour as a colour-blind reader sees it, in linear RGB (Machado et al. 2009, severity
    1)."""
    part = np.array(to_rgb(colour))
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    return np.clip(np.array(matrix) @ linear, 0, 1)


def test_methods_differ_without_colour_and_for_the_colour_blind() -> None:
    styles = styles_of([*METHODS, "one", "two"])
    assert len({style["marker"] for style in styles.values()}) == len(styles)
    paper = [style for name, style in styles.items() if name not in ("one", "two", "baseline")]
    assert len({str(style["linestyle"]) for style in paper}) == len(paper)
    for matrix in (DEUTERANOPIA, PROTANOPIA):
        seen = [simulated(style["color"], matrix) for style in paper]
        assert min(np.abs(colour - other).max() for colour, other in combinations(seen, 2)) > 0.1


def test_style_of_a_method_depends_on_no_other() -> None:
    assert styles_of(["lazy"])["lazy"] == styles_of(["mine", "baseline", "lazy"])["lazy"]
    mine, other = styles_of(["mine", "other"]).values()
    assert styles_of(["other", "mine"])["mine"] == mine != other
    ordered = ["baseline", "random_drop", "lazy", "mine"]
    assert list(styles_of(ordered[::-1])) == ordered
    for name, kind in METHODS.items():
        look = kind.label, kind.colour, kind.marker
        assert tuple(styles_of([name])[name][key] for key in ("label", "color", "marker")) == look


def test_saved_files_are_equal_and_undated(tmp_path: Path) -> None:
    def drawn(name: str) -> list[bytes]:
        figure = new_figure(2, 2)
        figure.subplots().plot([1, 2], label="a line")
        paths = save(figure, tmp_path / name, ("svg", "pdf", "png"))
        assert [path.name for path in paths] == [f"{name}.svg", f"{name}.pdf", f"{name}.png"]
        return [path.read_bytes() for path in paths]

    first, second = drawn("first"), drawn("second")
    assert first == second
    assert b"<text" not in first[0]  # drawn as paths, which need no fonts
    assert b"dc:date" not in first[0]
    assert b"CreationDate" not in first[1]


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("lazy, schedule=tuned/my_own", "LazyLLM, schedule=tuned/my_own"),
        ("mine, form=$a^$", r"mine, form=\$a^\$"),  # no formula
        (
            "mine, a\n" + 8 * "long " + 9 * "words ",
            "mine, a long long long long long long long long\n"
            "words words words words words words words words…",
        ),
    ],
)
def test_labels_have_the_methods_names_as_shown(label: str, expected: str) -> None:
    assert shown_label(label, label.partition(",")[0]) == expected


@pytest.mark.parametrize(
    ("ends", "expected"), [((0.3, 5), [0.5, 0.7, 1, 1.5, 2, 3, 4]), ((0.88, 1.45), [1, 1.2, 1.4])]
)
def test_short_axis_of_speedups_has_several_ticks(
    ends: tuple[float, float], expected: list[float]
) -> None:
    axes = new_figure(2, 2).subplots()
    axes.set_xlim(ends)
    log_scale(axes, "x")
    low, high = ends
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == pytest.approx(expected)


def test_styled_restores_matplotlibs_settings() -> None:
    before = dict(mpl.rcParams)
    assert styled(lambda: mpl.rcParams["font.size"])() == 9
    assert dict(mpl.rcParams) == before


def test_around_gives_distances_and_nan_without_interval() -> None:
    rows = pd.DataFrame({"x": [5.0, 5.0], "x_low": [4.0, np.nan], "x_high": [7.5, np.nan]})
    assert np.array_equal(around(rows, "x"), [[1, np.nan], [2.5, np.nan]], equal_nan=True)


def test_figures_draw_the_largest_panels_and_say_how_to_choose() -> None:
    frame = pd.DataFrame({"model": list("abbccdddde"), "suite": "s"})
    panels, left_out = panels_of(frame, ["model", "suite"])
    assert [key for key, _ in panels] == [("b", "s"), ("c", "s"), ("d", "s")]
    assert (len(panels), left_out) == (MOST, 2)
    assert "2 more in the CSV: --where KEY=VALUE chooses the runs to draw" in texts(
        new_figure(2, 2, left_out)
    )
    assert not texts(new_figure(2, 2))
