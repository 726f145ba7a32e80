"""What a run gives to W&B: its calls are recorded by a stand-in, and one run is W&B's own, offline.

W&B has no reader of its offline files in Python, so values are compared in the calls.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from eval.analysis.run_table import run_table
from eval.config import TrackerSettings
from eval.run.wandb_run import open_trackers
from eval.store.folder import read_about, read_visits
from eval.store.results import Results
from eval.store.runs import StoredRun
from tests.eval.store.visits import only, visit
from tests.runs import checked, measured

SECRET = "5ecret" * 8
ARMS = {
    "baseline": {"method": {"name": "baseline"}},
    "lazy": {"method": {"name": "lazy", "schedule": {"2": 0.3}}},
}
ABOUT = {
    "fingerprint": "abc",
    "identity": {"model": "tiny", "arms": ARMS, "baseline": "baseline", "seed": 0, "device": "X"},
    "config": {"model": {"name": "tiny", "paper": None}, "limit": 2, "label": "l"},
    "provenance": {"machine": {"device": "X"}, "started": "2026-01-02T03:04:05Z"},
}


def timed(score: float, ttft_s: float, step_s: float, computed: int) -> dict[str, Any]:
    """Fields of an answer that computed this share of 100 prompt tokens in each layer."""
    counts = {"group_layers": [4], "computed": [[computed]]}
    return {"score": score, "ttft_s": ttft_s, "decode_step_s": [step_s], "text": "yes", **counts}


FIRST = visit("a", gold=["yes", "so"], baseline=timed(0.5, 0.3, 0.7, 100), **timed(1, 0.1, 0.4, 50))
SECOND = visit("b", "trec", gold=[], baseline=timed(1, 0.5, 0, 100), **timed(0, 0.3, 0.2, 70))
# by hand: (1 + 0) / 2 and (0.3 + 0.5) / (0.1 + 0.3) and (1.0 + 0.5) / (0.5 + 0.5)
AFTER_FIRST = {
    "examples": 1, "running/score": 100, "running/pct_prompt_tokens_computed": 50,
    "running/ttft_speedup": 3, "running/generation_speedup": 2,
}  # fmt: skip
AFTER_SECOND = {
    "examples": 2, "running/score": 50, "running/pct_prompt_tokens_computed": 60,
    "running/ttft_speedup": 2, "running/generation_speedup": 1.5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _a_users_machine(tmp_path: Path, monkeypatch, wandb_ends: None) -> None:
    """A key that must not be written, an empty home folder, and the test's own working folder."""
    (tmp_path / "home").mkdir()
    os.environ |= {"HOME": str(tmp_path / "home"), "WANDB_RUN_GROUP": "a-sweep"}
    os.environ |= {"WANDB_API_KEY": SECRET, "HF_TOKEN": f"hf_{SECRET}"}
    monkeypatch.setattr(sys, "argv", ["run.py", f"anything={SECRET}"])
    monkeypatch.chdir(tmp_path)


def stand_in(monkeypatch: pytest.MonkeyPatch, fails: str = "") -> list[Mock]:
    """The runs that W&B's stand-in makes, each with what `wandb.init` was `given`."""
    runs: list[Mock] = []

    def init(**given: Any) -> Mock:
        runs.append(run := Mock(given=given, offline=True, dir="wandb/offline/files"))
        error = OSError("no such server")
        if fails == "init":
            raise error
        run.configure_mock(**({f"{fails}.side_effect": error} if fails else {}))
        return run

    monkeypatch.setattr("wandb.init", init)
    return runs


def logged(run: Mock, key: str = "examples") -> list[dict[str, Any]]:
    """What was logged with this key: by default, the history."""
    return [call.args[0] for call in run.log.call_args_list if key in call.args[0]]


RESULTS = Results([StoredRun(Path("run"), ABOUT, [FIRST, SECOND])])


def tracked(second: Any = SECOND) -> None:
    """Track a run of two examples."""
    Path("run").mkdir()
    Path("run/visits.jsonl").write_text("{}\n")
    Path("run/other.txt").write_text("not shared")
    with open_trackers(TrackerSettings(name="wandb"), RESULTS.runs[0]) as trackers:
        for tracker in trackers:
            tracker.visit(FIRST)
            tracker.visit(second)
            tracker.finish(RESULTS, run_table(RESULTS, "a run"), [])


def test_each_arm_is_a_run_of_one_group(monkeypatch) -> None:
    runs = stand_in(monkeypatch)
    tracked()
    first, second = (run.given for run in runs)
    assert (first["id"], second["id"]) == ("abc-0", "abc-1")
    assert (first["name"], second["name"]) == ("tiny, baseline", "tiny, lazy")
    for init, arm in ((first, "baseline"), (second, "lazy")):
        found = (init["group"], init["mode"], init["reinit"])
        assert found == ("a-sweep", "offline", "create_new")
        assert init["config"] | ABOUT["config"] == init["config"]
        assert (init["config"]["identity"], init["config"]["arm"]) == (ABOUT["identity"], arm)
        assert init["config"]["fingerprint"] == "abc"
        assert init["config"]["provenance"] == ABOUT["provenance"]


def test_arm_shows_history_summary_table_and_the_first_one_files(monkeypatch) -> None:
    runs = stand_in(monkeypatch)
    tracked()
    baseline, mine = runs
    assert logged(mine) == [pytest.approx(AFTER_FIRST), pytest.approx(AFTER_SECOND)]
    assert [row["running/score"] for row in logged(baseline)] == [50, 75]
    assert [row["running/ttft_speedup"] for row in logged(baseline)] == [1, 1]
    # by hand, of FIRST (hotpotqa, multi_doc_qa) and SECOND (trec, few_shot)
    expected = {
        "multi_doc_qa/score": 100, "multi_doc_qa/ttft_speedup": 3, "few_shot/score": 0,
        "few_shot/ttft_speedup": 5 / 3, "all/score": 50, "all/pct_prompt_tokens_computed": 60,
        "all/examples": 2, "few_shot/kv_bytes": 640,
    }  # fmt: skip
    reference, summary = (run.summary.update.call_args.args[0] for run in runs)
    assert {key: summary[key] for key in expected} == pytest.approx(expected)
    assert (reference["all/score"], reference["all/ttft_speedup"]) == (75, 1)
    table = logged(mine, "per_example")[0]["per_example"]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.data]
    shared = ["dataset", "id", "prompt_tokens", "score", "ttft_s", "ttft_speedup", "answer", "gold"]
    assert [[row[column] for column in shared] for row in rows] == [
        ["hotpotqa", "row-a", 100, 100, 0.1, pytest.approx(3), "yes", "yes | so"],
        ["trec", "row-b", 100, 0, 0.3, pytest.approx(5 / 3), "yes", ""],
    ]
    assert set(baseline.log_artifact.call_args.args[0].manifest.entries) == {"visits.jsonl"}
    mine.log_artifact.assert_not_called()
    for run in runs:
        run.finish.assert_called_once_with(exit_code=0)


def test_arm_without_an_answer_in_a_visit_shows_nothing_of_it(monkeypatch) -> None:
    runs = stand_in(monkeypatch)
    tracked(only(SECOND, "lazy"))
    baseline, mine = map(logged, runs)
    assert [row["examples"] for row in baseline] == [1]
    assert [row["examples"] for row in mine] == [1, 2]
    # a speedup is of the visits that hold both
    assert [row["running/ttft_speedup"] for row in mine] == [pytest.approx(3)] * 2


def test_offline_run_of_wandb_writes_no_secret(caplog) -> None:
    import wandb

    tracked()
    wandb.teardown()  # W&B's service ends, which completes the files
    files = [file for file in Path("run/wandb").rglob("*") if file.is_file()]
    assert {".wandb", ".json"} <= {file.suffix for file in files}
    assert not [file for file in files if SECRET.encode() in file.read_bytes()]
    tables = [json.loads(file.read_text()) for file in Path("run/wandb").rglob("per_example*.json")]
    assert [len(table["data"]) for table in tables] == [2, 2]
    assert len({file.parent for file in files if file.suffix == ".wandb"}) == 2
    assert "W&B failed" not in caplog.text


CALLS = ("init", "define_metric", "log", "summary.update", "log_artifact", "finish")


@pytest.mark.parametrize("call", CALLS)
def test_run_is_whole_if_wandb_fails(monkeypatch, caplog, call: str) -> None:
    stand_in(monkeypatch, fails=call)
    tracked()
    said = "W&B failed (OSError: no such server); the run goes on without it"
    # once for each arm's
    assert caplog.text.count(said) == (1 if call == "log_artifact" else 2)


def test_trackers_end_with_error_of_run(monkeypatch) -> None:
    runs, settings = stand_in(monkeypatch), TrackerSettings(name="wandb")
    with pytest.raises(ZeroDivisionError), open_trackers(settings, RESULTS.runs[0]):
        _ = 1 / 0
    assert [run.finish.call_args.kwargs for run in runs] == [{"exit_code": 1}] * 2


def test_run_passes_trackers_its_visits_and_table(monkeypatch) -> None:
    runs = stand_in(monkeypatch)
    del os.environ["WANDB_RUN_GROUP"]
    quick = ["dataset=lookup", "limit=2", "max_new_tokens=3", "warmup=0", "baseline=false"]
    measured(checked("tracker=wandb", "label=mine", "out=run", *quick))
    about, visits = read_about(Path("run/run.json")), read_visits(Path("run"))
    (run,) = runs
    assert (run.given["id"], run.given["group"]) == (f"{about['fingerprint']}-0", "mine")
    assert [row["examples"] for row in logged(run)] == [1, 2]
    table = logged(run, "per_example")[0]["per_example"]
    assert table.get_column("id") == [visit.id for visit in visits]
    assert table.get_column("ttft_speedup") == [None, None]
    names = {name for call in run.log.call_args_list for name in call.args[0]}
    assert any(name.startswith("figures/") for name in names)
