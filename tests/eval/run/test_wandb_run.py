"""What a run gives to W&B: its calls are recorded by a stand-in, and one run is W&B's own, offline.

W&B has no reader of its offline files in Python, so values are compared in the calls.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval.analysis.run_table import run_table
from eval.analysis.table import Table
from eval.run.config import TrackerConfig
from eval.run.loop import run
from eval.run.resolved import check_early
from eval.run.wandb_run import facts_of, open_tracker
from eval.store.folder import read_about, read_records
from eval.store.record import Measurement, Record
from eval.store.results import Results
from eval.store.runs import StoredRun
from lazyllm.errors import UserError
from tests.eval.store.made import measurement
from tests.runs import run_of

SECRET = "5ecret" * 8
CONFIG = TrackerConfig("wandb", tags=["a-tag"])
ABOUT = {
    "fingerprint": "abc",
    "identity": {"model": "tiny", "method": {"name": "lazy", "schedule": {"2": 0.3}}, "seed": 0, "paired": True},
    "config": {"model": {"name": "tiny", "paper": None}, "limit": 2},
    "provenance": {"cpu": "X"},
}


def timed(score: float, ttft_s: float, total_s: float, computed: float = 50.0, text: str = "yes") -> Measurement:
    return measurement(text, score, ttft_s=ttft_s, total_s=total_s, pct_prompt_tokens_computed=computed)


FIRST = Record(
    "hotpotqa", "a", "abc", 100, 120, timed(1.0, 0.1, 0.5), timed(0.5, 0.3, 1.0, 100.0, "no"), "?", ["yes", "so"]
)
SECOND = Record("trec", "b", "abd", 200, 200, timed(0.0, 0.3, 0.5, 70.0), timed(1.0, 0.5, 0.5, 100.0))
# by hand: two examples, (1 + 0) / 2 and (0.3 + 0.5) / (0.1 + 0.3) and (1.0 + 0.5) / (0.5 + 0.5)
AFTER_FIRST = {
    "examples": 1, "running/score": 100, "running/baseline_score": 50, "running/pct_prompt_tokens_computed": 50,
    "running/ttft_speedup": 3, "running/generation_speedup": 2,
}  # fmt: skip
AFTER_SECOND = {
    "examples": 2, "running/score": 50, "running/baseline_score": 75, "running/pct_prompt_tokens_computed": 60,
    "running/ttft_speedup": 2, "running/generation_speedup": 1.5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _a_users_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A key that must not be written, an empty home folder, and the test's own working folder."""
    (tmp_path / "home").mkdir()
    for name, value in {"HOME": tmp_path / "home", "WANDB_API_KEY": SECRET, "HF_TOKEN": f"hf_{SECRET}"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", ["run.py", f"anything={SECRET}"])
    monkeypatch.chdir(tmp_path)
    yield
    import wandb

    wandb.teardown()


class Shown:
    """A stand-in for W&B's run: the arguments of `wandb.init`, and what is logged. fails: the call that raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: str = "") -> None:
        self.calls: dict[str, list[Any]] = {}
        self.summary = SimpleNamespace(update=self._taken("summary", fails))
        self.offline, self.id, self.dir = True, "abc", "wandb/offline/files"
        for name in ("define_metric", "log", "log_artifact", "finish"):
            setattr(self, name, self._taken(name, fails))
        monkeypatch.setattr("wandb.init", lambda **given: [self._taken("init", fails)(given), self][1])

    def _taken(self, name: str, fails: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> None:
            self.calls.setdefault(name, []).append(arguments[0] if arguments else keywords)
            if name == fails:
                raise OSError("no such server")

        return call


def results() -> Results:
    return Results([StoredRun(Path("run"), ABOUT, [FIRST, SECOND])])


def tracked(*pictures: Path) -> Table:
    """Track a run of two examples; returns its table."""
    table = run_table(results(), "a run")
    Path("run").mkdir()
    Path("run/records.jsonl").write_text("{}\n")
    Path("run/other.txt").write_text("not shared")
    with open_tracker(CONFIG, Path("run"), group="a-sweep", **facts_of(results().runs[0])) as tracker:
        for record in (FIRST, SECOND):
            tracker.record(record)
        tracker.finish(table, [FIRST, SECOND], pictures, Path("run"))
    return table


def test_tracker_shows_config_history_summary_table_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch).calls
    calls = shown if tracked() else {}
    (init,) = calls["init"]
    assert (init["id"], init["name"], init["group"], init["mode"]) == (
        "abc", "tiny, lazy, schedule={2: 0.3}", "a-sweep", "offline",
    )  # fmt: skip
    assert init["config"] | ABOUT["config"] == init["config"]
    assert (init["config"]["identity"], init["config"]["provenance"]) == (ABOUT["identity"], {"cpu": "X"})
    first, second, last = calls["log"]
    assert [first, second] == [pytest.approx(AFTER_FIRST), pytest.approx(AFTER_SECOND)]
    # by hand, of FIRST (hotpotqa, multi_doc_qa) and SECOND (trec, few_shot)
    expected = {
        "hotpotqa/score": 100, "hotpotqa/baseline_score": 50, "hotpotqa/ttft_speedup": 3, "multi_doc_qa/score": 100,
        "trec/score": 0, "few_shot/ttft_speedup": 5 / 3, "all/score": 50, "all/baseline_score": 75,
        "all/pct_prompt_tokens_computed": 60, "all/examples": 2, "trec/kv_bytes": 640, "trec/aux_bytes": 32,
    }  # fmt: skip
    (summary,) = calls["summary"]
    assert {key: summary[key] for key in expected} == pytest.approx(expected)
    table = last["per_example"]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.data]
    shared = ("dataset", "id", "prompt_tokens", "score", "ttft_s", "ttft_speedup", "answer", "baseline_answer", "gold")
    assert [[row[column] for column in shared] for row in rows] == [
        ["hotpotqa", "a", 100, 100, 0.1, pytest.approx(3), "yes", "no", "yes | so"],
        ["trec", "b", 200, 0, 0.3, pytest.approx(5 / 3), "yes", "yes", ""],
    ]
    (artifact,) = calls["log_artifact"]
    assert set(artifact.manifest.entries) == {"records.jsonl"}
    assert calls["finish"] == [{"exit_code": 0}]


def test_offline_run_of_wandb_writes_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    import wandb

    tracked()
    wandb.teardown()  # W&B's service ends, which completes the file
    files = [file for file in Path("run/wandb").rglob("*") if file.is_file()]
    assert {".wandb", ".json"} <= {file.suffix for file in files}
    assert not [file for file in files if SECRET.encode() in file.read_bytes()]
    (table,) = Path("run/wandb").rglob("per_example*.json")
    assert len(json.loads(table.read_text())["data"]) == 2
    assert "W&B failed" not in caplog.text


@pytest.mark.parametrize("call", ["init", "define_metric", "log", "summary", "log_artifact", "finish"])
def test_run_is_whole_if_wandb_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call) -> None:
    Shown(monkeypatch, fails=call)
    tracked()
    assert caplog.text.count("W&B failed (OSError: no such server); the run goes on without it") == 1


def test_tracker_ends_with_error_of_run(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch)
    with pytest.raises(ZeroDivisionError), open_tracker(CONFIG, Path("run")):
        _ = 1 / 0
    assert shown.calls["finish"] == [{"exit_code": 1}]


def test_online_run_without_a_key_or_without_wandb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", "nowhere")
    for tracker, expected in (("none", "tracker=wandb with it"), ("wandb", "a key .wandb login")):
        with pytest.raises(UserError, match=f"tracker.mode=online: expected {expected}"):
            check_early(run_of(f"tracker={tracker}", "tracker.mode=online"))


def test_run_passes_tracker_its_records_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Shown(monkeypatch).calls
    quick = ["dataset=lookup", "limit=2", "max_new_tokens=3", "timing.warmup=0", "out=run", "timing.paired=false"]
    run(run_of("tracker=wandb", "label=mine", *quick), show=False)
    about, records = read_about(Path("run/run.json")), read_records(Path("run"))
    assert (calls["init"][0]["id"], calls["init"][0]["group"]) == (about["fingerprint"], "mine")
    assert [row["examples"] for row in calls["log"] if "examples" in row] == [1, 2]
    (table,) = [row["per_example"] for row in calls["log"] if "per_example" in row]
    assert table.get_column("id") == [record.id for record in records]
    assert table.get_column("baseline_score") == [None, None]
    assert {name.partition("/")[0] for row in calls["log"] for name in row if "figures" in name} == {"figures"}
