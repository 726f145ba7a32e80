import json
import math
from typing import Any

import pytest

from eval.analysis.paper_tables import paper_values, table1, table1_paper, table2, table2_paper
from eval.store.results import Results
from eval.store.runs import StoredRun
from eval.store.visit import Visit
from tests.eval.analysis.made import ARM, PRESETS, line, over, preset, stored

pytestmark = pytest.mark.usefixtures("two_have_an_interval")

MULTI_DOC_QA = ("hotpotqa", "2wikimqa", "musique")
OTHER = {"schedule": {"2": 0.5}}


def llama2(method: str, records: list[Visit], **about: Any) -> StoredRun:
    return preset(method, records, **{"model": "llama2", "paper": "llama2"} | about)


def test_paper_values_are_read_by_key() -> None:
    values = paper_values()
    assert len(values) == 2 * 6 * 5 * 2 + 2 * 6 * 2
    # read off the paper's Tables 1 and 2
    assert values["llama2", "multi_doc_qa", "lazy", "ttft_speedup"] == 2.34
    assert values["xgen", "synthetic", "lazy", "score"] == 5.66
    assert values["llama2", "code", "prompt_compression", "score"] == 17.45
    assert values["xgen", "few_shot", "lazy", "pct_prompt_tokens_computed"] == 65.30
    assert values["llama2", "synthetic", "lazy", "equal_length_speedup"] == 1.79


def test_table1_by_hand() -> None:
    lazy = llama2("lazy", over(MULTI_DOC_QA, score=0.25, ttft_s=0.1, kl=0.002))
    lazy.identity["arms"][ARM]["parameters"] = {"musique": {"name": "lazy", "schedule": {"2": 0.4}, "revive": True}}
    other = stored(over(MULTI_DOC_QA), "lazy", OTHER, model="llama2", paper="llama2")  # not the preset: no row
    table = table1(Results([lazy, other, llama2("static_pruning", over(MULTI_DOC_QA))]))
    assert table.frame["method"].tolist() == ["baseline", "static_pruning", "lazy"]  # as in the paper
    found = line(table.frame, model="llama2", task="multi_doc_qa", method="lazy")
    assert (found["status"], found["examples"], found["datasets"]) == ("measured", 6, 3)
    assert json.loads(found["parameters"]) == {"schedule": {"2": 0.4}, "revive": True}
    assert (found["score"], found["paper_score"]) == (25, 22.31)
    assert found["score_difference"] == pytest.approx(2.69)
    assert found["ttft_speedup"] == pytest.approx(4)  # 0.4 s to 0.1 s
    assert found["ttft_speedup_difference"] == pytest.approx(4 - 2.34)
    cells = line(table.cells, model="llama2", task="multi_doc_qa", method="lazy")
    assert list(cells.values())[3:] == [
        "6", "25.00 ±0.00", "22.31", "+2.69", "4.00 ±0.00", "2.34", "+1.66", "0.00200 ±0.00000"
    ]  # fmt: skip
    assert table.cells["KL, nats"].tolist()[:2] == ["-", "-"]  # the baseline has none; the other was not measured
    assert "paper_kl" not in table.frame
    baseline = line(table.frame, model="llama2", task="multi_doc_qa", method="baseline")
    assert (baseline["score"], baseline["ttft_speedup"], baseline["paper_score"]) == (100, 1, 22.43)


def test_table1_does_not_compare_part_of_a_task() -> None:
    table = table1(Results([llama2("lazy", over(("hotpotqa",), score=0.25))]))
    found = line(table.frame, model="llama2", task="multi_doc_qa", method="lazy")
    assert (found["status"], found["score"], found["paper_score"]) == ("1 of 3 datasets", 25, 22.31)
    assert math.isnan(found["score_difference"])
    cells = line(table.cells, model="llama2", task="multi_doc_qa", method="lazy")
    assert (cells["n"], cells["score, Δ"]) == ("2 (1 of 3 datasets)", "-")


def test_table1_averages_seeds_and_keeps_their_deviation() -> None:
    runs = [llama2("random_drop", over(MULTI_DOC_QA, score=score), seed=seed) for seed, score in enumerate((0.1, 0.4))]
    found = line(table1(Results(runs)).frame, model="llama2", task="multi_doc_qa", method="random_drop")
    assert (found["seeds"], found["examples"], found["score"]) == (2, 6, 25)
    assert found["score_seed_std"] == pytest.approx(math.sqrt(2 * 15**2))  # of 10 and 40


def test_table1_has_no_published_number_of_other_models() -> None:
    table = table1(Results([preset("lazy", over(("hops",)))]))
    found = line(table.frame, model="tiny", task="multi_doc_qa", method="lazy")
    assert (found["suite"], found["status"], found["score"]) == ("embedded", "measured", 50)
    cells = line(table.cells, model="tiny (embedded)", task="multi_doc_qa", method="lazy")
    assert (cells["score"], cells["score, paper"], cells["score, Δ"]) == ("50.00 ±0.00", "-", "-")
    # the paper's model on another suite is not the paper's experiment either
    embedded = line(table1(Results([llama2("lazy", over(("hops",)))])).frame, method="lazy")
    assert math.isnan(embedded["paper_score"])


def test_table1_names_settings_of_one_method() -> None:
    ablation = PRESETS["lazy"] | {"revive": False}
    runs = [preset("lazy", over(("hops",))), stored(over(("hops",), score=0.2), "lazy", ablation)]
    table = table1(Results(runs))
    rows = table.frame[table.frame["method"] == "lazy"]
    assert dict(zip(rows["label"], rows["score"], strict=True)) == {
        "lazy, schedule=table1": 50,
        "lazy, schedule=table1, revive=false": 20,
    }
    assert "lazy, schedule=table1, revive=false" in set(table.cells["method"])


def test_table2_by_hand() -> None:
    table = table2(
        Results(
            [
                llama2(
                    "lazy",
                    over(MULTI_DOC_QA, ttft_s=0.1, decode_step_s=[0.15], total_s=0.2, pct_prompt_tokens_computed=60.0),
                )
            ]
        )
    )
    assert set(table.frame["method"]) == {"lazy"}
    found = line(table.frame, model="llama2", task="multi_doc_qa")
    assert (found["pct_prompt_tokens_computed"], found["paper_pct_prompt_tokens_computed"]) == (60, 63.94)
    assert found["pct_prompt_tokens_computed_difference"] == pytest.approx(-3.94)
    assert found["generation_speedup"] == pytest.approx(4)  # 0.8 s to 0.2 s
    assert found["equal_length_speedup_difference"] == pytest.approx(0.5 / 0.25 - 1.56)  # to the second token


def test_printed_tables_have_the_papers_shape() -> None:
    runs = [llama2("lazy", over(MULTI_DOC_QA, score=0.25, ttft_s=0.1)), llama2("static_pruning", over(("trec",)))]
    first, second = table1_paper(Results(runs)), table2_paper(Results(runs))
    assert (first.cells.shape, second.cells.shape) == ((30, 2 + 5), (6, 1 + 5))  # n of Llama 2, which was run
    row = line(first.cells, Tasks="Multi-Document QA", Method="LazyLLM")
    assert list(row.values())[2:] == ["6", "25.00 (22.31)", "4.00 (2.34)", "- (20.68)", "- (2.65)"]
    part = line(first.cells, Tasks="Few-shot Learning", Method="Static Token Pruning")
    assert (part["Llama 2 7B: score"], part["Llama 2 7B: n"]) == ("50.00* (56.54)", "2")
    missing = line(first.cells, Tasks="Synthetic", Method="LazyLLM")
    assert (missing["Llama 2 7B: score"], missing["Llama 2 7B: n"]) == ("- (4.98)", "-")
    assert line(second.cells, Tasks="Multi-Document QA")["Llama 2 7B: % tokens computed"] == "75.00 (63.94)"
    tex = first.to_latex().splitlines()
    assert r"\multicolumn{2}{c}{} & \multicolumn{3}{c}{Llama 2 7B} & \multicolumn{2}{c}{XGen 7B} \\" in tex
    assert r" & LazyLLM & 6 & 25.00 (22.31) & 4.00 (2.34) & - (20.68) & - (2.65) \\" in tex  # its task stands above


def test_printed_tables_have_the_papers_numbers_without_any_run_of_its_models() -> None:
    for table in (table1_paper(Results([])), table2_paper(Results([]))):
        texts = table.cells.drop(columns=["Tasks", "Method"], errors="ignore").to_numpy().ravel().tolist()
        numbers = [float(text.removeprefix("- (").removesuffix(")")) for text in texts]
        assert len(numbers) == len(table.cells) * 4
        assert set(numbers) <= set(paper_values().values())


def test_printed_tables_show_other_models_beside_the_papers() -> None:
    runs = [preset("lazy", over(("hops",))), preset("lazy", over(("hops",), score=0.2), model="mine")]
    runs[0].about["examples"] = {"hops": 4}  # of which two were run
    cells = table1_paper(Results(runs)).cells
    row = line(cells, Tasks="Multi-Document QA", Method="LazyLLM")
    assert {name: row[name] for name in list(row)[2:] if "speedup" not in name} == {
        "Llama 2 7B: score": "- (22.31)", "XGen 7B: score": "- (20.68)",
        "mine (embedded): n": "2", "mine (embedded): score": "20.00*",
        "tiny (embedded): n": "2", "tiny (embedded): score": "50.00*",
    }  # fmt: skip
    assert list(line(cells, Tasks="Synthetic", Method="Baseline").values())[-3:] == ["-"] * 3
