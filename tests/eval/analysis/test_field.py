from typing import Any

import pytest

from eval.analysis.field import data, field, plot
from eval.analysis.run_table import run_table
from eval.store.results import Results
from eval.store.runs import StoredRun
from tests.eval.made import SIX, drawn, line, over, stored, texts
from tests.eval.store.visits import visit

pytestmark = pytest.mark.usefixtures("two_have_an_interval")


def test_field_names_methods_and_their_settings() -> None:
    baseline = {"score": 0.5, "prefill_flops": 450}
    changes: dict[str, Any] = {
        "score": 0.25,
        "scoring_s": 0.05,
        "kv_bytes": 2_000_000,
        "attention_ceiling": 1.6,
    }
    visits = over(SIX, baseline=baseline, decode_step_s=[0.3], prefill_flops=300, **changes)
    table = field(Results([stored(visits, "gemfilter", {"speedup": 2.0})]))
    assert table.cells["method"].tolist() == ["baseline", "GemFilter"]
    # 0.4 s to 0.2 s; both answers have two tokens, after 0.5 s
    assert list(line(table.cells, method="GemFilter").values())[2:] == [
        "speedup=2x", "12", "25.00 ±0.00", "50.0 ±0.0", "2.00 ±0.00", "1.50 ±0.00", "25.0",
        "1.00 ±0.00", "1.00 ±0.00",
        "2.000 ±0.000", "75.0 ±0.0", "1.60",
    ]  # fmt: skip
    baseline_row = line(table.cells, method="baseline")
    assert (baseline_row["ideal"], baseline_row["scoring, %"]) == ("1.00 ±0.00", "-")
    assert set(field(Results([stored([visit()], "fastkv")])).cells["setting"]) == {"-"}


def test_settings_that_no_speedup_gives_are_named() -> None:
    settings = {"uniprefill": {"p": 0.99}, "asl": {"keep": 2048}, "fastkv": {"keep": 0.2}}
    runs = [stored(over(("trec",)), *setting) for setting in settings.items()]
    assert "speedup gives" not in field(Results(runs)).notes  # none was asked for
    runs.append(stored(over(("trec",)), settings={"speedup": 2.0}))
    note = (
        "No speedup gives the settings of {}: the number of computed tokens depends on the prompt"
    )
    for text in (field(Results(runs)).notes, run_table(Results(runs), "").caption):
        assert note.format("ASL and UniPrefill") in text
    assert note.format("UniPrefill") in field(Results([runs[0], runs[-1]])).notes
    assert "speedup gives" not in field(Results(runs[2:])).notes


def point(
    method: str, settings: dict[str, Any], score: float, ttft_s: float, flops: int
) -> StoredRun:
    example = visit(
        1, "trec", {"prefill_flops": 600}, score=score, ttft_s=ttft_s, prefill_flops=flops
    )
    return stored([example], method, settings)


RUNS = [
    point("lazy", {"speedup": 2.0}, 0.9, 0.2, 250),
    point("lazy", {"speedup": 6.0}, 0.6, 0.1, 100),
    point("fastkv", {"keep": 0.2}, 0.8, 0.25, 400),
    point("claa", {"speedup": 2.0}, 1.0, 0.2, 300),
]
POINTS = {  # score, speedup and ideal speedup
    "lazy, speedup=2x": [90, 2.0, 2.4], "lazy, speedup=6x": [60, 4.0, 6.0],
    "fastkv, keep=0.2": [80, 1.6, 1.5],
    "claa, speedup=2x": [100, 2, 2],
}  # fmt: skip


def test_figure_has_every_setting_but_the_baseline() -> None:
    frame: Any = data(Results(RUNS)).set_index("label")
    values = frame[["relative_score", "ttft_speedup", "ideal_ttft_speedup"]]
    found = {label: row.tolist() for label, row in values.iterrows()}
    assert found == {label: pytest.approx(point) for label, point in POINTS.items()}
    assert frame["on_curve"].all()  # FastKV has no other setting
    assert data(Results([stored([visit()], "baseline")])).empty


def test_figure_draws_curves_and_ideals() -> None:
    slow = point("fastkv", {"keep": 0.4}, 0.7, 0.4, 1000)
    picture = drawn(plot, data(Results([*RUNS, slow])))
    scores, ideals, _ = picture.axes
    curves = {tuple(map(tuple, bars.lines[0].get_xydata().round(6))) for bars in scores.containers}
    assert {((2.0, 90.0), (4.0, 60.0)), ((2.0, 100.0),)} <= curves
    points = sorted(
        xy for bars in ideals.containers for xy in map(tuple, bars.lines[0].get_xydata().round(6))
    )
    assert points == [(0.6, 1.0), (1.5, 1.6), (2.0, 2.0), (2.4, 2.0), (6.0, 4.0)]
    low, high = ideals.get_xlim()
    assert all(low < min(point) <= max(point) < high for point in points)
    assert "faint: other settings" in " ".join(texts(picture))
