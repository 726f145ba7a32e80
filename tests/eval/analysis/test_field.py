from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer

from eval.analysis.field import FIGURE, field, memory, plot_comparison, ttft_share
from eval.store.results import Results
from lazyllm.methods import METHODS
from tests.eval.analysis.made import drawn, example, line, over, stored, texts

BASELINE = {"prefill_flops": 600}


def test_field_by_hand() -> None:
    records = [
        example(name, "a", score=0.25, ttft_s=0.2, total_s=0.4, scoring_s=0.05, kv_bytes=2_000_000, prefill_flops=300,
                baseline={"prefill_flops": 450, "score": 0.5})
        for name in ("hotpotqa", "2wikimqa", "musique")
    ]  # fmt: skip
    runs = [stored(records, name, {"keep": "2x"}) for name in ("gemfilter", "oracle")]
    table = field(Results(runs))
    cells = line(table.cells, method="GemFilter")
    assert list(cells.values())[2:] == [
        "keep=2x", "3", "25.00", "50.0", "2.00", "1.50", "25.0", "2.00", "2.000", "75.0",
    ]  # fmt: skip
    marked = line(table.cells, method="oracle (diagnostic)")
    assert [marked[name] for name in ("TTFT speedup", "ideal", "% computed")] == ["(2.00)", "(1.50)", "(75.0)"]
    assert table.cells["method"].tolist() == ["baseline", "GemFilter", "oracle (diagnostic)"]
    assert line(table.cells, method="baseline")["ideal"] == "1.00"
    assert line(field(Results([stored(over(("trec",)), "lazy")])).cells, method="LazyLLM")["ideal"] == "-"


def test_memory_by_hand() -> None:
    baseline = {"kv_bytes": 2_000_000, "aux_bytes": 0, "peak_memory_bytes": 10_000_000}
    measured = {"kv_bytes": 1_000_000, "aux_bytes": 500_000, "peak_memory_bytes": 9_000_000}
    records = [
        *(example("hops", row, baseline=baseline, **measured) for row in "ab"),
        *(example("lookup", row, baseline=baseline | {"kv_bytes": 4_000_000}, **measured) for row in "ab"),
    ]
    table = memory(Results([stored(records)]))
    found = line(table.frame, method="lazy")
    assert (found["kv_bytes"], found["aux_bytes"], found["cache_bytes"]) == (1e6, 5e5, 1.5e6)
    assert found["baseline_cache_bytes"] == 3e6  # the mean of two tasks
    assert (found["cache_ratio"], found["peak_ratio"]) == (0.5, 0.9)
    assert line(table.frame, method="baseline")["cache_ratio"] == 1
    assert table.cells["method"].tolist() == ["baseline", "lazy, schedule=paper"]
    cells = line(table.cells, method="lazy, schedule=paper")
    assert list(cells.values())[2:] == [
        "4", "1.000 ±0.000", "0.500 ±0.000", "1.500 ±0.000", "0.500", "9.0 ±0.0", "0.900",
    ]  # fmt: skip


def test_memory_says_what_was_not_measured() -> None:
    records = [replace(record, baseline=None) for record in over(("hops",))]
    cells = line(memory(Results([stored(records)])).cells, method="lazy, schedule=paper")
    assert (cells["both / baseline"], cells["peak / baseline"], cells["peak, MB"]) == ("unpaired",) * 2 + ("not known",)


def test_ttft_share_by_hand() -> None:
    records = [
        example("hops", "a", prompt_tokens=512, ttft_s=0.1, total_s=0.4, token_ids=[1] * 4),
        example("hops", "b", prompt_tokens=513, ttft_s=0.3, total_s=0.4, token_ids=[1] * 4),
        example("hops", "c", prompt_tokens=1000, ttft_s=0.1, total_s=0.8, token_ids=[1] * 5),
    ]
    table = ttft_share(Results([stored(records)]))
    frame = table.frame[table.frame["method"] == "lazy"]
    found = {
        (row["prompt_tokens"], row["answer_tokens"]): (row["generations"], row["share"])
        for row in frame.to_dict("records")
    }
    expected = {
        ("1-512", "1-4"): (1, 25), ("513-1024", "1-4"): (1, 75), ("513-1024", "5-16"): (1, 12.5),
        ("1-512", "all"): (1, 25), ("513-1024", "all"): (2, 100 * 0.4 / 1.2), ("all", "1-4"): (2, 50),
        ("all", "5-16"): (1, 12.5), ("all", "all"): (3, 100 * 0.5 / 1.6),
    }  # fmt: skip
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value)
    assert line(table.cells, method="baseline")["all"] == "50.0"  # 0.4 s of 0.8 s
    assert line(table.cells, method="baseline")["in steps"] == "4.0"  # of 0.1 s
    assert line(table.cells, method="lazy, schedule=paper") == {
        "model": "tiny (embedded)", "method": "lazy, schedule=paper", "in steps": "1.7", "all": "31.2",
        "prompt 1-512": "25.0", "prompt 513-1024": "33.3", "answer 1-4": "50.0", "answer 5-16": "12.5",
    }  # fmt: skip


def runs() -> list:
    """LazyLLM at two targets, FastKV at another setting, a diagnostic, and an old run without FLOPs."""
    return [
        stored([example("trec", "a", score=0.9, ttft_s=0.2, prefill_flops=250, baseline=BASELINE)],
               settings={"schedule": "2x", "revive": True}),
        stored([example("trec", "a", score=0.6, ttft_s=0.1, prefill_flops=100, baseline=BASELINE)],
               settings={"schedule": "6x", "revive": True}),
        stored([example("trec", "a", score=0.8, ttft_s=0.25, prefill_flops=400, baseline=BASELINE)],
               "fastkv", {"keep": 0.2, "retain": 0.1}),
        stored([example("trec", "a", score=1.0, ttft_s=0.2, prefill_flops=300, baseline=BASELINE)],
               "oracle", {"keep": "2x"}),
        stored([example("trec", "a", score=0.5, ttft_s=0.2)], "random_drop", {"keep": 0.5}),
    ]  # fmt: skip


def test_field_figure_by_hand() -> None:
    frame: Any = FIGURE.data(Results(runs()))
    found = frame.set_index("label")[["relative_score", "ttft_speedup", "ideal_ttft_speedup", "on_curve"]]
    assert found.loc["lazy, schedule=2x"].tolist() == pytest.approx([90, 2.0, 2.4, True])
    assert found.loc["lazy, schedule=6x"].tolist() == pytest.approx([60, 4.0, 6.0, True])
    assert found.loc["fastkv, keep=0.2, retain=0.1"].tolist() == pytest.approx([80, 1.6, 1.5, False])
    assert found.loc["random_drop, keep=0.5"].isna().tolist() == [False, False, True, False]
    assert "oracle, keep=2x (diagnostic)" in found.index
    assert "baseline" not in set(frame["method"])
    assert FIGURE.data(Results([stored([example("trec", "a")], "baseline")])).empty


def test_field_figure_draws_curves_ideals_and_a_hollow_diagnostic() -> None:
    picture = drawn(FIGURE, FIGURE.data(Results(runs())))
    scores, ideals, _ = picture.axes
    curves = {tuple(map(tuple, bars.lines[0].get_xydata().round(6))): bars.lines[0] for bars in scores.containers}
    assert ((2.0, 90.0), (4.0, 60.0)) in curves
    hollow = [points for points, line in curves.items() if line.get_markerfacecolor() == "white"]
    assert hollow == [((2.0, 100.0),)]
    points = sorted(xy for bars in ideals.containers for xy in map(tuple, bars.lines[0].get_xydata().round(6)))
    assert points == [(1.5, 1.6), (2.0, 2.0), (2.4, 2.0), (6.0, 4.0)]
    written = " ".join(texts(picture))
    assert "oracle (diagnostic):\nits price is not in its TTFT" in written
    assert "faint: other settings" in written


def row(task: str, method: str, score: float, speedup: float, half: float | None) -> dict:
    ends = {
        f"{name}_{end}": None if half is None else value + sign * half
        for name, value in (("score", score), ("ttft_speedup", speedup))
        for end, sign in (("low", -1), ("high", 1))
    }
    return {"task": task, "method": method, "score": score, "ttft_speedup": speedup, **ends}


def test_comparison_draws_tasks_and_a_mean_with_intervals() -> None:
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


def test_comparison_gives_a_label_its_methods_style() -> None:
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
