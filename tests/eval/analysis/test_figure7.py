import pytest

from eval.analysis.figure7 import data, plot
from eval.store.results import Results
from tests.eval.made import drawn, stored, texts
from tests.eval.store.visits import visit

# 10 prompt tokens and three steps; 20 tokens and one step, whose last two groups happen to agree
COMPUTED = [[10, 5, 2], [10, 7, 4], [10, 8, 6]]
LONG = visit(1, prompt_tokens=10, group_layers=[2, 2, 3], computed=COMPUTED)
SHORT = visit(1, "trec", prompt_tokens=20, group_layers=[2, 5], computed=[[20, 10]])
SHARES = {  # after each step; the short answer stays as it is
    "layers 1–2": [100, 100, 100], "layers 3–4": [50, (70 + 50) / 2, 65],
    "layers 5 and up": [35, 45, 55],
}  # fmt: skip


def test_figure7_by_hand() -> None:
    frame = data(Results([stored([LONG]), stored([SHORT], seed=1)]))
    assert frame[["layers", "step", "generating", "pct_computed"]].to_numpy().tolist() == [
        [name, step, 2 if step == 0 else 1, share]
        for name, shares in SHARES.items()
        for step, share in enumerate(shares)
    ]
    assert (set(frame["examples"]), set(frame["label"])) == ({2}, {"lazy, schedule=paper"})
    assert data(Results([stored([LONG]), stored([LONG, SHORT])]))["examples"].unique().tolist() == [
        2
    ]


def test_figure7_shows_one_setting_for_each_model() -> None:
    low, high = ({"schedule": {"2": keep}} for keep in (0.3, 0.5))
    runs = [
        stored([LONG], settings=low), stored([LONG, SHORT], settings=high),
        stored([SHORT], "static_pruning"),
        stored([LONG, SHORT], settings=high, model="big"), stored([LONG], model="big"),
    ]  # fmt: skip
    frame = data(Results(runs))
    chosen = frame.groupby("model")[["label", "examples"]].first()
    assert chosen.loc["tiny"].tolist() == ["lazy, schedule={2: 0.5}", 2]  # the most run one
    # Figure 4's, whatever else there is
    assert chosen.loc["big"].tolist() == ["lazy, schedule=paper", 1]
    assert data(Results([runs[2]])).empty
    picture = drawn(plot, frame)
    assert len(picture.axes) == 4
    assert any(
        text.endswith("tiny,\nLazyLLM, schedule={2: 0.5}, 2 examples") for text in texts(picture)
    )


def test_figure7_draws_a_curve_for_each_group() -> None:
    picture = drawn(plot, data(Results([stored([LONG, SHORT])])))
    curves, examples = picture.axes
    *groups, baseline = curves.lines
    assert [list(line.get_ydata()) for line in groups] == [
        pytest.approx(shares) for shares in SHARES.values()
    ]
    assert (list(baseline.get_ydata()), baseline.get_label()) == ([100, 100], "baseline")
    assert (
        len(
            {
                (line.get_color(), line.get_marker(), str(line.get_linestyle()))
                for line in curves.lines
            }
        )
        == 4
    )
    assert examples.patches[0].get_data().values.tolist() == [2, 1, 1]
    assert {*SHARES, "still generating", "generation step (0: prefill)"} <= {*texts(picture)}


@pytest.mark.parametrize(("steps", "scale"), [(1, "linear"), (100, "symlog")])
def test_figure7_draws_one_step_and_long_answers(steps: int, scale: str) -> None:
    computed = [[10, 5 + step // 20] for step in range(steps)]
    picture = drawn(plot, data(Results([stored([visit(prompt_tokens=10, computed=computed)])])))
    assert picture.axes[0].get_xscale() == scale
