import json
from pathlib import Path

import pytest

from eval.analysis.screen import summary, table_of
from eval.store.results import Results
from eval.store.runs import StoredRun
from tests.eval.made import stored
from tests.eval.store.visits import visit


@pytest.mark.parametrize(
    ("by", "parts"),
    [
        ("length", {"all": 2, "1-512": 1, "513-1024": 1}),
        ("task", {"all": 2, "multi_doc_qa": 1, "few_shot": 1}),
    ],
)
def test_parts_follow_the_mean_and_name_a_setting_as_it_does(
    by: str, parts: dict[str, int]
) -> None:
    visits = [visit(1, "trec"), visit(1, "hotpotqa", prompt_tokens=600)]
    frame = summary(Results([stored(visits, "gemfilter", {"speedup": 2.0})]), by)
    assert frame[["part", "label", "examples"]].to_numpy().tolist() == [
        [part, label, examples]
        for part, examples in parts.items()
        for label in ("baseline", "gemfilter, speedup=2x")
    ]


def planned(
    folder: Path, dataset: str, rows: int, lacking: int = 0, answered: int | None = None
) -> StoredRun:
    """A run whose last `lacking` visits have no answer of LazyLLM."""
    folder.mkdir()
    (folder / "examples.json").write_text(
        json.dumps({dataset: [f"row-{row}" for row in range(rows)]})
    )
    visits = [visit(row, dataset) for row in range(rows if answered is None else answered)]
    for example in visits[len(visits) - lacking :]:
        del example.arms["lazy"]
    return stored(visits, folder=folder)


def test_unfinished_counts_the_answers_of_each_arm_on_each_suite(tmp_path: Path) -> None:
    runs = [
        planned(tmp_path / "done", "lookup", 1),
        planned(tmp_path / "fails", "trec", 2, lacking=1),
    ]
    frame = summary(Results(runs))
    found = frame[["suite", "method", "unfinished"]].to_numpy().tolist()
    assert sorted(found) == [
        ["embedded", "baseline", ""], ["embedded", "lazy", ""],
        ["longbench", "baseline", ""], ["longbench", "lazy", "1 of 2 examples"],
    ]  # fmt: skip


def test_unfinished_says_nothing_of_a_run_whose_answers_do_not_count(tmp_path: Path) -> None:
    runs = [
        planned(tmp_path / "stopped", "trec", 2, answered=1),
        planned(tmp_path / "whole", "trec", 2),
    ]
    assert summary(Results(runs))["unfinished"].tolist() == ["", ""]
    assert summary(Results(runs[:1]))["unfinished"].tolist() == ["1 of 2 examples"] * 2


@pytest.mark.parametrize("by", [None, "task", "length"])
def test_seeds_are_a_column_if_a_setting_has_several(by: str | None) -> None:
    drops = [stored([visit(1)], "random_drop", {"keep": 0.5}, seed=seed) for seed in (0, 1)]
    frame = summary(Results([*drops, stored([visit(1)])]), by)
    seeds = dict(zip(frame["method"], frame["seeds"], strict=True))
    assert (seeds["random_drop"], seeds["lazy"], set(frame["examples"])) == (2, 1, {1})
    assert "seeds" in table_of(frame).cells
    assert "seeds" not in table_of(summary(Results(drops[:1]), by)).cells
