from typing import Any

import pytest

from eval.analysis.field import data, field, memory, plot, ttft_share
from eval.analysis.run_table import run_table
from eval.store.results import Results
from tests.eval.analysis.made import drawn, example, line, over, stored, texts
from tests.eval.store.made import alone

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
    named = [stored(visits, "server", {"label": "server two"}), stored(visits, "fastkv", {})]
    assert set(field(Results(named)).cells["setting"]) == {"server two", "-"}
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
    assert line(table.frame, method="baseline")["cache_bytes"] == 3e6  # the mean of two tasks
    assert (found["cache_ratio"], found["peak_ratio"]) == (0.5, 0.9)
    assert line(table.frame, method="baseline")["cache_ratio"] == 1
    assert table.cells["method"].tolist() == ["baseline", "lazy, schedule=paper"]
    cells = line(table.cells, method="lazy, schedule=paper")
    assert list(cells.values())[2:] == [
        "4", "1.000 ±0.000", "0.500 ±0.000", "1.500 ±0.000", "0.500", "9.0 ±0.0", "0.900",
    ]  # fmt: skip
    visits = [alone(visit) for visit in over(("hops",))]
    cells = line(memory(Results([stored(visits)])).cells, method="lazy, schedule=paper")
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
    assert line(table.cells, method="baseline")["TTFT, steps"] == "4.0"  # of 0.1 s
    assert line(table.cells, method="lazy, schedule=paper") == {
        "model": "tiny (embedded)", "method": "lazy, schedule=paper", "TTFT, steps": "1.7", "all": "31.2",
        "prompt 1-512": "25.0", "prompt 513-1024": "33.3", "answer 1-4": "50.0", "answer 5-16": "12.5",
    }  # fmt: skip
    table = ttft_share(Results([stored([example("trec", "a", token_ids=None)])]))  # of a server that does not count
    assert [heading for heading in table.cells if "answer" in heading] == ["answer 1-4"]  # the baseline's
    assert set(table.frame["answer_tokens"]) == {"1-4", "unknown", "all"}


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
