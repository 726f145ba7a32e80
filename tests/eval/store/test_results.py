"""Runs read from folders: which share a table, which are chosen, which answers count."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from eval.store.results import COLUMNS, Results, chosen, with_variants
from eval.store.runs import label_of, stored_runs
from lazyllm.errors import UserError
from tests.eval.made import LAZY, stored, write_run
from tests.eval.store.visits import answer, visit


def test_runs_are_listed_at_any_depth_and_in_order(tmp_path: Path) -> None:
    write_run(tmp_path / "b", [visit(0)])
    write_run(tmp_path / "a" / "deep", [visit(1)], seed=1)
    write_run(tmp_path / "begun", [], seed=2)
    (tmp_path / "stray.jsonl").write_text("{}")
    runs = Results.read([tmp_path, tmp_path / "a"]).runs
    assert [run.folder for run in runs] == [tmp_path / "a" / "deep", tmp_path / "b"]
    assert runs[1].visits == [visit(0)]
    lazy = runs[0].arms["lazy"]
    assert (lazy.method, lazy.seed, lazy.settings) == ("lazy", 1, LAZY)
    assert [arm.is_baseline for arm in runs[0].arms.values()] == [True, False]


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        Results.read([tmp_path / "absent"])
    assert list(Results([]).frame.columns) == COLUMNS
    write_run(tmp_path / "begun", [])
    with pytest.raises(UserError, match="no run with answers"):
        Results.read([tmp_path])


DROP = {"method": "random_drop"}
ODD = {"dtype": "x", "size": 2}
NEWEST = {"provenance": {"started": "2026-01-02"}}


@pytest.mark.parametrize(
    ("runs", "variants"),
    [
        ([{}, {"engine": "another"}, {"seed": 1}], ["", "engine=another", ""]),
        ([{}, {"engine": "0123456789abcdef"}, {}], ["", "engine=0123456789abcdef", ""]),
        ([{}, {"versions": {"torch": "3"}}, {}], ["", "versions.torch=3", ""]),
        ([{}, {"max_new_tokens": 3}, {}], ["", "max_new_tokens=3", ""]),
        ([{}, {"size": 4, "data": {"hotpotqa": "x"}}, {}], ["", "size=4, rows of hotpotqa=x", ""]),
        ([{}, {}, {"dtype": "x", "threads": 2}, {"dtype": "x"}, {"threads": 2}],
         ["", "", "dtype=x, threads=2", "dtype=x", "threads=2"]),
        ([{}, {}, {"engine": "0123456789abcdef"}, {"engine": "0123fedcba987654"}],
         ["", "", "engine=0123456789abcdef", "engine=0123fedcba987654"]),
        # two of one name are numbered
        ([{}, {}, {}, ODD | {"threads": 3}, ODD | {"threads": 2}],
         ["", "", "", "size=2 and 2 more, 2", "size=2 and 2 more"]),
        # a method's and a suite's code count only where they ran
        ([{}, DROP | {"seed": 3}, {"data": {"hops": "1"}, "suite_code": "t"}], ["", "", ""]),
        ([{}, DROP, {"suite_code": "u"}], ["", "", "code of longbench=u"]),
        # of equally common settings, the newest run has the plain name
        ([NEWEST, {"engine": "b"}], ["", "engine=b"]),
    ],
)  # fmt: skip
def test_model_name_tells_runs_apart_that_share_no_table(runs: list[dict[str, Any]], variants: list[str]) -> None:
    usual: dict[str, Any] = {
        "data": {"hotpotqa": "1234 5678"}, "versions": {"torch": "2"}, "max_new_tokens": None, "size": 1,
        "dtype": "usual", "threads": 1, "suite_code": "s",
    }  # fmt: skip
    found = with_variants([stored([visit(row)], **usual | changes) for row, changes in enumerate(runs)])
    names = [f"tiny ({variant})" if variant else "tiny" for variant in variants]
    assert [run.model for run in found] == names
    assert list(Results(found).frame["model"].unique()) == list(dict.fromkeys(names))
    if len(variants) == 3 and variants[1]:  # all differences, for the table of settings
        assert len(found[1].differences) == len(runs[1])


@pytest.mark.parametrize(
    ("models", "names"),
    [
        # {path: weights} as given, in order
        ([("/a/model", "1"), ("/b/model", "2")], ["a/model", "b/model"]),
        ([("/a/x/model", "1"), ("/b/x/model", "2"), ("other", "3")], ["a/x/model", "b/x/model", "other"]),
        ([("/x/tiny", "1"), ("tiny", "2")], ["x/tiny", "tiny"]),
        ([("/a/model", "1"), ("/copy/model", "1")], ["model", "model"]),  # the same weights are one model
        ([("/a/model", "1"), ("/copy/model", "1"), ("/b/model", "2")], ["a/model", "a/model", "b/model"]),
        ([("/a/model", "1"), ("/a/model", "2")], ["model (weights=1)", "model"]),  # trained on, in place
    ],
)
def test_models_of_one_name_are_told_apart_by_their_paths(models: list[tuple[str, str]], names: list[str]) -> None:
    runs = [
        stored([], model=path, weights=weights, provenance={"started": f"2026-01-0{number}"})
        for number, (path, weights) in enumerate(models)
    ]
    for run in runs:
        run.identity["model"] = Path(run.identity["model"]).name
    assert [run.model for run in with_variants(runs)] == names


def test_gguf_files_of_one_name_are_told_apart_with_their_quantisation() -> None:
    runs = [stored([], model=f"/{name}/model.gguf", weights=name, gguf="Q4_1") for name in "ab"]
    for run in runs:
        run.identity["model"] = "model (Q4_1)"
    assert [run.model for run in runs] == ["model (Q4_1)"] * 2
    assert [run.model for run in with_variants(runs)] == ["a/model.gguf (Q4_1)", "b/model.gguf (Q4_1)"]


def test_newest_runs_share_a_table_with_the_newest_of_their_model() -> None:
    runs = [
        stored([], folder=Path(name), provenance={"started": started}, engine=engine)
        for name, started, engine in (("a", "2026-01-02", "1"), ("b", "2026-01-01", "2"), ("c", "2026-01-01", "1"))
    ]
    assert [run.folder.name for run in chosen(runs, newest=True)] == ["a", "c"]


def test_where_selects_by_config_and_identity() -> None:
    runs = [
        stored([], settings={"schedule": {"2": 0.5}}, folder=Path("a"), dtype="bfloat16", max_new_tokens=None),
        stored([], "gemfilter", folder=Path("b"), dtype="float32", max_new_tokens=3),
    ]

    def names(*where: str) -> list[str]:
        return [run.folder.name for run in chosen(runs, where)]

    assert names("dtype=bfloat16") == names("max_new_tokens=null") == names("arms.lazy.method.schedule.2=0.5") == ["a"]
    assert names("max_new_tokens=3") == names("arms.lazy.method.name=gemfilter", "dtype=float32") == ["b"]
    with pytest.raises(UserError, match=r"--where dtype=int8: no such run; dtype is one of bfloat16, float32"):
        names("dtype=int8")
    assert chosen([], ["dtype=int8"]) == []
    for wrong in ("dtypo=int8", "dtype"):
        with pytest.raises(UserError, match=rf"--where {wrong}: expected KEY=VALUE with a key of these runs: .*dtype"):
            names(wrong)


def test_a_row_holds_the_answer(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"score": 0.25, "rouge_l": 0.5, "decode_step_s": [0.1, 0.3], "token_ids": [1, 2, 3]}
    short = answer(decode_step_s=[], token_ids=[1], text="")
    one = visit(7, "gov_report", arms={"baseline": short, "lazy": answer(**changes)}, attention_ceiling=1.5)
    write_run(tmp_path, [one], "random_drop", {"keep": 0.5, "seed": 4})
    frame: Any = Results.read([tmp_path]).frame
    assert list(frame.columns) == COLUMNS
    baseline, row = frame.to_dict("records")
    expected = {
        "model": "tiny", "arm": "lazy", "method": "random_drop", "settings": '{"keep": 0.5}',
        "label": "random_drop, keep=0.5", "seed": 4, "is_baseline": False, "dataset": "gov_report",
        "task": "summarization", "suite": "longbench", "id": "row-7", "prompt_tokens": 100, "visit": 0,
        "counts": True, "score": 25, "rouge_l": 50, "ttft_s": 0.2, "step_s": 0.2, "generated_tokens": 3,
        "pct_answered": 100, "total_s": 0.6, "tokens_computed": 75, "attention_ceiling": 1.5,
    }  # fmt: skip
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    assert row["token_s"] == pytest.approx((0.2, 0.3, 0.6))
    expected = {"arm": "baseline", "seed": 0, "is_baseline": True, "generated_tokens": 1, "pct_answered": 0}
    assert {key: baseline[key] for key in expected} == expected
    assert all(math.isnan(baseline[missing]) for missing in ("step_s", "rouge_l", "peak_memory_bytes"))


def test_measurements_are_behind_their_rows() -> None:
    results = Results([stored([visit(row, prompt_tokens=10 + row) for row in range(3)])])
    rows: Any = results.counting.iloc[::-1]
    found = [(visit.prompt_tokens, answer.text) for visit, answer in results.answers(rows)]
    assert found == [(10 + row, text) for text in ("an answer", "base") for row in (2, 1, 0)]


def test_several_runs_of_a_setting_count_once_and_a_sentence_says_which() -> None:
    runs = [
        stored([visit(0, score=0.25)], folder=Path("look"), provenance={"started": "2026-02"}),
        stored([visit(0, score=1.0), visit(1)], folder=Path("whole"), provenance={"started": "2026-01"}),
    ]
    results = Results(runs)
    counting = results.counting[results.counting["arm"] == "lazy"]
    assert counting[["id", "score"]].to_numpy().tolist() == [["row-0", 100], ["row-1", 50]]
    (sentence,) = results.choices
    start = "lazy, schedule=paper, hotpotqa: measured in look and in whole; tables count whole, which"
    assert sentence.startswith(start)
    again = stored([visit(0), visit(1)], folder=Path("again"), provenance={"started": "2026-03"})
    assert {*Results([*runs, again]).counting["folder"]} == {"again"}  # as many, but newer


def test_a_target_speedup_is_one_setting_however_it_is_written() -> None:
    runs = [stored([visit(0)], settings={"schedule": target}) for target in ("2.0x", "2x", "2.05x")]
    frame = Results(runs).counting
    assert set(frame["label"]) == {"baseline", "lazy, schedule=2x", "lazy, schedule=2.05x"}


def test_label_leaves_out_usual_values() -> None:
    assert label_of("baseline", {}) == "baseline"
    assert label_of("lazy", LAZY | {"schedule": {"2": 0.3}}) == "lazy, schedule={2: 0.3}"
    assert label_of("lazy", {"schedule": "paper", "revive": False}) == "lazy, schedule=paper, revive=false"
    assert label_of("prompt_compression", {"keep": 0.5, "scorer": None}) == "prompt_compression, keep=0.5"


def test_unfinished_runs_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [visit(0)])
    assert Results.read([tmp_path]).unfinished == []  # nothing is known of a plan
    (folder / "examples.json").write_text(json.dumps({"hotpotqa": ["row-0", "row-1", "row-2"]}))
    assert Results.read([tmp_path]).unfinished == ["Unfinished: a, 1 of 3 examples."]
    assert [run.visits for run in stored_runs([tmp_path])] == [[visit(0)]]
