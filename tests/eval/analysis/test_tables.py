from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from tests.eval.paper.figures.made import example, stored

from eval.analysis.tables import (
    TABLES,
    claims,
    effective_keep,
    field,
    memory,
    ranking,
    sensitivity,
    table1,
    table2,
    ttft_share,
)  # fmt: skip
from eval.analysis.tables.beside_paper import paper_values
from eval.store.record import Record
from eval.store.results import Results
from eval.store.runs import StoredRun

PRESETS: dict[str, dict[str, Any]] = {
    "lazy": {"schedule": "table1", "prune_generated": False, "revive": True},
    "random_drop": {"keep": "table1"},
    "static_pruning": {"layer": 2, "keep": "table1"},
}
MULTI_DOC_QA = ("hotpotqa", "2wikimqa", "musique")


def preset(method: str, records: list[Record], **about: Any) -> StoredRun:
    return stored(records, method, PRESETS[method], **about)


def llama2(method: str, records: list[Record], **about: Any) -> StoredRun:
    return preset(method, records, model="llama2", paper="llama2", **about)


def over(names: tuple[str, ...], **method: Any) -> list[Record]:
    return [example(name, row, **method) for name in names for row in "ab"]


def line(frame: pd.DataFrame, **key: Any) -> dict[str, Any]:
    found = frame
    for name, value in key.items():
        found = found[found[name] == value]
    assert len(found) == 1
    return found.iloc[0].to_dict()  # type: ignore[union-attr]


def test_the_papers_numbers_are_read_by_key() -> None:
    values = paper_values()
    assert len(values) == 2 * 6 * 5 * 2 + 2 * 6 * 2
    # read off the paper's Tables 1 and 2
    assert values["llama2", "multi_doc_qa", "lazy", "ttft_speedup"] == 2.34
    assert values["xgen", "synthetic", "lazy", "score"] == 5.66
    assert values["llama2", "code", "prompt_compression", "score"] == 17.45
    assert values["xgen", "few_shot", "lazy", "pct_prompt_tokens_computed"] == 65.30
    assert values["llama2", "synthetic", "lazy", "generation_speedup"] == 1.79


def test_table_1_by_hand() -> None:
    runs = [llama2("lazy", over(MULTI_DOC_QA, score=0.25, ttft_s=0.1))]
    table = table1(Results(runs))
    found = line(table.frame, model="llama2", task="multi_doc_qa", method="lazy")
    assert (found["status"], found["examples"], found["datasets"]) == ("measured", 6, 3)
    assert (found["score"], found["paper_score"]) == (25, 22.31)
    assert found["score_difference"] == pytest.approx(2.69)
    assert found["ttft_speedup"] == pytest.approx(4)  # 0.4 s to 0.1 s
    assert found["ttft_speedup_difference"] == pytest.approx(4 - 2.34)
    cells = line(table.cells, model="llama2", task="multi_doc_qa", method="lazy")
    assert list(cells.values())[3:] == ["6", "25.00 ±0.00", "22.31", "+2.69", "4.00 ±0.00", "2.34", "+1.66", "-"]
    baseline = line(table.frame, model="llama2", task="multi_doc_qa", method="baseline")
    assert (baseline["score"], baseline["ttft_speedup"], baseline["paper_score"]) == (100, 1, 22.43)


def test_what_was_not_run_says_so() -> None:
    table = table1(Results([llama2("lazy", over(MULTI_DOC_QA))]))
    assert len(table.frame) == 2 * 6 * 5
    for key in (
        {"model": "llama2", "task": "multi_doc_qa", "method": "static_pruning"},
        {"model": "llama2", "task": "code", "method": "lazy"},
        {"model": "xgen", "task": "multi_doc_qa", "method": "lazy"},
    ):
        found, cells = line(table.frame, **key), line(table.cells, **key)
        assert found["status"] == "no run"
        assert math.isnan(found["score"])
        assert math.isnan(found["score_difference"])
        assert (cells["score"], cells["TTFT speedup"], cells["score, Δ"], cells["n"]) == ("no run", "no run", "-", "-")
        assert cells["score, paper"] == f"{found['paper_score']:.2f}"


def test_only_the_presets_runs_count() -> None:
    other = {"schedule": {"2": 0.5}, "prune_generated": False, "revive": True}
    table = table1(Results([stored(over(MULTI_DOC_QA), "lazy", other, model="llama2", paper="llama2")]))
    assert set(table.frame["status"]) == {"no run"}


def test_part_of_a_task_is_not_compared() -> None:
    table = table1(Results([llama2("lazy", over(("hotpotqa",), score=0.25))]))
    found = line(table.frame, model="llama2", task="multi_doc_qa", method="lazy")
    assert (found["status"], found["score"], found["paper_score"]) == ("1 of 3 datasets", 25, 22.31)
    assert math.isnan(found["score_difference"])
    cells = line(table.cells, model="llama2", task="multi_doc_qa", method="lazy")
    assert (cells["n"], cells["score, Δ"]) == ("2 (1 of 3 datasets)", "-")


def test_seeds_are_averaged_and_their_deviation_kept() -> None:
    runs = [llama2("random_drop", over(MULTI_DOC_QA, score=score), seed=seed) for seed, score in enumerate((0.1, 0.4))]
    found = line(table1(Results(runs)).frame, model="llama2", task="multi_doc_qa", method="random_drop")
    assert (found["seeds"], found["examples"], found["score"]) == (2, 6, 25)
    assert found["score_seed_std"] == pytest.approx(math.sqrt(2 * 15**2))  # of 10 and 40


def test_other_models_have_no_paper_beside_them() -> None:
    table = table1(Results([preset("lazy", over(("hops",)))]))
    found = line(table.frame, model="tiny", task="multi_doc_qa", method="lazy")
    assert (found["suite"], found["status"], found["score"]) == ("embedded", "measured", 50)
    cells = line(table.cells, model="tiny (embedded)", task="multi_doc_qa", method="lazy")
    assert (cells["score"], cells["score, paper"], cells["score, Δ"]) == ("50.00 ±0.00", "-", "-")
    # the paper's model on another suite is not the paper's experiment either
    frame = table1(Results([llama2("lazy", over(("hops",)))])).frame
    assert line(frame, suite="longbench", task="multi_doc_qa", method="lazy", model="llama2")["status"] == "no run"
    embedded = line(frame, suite="embedded", task="multi_doc_qa", method="lazy")
    assert math.isnan(embedded["paper_score"])


def test_settings_of_one_method_are_told_apart() -> None:
    ablation = PRESETS["lazy"] | {"revive": False}
    runs = [preset("lazy", over(("hops",))), stored(over(("hops",), score=0.2), "lazy", ablation)]
    table = table1(Results(runs))
    rows = table.frame[(table.frame["method"] == "lazy") & (table.frame["task"] == "multi_doc_qa")]
    rows = rows[rows["model"] == "tiny"]
    assert dict(zip(rows["label"], rows["score"], strict=True)) == {
        "lazy, schedule=table1": 50,
        "lazy, schedule=table1, revive=false": 20,
    }
    assert "lazy, schedule=table1, revive=false" in set(table.cells["method"])


def test_random_weights_are_named() -> None:
    flops = {"prefill_flops": 50, "baseline": {"prefill_flops": 100}}
    measured = {"kl": 0.1, "evidence_prefill": [1.0], "evidence_revived": [0.0]} | flops
    runs = [preset("lazy", over(("hops",), **measured)), swept("lazy", "1.5x", [0.1], [1])]
    for run in runs:
        run.identity["load_format"] = "dummy"
    for name in TABLES.keys() - {"groups", "claims", "turns"}:  # no group, no published model, one question each
        assert "tiny (embedded, random weights)" in set(TABLES[name](Results(runs)).cells["model"])


def test_what_a_preset_stood_for_is_kept() -> None:
    run = preset("lazy", over(("hops",)))
    run.identity["parameters"] = {"hops": {"name": "lazy", "schedule": {"2": 0.4}, "revive": True}}
    found = line(table1(Results([run])).frame, model="tiny", task="multi_doc_qa", method="lazy")
    assert json.loads(found["parameters"]) == {"schedule": {"2": 0.4}, "revive": True}


def test_table_2_by_hand() -> None:
    table = table2(Results([llama2("lazy", over(MULTI_DOC_QA, total_s=0.2, pct_prompt_tokens_computed=60.0))]))
    assert set(table.frame["method"]) == {"lazy"}
    found = line(table.frame, model="llama2", task="multi_doc_qa")
    assert (found["pct_prompt_tokens_computed"], found["paper_pct_prompt_tokens_computed"]) == (60, 63.94)
    assert found["pct_prompt_tokens_computed_difference"] == pytest.approx(-3.94)
    assert found["generation_speedup"] == pytest.approx(4)  # 0.8 s to 0.2 s
    assert found["generation_speedup_difference"] == pytest.approx(4 - 1.56)


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


def test_memory_without_a_baseline_or_a_peak_says_so() -> None:
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
    assert line(table.cells, method="lazy, schedule=paper") == {
        "model": "tiny (embedded)", "method": "lazy, schedule=paper", "all": "31.2",
        "prompt 1-512": "25.0", "prompt 513-1024": "33.3", "answer 1-4": "50.0", "answer 5-16": "12.5",
    }  # fmt: skip


def test_sensitivity_by_hand() -> None:
    def run(schedule: Any, score: float, ttft_s: float, **others: Any) -> StoredRun:
        settings = {"schedule": schedule, "prune_generated": False, "revive": True} | others
        return stored(over(("hops",), score=score, ttft_s=ttft_s), "lazy", settings)

    table = sensitivity(
        Results(
            [
                run({"2": 0.5}, 0.8, 0.2),
                run({"2": 0.8}, 0.9, 0.3),
                run({"2": 0.5, "10": 0.4}, 0.6, 0.1),
                run({"2": 0.5}, 0.4, 0.2, revive=False),
                run("paper", 0.95, 0.25),
            ]
        )
    )
    rows = {row["label"]: row for row in table.frame.to_dict("records")}
    assert [row["ttft_speedup"] for row in rows.values()] == pytest.approx([0.4 / 0.3, 1.6, 2, 2, 4])
    slope = "score_change_per_0.1_keep"
    assert rows["lazy, schedule={2: 0.8}"]["score_change"] == -10
    assert rows["lazy, schedule={2: 0.8}"][slope] == pytest.approx(-5)  # 10 points for the first 0.2
    assert rows["lazy, schedule={2: 0.5}"][slope] == pytest.approx(-10 / 3)  # 10 more for the next 0.3
    assert rows["lazy, schedule={2: 0.5}, revive=false"][slope] == pytest.approx(-12)  # 60 for 0.5, on its own
    several = rows["lazy, schedule={2: 0.5, 10: 0.4}"]
    assert several["keep"] == pytest.approx(0.2)
    assert several["layers"] == "2 10"
    assert math.isnan(several[slope])  # two ratios have no one slope
    assert math.isnan(rows["lazy, schedule=paper"][slope])
    assert table.cells["schedule"].tolist()[:2] == ["{2: 0.8}", "paper"]


def test_table_1_has_kl_without_the_papers() -> None:
    runs = [llama2("lazy", over(MULTI_DOC_QA, kl=0.002)), llama2("static_pruning", over(MULTI_DOC_QA))]
    table = table1(Results(runs))
    assert line(table.frame, model="llama2", task="multi_doc_qa", method="lazy")["kl"] == pytest.approx(0.002)
    methods = ("lazy", "static_pruning", "baseline")  # older records and the baseline itself have no value
    cells = [line(table.cells, model="llama2", task="multi_doc_qa", method=method)["KL, nats"] for method in methods]
    assert cells == ["0.00200 ±0.00000", "-", "-"]
    assert "paper_kl" not in table.frame


def swept(method: str, target: str, kls: list[float], scores: list[float], **settings: Any) -> StoredRun:
    key = "schedule" if method == "lazy" else "keep"
    pairs = enumerate(zip(kls, scores, strict=True))
    records = [example("hops", str(number), kl=kl, score=score) for number, (kl, score) in pairs]
    return stored(records, method, {key: target, **settings})


def test_ranking_by_hand() -> None:
    runs = [
        swept("lazy", "1.5x", [0.1, 0.3, 0.2], [1, 1, 0.5]),
        swept("static_pruning", "1.5x", [0.2, 0.4, 0.3], [1, 0, 0.5], layer=2),
        swept("random_drop", "1.5x", [0.9, 0.1], [0, 1]),
        swept("lazy", "2.0x", [0.5, 0.7], [1, 1]),
        stored([example("hops", "0", kl=0.0)]),  # its speedup is not given
    ]
    table = ranking(Results(runs))
    columns = ["target", "rank", "method", "examples", "kl", "kl_difference", "score", "score_difference"]
    assert table.frame[columns].to_numpy().tolist() == [
        [1.5, 1, "lazy", 2, pytest.approx(0.2), 0, 100, 0],  # on the two examples that all three have
        [1.5, 2, "static_pruning", 2, pytest.approx(0.3), pytest.approx(0.1), 50, -50],
        [1.5, 3, "random_drop", 2, pytest.approx(0.5), pytest.approx(0.3), 50, -50],
        [2.0, 1, "lazy", 2, pytest.approx(0.6), 0, 100, 0],
    ]
    static, drop = (line(table.frame, target=1.5, rank=rank) for rank in (2, 3))
    assert (static["kl_low"], static["kl_high"]) == (pytest.approx(0.2), pytest.approx(0.4))
    # paired: always 0.1 worse, whatever is drawn
    assert (static["kl_difference_low"], static["kl_difference_high"]) == (pytest.approx(0.1), pytest.approx(0.1))
    assert (drop["kl_difference_low"], drop["kl_difference_high"]) == (pytest.approx(-0.2), pytest.approx(0.8))
    cells = line(table.cells, method="static_pruning, layer=2")
    assert cells["KL - first's"] == "+0.10000 (+0.10000, +0.10000)"
    assert table.cells["KL - first's"].tolist()[0] == "-"


def test_what_did_not_reach_the_speedup_and_diagnostics_have_no_rank() -> None:
    def run(method: str, kls: list[float], ideal: float) -> StoredRun:
        flops = [
            example("hops", str(row), kl=kl, prefill_flops=1000, baseline={"prefill_flops": round(1000 * ideal)})
            for row, kl in enumerate(kls)
        ]
        return stored(flops, method, {"keep": "2x"})

    runs = [
        run("fastkv", [0.3, 0.5], 1.85),
        run("random_drop", [0.9], 2.3),
        run("asl", [0.0], 1.0),  # it never cut: nothing was saved, and nothing lost
        run("oracle", [0.1], 2.0),
    ]
    table = ranking(Results(runs))
    assert table.frame[["rank", "method", "examples"]].to_numpy().tolist() == [[1, "fastkv", 1], [2, "random_drop", 1]]
    caption = " Not ranked: asl, keep=2x, whose prefills had an ideal speedup of 1.00; oracle, keep=2x (diagnostic)."
    assert table.caption.endswith(caption)
    assert "Not ranked" not in ranking(Results(runs[:2])).caption


def with_flops(label: float, scores: dict[str, float], tokens: int = 500, dataset: str = "hops") -> StoredRun:
    records = [
        example(dataset, name, tokens, {"prefill_flops": 1000}, score=score, prefill_flops=round(1000 * label))
        for name, score in scores.items()
    ]
    return stored(records, settings={"schedule": {"2": label}})


def test_effective_keep_by_hand() -> None:
    runs = [
        with_flops(0.8, {"a": 1.0, "b": 1.0, "c": 1.0}),
        with_flops(0.5, {"a": 1.0, "b": 0.985, "c": 0.0}),
        with_flops(0.2, {"a": 0.97, "b": 0.0}),
        stored(
            [example("hops", "a", prefill_flops=1500, baseline={"prefill_flops": 1000})],
            "prompt_compression",
            {"keep": 0.5},
        ),
        stored([example("hops", "a")], "baseline"),
    ]
    found = effective_keep(Results(runs)).frame.set_index(["method", "task", "prompt_tokens"])
    lazy = found.loc[("lazy", "multi_doc_qa", "1-512")]
    # of the two examples that all three settings have, the mean score is 99.25 % of the baseline's at 50 % of the FLOPs
    assert (lazy["keep"], lazy["setting"], lazy["examples"], lazy["settings"]) == (50, "lazy, schedule={2: 0.5}", 2, 3)
    assert (lazy["keep_low"], lazy["keep_high"]) == (50, 80)  # "b" twice is 98.5 %
    assert found.loc[("lazy", "all", "all")]["keep"] == 50
    dear = found.loc[("prompt_compression", "all", "all")]
    assert (dear["keep"], dear["setting"]) == (100, "baseline")
    for within, keep in ((0.5, 80), (60, 20)):
        frame = effective_keep(Results(runs), within).frame
        assert set(frame.loc[frame["method"] == "lazy", "keep"]) == {keep}


def test_effective_keep_by_task_and_length() -> None:
    short, long, task = {"a": 1.0, "b": 1.0}, {"c": 0.5, "d": 0.5}, {"e": 0.0, "f": 0.0}
    parts = (with_flops(0.3, short), with_flops(0.6, long, 900), with_flops(0.4, task, 900, "lookup"))
    run = stored([record for part in parts for record in part.records], settings={"schedule": {"2": 0.3}})
    table = effective_keep(Results([run]))
    found = table.frame.set_index(["task", "prompt_tokens"])["keep"].to_dict()
    assert found == {
        ("single_doc_qa", "513-1024"): 100, ("single_doc_qa", "all"): 100, ("multi_doc_qa", "1-512"): 30,
        ("multi_doc_qa", "513-1024"): 100, ("multi_doc_qa", "all"): 100, ("all", "1-512"): 30, ("all", "513-1024"): 100,
        ("all", "all"): 100,
    }  # fmt: skip
    assert line(table.cells, task="single_doc_qa")["1-512 tokens"] == "-"
    silent = stored(
        [replace(record, baseline=replace(record.baseline, score=0.0)) for record in run.records if record.baseline]
    )
    assert effective_keep(Results([silent])).frame["keep"].isna().all()  # any share is near a baseline that scores 0


@pytest.mark.parametrize("name", TABLES)
def test_nothing_gives_a_table_that_says_so(name: str) -> None:
    table = TABLES[name](Results([]))
    shown = table.to_markdown()
    assert shown.count("no run") == 2 * {"table1": 60, "table2": 12}.get(name, 0)
    assert ("No run for this table." in shown) == (name not in ("table1", "table2"))
    assert table.name == name
    assert len(pd.read_csv(io.StringIO(table.to_csv()))) == len(table.frame) == len(table.cells)
    assert table.to_latex()


def test_the_order_of_runs_does_not_matter() -> None:
    runs = [
        llama2("lazy", over(MULTI_DOC_QA, score=0.25)),
        llama2("static_pruning", over(MULTI_DOC_QA, score=0.3)),
        preset("lazy", over(("hops", "lookup"))),
    ]
    for name in TABLES:
        assert TABLES[name](Results(runs)).to_csv() == TABLES[name](Results(runs[::-1])).to_csv()


def test_every_method_on_one_clock_by_hand() -> None:
    records = [
        example(name, "a", score=0.25, ttft_s=0.2, total_s=0.4, scoring_s=0.05, kv_bytes=2_000_000, prefill_flops=300,
                baseline={"prefill_flops": 450, "score": 0.5})
        for name in MULTI_DOC_QA
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


def test_what_authors_report_stands_beside_the_same_settings_here() -> None:
    settings = {"keep": 1024, "sound": False}
    model = {"model": "Meta-Llama-3.1-8B-Instruct"}
    runs = [
        stored(over(("trec",), score=0.4), "gemfilter", settings, **model),
        stored(over(("trec", "qasper"), score=0.1), "gemfilter", settings | {"sound": True}, **model),
        stored(over(("trec",), score=0.3), "gemfilter", settings | {"keep": 512}, **model),
    ]
    cells = claims(Results(runs)).cells
    found = line(cells, model="Llama-3.1-8B-Instruct", setting="keep=1024")
    assert (found["score"], found["full"], found["score, ours"]) == ("34.50", "36.72", "40.00 ±0.00")
    assert "no chat template" in found["why they differ"]
    assert set(cells[cells["score, ours"] != "40.00 ±0.00"]["score, ours"]) == {"no run"}
