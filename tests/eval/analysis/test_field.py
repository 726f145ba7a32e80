from typing import Any

import pytest

from eval.analysis.field import field
from eval.analysis.run_table import run_table
from eval.store.results import Results
from tests.eval.made import SIX, line, over, stored
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
