"""Runs read from folders: which share a table, which are chosen, which answers count."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from eval import cli
from eval.store.frame import COLUMNS, MEASURED, numbers_of
from eval.store.results import Results, choose, explain, read_results, share
from eval.store.runs import label_of, stored_runs
from lazyllm.errors import UserError
from tests.eval.made import LAZY, over, stored, write_run
from tests.eval.store.visits import FAILED, answer, visit


def test_runs_are_listed_at_any_depth_and_in_order(tmp_path: Path) -> None:
    write_run(tmp_path / "b", [visit(0)])
    write_run(tmp_path / "a" / "deep", [visit(1)], seed=1)
    write_run(tmp_path / "begun", [], seed=2)
    (tmp_path / "stray.jsonl").write_text("{}")
    (results,) = read_results([tmp_path, tmp_path / "a"])
    runs = results.runs
    assert [run.folder for run in runs] == [tmp_path / "a" / "deep", tmp_path / "b"]
    assert runs[1].visits == [visit(0)]
    lazy = runs[0].arms["lazy"]
    assert (lazy.method, lazy.seed, lazy.values, lazy.settings) == (
        "lazy",
        1,
        LAZY,
        '{"schedule": "paper"}',
    )
    assert [arm.is_baseline for arm in runs[0].arms.values()] == [True, False]


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        read_results([tmp_path / "absent"])
    assert list(Results([]).frame.columns) == COLUMNS
    write_run(tmp_path / "begun", [])
    with pytest.raises(UserError, match="no run with answers"):
        read_results([tmp_path])


USUAL: dict[str, Any] = {
    "data": {"hotpotqa": "12 34"}, "versions": {"torch": "2"}, "max_new_tokens": None, "threads": 1,
    "suite_code": "s",
}  # fmt: skip
TRAINED = {"model": "/b/tiny", "weights": "w"}  # another folder of the same name


@pytest.mark.parametrize(
    ("runs", "groups", "sentence"),
    [
        # what may differ, each time in the second run
        *(
            ([{}, changes], [[0, 1]], "")
            for changes in (
                {"method": "random_drop"}, {"seed": 1}, {"baseline": None}, {"subset": "cc"},
                {"warmup": 0},
                {"data": {"trec": "56 78"}}, {"fidelity": "answer"}, {"batch_size": 4},
                {"data": {"hops": "56 78"}, "suite_code": "t"}, {"today": None},
                {"thinking_tokens": 0},
                {"model": "other", "max_new_tokens": 3, "versions": {"torch": "3"}},
            )
        ),
        ([{}, {"engine": "new"}, {}], [[0, 2], [1]], "engine (1, new)"),
        ([{}, {"versions": {"torch": "3"}}], [[0], [1]], "versions.torch (2, 3)"),
        ([{}, {"max_new_tokens": 3}, {"threads": 2}], [[0], [1], [2]],
        "max_new_tokens (null, 3), threads (1, 2)"),
        ([{}, {"data": {"hotpotqa": "12 35"}}], [[0], [1]], "rows of hotpotqa (12 34, 12 35)"),
        ([{}, {"suite_code": "t"}], [[0], [1]], "code of longbench (s, t)"),
        ([{}, {"code": "3"}], [[0], [1]], "code of lazy (2, 3)"),
        ([{}, {"thinking_tokens": 9}, {"today": "2024-07-26"}], [[0], [1], [2]],
         "today (null, 2024-07-26), thinking_tokens (0, 9)"),
        ([{"model": "/a/tiny"}, TRAINED], [[0], [1]], "model (/a/tiny, /b/tiny)"),
        # the third agrees with both others, and joins the first; the fourth agrees with the second
        # only
        ([{"weights": "v"}, {"weights": "w"}, {}, {"weights": "w", "engine": "1"}],
        [[0, 2], [1, 3]], "weights (v, w)"),
        ([{}, {"engine": 30 * "e"}], [[0], [1]], "engine (1, eeeeeeeeeeeeeeeee...)"),
    ],
)  # fmt: skip
def test_runs_share_tables_that_differ_in_arms_and_data_alone(
    runs: list[dict[str, Any]], groups: list[list[int]], sentence: str
) -> None:
    made = []
    for row, changes in enumerate(runs):
        code = changes.pop("code", None)
        made.append(stored([visit(row)], **USUAL | changes))
        if code:
            made[-1].identity["arms"]["lazy"]["code"] = code
    found = share(made)
    assert [[made.index(run) for run in results.runs] for results in found] == groups
    if sentence:
        names = "; ".join(results.name for results in found)
        assert explain(found) == f"runs that differ in {sentence} share no table: {names}"
        assert len({results.name for results in found}) == len(found)
    else:
        assert found[0].name == ""  # nothing tells it from others


def test_groups_are_named_by_their_runs() -> None:
    runs = [
        stored([visit()], method, engine=engine)
        for engine, methods in {
            "1": ("lazy", "fastkv"),
            "2": ("lazy",),
            "3": ("lazy",),
            "4": ("baseline",),
        }.items()
        for method in methods
    ]
    # by what keeps them apart, unless all runs have labels
    assert [results.name for results in share(runs)] == [f"engine={number}" for number in "1234"]
    for run, label in zip(runs, ("figure5", "tuned/mine", "figure5"), strict=False):
        run.about["config"]["label"] = label
    assert [results.name for results in share(runs)] == [
        "figure5+tuned_mine", "figure5", "engine=3", "engine=4",
    ]  # fmt: skip
    runs[1].about["config"]["label"] = "figure5"
    assert [results.name for results in share(runs)][:2] == ["figure5", "figure5-2"]


def test_a_command_reads_all_groups_and_says_why_there_are_several(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for engine in "12":
        write_run(tmp_path / engine, [visit()], engine=engine)
    assert [[run.folder.name for run in results.runs] for results in read_results([tmp_path])] == [
        ["1"],
        ["2"],
    ]
    assert "runs that differ in engine (1, 2) share no table: engine=1; engine=2" in caplog.messages
    assert len(read_results([tmp_path], ["engine=2"])) == 1


def test_where_selects_by_config_and_identity() -> None:
    runs = [
        stored(
            [],
            settings={"schedule": {"2": 0.5}},
            folder=Path("a"),
            dtype="bfloat16",
            max_new_tokens=None,
        ),
        stored([], "gemfilter", folder=Path("b"), dtype="float32", max_new_tokens=3),
    ]

    def names(*where: str) -> list[str]:
        return [run.folder.name for run in choose(runs, where)]

    assert (
        names("dtype=bfloat16")
        == names("max_new_tokens=null")
        == names("arms.lazy.method.schedule.2=0.5")
        == ["a"]
    )
    assert (
        names("max_new_tokens=3")
        == names("arms.lazy.method.name=gemfilter", "dtype=float32")
        == ["b"]
    )
    with pytest.raises(
        UserError, match=r"--where dtype=int8: no such run; dtype is one of bfloat16, float32"
    ):
        names("dtype=int8")
    assert choose([], ["dtype=int8"]) == []
    for wrong in ("dtypo=int8", "dtype"):
        with pytest.raises(
            UserError,
            match=rf"--where {wrong}: expected KEY=VALUE with a key of these runs: .*dtype",
        ):
            names(wrong)


def test_an_answer_has_the_stored_numbers_and_those_that_follow() -> None:
    percent = {
        "score": 0.25,
        "rouge_l": 0.5,
        "prefill_mfu": 0.3,
        "top1_agrees": 1,
        "edit_similarity": 0.4,
        "same_answer": 0,
    }
    counts = {
        "scoring_tokens": 10,
        "kv_bytes": 640,
        "aux_bytes": 32,
        "peak_memory_bytes": 9000,
        "prefill_flops": 100,
        "leading_tokens": 2,
    }
    plain = {"ttft_s": 0.2, "scoring_s": 0.1, "revived_tokens": 5.0, **dict.fromkeys(
        ("kl", "answer_kl", "gold_kl", "answer_log_likelihood", "gold_log_likelihood"),
        -0.5)}  # fmt: skip
    lists = {
        "decode_step_s": [0.1, 0.3],
        "token_ids": [1, 2, 3],
        "group_layers": [3, 1],
        "computed": [[200, 40], [200, 80]],
    }
    example = visit(
        7, prompt_tokens=200, attention_ceiling=1.5, **percent, **counts, **plain, **lists
    )
    derived = {
        "total_s": 0.6, "step_s": 0.2, "generated_tokens": 3, "attention_ceiling": 1.5,
        "pct_prompt_tokens_computed": 100 * (10 + (3 * 200 + 80) / 4) / 200,
    }  # fmt: skip
    expected = {name: 100 * share for name, share in percent.items()} | counts | plain | derived
    assert expected.keys() == set(MEASURED)
    assert numbers_of(example, example.answers["lazy"]) == pytest.approx(expected)


def test_a_row_has_the_answers_numbers_and_their_origin(tmp_path: Path) -> None:
    bare = answer(decode_step_s=[], token_ids=[1])
    example = visit(
        7,
        "gov_report",
        arms={"baseline": bare, "lazy": answer(decode_step_s=[0.1, 0.3])},
        groups=["long"],
    )
    folder = write_run(
        tmp_path / "one", [example], "random_drop", {"keep": 0.5, "seed": 4}, paper="llama2"
    )
    (results,) = read_results([tmp_path])
    frame: Any = results.frame
    assert list(frame.columns) == COLUMNS
    baseline, row = frame.to_dict("records")
    expected = {
        "model": "tiny", "paper_model": "llama2", "run": results.runs[0].about["fingerprint"],
        "folder": str(folder),
        "arm": "lazy", "method": "random_drop", "settings": '{"keep": 0.5}',
        "label": "random_drop, keep=0.5",
        "speedup": None, "seed": 4, "is_baseline": False, "dataset": "gov_report",
        "task": "summarization",
        "suite": "longbench", "id": "row-7", "groups": ["long"], "prompt_tokens": 100, "visit": 0,
        "counts": True,
    }  # fmt: skip
    assert {key: row[key] for key in expected} == expected
    assert expected.keys() | {*MEASURED, "token_s"} == {*COLUMNS}
    assert row["token_s"] == pytest.approx((0.2, 0.3, 0.6))
    assert {name: row[name] for name in MEASURED} == pytest.approx(
        numbers_of(example, example.answers["lazy"]), nan_ok=True
    )
    assert (baseline["arm"], baseline["seed"], baseline["is_baseline"], baseline["token_s"]) == (
        "baseline",
        0,
        True,
        (0.2,),
    )
    assert all(
        math.isnan(baseline[missing]) for missing in ("step_s", "rouge_l", "peak_memory_bytes")
    )
    batch = visit(decode_step_s=None)
    assert math.isnan(numbers_of(batch, batch.answers["lazy"])["total_s"])


def test_measurements_are_behind_their_rows() -> None:
    results = Results([stored([visit(row, prompt_tokens=10 + row) for row in range(3)])])
    rows: Any = results.counting.iloc[::-1]
    found = [(visit.prompt_tokens, answer.text) for visit, answer in results.answers(rows)]
    assert found == [(10 + row, text) for text in ("an answer", "base") for row in (2, 1, 0)]


def test_several_runs_of_a_setting_count_once_and_a_sentence_says_which() -> None:
    runs = [
        stored([visit(0, score=0.25)], folder=Path("look"), provenance={"started": "2026-02"}),
        stored(
            [visit(0, score=1.0), visit(1)], folder=Path("whole"), provenance={"started": "2026-01"}
        ),
    ]
    results = Results(runs)
    counting = results.counting[results.counting["arm"] == "lazy"]
    assert counting[["id", "score"]].to_numpy().tolist() == [["row-0", 100], ["row-1", 50]]
    (sentence,) = results.choices
    start = (
        "lazy, schedule=paper (hotpotqa): measured in look and in whole; tables count whole, which"
    )
    assert sentence.startswith(start)
    again = stored([visit(0), visit(1)], folder=Path("again"), provenance={"started": "2026-03"})
    assert {*Results([*runs, again]).counting["folder"]} == {"again"}  # as many, but newer


def test_a_setting_is_named_by_its_speedup_and_hyperparameters() -> None:
    assert label_of("baseline", {}) == "baseline"
    assert (
        label_of("lazy", {"schedule": {"2": 0.3}, "revive": False})
        == "lazy, schedule={2: 0.3}, revive=false"
    )
    assert (
        label_of("prompt_compression", {"keep": 0.5, "scorer": None})
        == "prompt_compression, keep=0.5"
    )
    labels = {2.0: "static_pruning, speedup=2x, layer=2",
    1.25: "static_pruning, speedup=1.25x, layer=2",
             "table1": "static_pruning, speedup=table1, layer=2"}  # fmt: skip
    for speedup, label in labels.items():
        run = stored(
            [visit()],
            "static_pruning",
            {"layer": 2, "speedup": speedup},
            solved={"hotpotqa": {"keep": 0.3}},
        )
        arm, row = run.arms["lazy"], run.rows.iloc[1]
        # what was solved for is not named
        assert (arm.speedup, arm.values) == (speedup, {"speedup": speedup, "layer": 2})
        assert (arm.label, row["label"], row["speedup"]) == (label, label, speedup)
        assert json.loads(row["settings"]) == arm.values


def test_unfinished_runs_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [visit(0)])
    assert read_results([tmp_path])[0].unfinished == []  # nothing is known of a plan
    (folder / "examples.json").write_text(json.dumps({"hotpotqa": ["row-0", "row-1", "row-2"]}))
    assert read_results([tmp_path])[0].unfinished == ["Unfinished: a, 1 of 3 examples."]
    assert [run.visits for run in stored_runs([tmp_path])] == [[visit(0)]]


def test_a_run_without_an_answer_is_named_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path / "whole", [visit(0)])
    plan(write_run(tmp_path / "begun", []), hotpotqa=2)
    (results,) = read_results([tmp_path])
    assert [run.folder.name for run in results.runs] == ["whole"]
    assert "Unfinished: begun, 0 of 2 examples." in caplog.text


def plan(folder: Path, **rows: int) -> None:
    content = {name: [f"row-{row}" for row in range(count)] for name, count in rows.items()}
    (folder / "examples.json").write_text(json.dumps(content))


def test_a_task_of_an_unfinished_run_stands_apart_until_it_is_whole(tmp_path: Path) -> None:
    """One row of another dataset, of a run that was stopped, joined the mean over tasks and took
    its interval away."""
    whole = write_run(tmp_path / "whole", over(("hotpotqa",), 6, score=0.5))
    plan(whole, hotpotqa=6)
    stopped = write_run(tmp_path / "stopped", over(("trec",), 1, score=0.0), data={"trec": "1"})
    plan(stopped, trec=6)

    def mean(results: Results) -> tuple[float, int, bool]:
        rows: Any = results.by_task
        (row,) = rows[(rows["level"] == "all") & (rows["method"] == "lazy")].to_dict("records")
        return row["score"], row["examples"], math.isnan(row["score_low"])

    (results,) = read_results([tmp_path])
    assert mean(results) == (50, 6, False)
    assert results.unfinished == [
        "Unfinished: stopped, 1 of 6 examples. No table counts its few_shot until it is whole."
    ]
    assert results.choices == []
    # it has nothing to stand beside
    (alone,) = read_results([stopped])
    assert (mean(alone), alone.unfinished) == (
        (0, 1, True),
        ["Unfinished: stopped, 1 of 6 examples."],
    )
    write_run(stopped, over(("trec",), 6, score=0.0)[1:], data={"trec": "1"})
    (results,) = read_results([tmp_path])
    assert (mean(results), results.unfinished) == ((25, 12, False), [])


def test_a_whole_run_counts_before_a_longer_unfinished_one(tmp_path: Path) -> None:
    """What a stopped run has finished counts, and a failed answer leaves nothing unfinished."""
    look = write_run(tmp_path / "look", over(("trec",), 2, score=1.0))
    plan(look, trec=2)
    visits = [*over(("hotpotqa",), 3, score=0.5), *over(("trec",), 5, score=0.5)]
    visits[0].arms["lazy"] = FAILED
    stopped = write_run(tmp_path / "stopped", visits, warmup=0)
    plan(stopped, hotpotqa=3, trec=9)
    (results,) = read_results([tmp_path])
    lazy = results.counting[results.counting["method"] == "lazy"]
    found = {name: (len(rows), {*rows["score"]}) for name, rows in lazy.groupby("dataset")}
    assert found == {"trec": (2, {100.0}), "hotpotqa": (2, {50.0})}
    assert results.unfinished[0].endswith(
        "7 of 12 examples. No table counts its few_shot until it is whole."
    )
    assert "look, which is whole" in results.choices[0]


def damage(tmp_path: Path) -> None:
    """Four runs that are damaged in one file each, between two that are whole."""
    for name in "abcdef":
        plan(write_run(tmp_path / name, over(("trec",), 2), seed=ord(name)), trec=2)
    (tmp_path / "a" / "run.json").write_text("{")
    (tmp_path / "c" / "visits.jsonl").write_text("{}\n")
    (tmp_path / "d" / "examples.json").write_text("[")
    (tmp_path / "e" / "jobs.jsonl").write_text('{"event": "middle"}\n')


NAMED = ["a/run.json: ", "c/visits.jsonl:1: ", "d/examples.json: ", "e/jobs.jsonl:1: "]


def test_results_and_status_name_all_damaged_runs_and_show_the_whole_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(tmp_path)
    assert cli.main(["results", str(tmp_path), "--json"]) == 1
    captured = capsys.readouterr()
    (row,) = [row for row in json.loads(captured.out) if row["method"] == "lazy"]
    assert row["seeds"] == 2
    assert [name for name in NAMED if name in captured.err] == NAMED
    assert cli.main(["status", str(tmp_path), "--json"]) == 1
    lines = {line["run"]: line for line in json.loads(capsys.readouterr().out)}
    assert {name for name, line in lines.items() if line["state"] == "failed"} == set("acde")
    assert all(name in lines[name[0]]["why"] for name in NAMED)
    with pytest.raises(UserError) as refused:  # tables on disk would not say what they lack
        read_results([tmp_path])
    assert [name for name in NAMED if name in str(refused.value)] == NAMED


def test_only_damaged_runs_are_no_results(tmp_path: Path) -> None:
    damage(tmp_path)
    with pytest.raises(UserError, match=r"c/visits.jsonl:1: .*no run with answers"):
        read_results([tmp_path / "c"])
    # what --where leaves out is not read
    assert len(read_results([tmp_path / "b", tmp_path / "c"], ["seed=98"])) == 1
