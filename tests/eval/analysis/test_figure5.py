from typing import Any

import numpy as np
import pandas as pd
import pytest

from eval.analysis.figure5 import _undominated, data, paper_points, plot
from eval.analysis.paper_tables import PUBLISHED
from eval.analysis.table import figures
from eval.store.results import Results
from tests.eval.analysis.made import drawn, example, stored, texts


def runs(**where: Any) -> list:
    """Two tasks; two settings of LazyLLM, and one of random token drop with two seeds."""
    return [
        stored([example("hotpotqa", "a", score=0.5, ttft_s=0.2), example("trec", "a", score=1.0, ttft_s=0.1)],
               settings={"schedule": {"2": 0.3}}, **where),
        stored([example("hotpotqa", "a", score=0.9, ttft_s=0.25), example("trec", "a", score=0.8, ttft_s=0.4)],
               settings={"schedule": {"2": 0.5}}, **where),
        stored([example("hotpotqa", "a", score=0.2, ttft_s=0.1)], "random_drop", {"keep": 0.5}, **where),
        stored([example("hotpotqa", "a", score=0.4, ttft_s=0.3)], "random_drop", {"keep": 0.5}, seed=1, **where),
    ]  # fmt: skip


def test_figure5_by_hand() -> None:
    frame: Any = data(Results(runs()))
    measured = frame[frame["source"] == "measured"].set_index(["task", "label"])
    found = measured[["relative_score", "ttft_speedup", "on_curve", "seeds"]]
    one, other, drop = "lazy, schedule={2: 0.3}", "lazy, schedule={2: 0.5}", "random_drop, keep=0.5"
    expected = {
        ("multi_doc_qa", one): [50, 2.0, True, 1],
        ("multi_doc_qa", other): [90, 1.6, True, 1],
        ("few_shot", one): [100, 4.0, True, 1],
        ("few_shot", other): [80, 1.0, False, 1],  # slower and worse than the first
        ("all", one): [75, 3.0, True, 1],
        ("all", other): [85, 1.3, True, 1],
        # (0.4 + 0.4) / (0.1 + 0.3); of one task only, so in no mean over both
        ("multi_doc_qa", drop): [30, 2.0, True, 2],
    }
    assert set(found.index) == set(expected)
    for key, values in expected.items():
        assert found.loc[key].tolist() == pytest.approx(values), key


def test_figure5_draws_kl_in_panels_without_published_points() -> None:
    frame = data(Results([stored([example("hotpotqa", "a", ttft_s=0.2, kl=0.02)])]))
    assert frame.loc[frame["source"] == "measured", "kl"].tolist() == [0.02, 0.02]
    picture = drawn(plot, frame)
    scales = [axes.get_yscale() for axes in picture.axes if axes.get_title(loc="left") == "multi doc QA"]
    assert scales == ["linear", "log"]
    below = [axes for axes in picture.axes if axes.get_yscale() == "log" and axes.get_title(loc="left")]
    points = [line.get_xydata().tolist() for axes in below for line in axes.lines if len(line.get_xydata()) == 1]
    assert points == [[[2, 0.02]]]  # a mean over one task has no panel
    assert "KL from the baseline's first token, nats" in texts(picture)


def test_paper_points_are_those_of_the_papers_table() -> None:
    cells = pd.read_csv(PUBLISHED / "table1.csv").set_index(["task", "method"])
    methods, tasks = cells.drop("baseline", level="method"), sorted(set(cells.index.get_level_values("task")))
    for model in ("llama2", "xgen"):
        points = paper_points(model, [*tasks, "all"])
        table = points[points["source"] == "paper, Table 1"].set_index(["task", "method"])
        assert len(table) == 7 * 4
        baseline = cells.xs("baseline", level="method")[f"{model}_score"]
        for key, row in methods.iterrows():
            assert table.loc[key, "relative_score"] == pytest.approx(100 * row[f"{model}_score"] / baseline[key[0]])
            assert table.loc[key, "ttft_speedup"] == row[f"{model}_ttft_speedup"]
    llama = paper_points("llama2", ["all", "multi_doc_qa"])
    mean = llama[(llama["task"] == "all") & (llama["method"] == "lazy")].iloc[0]
    assert mean["ttft_speedup"] == pytest.approx((1.36 + 2.34 + 1.46 + 2.19 + 2.89 + 1.94) / 6)
    scores, baselines = 25.59 + 22.31 + 24.75 + 62.81 + 4.98 + 53.30, 25.79 + 22.43 + 24.65 + 62.90 + 4.97 + 55.18
    assert mean["relative_score"] == pytest.approx(100 * scores / baselines)
    claims = llama[llama["source"] == "paper, text"]
    assert claims[["task", "ttft_speedup", "relative_score"]].to_numpy().tolist() == [
        ["multi_doc_qa", 2.34, 99], ["multi_doc_qa", 3.0, 90],
    ]  # fmt: skip
    assert "paper, text" not in set(paper_points("xgen", tasks)["source"])


@pytest.mark.parametrize(("model", "paper", "column"), [("tiny", None, "llama2"), ("xgen", "xgen", "xgen")])
def test_figure5_draws_the_published_points_of_the_model(model: str, paper: str | None, column: str) -> None:
    frame: Any = data(Results(runs(model=model, paper=paper)))
    published = frame[frame["source"] == "paper, Table 1"]
    assert set(published["paper_model"]) == {column}
    assert set(published["task"]) == {"multi_doc_qa", "few_shot", "all"}
    picture = drawn(plot, frame)
    written = " ".join(texts(picture))
    own = {"tiny": "the paper's (of Llama 2 7B,\non LongBench)", "xgen": "the paper's, XGen 7B"}
    assert own[model] in written
    assert ("the paper's claims:\n2.34x at 99 %, 3x at 90 %" in written) == (model == "tiny")
    for text in ("LazyLLM", "random token drop", "static pruning (the paper's only)", "multi doc QA", "mean over tasks",
                 "TTFT speedup over the baseline (times)", "score, % of the baseline's"):  # fmt: skip
        assert text in written
    panel = next(axes for axes in picture.axes if axes.get_title(loc="left") == "multi doc QA")
    hollow = {
        (round(line.get_xdata()[0], 4), round(line.get_ydata()[0], 4))
        for line in panel.lines if line.get_markerfacecolor() == "none"
    }  # fmt: skip
    in_panel = published[published["task"] == "multi_doc_qa"]
    assert hollow == set(zip(in_panel["ttft_speedup"].round(4), in_panel["relative_score"].round(4), strict=True))
    curves = [np.round(bars.lines[0].get_xydata(), 6).tolist() for bars in panel.containers]
    assert curves == [[[1.6, 90], [2, 50]], [[2, 30]]]


def test_figure5_has_panels_for_each_model_and_suite() -> None:
    embedded = stored([example("hops", "a", score=0.5, ttft_s=0.2)])
    frame = data(Results([*runs(), embedded, *runs(model="llama2", paper="llama2")]))
    assert list(dict.fromkeys(zip(frame["model"], frame["suite"], strict=True))) == [
        ("tiny", "longbench"), ("tiny", "embedded"), ("llama2", "longbench"),
    ]  # fmt: skip
    written = texts(drawn(plot, frame))
    assert all(any(text.endswith(name) for text in written) for name in ("tiny, longbench", "llama2, longbench"))
    assert "1 more in the CSV: --where KEY=VALUE chooses the runs to draw" in written


def test_figure5_leaves_out_scores_without_a_share() -> None:
    without = example("hotpotqa", "a", baseline={"score": 0.0})
    assert data(Results([stored([without])])).empty  # no share of nothing
    assert data(Results([stored([example("hotpotqa", "a")], "baseline")])).empty


def test_figure5_joins_settings_given_by_a_speedup() -> None:
    swept = [
        stored([example("trec", "a", score=score, ttft_s=ttft)], settings={"schedule": name})
        for name, score, ttft in (("1.5x", 0.3, 0.2), ("2.0x", 0.4, 0.1), ("table1", 0.9, 0.05))
    ]
    frame: Any = data(Results(swept))
    measured = frame[(frame["source"] == "measured") & (frame["task"] == "few_shot")]
    assert dict(zip(measured["label"], measured["on_curve"], strict=True)) == {
        "lazy, schedule=1.5x": True, "lazy, schedule=2x": True, "lazy, schedule=table1": False,
    }  # fmt: skip


def test_undominated_by_hand() -> None:
    points = [(1.0, 100.0), (2.0, 90.0), (2.0, 95.0), (3.0, 95.0), (4.0, 20.0), (3.5, 10.0), (0.5, 100.0)]
    table = pd.DataFrame(points, columns=["ttft_speedup", "relative_score"])
    assert _undominated(table).tolist() == [True, False, False, True, True, False, False]


def test_figure5_speaks_of_faint_points_only_if_there_are_some() -> None:
    beaten, alone = data(Results(runs())), data(Results(runs()[:1]))
    assert [any("faint" in text for text in texts(drawn(plot, frame))) for frame in (beaten, alone)] == [True, False]


def test_figure5_has_panels_of_the_best_kl_and_figure6_of_each() -> None:
    kls = {"kl": 0.1, "answer_kl": 0.2}
    runs = [stored([example("trec", row, **kls) for row in "ab"], settings={"schedule": {"2": 0.5}})]
    for name, has_first in (("figure5", False), ("figure6", True)):
        one = figures()[name]
        written = texts(drawn(one.plot, one.data(Results(runs))))
        assert "KL over the baseline's answer, nats" in written, name
        assert ("KL from the baseline's first token, nats" in written) == has_first, name
        assert "KL over the gold answer, nats" not in written, name


def test_figure5_shows_the_kl_of_a_task_in_which_the_baseline_scores_nothing() -> None:
    wrong = [example("trec", row, baseline={"score": 0.0}, score=0.0, answer_kl=0.2, kl=0.1) for row in "ab"]
    results = Results([stored(wrong, settings={"schedule": {"2": 0.5}})])
    measured = data(results).query("source == 'measured' and task == 'few_shot'")
    assert measured["answer_kl"].tolist() == [0.2]
    assert measured["relative_score"].isna().all()
    assert measured["on_curve"].all()  # no setting has a better score
    assert "KL over the baseline's answer, nats" in texts(drawn(plot, data(results)))


def test_scores_of_tasks_without_an_interval_are_not_drawn_beside_those_with_one() -> None:
    many = [example("trec", row, score=score, kl=0.1) for row, score in zip("abcdef", (0.1, 0.9) * 3, strict=True)]
    few = [example("lcc", row, score=0.4, kl=0.1) for row in "ab"]
    panels = {}
    for name, visits in {"both": [*many, *few], "few": few}.items():
        figure = drawn(plot, data(Results([stored(visits)])))
        for part in figure.subfigs[0].subfigs:
            assert part.get_supylabel()
            panels[name, part.get_supylabel()[:5]] = [axes.get_title(loc="left") for axes in part.axes]
    assert panels["both", "score"] == ["few shot", "mean over tasks"]
    assert panels["both", "KL fr"] == ["few shot", "code", "mean over tasks"]
    assert panels["few", "score"] == ["code"]  # no task has an interval


def test_a_mean_over_fewer_tasks_is_not_on_the_curve() -> None:
    both = [example(dataset, row, ttft_s=0.2) for dataset in ("trec", "lcc") for row in "ab"]
    runs = [stored(both, settings={"schedule": "2x"}), stored(both[:2], settings={"schedule": "3x"})]
    for name in ("figure5", "field"):
        frame = figures()[name].data(Results(runs))
        means = frame[frame["task"] == "all"] if name == "figure5" else frame
        labels = {"lazy, schedule=2x"}
        assert set(means["label"].dropna()) == labels, name
    shown = data(Results(runs)).query("task == 'few_shot' and source == 'measured'")
    assert set(shown["label"]) == {"lazy, schedule=2x", "lazy, schedule=3x"}  # its own task is drawn


def test_no_figure_joins_ablations() -> None:
    visits = [example("trec", row, ttft_s=0.2) for row in "ab"]
    runs = [stored(visits, settings={"schedule": "2x", **own}) for own in ({}, {"revive": False})]
    for name in ("figure5", "field"):
        assert set(figures()[name].data(Results(runs))["label"].dropna()) == {"lazy, schedule=2x"}, name


def test_figure5_of_a_suite_that_the_baseline_fails_shows_the_kl_alone() -> None:
    """The paper has no points of its task either."""
    wrong = [example("needle", row, score=0.0, kl=0.1, ttft_s=0.2, baseline={"score": 0.0}) for row in "ab"]
    shown = texts(drawn(plot, data(Results([stored(wrong)]))))
    assert "score, % of the baseline's" not in shown
    assert "KL from the baseline's first token, nats" in shown
