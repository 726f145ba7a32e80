from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.store.folder import fingerprint, read_records
from eval.store.results import COLUMNS, as_frame, chosen, find_runs
from eval.store.runs import label_of
from lazyllm.errors import UserError
from tests.eval.store.made import LAZY, PROVENANCE, measurement, record, write_run


def test_runs_are_listed_at_any_depth_and_in_order(tmp_path: Path) -> None:
    write_run(tmp_path / "b", [record(0)])
    write_run(tmp_path / "a" / "deep", [record(1)], seed=1)
    write_run(tmp_path / "begun", [], seed=2)
    (tmp_path / "stray.jsonl").write_text("{}")
    runs = find_runs([tmp_path, tmp_path / "a"])
    assert [run.folder for run in runs] == [tmp_path / "a" / "deep", tmp_path / "b"]
    assert runs[1].records == [record(0)]
    assert [run.seed for run in runs] == [1, 0]
    assert runs[0].settings == {"schedule": {"2": 0.5}, "prune_generated": False, "revive": True}


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        find_runs([tmp_path / "absent"])
    assert list(as_frame([]).columns) == COLUMNS
    write_run(tmp_path / "begun", [])
    with pytest.raises(UserError, match="no run with records"):
        find_runs([tmp_path])


@pytest.mark.parametrize(
    ("identity", "apart"),
    [
        ({"code": "another"}, "code=another"),
        ({"code": "0123456789abcdef"}, "code=0123"),
        ({"versions": {"torch": "3"}}, "versions.torch=3"),
        ({"max_new_tokens": 3}, "max_new_tokens=3"),
        # the first four digits of the hash of the rows that differ
        ({"data": {"hotpotqa": "another"}}, f"rows {fingerprint({'rows of hotpotqa': 'another'})[:4]}"),
        ({"turns": 4, "data": {"hotpotqa": "another"}}, "turns=4"),  # as short as tells it apart
    ],
)
def test_model_name_tells_runs_apart_that_share_no_table(tmp_path: Path, identity: dict[str, Any], apart: str) -> None:
    usual: dict[str, Any] = {
        "data": {"hotpotqa": "1234 5678"}, "device": "a", "versions": {"torch": "2"}, "max_new_tokens": None,
        "turns": 1,
    }  # fmt: skip
    write_run(tmp_path / "a", [record(0)], **usual)
    write_run(tmp_path / "b", [record(0)], **usual | identity)
    write_run(tmp_path / "c", [record(1)], **usual, seed=1)
    runs = find_runs([tmp_path])
    assert [run.model for run in runs] == ["tiny", f"tiny ({apart})", "tiny"]
    assert as_frame(runs)["model"].tolist() == ["tiny", f"tiny ({apart})", "tiny"]
    assert len(runs[1].facts) == len(identity)  # all of them, for the table of settings


def test_model_name_has_more_facts_if_others_share_the_first(tmp_path: Path) -> None:
    odd = [{}, {}, {"code": "2", "dtype": "x"}, {"code": "2"}, {"dtype": "x"}]
    for number, identity in enumerate(odd):
        write_run(tmp_path / str(number), [record(0)], **{"dtype": "usual"} | identity)
    names = [run.model for run in find_runs([tmp_path])]
    assert names == ["tiny", "tiny", "tiny (code=2, dtype=x)", "tiny (code=2)", "tiny (dtype=x)"]


def test_model_names_differ_though_their_hashes_begin_alike(tmp_path: Path) -> None:
    for number, code in enumerate(["1", "1", "0123456789abcdef", "0123fedcba9876543"]):
        write_run(tmp_path / str(number), [record(0)], code=code)
    assert [run.model for run in find_runs([tmp_path])][2:] == ["tiny (code=01234567)", "tiny (code=0123fedc)"]


def test_newest_of_equally_common_settings_has_the_plain_name(tmp_path: Path) -> None:
    for name, started in (("a", "2026-01-02"), ("b", "2026-01-01")):
        write_run(tmp_path / name, [record(0)], provenance=PROVENANCE | {"started": started}, code=name)
    assert [run.model for run in find_runs([tmp_path])] == ["tiny", "tiny (code=b)"]
    assert [run.folder.name for run in find_runs([tmp_path], newest=True)] == ["a"]


def test_where_selects_by_config_and_identity(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [record(0)], dtype="bfloat16", max_new_tokens=None)
    write_run(tmp_path / "b", [record(0)], {"name": "baseline"}, dtype="float32", max_new_tokens=3)

    def names(*where: str) -> list[str]:
        return [run.folder.name for run in find_runs([tmp_path], where)]

    assert names("dtype=bfloat16") == names("max_new_tokens=null") == names("method.schedule.2=0.5") == ["a"]
    assert names("max_new_tokens=3") == names("method.name=baseline", "dtype=float32") == ["b"]
    with pytest.raises(UserError, match=r"--where dtype=int8: no such run; dtype is one of bfloat16, float32"):
        names("dtype=int8")
    assert chosen([], ["dtype=int8"]) == []
    for wrong in ("dtypo=int8", "dtype"):
        with pytest.raises(UserError, match=rf"--where {wrong}: expected KEY=VALUE with a key of these runs: .*dtype"):
            names(wrong)


def test_methods_seeds_and_models_share_tables(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [record(0)])
    write_run(tmp_path / "b", [record(0)], {"name": "baseline"}, paired=False, seed=3, data={"x": "y"}, warmup=1)
    write_run(tmp_path / "c", [record(0)], LAZY | {"schedule": "table1"}, parameters={"hotpotqa": LAZY})
    write_run(tmp_path / "d", [record(0)], model="folder/llama", paper="llama2", code="2")
    runs = find_runs([tmp_path])
    assert [(run.model, run.paper_model, run.method) for run in runs] == [
        ("tiny", None, "lazy"),
        ("tiny", None, "baseline"),
        ("tiny", None, "lazy"),
        ("llama", "llama2", "lazy"),
    ]


def test_frame_row_holds_the_record(tmp_path: Path) -> None:
    one = replace(
        record(7, "gov_report"),
        method=measurement(
            score=0.25, rouge_l=0.5, ttft_s=0.2, total_s=0.6, scoring_s=0.1, decode_step_s=[0.1, 0.3],
            token_ids=[1, 2, 3], peak_memory_bytes=9, scoring_tokens=7,
        ),
        baseline=measurement(decode_step_s=[], token_ids=[1]),
    )  # fmt: skip
    write_run(tmp_path, [one], {"name": "random_drop", "keep": 0.5, "seed": 4}, seed=4)
    frame = as_frame(find_runs([tmp_path]))
    assert list(frame.columns) == COLUMNS
    row = frame.iloc[0].to_dict()
    expected = {
        "model": "tiny", "method": "random_drop", "settings": '{"keep": 0.5}', "label": "random_drop, keep=0.5",
        "seed": 4, "paired": True, "dataset": "gov_report", "task": "summarization", "suite": "longbench",
        "id": "row-7", "prompt_tokens": 100, "score": 25, "rouge_l": 50, "ttft_s": 0.2, "scoring_s": 0.1,
        "total_s": 0.6, "step_s": 0.2, "generated_tokens": 3, "pct_prompt_tokens_computed": 75, "kv_bytes": 640,
        "aux_bytes": 32, "scoring_tokens": 7, "peak_memory_bytes": 9, "baseline_score": 50,
        "baseline_generated_tokens": 1, "baseline_ttft_s": 0.2, "baseline_scoring_tokens": 0,
    }  # fmt: skip
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    for missing in ("baseline_step_s", "baseline_rouge_l", "baseline_peak_memory_bytes"):
        assert math.isnan(row[missing])


def test_paired_measurement_goes_before_unpaired(tmp_path: Path) -> None:
    alone = replace(record(0), method=measurement(score=0.0), baseline=None)
    write_run(tmp_path / "a", [alone, replace(alone, id="only here")], paired=False)
    write_run(tmp_path / "b", [record(0, score=1.0)])
    frame = as_frame(find_runs([tmp_path]))
    assert frame[["id", "score", "paired"]].to_numpy().tolist() == [["only here", 0, False], ["row-0", 100, True]]


def test_frame_refuses_example_measured_twice(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [record(0), record(2)])
    write_run(tmp_path / "b", [record(1), record(0)], warmup=9)
    message = r"row-0, lazy, schedule=.* measured twice, in .*/a and .*/b; remove one, or choose by warmup: --where"
    with pytest.raises(UserError, match=message):
        as_frame(find_runs([tmp_path]))


@pytest.mark.parametrize(
    ("method", "settings", "label"),
    [
        ("baseline", {}, "baseline"),
        ("lazy", {"schedule": {"2": 0.3}, "prune_generated": False, "revive": True}, "lazy, schedule={2: 0.3}"),
        ("lazy", {"schedule": "paper", "revive": False}, "lazy, schedule=paper, revive=false"),
        ("prompt_compression", {"keep": 0.5, "scorer": None}, "prompt_compression, keep=0.5"),
    ],
)
def test_label_leaves_out_usual_values(method: str, settings: dict[str, Any], label: str) -> None:
    assert label_of(method, json.loads(json.dumps(settings))) == label


def test_run_with_more_examples_goes_before_a_first_look(tmp_path: Path) -> None:
    write_run(tmp_path / "look", [record(0, score=0.25)])
    write_run(tmp_path / "whole", [record(0, score=1.0), record(1)], warmup=9)
    frame = as_frame(find_runs([tmp_path]))
    assert frame["id"].tolist() == ["row-0", "row-1"]
    assert frame["score"].tolist() == [100, 50]


def test_frame_takes_the_paired_run_though_two_unpaired_ones_are_equal(tmp_path: Path) -> None:
    for warmup in (1, 2):
        write_run(tmp_path / f"{warmup}", [replace(record(0), baseline=None)], paired=False, warmup=warmup)
    write_run(tmp_path / "paired", [record(0)])
    assert as_frame(find_runs([tmp_path]))["paired"].tolist() == [True]


def test_records_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    monkeypatch.setattr("eval.store.runs.read_records", lambda folder: folders.append(folder) or read_records(folder))
    write_run(tmp_path, [record(0)])
    assert len(as_frame(find_runs([tmp_path]))) == len(folders) == 1
