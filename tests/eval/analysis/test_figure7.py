import pytest

from eval.analysis.figure7 import data, plot
from eval.store.results import Results
from tests.eval.analysis.made import LONG, SHORT, drawn, example, stored, texts


def test_figure7_by_hand() -> None:
    frame = data(Results([stored([LONG]), stored([SHORT], seed=1)]))
    assert frame[["layers", "step", "generating", "pct_computed"]].to_numpy().tolist() == [
        ["layers 1–2", 0, 2, 100], ["layers 1–2", 1, 1, 100], ["layers 1–2", 2, 1, 100],
        ["layers 3–4", 0, 2, 50], ["layers 3–4", 1, 1, 60], ["layers 3–4", 2, 1, 65],  # (80 + 50) / 2: short stays
        ["layers 5 and up", 0, 2, 35], ["layers 5 and up", 1, 1, 45], ["layers 5 and up", 2, 1, 55],
    ]  # fmt: skip
    assert set(frame["examples"]) == {2}
    assert data(Results([stored([LONG]), stored([LONG, SHORT])]))["examples"].unique().tolist() == [2]
    assert set(frame["label"]) == {"lazy, schedule=paper"}
    assert set(frame["group"]) == {1, 2, 3}


def test_figure7_shows_one_setting_for_each_model() -> None:
    one, other = ({"schedule": {"2": keep}} for keep in (0.3, 0.5))
    runs = [
        stored([LONG], settings=one), stored([LONG, SHORT], settings=other), stored([SHORT], "static_pruning"),
        stored([LONG, SHORT], settings=other, model="big"), stored([LONG], model="big"),
    ]  # fmt: skip
    frame = data(Results(runs))
    chosen = frame.groupby("model")[["label", "examples"]].first()
    assert chosen.loc["tiny"].tolist() == ["lazy, schedule={2: 0.5}", 2]  # the most run one
    assert chosen.loc["big"].tolist() == ["lazy, schedule=paper", 1]  # Figure 4's, whatever else there is
    assert data(Results([runs[2]])).empty
    picture = drawn(plot, frame)
    assert len(picture.axes) == 4
    assert any(text.endswith("tiny,\nLazyLLM, schedule={2: 0.5}, 2 examples") for text in texts(picture))


def test_figure7_draws_a_curve_for_each_group() -> None:
    picture = drawn(plot, data(Results([stored([LONG, SHORT])])))
    curves, examples = picture.axes
    assert [list(line.get_ydata()) for line in curves.lines] == [
        pytest.approx([100, 100, 100]), pytest.approx([50, 60, 65]), pytest.approx([35, 45, 55]), [100, 100],
    ]  # fmt: skip
    assert curves.lines[3].get_label() == "baseline"
    assert len({(line.get_color(), line.get_marker(), str(line.get_linestyle())) for line in curves.lines}) == 4
    assert examples.patches[0].get_data().values.tolist() == [2, 1, 1]
    written = texts(picture)
    for text in ("layers 1–2", "layers 3–4", "layers 5 and up", "still generating", "generation step (0: prefill)"):
        assert text in written


def test_figure7_draws_one_step_and_long_answers() -> None:
    drawn(plot, data(Results([stored([SHORT])])))
    computed = [[10, 5 + step // 20] for step in range(100)]
    picture = drawn(plot, data(Results([stored([example("trec", "a", 10, group_starts=[1, 3], computed=computed)])])))
    assert picture.axes[0].get_xscale() == "symlog"
