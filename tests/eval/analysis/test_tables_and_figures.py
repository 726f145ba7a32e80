import io
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from eval.analysis.table import figures, tables
from eval.store.results import Results
from tests.eval.made import TABLE1, over, small_trace, stored, with_traces
from tests.eval.store.visits import visit

TABLES, FIGURES = tables(), figures()


def sentences(text: str) -> int:
    return len(re.findall(r"[.](?= |$)", text))


@pytest.mark.parametrize("name", TABLES)
def test_table_without_runs_says_so(name: str) -> None:
    table = TABLES[name](Results([]))
    assert "No run for this table." in table.to_markdown()
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
    about = {"model": "llama2", "paper": "llama2"}
    runs = [
        stored(over(("hotpotqa", "musique"), score=0.25), "lazy", TABLE1["lazy"], **about),
        stored(
            over(("hotpotqa", "musique"), score=0.3),
            "static_pruning",
            TABLE1["static_pruning"],
            **about,
        ),
        stored(over(("hops", "lookup"))),
    ]
    for make in TABLES.values():
        assert make(Results(runs)).to_csv() == make(Results(runs[::-1])).to_csv()


def test_tables_name_random_weights() -> None:
    visits = over(("hops",), kl=0.1, prefill_flops=50, baseline={"prefill_flops": 75})
    settings = ({"speedup": "table1"}, {"speedup": 1.5})
    results = Results(
        [stored(visits, "lazy", setting, load_format="dummy") for setting in settings]
    )
    # no ablation, no column for models, not the paper's benchmark
    for name in TABLES.keys() - {"revival", "table1_paper", "table2_paper", "verdicts"}:
        assert "tiny (embedded, random weights)" in set(TABLES[name](results).cells["model"]), name


@pytest.mark.parametrize("name", ["figure5", "figure6", "figure7", "mechanism"])
@pytest.mark.parametrize("changed", [{"revive": False}, {"prune_generated": True}])
def test_figures_leave_out_ablations(name: str, changed: dict[str, Any], tmp_path: Path) -> None:
    """Neither alone nor with more examples than the method itself."""
    method, ablation = [], []
    for layer in (2, 4):
        settings = {"schedule": {str(layer): 0.5}}
        folders = (tmp_path / f"{kind}-{layer}" for kind in ("method", "ablation"))
        method.append(
            with_traces(stored([visit(1)], settings=settings), next(folders), small_trace())
        )
        more = stored([visit(0), visit(1)], settings=settings | changed)
        ablation.append(with_traces(more, next(folders), small_trace(id="b")))
    data = FIGURES[name].data
    assert data(Results(ablation)).empty
    frames = [data(Results(runs)).reset_index(drop=True) for runs in ([*ablation, *method], method)]
    pd.testing.assert_frame_equal(*frames)


def test_a_mean_over_fewer_tasks_is_not_drawn_beside_others() -> None:
    both = over(("trec", "lcc"))
    runs = [stored(both, settings={"speedup": 2.0}), stored(both[:2], settings={"speedup": 3.0})]
    frame: Any = FIGURES["figure5"].data(Results(runs))
    assert set(frame.query("task == 'all'")["label"].dropna()) == {"lazy, speedup=2x"}
    task = frame.query("task == 'few_shot' and source == 'measured'")
    assert set(task["label"]) == {"lazy, speedup=2x", "lazy, speedup=3x"}  # its own task is drawn
