import json
import math
from typing import Any

import pytest

from eval.analysis.paper_tables import paper_values, table1, table1_paper, table2, table2_paper
from eval.store.results import Results
from eval.store.runs import StoredRun
from tests.eval.made import TABLE1, line, over, stored

pytestmark = pytest.mark.usefixtures("two_have_an_interval")

QA = ("hotpotqa", "2wikimqa", "musique")
LAZY = {"model": "llama2", "task": "multi_doc_qa", "method": "lazy"}


def llama2(
    method: str = "lazy", datasets: tuple[str, ...] = QA, seed: int = 0, **changes: Any
) -> StoredRun:
    return stored(
        over(datasets, **changes), method, TABLE1[method], seed=seed, model="llama2", paper="llama2"
    )


def test_paper_values_are_read_by_key() -> None:
    values = paper_values()
    assert len(values) == 2 * 6 * 5 * 2 + 2 * 6 * 2
    # read off the paper's Tables 1 and 2
    assert values["llama2", "multi_doc_qa", "lazy", "ttft_speedup"] == 2.34
    assert values["xgen", "synthetic", "lazy", "score"] == 5.66
    assert values["llama2", "code", "prompt_compression", "score"] == 17.45
    assert values["xgen", "few_shot", "lazy", "pct_prompt_tokens_computed"] == 65.30
    assert values["llama2", "synthetic", "lazy", "equal_length_speedup"] == 1.79


def test_table1_stands_beside_the_papers_numbers() -> None:
    lazy = llama2(score=0.25, ttft_s=0.1, kl=0.002)
    lazy.identity["arms"]["lazy"]["parameters"] = {"musique": {"schedule": {"2": 0.4}}}
    # not solved for the paper's speedups: no row
    other = stored(over(QA), settings={"schedule": {"2": 0.5}}, model="llama2", paper="llama2")
    table = table1(Results([lazy, other, llama2("static_pruning")]))
    # as in the paper
    assert table.frame["method"].tolist() == ["baseline", "static_pruning", "lazy"]
    found = line(table.frame, **LAZY)
    assert (found["status"], found["examples"], found["datasets"]) == ("measured", 6, 3)
    assert json.loads(found["parameters"]) == {"schedule": {"2": 0.4}}
    cells = line(table.cells, **LAZY)
    assert list(cells.values())[3:] == [
        "6", "25.00 ±0.00", "22.31", "+2.69", "4.00 ±0.00", "2.34", "+1.66", "0.00200 ±0.00000"
    ]  # fmt: skip
    # the baseline has none; the other was not measured
    assert table.cells["KL, nats"].tolist()[:2] == ["-", "-"]
    assert line(table.frame, method="baseline")["paper_score"] == 22.43


def test_part_of_a_task_is_not_compared() -> None:
    table = table1(Results([llama2(datasets=QA[:1], score=0.25)]))
    found = line(table.frame, **LAZY)
    assert (found["status"], found["score"], found["paper_score"]) == ("1 of 3 datasets", 25, 22.31)
    assert math.isnan(found["score_difference"])
    cells = line(table.cells, **LAZY)
    assert (cells["n"], cells["score, Δ"]) == ("2 (1 of 3 datasets)", "-")


def test_other_models_and_suites_have_no_published_number() -> None:
    table = table1(Results([stored(over(("hops",)), settings=TABLE1["lazy"])]))
    assert line(table.frame, method="lazy")["status"] == "measured"
    cells = line(table.cells, model="tiny (embedded)", task="multi_doc_qa", method="lazy")
    assert (cells["score"], cells["score, paper"], cells["score, Δ"]) == ("50.00 ±0.00", "-", "-")
    # the paper's model on another suite is not the paper's experiment either
    assert math.isnan(
        line(table1(Results([llama2(datasets=("hops",))])).frame, method="lazy")["paper_score"]
    )


def test_settings_of_one_method_are_named() -> None:
    settings = {"lazy, speedup=table1": {}, "lazy, speedup=table1, revive=false": {"revive": False}}
    runs = [stored(over(("hops",)), settings=TABLE1["lazy"] | more) for more in settings.values()]
    assert settings.keys() < set(table1(Results(runs)).cells["method"])


def test_table2_has_lazyllm_alone() -> None:
    table = table2(Results([llama2(ttft_s=0.1, decode_step_s=[0.1, 0.1], computed=[[100, 20]])]))
    assert set(table.frame["method"]) == {"lazy"}
    # 0.5 s to 0.3 s, and to 0.2 s for the second token
    assert list(line(table.cells, model="llama2", task="multi_doc_qa").values())[3:] == [
        "6", "60.00 ±0.00", "63.94", "-3.94", "2.50 ±0.00", "1.56", "+0.94", "1.67 ±0.00",
    ]  # fmt: skip


def test_printed_tables_have_the_papers_shape() -> None:
    runs = [llama2(score=0.25, ttft_s=0.1), llama2("static_pruning", ("trec",))]
    first, second = table1_paper(Results(runs)), table2_paper(Results(runs))
    # n of Llama 2, which was run
    assert (first.cells.shape, second.cells.shape) == ((30, 2 + 5), (6, 1 + 5))
    row = line(first.cells, Tasks="Multi-Document QA", Method="LazyLLM")
    assert list(row.values())[2:] == ["6", "25.00 (22.31)", "4.00 (2.34)", "- (20.68)", "- (2.65)"]
    part = line(first.cells, Tasks="Few-shot Learning", Method="Static Token Pruning")
    assert (part["Llama 2 7B: score"], part["Llama 2 7B: n"]) == ("50.00* (56.54)", "2")
    missing = line(first.cells, Tasks="Synthetic", Method="LazyLLM")
    assert (missing["Llama 2 7B: score"], missing["Llama 2 7B: n"]) == ("- (4.98)", "-")
    assert (
        line(second.cells, Tasks="Multi-Document QA")["Llama 2 7B: % tokens computed"]
        == "75.00 (63.94)"
    )
    tex = first.to_latex().splitlines()
    assert (
        r"\multicolumn{2}{c}{} & \multicolumn{3}{c}{Llama 2 7B} & \multicolumn{2}{c}{XGen 7B} \\"
        in tex
    )
    # its task stands above
    assert r" & LazyLLM & 6 & 25.00 (22.31) & 4.00 (2.34) & - (20.68) & - (2.65) \\" in tex


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (table1_paper, ("score", "ttft_speedup")),
        (table2_paper, ("pct_prompt_tokens_computed", "equal_length_speedup")),
    ],
)
def test_printed_tables_have_all_numbers_of_the_paper_beside_a_method_of_another_model(
    make: Any, values: Any
) -> None:
    cells = make(Results([stored(over(("hops",)), settings=TABLE1["lazy"])])).cells
    texts = cells.filter(regex="Llama|XGen").to_numpy().ravel().tolist()
    numbers = [float(text.removeprefix("- (").removesuffix(")")) for text in texts]
    assert sorted(numbers) == sorted(
        number for (*_, value), number in paper_values().items() if value in values
    )
    assert make(
        Results([stored(over(("hops",)), "baseline")])
    ).frame.empty  # a baseline alone is no table


def test_printed_tables_show_other_models_beside_the_papers() -> None:
    runs = [
        stored(over(("hops",)), settings=TABLE1["lazy"], model=model) for model in ("tiny", "mine")
    ]
    runs[0].about["examples"] = {"hops": 4}  # of which two were run
    cells = table1_paper(Results(runs)).cells
    row = line(cells, Tasks="Multi-Document QA", Method="LazyLLM")
    assert {name: row[name] for name in list(row)[2:] if "speedup" not in name} == {
        "Llama 2 7B: score": "- (22.31)", "XGen 7B: score": "- (20.68)",
        "mine (embedded): n": "2", "mine (embedded): score": "50.00*",
        "tiny (embedded): n": "2", "tiny (embedded): score": "50.00*",
    }  # fmt: skip
    assert list(line(cells, Tasks="Synthetic", Method="Baseline").values())[-3:] == ["-"] * 3
