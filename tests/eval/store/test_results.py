import json
import math
from pathlib import Path
from typing import Any

import pytest

from eval.store.results import COLUMNS, Results, chosen, with_variants
from eval.store.runs import label_of, stored_runs
from lazyllm.errors import UserError
from tests.eval.store.made import PROVENANCE, write_run
from tests.eval.store.visits import measurement, visit


def frame_of(*folders: Path) -> Any:
    return Results.read(folders).frame


def test_runs_are_listed_at_any_depth_and_in_order(tmp_path: Path) -> None:
    write_run(tmp_path / "b", [visit(0)])
    write_run(tmp_path / "a" / "deep", [visit(1)], seed=1)
    write_run(tmp_path / "begun", [], seed=2)
    (tmp_path / "stray.jsonl").write_text("{}")
    runs = Results.read([tmp_path, tmp_path / "a"]).runs
    assert [run.folder for run in runs] == [tmp_path / "a" / "deep", tmp_path / "b"]
    assert runs[1].visits == [visit(0)]
    assert runs[1].visits is runs[1].visits  # they are read once
    lazy = runs[0].arms["lazy"]
    assert (lazy.method, lazy.seed, lazy.is_baseline, runs[1].arms["lazy"].seed) == ("lazy", 1, False, 0)
    assert lazy.settings == {"schedule": {"2": 0.5}, "prune_generated": False, "revive": True}
    assert [arm.is_baseline for arm in runs[0].arms.values()] == [True, False]


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        Results.read([tmp_path / "absent"])
    assert list(Results([]).frame.columns) == COLUMNS
    write_run(tmp_path / "begun", [])
    with pytest.raises(UserError, match="no run with answers"):
        Results.read([tmp_path])


DROP = {"method": {"name": "random_drop", "keep": 0.5}}


@pytest.mark.parametrize(
    ("runs", "variants"),
    [
        ([{}, {"engine": "another"}, {"seed": 1}], ["", "engine=another", ""]),
        ([{}, {"engine": "0123456789abcdef"}, {}], ["", "engine=0123456789abcdef", ""]),
        ([{}, {"versions": {"torch": "3"}}, {}], ["", "versions.torch=3", ""]),
        ([{}, {"max_new_tokens": 3}, {}], ["", "max_new_tokens=3", ""]),
        ([{}, {"data": {"hotpotqa": "another"}}, {}], ["", "rows of hotpotqa=another", ""]),
        ([{}, {"turns": 4, "data": {"hotpotqa": "another"}}, {}], ["", "turns=4, rows of hotpotqa=another", ""]),
        ([{}, {}, {"dtype": "x", "threads": 2}, {"dtype": "x"}, {"threads": 2}],
         ["", "", "dtype=x, threads=2", "dtype=x", "threads=2"]),
        ([{}, {}, {"engine": "0123456789abcdef"}, {"engine": "0123fedcba987654"}],
         ["", "", "engine=0123456789abcdef", "engine=0123fedcba987654"]),
        # two of one name are numbered
        ([{}, {}, {}, {"dtype": "x", "turns": 2, "threads": 3}, {"dtype": "x", "turns": 2, "threads": 2}],
         ["", "", "", "turns=2 and 2 more, 2", "turns=2 and 2 more"]),
        # a method's and a suite's code count only where they ran
        ([{}, DROP | {"seed": 3}, {"data": {"hops": "1"}, "suite_code": "t"}], ["", "", ""]),
        ([{}, DROP, {"suite_code": "u"}], ["", "", "code of longbench=u"]),
        # of equally common settings, the newest run has the plain name
        ([{"provenance": PROVENANCE | {"started": "2026-01-02"}}, {"engine": "b"}], ["", "engine=b"]),
    ],
)  # fmt: skip
def test_model_name_tells_runs_apart_that_share_no_table(
    tmp_path: Path, runs: list[dict[str, Any]], variants: list[str]
) -> None:
    usual: dict[str, Any] = {
        "data": {"hotpotqa": "1234 5678"}, "versions": {"torch": "2"}, "max_new_tokens": None, "turns": 1,
        "dtype": "usual", "threads": 1, "suite_code": "s",
    }  # fmt: skip
    for number, changes in enumerate(runs):
        write_run(tmp_path / str(number), [visit(number)], **usual | changes)
    found = Results.read([tmp_path]).runs
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
def test_models_of_one_name_are_told_apart_by_their_paths(
    tmp_path: Path, models: list[tuple[str, str]], names: list[str]
) -> None:
    for number, (path, weights) in enumerate(models):
        started = PROVENANCE | {"started": f"2026-01-0{number + 1}"}
        write_run(tmp_path / str(number), [visit(number)], model=path, weights=weights, provenance=started)
    runs = stored_runs([tmp_path])
    for run in runs:
        run.identity["model"] = Path(run.identity["model"]).name
    assert [run.model for run in with_variants(runs)] == names


def test_gguf_files_of_one_name_are_told_apart_with_their_quantisation(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name, [visit(0)], model=f"/{name}/model.gguf", weights=name, gguf="Q4_1")
    runs = stored_runs([tmp_path])
    for run in runs:
        run.identity["model"] = "model (Q4_1)"
    assert [run.model for run in runs] == ["model (Q4_1)"] * 2
    assert [run.model for run in with_variants(runs)] == ["a/model.gguf (Q4_1)", "b/model.gguf (Q4_1)"]


def test_newest_runs_share_a_table_with_the_newest_of_their_model(tmp_path: Path) -> None:
    for name, started, engine in (("a", "2026-01-02", "1"), ("b", "2026-01-01", "2"), ("c", "2026-01-01", "1")):
        write_run(tmp_path / name, [visit(0)], provenance=PROVENANCE | {"started": started}, engine=engine)
    assert [run.folder.name for run in Results.read([tmp_path], newest=True).runs] == ["a", "c"]


def test_where_selects_by_config_and_identity(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [visit(0)], dtype="bfloat16", max_new_tokens=None)
    write_run(tmp_path / "b", [visit(0)], {"name": "gemfilter"}, dtype="float32", max_new_tokens=3)

    def names(*where: str) -> list[str]:
        return [run.folder.name for run in Results.read([tmp_path], where).runs]

    assert names("dtype=bfloat16") == names("max_new_tokens=null") == names("arms.lazy.method.schedule.2=0.5") == ["a"]
    assert names("max_new_tokens=3") == names("arms.lazy.method.name=gemfilter", "dtype=float32") == ["b"]
    with pytest.raises(UserError, match=r"--where dtype=int8: no such run; dtype is one of bfloat16, float32"):
        names("dtype=int8")
    assert chosen([], ["dtype=int8"]) == []
    for wrong in ("dtypo=int8", "dtype"):
        with pytest.raises(UserError, match=rf"--where {wrong}: expected KEY=VALUE with a key of these runs: .*dtype"):
            names(wrong)


def test_a_row_holds_the_answer(tmp_path: Path) -> None:
    one = visit(7, "gov_report", score=0.25, rouge_l=0.5, decode_step_s=[0.1, 0.3], token_ids=[1, 2, 3])
    one.answers["baseline"] = [measurement(decode_step_s=[], token_ids=[1], text="")]
    write_run(tmp_path, [one], {"name": "random_drop", "keep": 0.5, "seed": 4})
    frame = frame_of(tmp_path)
    assert list(frame.columns) == COLUMNS
    baseline, row = frame.to_dict("records")
    expected = {
        "model": "tiny", "arm": "lazy", "method": "random_drop", "settings": '{"keep": 0.5}',
        "label": "random_drop, keep=0.5", "seed": 4, "is_baseline": False, "dataset": "gov_report",
        "task": "summarization", "suite": "longbench", "id": "row-7", "prompt_tokens": 100, "turn": 1, "visit": 0,
        "counts": True, "score": 25, "rouge_l": 50, "ttft_s": 0.2, "step_s": 0.2, "generated_tokens": 3,
        "pct_answered": 100,
    }  # fmt: skip
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    expected = {"arm": "baseline", "seed": 0, "is_baseline": True, "generated_tokens": 1, "pct_answered": 0}
    assert {key: baseline[key] for key in expected} == pytest.approx(expected)
    for missing in ("step_s", "rouge_l", "peak_memory_bytes"):
        assert math.isnan(baseline[missing])


def test_each_turn_is_a_row_and_measurements_are_behind_it(tmp_path: Path) -> None:
    write_run(tmp_path, [visit(0, turns=3), visit(1)])
    results = Results.read([tmp_path])
    lazy = results.counting[results.counting["arm"] == "lazy"]
    assert lazy[["id", "turn", "prompt_tokens"]].to_numpy().tolist() == [
        ["row-0", 1, 100], ["row-0", 2, 1], ["row-0", 3, 2], ["row-1", 1, 100],
    ]  # fmt: skip
    assert [turn.tokens for turn, _ in results.answers(lazy)] == [100, 1, 2, 100]
    assert [answer.text for _, answer in results.answers(results.counting)] == ["base"] * 4 + ["an answer"] * 4


def test_several_runs_of_a_setting_count_once_and_a_sentence_says_which(tmp_path: Path) -> None:
    write_run(tmp_path / "look", [visit(0, score=0.25)], provenance=PROVENANCE | {"started": "2026-02"})
    write_run(
        tmp_path / "whole", [visit(0, score=1.0), visit(1)], provenance=PROVENANCE | {"started": "2026-01"}, warmup=9
    )
    results = Results.read([tmp_path])
    counting = results.counting[results.counting["arm"] == "lazy"]
    assert counting[["id", "score"]].to_numpy().tolist() == [["row-0", 100], ["row-1", 50]]
    (sentence,) = results.choices
    look, whole = tmp_path / "look", tmp_path / "whole"
    told = f"lazy, schedule={{2: 0.5}}, hotpotqa: measured in {look} and in {whole}; tables count {whole}, which"
    assert sentence.startswith(told)
    write_run(tmp_path / "again", [visit(0), visit(1)], provenance=PROVENANCE | {"started": "2026-03"}, warmup=8)
    assert {*Results.read([tmp_path]).counting["folder"]} == {str(tmp_path / "again")}  # as many, but newer


def test_a_target_speedup_is_one_setting_however_it_is_written(tmp_path: Path) -> None:
    for name, target in (("a", "2.0x"), ("b", "2x"), ("c", "2.05x")):
        write_run(tmp_path / name, [visit(0)], {"name": "lazy", "schedule": target})
    frame = Results.read([tmp_path]).counting
    labels = set(frame[frame["method"] == "lazy"]["label"])
    assert labels == {"lazy, schedule=2x", "lazy, schedule=2.05x"}


def test_label_leaves_out_usual_values() -> None:
    assert label_of("baseline", {}) == "baseline"
    usual = {"schedule": {"2": 0.3}, "prune_generated": False, "revive": True}
    assert label_of("lazy", usual) == "lazy, schedule={2: 0.3}"
    assert label_of("lazy", {"schedule": "paper", "revive": False}) == "lazy, schedule=paper, revive=false"
    assert label_of("prompt_compression", {"keep": 0.5, "scorer": None}) == "prompt_compression, keep=0.5"


def test_unfinished_runs_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [visit(0)])
    assert Results.read([tmp_path]).unfinished == []  # nothing is known of a plan
    (folder / "examples.json").write_text(json.dumps({"hotpotqa": ["row-0", "row-1", "row-2"]}))
    assert Results.read([tmp_path]).unfinished == ["Unfinished: a, 1 of 3 examples."]
