from typing import Any

import pytest

from eval.analysis.field import data, field, plot
from eval.analysis.run_table import run_table
from eval.store.results import Results
from tests.eval.analysis.made import drawn, example, line, over, stored, texts

pytestmark = pytest.mark.usefixtures("two_have_an_interval")

BASELINE = {"prefill_flops": 600}


def test_field_by_hand() -> None:
    records = [
        example(name, "a", score=0.25, ttft_s=0.2, total_s=0.4, scoring_s=0.05, kv_bytes=2_000_000, prefill_flops=300,
                attention_ceiling=1.6, baseline={"prefill_flops": 450, "score": 0.5})
        for name in ("hotpotqa", "2wikimqa", "musique")
    ]  # fmt: skip
    table = field(Results([stored(records, "gemfilter", {"keep": "2x"})]))
    cells = line(table.cells, method="GemFilter")
    assert list(cells.values())[2:] == [
        "keep=2x", "3", "25.00 ±0.00", "50.0 ±0.0", "2.00 ±0.00", "1.50 ±0.00", "25.0", "1.67 ±0.00", "2.00 ±0.00",
        "2.000 ±0.000", "75.0 ±0.0", "1.60",
    ]  # fmt: skip
    assert table.cells["method"].tolist() == ["baseline", "GemFilter"]
    assert line(table.cells, method="baseline")["ideal"] == "1.00 ±0.00"
    visits = [example("trec", "a")]
    named = [stored(visits, "gemfilter", {"label": "again"}), stored(visits, "fastkv", {})]
    assert set(field(Results(named)).cells["setting"]) == {"again", "-"}
    assert line(field(Results([stored(over(("trec",)), "lazy")])).cells, method="LazyLLM")["ideal"] == "-"


def test_settings_that_no_speedup_gives_are_named() -> None:
    runs = [stored(over(("trec",)), name, settings) for name, settings in
            (("uniprefill", {"p": 0.99}), ("asl", {"keep": 2048}), ("fastkv", {"keep": 0.2}))]  # fmt: skip
    assert "speedup gives" not in field(Results(runs)).notes  # none was asked for
    runs.append(stored(over(("trec",)), "lazy", {"schedule": "2x"}))
    said = "No speedup gives the settings of ASL and UniPrefill: the number of computed tokens depends on the prompt"
    for text in (field(Results(runs)).notes, run_table(Results(runs), "").caption):
        assert f"{said}, so the speed is measured, not set." in text
    said = "No speedup gives the settings of UniPrefill: "
    assert said in field(Results([runs[0], runs[-1]])).notes
    assert "speedup gives" not in field(Results(runs[2:])).notes


def test_a_speedup_asked_of_a_method_that_has_none_is_shown_as_its_numbers() -> None:
    def setting(method: str, **solved: float) -> str:
        numbers = {name: {"name": method, "p": p} for name, p in solved.items()}
        run = stored([example(name, "a") for name in solved], method, {"p": "1.5x"}, solved=numbers)
        return line(field(Results([run])).cells, method="UniPrefill")["setting"]

    assert setting("uniprefill", trec=0.44, hotpotqa=0.44) == "p=0.44"
    assert setting("uniprefill", trec=0.44, hotpotqa=0.4) == "p=[0.44, 0.4]"
    lazy = stored(over(("trec",)), "lazy", {"schedule": "1.5x"}, solved={"trec": {"schedule": {"2": 0.3}}})
    assert line(field(Results([lazy])).cells, method="LazyLLM")["setting"] == "schedule=1.5x"  # it reaches that


def runs() -> list:
    """LazyLLM at two targets, FastKV at another setting, CLAA at a target, and an old run without FLOPs."""
    return [
        stored([example("trec", "a", score=0.9, ttft_s=0.2, prefill_flops=250, baseline=BASELINE)],
               settings={"schedule": "2x", "revive": True}),
        stored([example("trec", "a", score=0.6, ttft_s=0.1, prefill_flops=100, baseline=BASELINE)],
               settings={"schedule": "6x", "revive": True}),
        stored([example("trec", "a", score=0.8, ttft_s=0.25, prefill_flops=400, baseline=BASELINE)],
               "fastkv", {"keep": 0.2, "retain": 0.1}),
        stored([example("trec", "a", score=1.0, ttft_s=0.2, prefill_flops=300, baseline=BASELINE)],
               "claa", {"keep": "2x"}),
        stored([example("trec", "a", score=0.5, ttft_s=0.2)], "random_drop", {"keep": 0.5}),
    ]  # fmt: skip


def test_field_figure_by_hand() -> None:
    frame: Any = data(Results(runs()))
    found = frame.set_index("label")[["relative_score", "ttft_speedup", "ideal_ttft_speedup", "on_curve"]]
    assert found.loc["lazy, schedule=2x"].tolist() == pytest.approx([90, 2.0, 2.4, True])
    assert found.loc["lazy, schedule=6x"].tolist() == pytest.approx([60, 4.0, 6.0, True])
    assert found.loc["fastkv, keep=0.2, retain=0.1"].tolist() == pytest.approx([80, 1.6, 1.5, True])  # its only setting
    assert found.loc["random_drop, keep=0.5"].isna().tolist() == [False, False, True, False]
    assert "claa, keep=2x" in found.index
    assert "baseline" not in set(frame["method"])
    assert data(Results([stored([example("trec", "a")], "baseline")])).empty


def test_field_figure_draws_curves_and_ideals() -> None:
    slow = example("trec", "a", score=0.7, ttft_s=0.4, prefill_flops=1000, baseline=BASELINE)
    other = stored([slow], "fastkv", {"keep": 0.4, "retain": 0.1})
    picture = drawn(plot, data(Results([*runs(), other])))
    scores, ideals, _ = picture.axes
    curves = {tuple(map(tuple, bars.lines[0].get_xydata().round(6))) for bars in scores.containers}
    assert {((2.0, 90.0), (4.0, 60.0)), ((2.0, 100.0),)} <= curves
    points = sorted(xy for bars in ideals.containers for xy in map(tuple, bars.lines[0].get_xydata().round(6)))
    assert points == [(0.6, 1.0), (1.5, 1.6), (2.0, 2.0), (2.4, 2.0), (6.0, 4.0)]
    low, high = ideals.get_xlim()
    assert all(low < min(point) <= max(point) < high for point in points)
    assert "faint: other settings" in " ".join(texts(picture))
