from typing import Any

import numpy as np
import pandas as pd
import pytest

from eval.analysis.figure5 import data, kl_data, paper_points, plot
from eval.analysis.paper_tables import PUBLISHED
from eval.store.results import Results
from eval.store.runs import StoredRun
from tests.eval.made import drawn, over, stored, texts
from tests.eval.store.visits import visit


def run(points: dict[str, tuple[float, float]], *setting: Any, **about: Any) -> StoredRun:
    """A run from the score and TTFT of an example of each dataset."""
    visits = [visit(1, name, score=score, ttft_s=ttft) for name, (score, ttft) in points.items()]
    return stored(visits, *setting, **about)


def runs(**where: Any) -> list[StoredRun]:
    """Two tasks; two settings of LazyLLM, and one of random token drop with two seeds."""
    low, high = ({"schedule": {"2": keep}} for keep in (0.3, 0.5))
    drop = ("random_drop", {"keep": 0.5})
    return [
        run({"hotpotqa": (0.5, 0.2), "trec": (1.0, 0.1)}, "lazy", low, **where),
        run({"hotpotqa": (0.9, 0.25), "trec": (0.8, 0.4)}, "lazy", high, **where),
        run({"hotpotqa": (0.2, 0.1)}, *drop, **where),
        run({"hotpotqa": (0.4, 0.3)}, *drop, seed=1, **where),
    ]


def test_points_by_hand() -> None:
    frame: Any = data(Results(runs()))
    measured = frame[frame["source"] == "measured"].set_index(["task", "label"])
    found = measured[["relative_score", "ttft_speedup", "seeds"]]
    low, high, drop = "lazy, schedule={2: 0.3}", "lazy, schedule={2: 0.5}", "random_drop, keep=0.5"
    expected = {
        ("multi_doc_qa", low): [50, 2.0, 1],
        ("multi_doc_qa", high): [90, 1.6, 1],
        ("few_shot", low): [100, 4.0, 1],
        ("few_shot", high): [80, 1.0, 1],
        ("all", low): [75, 3.0, 1],
        ("all", high): [85, 1.3, 1],
        # (0.4 + 0.4) / (0.1 + 0.3); of one task only, so in no mean over both
        ("multi_doc_qa", drop): [30, 2.0, 2],
    }
    assert {key: found.loc[key].tolist() for key in found.index} == {
        key: pytest.approx(values) for key, values in expected.items()
    }


def test_paper_points_are_those_of_the_papers_table() -> None:
    cells = pd.read_csv(PUBLISHED / "table1.csv").set_index(["task", "method"])
    methods = cells.drop("baseline", level="method")
    tasks = sorted(set(cells.index.get_level_values("task")))
    for model in ("llama2", "xgen"):
        points = paper_points(model, [*tasks, "all"])
        table = points[points["source"] == "paper, Table 1"].set_index(["task", "method"])
        assert len(table) == 7 * 4
        baseline = cells.xs("baseline", level="method")[f"{model}_score"]
        for key, row in methods.iterrows():
            assert table.loc[key, "relative_score"] == pytest.approx(
                100 * row[f"{model}_score"] / baseline[key[0]]
            )
            assert table.loc[key, "ttft_speedup"] == row[f"{model}_ttft_speedup"]
    llama = paper_points("llama2", ["all", "multi_doc_qa"])
    mean = llama[(llama["task"] == "all") & (llama["method"] == "lazy")].iloc[0]
    assert mean["ttft_speedup"] == pytest.approx((1.36 + 2.34 + 1.46 + 2.19 + 2.89 + 1.94) / 6)
    scores = 25.59 + 22.31 + 24.75 + 62.81 + 4.98 + 53.30
    baselines = 25.79 + 22.43 + 24.65 + 62.90 + 4.97 + 55.18
    assert mean["relative_score"] == pytest.approx(100 * scores / baselines)
    claims = llama[llama["source"] == "paper, text"]
    assert claims[["task", "ttft_speedup", "relative_score"]].to_numpy().tolist() == [
        ["multi_doc_qa", 2.34, 99], ["multi_doc_qa", 3.0, 90],
    ]  # fmt: skip
    assert "paper, text" not in set(paper_points("xgen", tasks)["source"])


@pytest.mark.parametrize(
    ("model", "paper", "legend"),
    [
        ("tiny", None, "the paper's (of Llama 2 7B,\non LongBench)"),
        ("xgen", "xgen", "the paper's, XGen 7B"),
    ],
)
def test_published_points_of_the_model_are_drawn(
    model: str, paper: str | None, legend: str
) -> None:
    frame: Any = data(Results(runs(model=model, paper=paper)))
    published = frame[frame["source"] == "paper, Table 1"]
    assert set(published["paper_model"]) == {paper or "llama2"}
    assert set(published["task"]) == {"multi_doc_qa", "few_shot", "all"}
    picture = drawn(plot, frame)
    written = " ".join(texts(picture))
    assert ("the paper's claims:\n2.34x at 99 %, 3x at 90 %" in written) == (model == "tiny")
    for text in (
        "LazyLLM", "random token drop", "static pruning (the paper's only)", "multi doc QA",
        "mean over tasks", "TTFT speedup over the baseline (times)", "score, % of the baseline's",
        legend,
    ):  # fmt: skip
        assert text in written
    panel = next(axes for axes in picture.axes if axes.get_title(loc="left") == "multi doc QA")
    lines = [line for line in panel.lines if line.get_markerfacecolor() == "none"]
    hollow = [line.get_xydata().round(4).tolist()[0] for line in lines]
    points = published.loc[published["task"] == "multi_doc_qa", ["ttft_speedup", "relative_score"]]
    assert sorted(hollow) == sorted(points.to_numpy().round(4).tolist())
    measured = [bars.lines[0] for bars in panel.containers]
    assert [np.round(line.get_xydata(), 6).tolist() for line in measured] == [
        [[2, 50], [1.6, 90]], [[2, 30]],
    ]  # fmt: skip
    assert {line.get_linestyle() for line in measured} == {"None"}  # no speedup gives them
    assert "faint" not in written


def test_models_and_suites_have_panels_of_their_own() -> None:
    embedded = stored([visit(1, "hops")])
    frame = data(Results([*runs(), embedded, *runs(model="llama2", paper="llama2")]))
    assert list(dict.fromkeys(zip(frame["model"], frame["suite"], strict=True))) == [
        ("tiny", "longbench"), ("tiny", "embedded"), ("llama2", "longbench"),
    ]  # fmt: skip
    written = texts(drawn(plot, frame))
    for name in ("tiny, longbench", "llama2, longbench"):
        assert any(text.endswith(name) for text in written)
    assert "1 more in the CSV: --where KEY=VALUE chooses the runs to draw" in written


def test_settings_given_by_a_speedup_are_joined() -> None:
    points = {2.0: (0.4, 0.1), 1.5: (0.3, 0.2), "table1": (0.9, 0.05)}
    swept = [
        run({"trec": point}, "lazy", {"speedup": speedup}) for speedup, point in points.items()
    ]
    frame = data(Results(swept))
    measured = frame.query("source == 'measured' and task == 'few_shot'")
    assert dict(zip(measured["label"], measured["on_curve"], strict=True)) == {
        "lazy, speedup=1.5x": True, "lazy, speedup=2x": True, "lazy, speedup=table1": False,
    }  # fmt: skip
    picture = drawn(plot, frame)
    (panel,) = (axes for axes in picture.axes if axes.get_title(loc="left") == "few shot")
    (curve,) = (bars.lines[0] for bars in panel.containers)
    assert (curve.get_xydata().tolist(), curve.get_linestyle()) == ([[2, 30], [4, 40]], "-")
    faint = [line.get_xydata().tolist() for line in panel.lines if line.get_alpha() == 0.4]
    assert faint == [[[8, 90]]]
    assert "faint" in " ".join(texts(picture))


def test_the_best_kl_is_drawn_without_published_points() -> None:
    kls = {"kl": 0.1, "answer_kl": 0.02}
    runs = [stored(over(("trec",), **kls), settings={"schedule": {"2": 0.5}})]
    picture = drawn(plot, kl_data(Results(runs)))
    (panel,) = (axes for axes in picture.axes if axes.get_title(loc="left") == "few shot")
    assert panel.get_yscale() == "log"
    points = [line.get_xydata().tolist() for line in panel.lines if len(line.get_xydata()) == 1]
    assert points == [[[2, 0.02]]]
    kl_labels = [text for text in texts(picture) if "KL" in text and "nats" in text]
    assert kl_labels == ["answer's KL, nats: lower is better"]


def test_what_lacks_the_drawn_kl_has_no_panel_and_no_name() -> None:
    runs = [
        stored(over(("trec",), kl=0.1, answer_kl=0.02)),
        stored(over(("lcc",), kl=0.1), "static_pruning", {"keep": 0.5}),
    ]
    picture = drawn(plot, kl_data(Results(runs)))
    written = texts(picture)
    assert {"few shot", "LazyLLM"} <= set(written)
    assert not {"code", "static pruning"} & set(written)


def test_a_baseline_that_scores_nothing_leaves_the_kl_alone() -> None:
    """A share of nothing is no number; the paper has no points of the needle's task either."""
    nothing = {"baseline": {"score": 0.0}, "score": 0.0}
    assert data(Results([stored([visit(**nothing)])])).empty
    assert kl_data(Results([stored([visit(**nothing)])])).empty
    assert data(Results([stored([visit()], "baseline")])).empty
    results = Results([stored(over(("needle",), **nothing, kl=0.1))])
    assert data(results).empty
    frame = kl_data(results)
    assert frame.query("task != 'all'")["kl"].tolist() == [0.1]
    assert "first token's KL, nats: lower is better" in texts(drawn(plot, frame))


def test_scores_of_tasks_without_an_interval_are_not_drawn_beside_those_with_one() -> None:
    many = [visit(row, "trec", score=score, kl=0.1) for row, score in enumerate((0.1, 0.9) * 3)]
    few = over(("lcc",), kl=0.1)

    def titles(visits: list[Any], data_of: Any = data) -> list[str]:
        picture = drawn(plot, data_of(Results([stored(visits)])))
        return [axes.get_title(loc="left") for axes in picture.axes if axes.axison]

    assert titles([*many, *few]) == ["mean over tasks", "few shot"]
    assert titles([*many, *few], kl_data) == ["mean over tasks", "few shot", "code"]
    assert titles(few) == ["code"]  # no task has an interval
