import json
from dataclasses import replace
from pathlib import Path

from eval.analysis.screen import summary, table_of
from eval.store.results import Results
from tests.eval.analysis.made import example, stored


def test_summary_by_length_names_a_setting_as_the_mean_does() -> None:
    visits = [example("trec", name, tokens, score=0.5) for name, tokens in (("a", 100), ("b", 600))]
    frame = summary(Results([stored(visits, "gemfilter", {"keep": "2x"})]), "length")
    assert frame[["part", "label", "examples"]].to_numpy().tolist() == [
        [part, label, examples]
        for part, examples in (("all", 2), ("1-512", 1), ("513-1024", 1))
        for label in ("baseline", "gemfilter, keep=2x")
    ]


def test_summary_by_task_puts_the_methods_of_a_task_together_after_the_mean() -> None:
    visits = [example(dataset, "a") for dataset in ("trec", "hotpotqa")]
    frame = summary(Results([stored(visits, "static_pruning", {"layer": 2, "keep": 0.3})]), "task")
    methods = ["baseline", "static_pruning"]
    assert frame[["part", "method"]].to_numpy().tolist() == [
        [part, method] for part in ("all", "multi_doc_qa", "few_shot") for method in methods
    ]


def test_unfinished_counts_the_answers_of_each_arm_on_each_suite(tmp_path: Path) -> None:
    whole, lacking = example("trec", "a"), example("trec", "b")
    lacking = replace(lacking, answers={label: lacking.answers[label] for label in ("baseline",)})
    runs = []
    for name, visits in (("done", [example("lookup", "a")]), ("lazy fails", [whole, lacking])):
        folder = tmp_path / name
        folder.mkdir()
        planned = {visits[0].dataset: [visit.id for visit in visits]}
        (folder / "examples.json").write_text(json.dumps(planned))
        runs.append(stored(visits, folder=folder))
    frame = summary(Results(runs))
    told = {(row["suite"], row["label"] == "baseline"): row["unfinished"] for row in frame.to_dict("records")}
    assert told == {
        ("embedded", True): "",
        ("embedded", False): "",
        ("longbench", True): "",
        ("longbench", False): "1 of 2 examples",
    }


def test_unfinished_says_nothing_of_a_run_whose_answers_do_not_count(tmp_path: Path) -> None:
    visits = [example("trec", "a"), example("trec", "b")]
    runs = []
    for name, answered in (("stopped", visits[:1]), ("whole", visits)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "examples.json").write_text('{"trec": ["a", "b"]}')
        runs.append(stored(answered, folder=folder))
    assert summary(Results(runs))["unfinished"].tolist() == ["", ""]
    assert summary(Results(runs[:1]))["unfinished"].tolist() == ["1 of 2 examples"] * 2


def test_seeds_are_a_column_if_a_setting_has_several() -> None:
    drops = [stored([example("trec", "a")], "random_drop", {"keep": 0.5}, seed=seed) for seed in (0, 1)]
    for by in (None, "task", "length"):
        frame = summary(Results([*drops, stored([example("trec", "a")])]), by)
        seeds = dict(zip(frame["method"], frame["seeds"], strict=True))
        assert (seeds["random_drop"], seeds["lazy"], set(frame["examples"])) == (2, 1, {1})
        assert "seeds" in table_of(frame).cells
    assert "seeds" not in table_of(summary(Results(drops[:1]))).cells
