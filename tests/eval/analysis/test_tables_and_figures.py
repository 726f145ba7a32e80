import io
import re
from pathlib import Path

import pandas as pd
import pytest

from eval.analysis.table import figures, tables
from eval.store.results import Results
from tests.eval.analysis.made import LONG, SHORT, over, preset, small_trace, stored, swept, with_traces

TABLES, FIGURES = tables(), figures()


def sentences(text: str) -> int:
    return len(re.findall(r"[.](?= |$)", text))


@pytest.mark.parametrize("name", TABLES)
def test_table_without_runs_says_so(name: str) -> None:
    table = TABLES[name](Results([]))
    shown = table.to_markdown()
    shows_what_could_run = name.endswith("_paper") or name == "verdicts"
    assert ("No run for this table." in shown) != shows_what_could_run
    assert table.name == name
    assert len(pd.read_csv(io.StringIO(table.to_csv()))) == len(table.frame) == len(table.cells)
    assert table.to_latex()
    assert sentences(table.caption) <= 2


@pytest.mark.parametrize("name", FIGURES)
def test_figure_has_a_caption_and_no_data_without_runs(name: str) -> None:
    figure = FIGURES[name]
    assert figure.title
    assert 1 <= sentences(figure.caption) <= 2
    assert figure.data(Results([])).empty


@pytest.mark.slow
def test_tables_do_not_depend_on_the_order_of_runs() -> None:
    runs = [
        preset("lazy", over(("hotpotqa", "musique"), score=0.25), model="llama2", paper="llama2"),
        preset("static_pruning", over(("hotpotqa", "musique"), score=0.3), model="llama2", paper="llama2"),
        preset("lazy", over(("hops", "lookup"))),
    ]
    for make in TABLES.values():
        assert make(Results(runs)).to_csv() == make(Results(runs[::-1])).to_csv()


def test_tables_name_random_weights() -> None:
    flops = {"prefill_flops": 50, "baseline": {"prefill_flops": 100}}
    measured = {"kl": 0.1} | flops
    runs = [preset("lazy", over(("hops",), **measured)), swept("lazy", "1.5x", [0.1], [1])]
    for run in runs:
        run.identity["load_format"] = "dummy"
    # no ablation, no column for models
    without = {"revival", "table1_paper", "table2_paper"}
    for name in TABLES.keys() - without:
        assert "tiny (embedded, random weights)" in set(TABLES[name](Results(runs)).cells["model"])


@pytest.mark.parametrize("name", ["figure5", "figure7", "mechanism", "figure6"])
@pytest.mark.parametrize("changed", [{"revive": False}, {"prune_generated": True}])
def test_figures_leave_out_ablations(name: str, changed: dict, tmp_path: Path) -> None:
    """Neither alone nor with more examples than the method itself."""
    method, ablation = [], []
    for layer in (2, 4):
        settings = {"schedule": {str(layer): 0.5}}
        folders = (tmp_path / f"{kind}-{layer}" for kind in ("method", "ablation"))
        method.append(with_traces(stored([SHORT], settings=settings), next(folders), small_trace()))
        more = stored([LONG, SHORT], settings=settings | changed)
        ablation.append(with_traces(more, next(folders), small_trace("b")))
    figure = FIGURES[name]
    assert figure.data(Results(ablation)).empty
    pd.testing.assert_frame_equal(figure.data(Results([*ablation, *method])), figure.data(Results(method)))
