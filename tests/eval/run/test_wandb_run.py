"""Files of an offline W&B run, read without wandb's own reader."""

from __future__ import annotations

import json
import logging
import math
import os
import struct
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from eval.analysis.run_table import run_json, run_table
from eval.analysis.table import Table
from eval.run.config import TrackerConfig
from eval.run.loop import run
from eval.run.wandb_run import open_tracker, summary_keys, track_pictures
from eval.store.folder import fingerprint, open_store, read_run
from eval.store.record import Measurement, Record
from eval.store.results import Results
from eval.store.runs import StoredRun
from tests.runs import run_of

ROOT = Path(__file__).resolve().parents[3]
SECRET = "5ecret" * 8
OFFLINE = TrackerConfig("wandb", mode="offline", tags=["a-tag"])
IDENTITY = {"model": "tiny", "method": {"name": "lazy", "schedule": {"2": 0.3}}, "seed": 0, "paired": True}
CONFIG = {
    "model": {"name": "tiny", "paper": None},
    "method": {"name": "lazy", "schedule": {2: 0.3}},
    "limit": 2,
}


@pytest.fixture(autouse=True)
def _a_users_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator:
    """No key or setting for W&B, an empty home folder, and the test's own working folder."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / ".netrc"))
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # the next test sets the environment again


def measurement(score: float, ttft_s: float, total_s: float, computed: float = 50.0, text: str = "yes") -> Measurement:
    return Measurement(
        text=text, token_ids=[3, 4], score=score, rouge_l=None, ttft_s=ttft_s, scoring_s=0.0, total_s=total_s,
        decode_step_s=[0.1], pct_prompt_tokens_computed=computed, group_starts=[1, 3], computed=[[8, 4], [8, 5]],
        kv_bytes=640, aux_bytes=32, peak_memory_bytes=None,
    )  # fmt: skip


FIRST = Record(
    "hotpotqa",
    "a",
    "abc",
    100,
    120,
    measurement(1.0, 0.1, 0.5),
    measurement(0.5, 0.3, 1.0, 100.0, "no"),
    "?",
    ["yes", "so"],
)
SECOND = Record("trec", "b", "abd", 200, 200, measurement(0.0, 0.3, 0.5, 70.0), measurement(1.0, 0.5, 0.5, 100.0))
# by hand: two examples, (1 + 0) / 2 and (0.3 + 0.5) / (0.1 + 0.3) and (1.0 + 0.5) / (0.5 + 0.5)
AFTER_FIRST = {
    "examples": 1, "running/score": 100, "running/baseline_score": 50, "running/pct_prompt_tokens_computed": 50,
    "running/ttft_speedup": 3, "running/generation_speedup": 2,
}  # fmt: skip
AFTER_SECOND = {
    "examples": 2, "running/score": 50, "running/baseline_score": 75, "running/pct_prompt_tokens_computed": 60,
    "running/ttft_speedup": 2, "running/generation_speedup": 1.5,
}  # fmt: skip


def stored_of(folder: Path, *stored: Record) -> StoredRun:
    about = {"fingerprint": fingerprint(IDENTITY), "identity": IDENTITY, "config": CONFIG, "provenance": {"cpu": "X"}}
    return StoredRun(folder, about, list(stored))


def table_of(*records: Record) -> Table:
    return run_table(Results([stored_of(Path("none"), *records)]), "")


def stored_folder(folder: Path, *records: Record) -> Path:
    """A run folder as `eval.run.loop` leaves it."""
    with open_store(folder, IDENTITY, {"config": CONFIG}) as store:
        for record in records:
            store.append(record)
        store.write("summary.json", run_json(table_of(*records), {"config": CONFIG}))
        store.write("summary.md", "| a table |\n")
    return folder


def tracked(folder: Path, config: TrackerConfig = OFFLINE, pictures: tuple[Path, ...] = ()) -> Path:
    """Track a run of two examples, of which an earlier call has measured the first. Returns the run's folder."""
    stored_folder(folder, FIRST, SECOND)
    with open_tracker(config, stored_of(folder, FIRST), "a-sweep") as tracker:
        tracker.record(SECOND)
        tracker.finish(table_of(FIRST, SECOND), [FIRST, SECOND], pictures)
    (offline,) = (folder / "wandb").glob("offline-run-*")
    return offline


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our warnings to the user; wandb's own log is not shown."""
    return [
        record.getMessage()
        for record in caplog.records
        if (record.name, record.levelname) == ("eval.run.wandb_run", "WARNING")
    ]


# ------------------------------------------------------------------------------------------------- reading a file back

BLOCK, FULL, FIRST_PART, LAST_PART = 32 * 1024, 1, 2, 4


def chunks(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log with a header of 7 bytes: crc32, length and type before each part of one."""
    assert data[:4] == b":W&B"
    place, parts = 7, []
    while place < len(data):
        left = BLOCK - place % BLOCK
        if left < 7:  # too little for a part: padding
            place += left
            continue
        crc, length, kind = struct.unpack("<IHB", data[place : place + 7])
        body = data[place + 7 : place + 7 + length]
        assert zlib.crc32(bytes([kind]) + body) == crc
        place += 7 + length
        if kind in (FULL, FIRST_PART):
            parts = []
        parts.append(body)
        if kind in (FULL, LAST_PART):
            yield b"".join(parts)


class Written:
    """An offline run's file: its run, config, history, last summary, metrics and artifacts."""

    def __init__(self, folder: Path) -> None:
        import wandb
        from wandb.proto import wandb_internal_pb2 as pb

        wandb.teardown()  # wandb's service ends, which completes the file
        self.folder = folder
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.artifacts: list[Any] = []
        self.steps: dict[str, str] = {}
        self.exit_code = None
        (file,) = folder.glob("*.wandb")
        for chunk in chunks(file.read_bytes()):
            record = pb.Record.FromString(chunk)
            match record.WhichOneof("record_type"):
                case "run":
                    self.run = record.run
                    self.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
                case "history":
                    self.history.append(_nested(record.history.item))
                case "summary":
                    self.summary |= _nested(record.summary.update)
                case "metric":
                    self.steps[record.metric.name or record.metric.glob_name] = record.metric.step_metric
                case "artifact":
                    self.artifacts.append(record.artifact)
                case "request" if record.request.HasField("log_artifact"):
                    self.artifacts.append(record.request.log_artifact.artifact)
                case "exit":
                    self.exit_code = record.exit.exit_code

    @property
    def running(self) -> list[dict[str, Any]]:
        """History without what W&B adds and the media."""
        logged = [{key: value for key, value in row.items() if not key.startswith("_")} for row in self.history]
        return [row for row in logged if "examples" in row]

    def table(self) -> list[dict[str, Any]]:
        media = next(row["per_example"] for row in self.history if "per_example" in row)
        content = json.loads((self.folder / "files" / media["path"]).read_text())
        return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]

    def artifact(self, kind: str) -> Any:
        return next(artifact for artifact in self.artifacts if artifact.type == kind)


def _nested(items: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in items:
        *outer, last = item.nested_key or [item.key]
        place = values
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = json.loads(item.value_json)
    return values


# -------------------------------------------------------------------------------------------------------------- values


def test_config_history_summary_table_and_artifact_lie_in_the_offline_file(tmp_path: Path) -> None:
    written = Written(tracked(tmp_path / "run"))
    assert (written.run.run_id, written.run.run_group) == (fingerprint(IDENTITY), "a-sweep")
    assert (written.run.project, written.run.display_name) == ("lazyllm-bench", "tiny, lazy, schedule={2: 0.3}")
    assert (list(written.run.tags), written.run.job_type) == (["a-tag"], "run")
    assert written.exit_code == 0

    assert written.config["method"] == {"name": "lazy", "schedule": {"2": 0.3}}
    assert written.config["model"] == {"name": "tiny", "paper": None}
    assert written.config["setting"] == "lazy, schedule={2: 0.3}"
    assert (written.config["identity"], written.config["provenance"]) == (IDENTITY, {"cpu": "X"})
    assert (written.config["limit"], written.config["fingerprint"]) == (2, fingerprint(IDENTITY))

    assert written.running == [pytest.approx(AFTER_FIRST), pytest.approx(AFTER_SECOND)]
    assert written.steps["running/*"] == "examples"

    # by hand, of FIRST (hotpotqa, multi_doc_qa) and SECOND (trec, few_shot)
    expected = {
        "hotpotqa/score": 100, "hotpotqa/baseline_score": 50, "hotpotqa/ttft_speedup": 3, "multi_doc_qa/score": 100,
        "trec/score": 0, "few_shot/ttft_speedup": 5 / 3, "all/score": 50, "all/baseline_score": 75,
        "all/pct_prompt_tokens_computed": 60, "all/examples": 2, "trec/kv_bytes": 640, "trec/aux_bytes": 32,
    }  # fmt: skip
    assert {key: written.summary[key] for key in expected} == pytest.approx(expected)

    common = {"kv_bytes": 640, "aux_bytes": 32, "answer": "yes", "total_s": 0.5, "baseline_total_s": 1.0}
    expected_rows = [
        common | {
            "dataset": "hotpotqa", "id": "a", "prompt_tokens": 100, "score": 100, "baseline_score": 50, "ttft_s": 0.1,
            "ttft_speedup": pytest.approx(3), "pct_prompt_tokens_computed": 50, "baseline_answer": "no",
            "gold": "yes | so",
        },
        common | {
            "dataset": "trec", "id": "b", "prompt_tokens": 200, "score": 0, "baseline_score": 100, "ttft_s": 0.3,
            "ttft_speedup": pytest.approx(5 / 3), "pct_prompt_tokens_computed": 70, "baseline_answer": "yes",
            "gold": "", "baseline_total_s": 0.5,
        },
    ]  # fmt: skip
    for row, expected in zip(written.table(), expected_rows, strict=True):
        assert {column: row[column] for column in expected} == expected

    artifact = written.artifact("run")
    files = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert set(files) == {"records.jsonl", "run.json", "summary.json", "summary.md"}
    for name in ("records.jsonl", "summary.md"):
        assert files[name].read_bytes() == (tmp_path / "run" / name).read_bytes()
    assert json.loads(files["run.json"].read_text())["identity"] == IDENTITY


def test_every_number_of_the_table_is_in_the_summary_with_its_interval() -> None:
    values = {"score": 1.5, "score_low": 1.0, "score_high": 2.0, "failed": 1, "score_failed_as_zero": 1.25}
    row = values | {"task": "code", "baseline_score": math.nan}
    rows = [row | {"name": "code", "kind": "task"}, row | {"name": "mean over tasks", "kind": "all"}]
    keys = summary_keys(replace(table_of(SECOND), frame=pd.DataFrame(rows)))
    for name in ("code", "all"):
        assert {column: keys[f"{name}/{column}"] for column in values} == values
        assert f"{name}/baseline_score" not in keys


def test_without_a_paired_baseline_its_columns_are_empty(tmp_path: Path) -> None:
    alone = [replace(record, baseline=None) for record in (FIRST, SECOND)]
    stored_folder(tmp_path / "run", *alone)
    with open_tracker(OFFLINE, stored_of(tmp_path / "run")) as tracker:
        for record in alone:
            tracker.record(record)
        tracker.finish(table_of(*alone), alone)
    written = Written(*(tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert written.running[-1] == {"examples": 2, "running/score": 50, "running/pct_prompt_tokens_computed": 60}
    assert [row["ttft_speedup"] for row in written.table()] == [None, None]
    assert [row["baseline_answer"] for row in written.table()] == [None, None]
    assert written.run.run_group == ""


def test_pictures_and_traces_go_along(tmp_path: Path) -> None:
    import matplotlib.image
    import numpy as np

    picture = tmp_path / "plot.png"
    matplotlib.image.imsave(picture, np.zeros((5, 7, 3)))
    (tmp_path / "run" / "traces").mkdir(parents=True)
    (tmp_path / "run" / "traces" / "one.json").write_text("{}")
    written = Written(tracked(tmp_path / "run", pictures=(picture, tmp_path / "plot.svg")))
    (image,) = [row["figures/plot"] for row in written.history if "figures/plot" in row]
    assert (image["width"], image["height"]) == (7, 5)
    assert (written.folder / "files" / image["path"]).read_bytes() == picture.read_bytes()
    assert "traces/one.json" in {entry.path for entry in written.artifact("run").manifest.contents}

    track_pictures(OFFLINE, tmp_path / "together", "table1", [picture])
    together = Written(*(tmp_path / "together" / "wandb").glob("offline-run-*"))
    assert (together.run.run_group, together.run.job_type) == ("table1", "figures")
    assert any("figures/plot" in row for row in together.history)


def test_a_run_that_goes_on_is_the_same_run_and_is_shown_whole(tmp_path: Path) -> None:
    folder = stored_folder(tmp_path / "run", FIRST)
    with pytest.raises(KeyboardInterrupt), open_tracker(OFFLINE, stored_of(folder)) as tracker:
        tracker.record(FIRST)
        raise KeyboardInterrupt
    (stopped,) = (folder / "wandb").glob("offline-run-*")
    assert Written(stopped).exit_code == 1
    first = stopped.rename(tmp_path / "stopped")  # two runs of one second would share a folder
    whole = Written(tracked(folder))
    assert Written(first).run.run_id == whole.run.run_id
    assert Written(first).running == [pytest.approx(AFTER_FIRST)]
    assert whole.running == [pytest.approx(AFTER_FIRST), pytest.approx(AFTER_SECOND)]


def fake_run(folder: Path, **own: Any) -> Any:
    """What `wandb.init` returns, without a server."""
    quiet = {name: lambda *_, **__: None for name in ("log", "define_metric", "finish")}
    place = str(folder / "run" / "wandb" / "run-1" / "files")
    return SimpleNamespace(**({"resumed": False, "url": "", "dir": place, "offline": False} | quiet | own))


@pytest.mark.parametrize(("resumed", "shown"), [(True, [2]), (False, [1, 2])])
def test_what_the_server_has_is_not_sent_again(tmp_path: Path, monkeypatch, resumed: bool, shown: list[int]) -> None:
    import wandb

    sent = []
    online = fake_run(tmp_path, resumed=resumed, log=lambda row: sent.append(row["examples"]))
    monkeypatch.setattr(wandb, "init", lambda **_: online)
    with open_tracker(OFFLINE, stored_of(tmp_path / "run", FIRST)) as tracker:
        tracker.record(SECOND)
    assert sent == shown


# ------------------------------------------------------------------------------------------------------------- privacy


def test_no_secret_is_in_any_byte_and_nothing_is_written_elsewhere(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", f"hf_{SECRET}")
    monkeypatch.setattr(sys, "argv", ["run.py", f"anything={SECRET}"])
    tracked(tmp_path / "run")
    files = [file for file in (tmp_path / "run" / "wandb").rglob("*") if file.is_file()]
    assert any(file.suffix == ".wandb" for file in files)
    for file in files:
        assert SECRET.encode() not in file.read_bytes(), file
    assert {path.name for path in tmp_path.iterdir()} == {"home", "run"}
    assert list((tmp_path / "home").rglob("*")) == []


ISOLATED = """
import sys
from pathlib import Path

reached = []

def watch(event, arguments):
    local = event == "socket.connect" and (isinstance(arguments[1], (str, bytes)) or arguments[1][0] == "127.0.0.1")
    if event == "socket.getaddrinfo" and arguments[0] in (None, "", "127.0.0.1", "localhost"):
        return
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname") and not local:
        reached.append((event, arguments[-1] if event == "socket.connect" else arguments[0]))
    if event in ("builtins.input", "getpass.getpass"):
        reached.append((event, None))

sys.addaudithook(watch)
"""


def isolated(tmp_path: Path, code: str, **environment: str) -> str:
    """The output of the code in a new process, with the helpers of this file as `t`."""
    head = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests' / 'eval' / 'run')!r}]\n"
    done = subprocess.run(
        [sys.executable, "-c", head + ISOLATED + textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path / "home"), **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, {"WANDB_API_KEY": SECRET, "WANDB_MODE": "offline"}])
def test_offline_nothing_is_asked_and_no_other_machine_is_called(tmp_path: Path, environment: dict[str, str]) -> None:
    said = isolated(
        tmp_path,
        """
        import test_wandb_run as t
        import wandb
        t.tracked(Path("run"), t.TrackerConfig("wandb"))
        wandb.teardown()
        print(reached, "-")
        """,
        **environment,
    )
    assert said == "[] -\n"  # wandb itself says nothing either


def test_the_watch_sees_a_call(tmp_path: Path) -> None:
    said = isolated(
        tmp_path,
        """
        import socket
        calls = (lambda: socket.create_connection(("192.0.2.1", 1), 0.01), lambda: socket.gethostbyname("x.invalid"))
        for call in calls:
            try:
                call()
            except OSError:
                pass
        print(sorted({event for event, _ in reached}))
        """,
    )
    assert "socket.gethostbyname" in said
    assert "socket.connect" in said


def test_none_and_disabled_do_not_import_wandb(tmp_path: Path) -> None:
    said = isolated(
        tmp_path,
        """
        import test_wandb_run as t
        for config in (t.TrackerConfig(), t.TrackerConfig("wandb", mode="disabled")):
            with t.open_tracker(config, t.stored_of(Path("run"), t.FIRST)) as tracker:
                tracker.record(t.SECOND)
                tracker.finish(t.table_of(t.FIRST, t.SECOND), [t.FIRST, t.SECOND])
        print("wandb" in sys.modules, Path("run").exists())
        """,
    )
    assert said.startswith("False False\n")  # torchao, if installed, prints warnings after it


# ---------------------------------------------------------------------------------------------------------------- mode


@pytest.mark.parametrize(
    ("wanted", "environment", "netrc", "mode"),
    [
        ("auto", {}, False, "offline"),
        ("auto", {"WANDB_API_KEY": "k" * 40}, False, "online"),
        ("auto", {}, True, "online"),
        ("auto", {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "offline"}, False, "offline"),
        ("auto", {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "disabled"}, False, "disabled"),
        ("auto", {"WANDB_MODE": "online"}, False, "offline"),
        ("online", {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "offline"}, False, "online"),
        ("online", {}, False, "offline"),
        ("offline", {"WANDB_API_KEY": "k" * 40}, False, "offline"),
    ],
)
def test_the_mode(tmp_path: Path, monkeypatch, caplog, wanted: str, environment, netrc: bool, mode: str) -> None:
    import wandb

    for name, value in {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_SILENT": "true", **environment}.items():
        monkeypatch.setenv(name, value)
    if netrc:
        (tmp_path / "home" / ".netrc").write_text(f"machine 127.0.0.1:9 login user password {'k' * 40}\n")
        (tmp_path / "home" / ".netrc").chmod(0o600)
    modes = []
    monkeypatch.setattr(wandb, "init", lambda mode, **_: modes.append(mode) or fake_run(tmp_path))
    with open_tracker(TrackerConfig("wandb", mode=wanted), stored_of(tmp_path / "run", FIRST)):
        pass
    assert (modes or ["disabled"]) == [mode]
    assert ("needs a key" in caplog.text) == (wanted == "online" and mode == "offline")


def test_an_unreachable_server_makes_the_run_an_offline_one(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "0.5")
    written = Written(tracked(tmp_path / "run", TrackerConfig("wandb")))
    assert written.running == [pytest.approx(AFTER_FIRST), pytest.approx(AFTER_SECOND)]
    (warning,) = warnings(caplog)
    assert "W&B: not online (CommError" in warning


def test_a_users_own_settings_are_kept(tmp_path: Path, monkeypatch) -> None:
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setenv("WANDB_DIR", str(own))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(own / "cache"))
    before = dict(os.environ)
    stored_folder(tmp_path / "run", FIRST)
    with open_tracker(OFFLINE, stored_of(tmp_path / "run")) as tracker:
        assert os.environ["WANDB_CACHE_DIR"] == str(own / "cache")
        assert os.environ["WANDB_SILENT"] == "true"
        tracker.record(FIRST)
    after = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # of wandb's own process
    assert after == before
    assert len(list((own / "wandb").glob("offline-run-*"))) == 1


def test_the_command_that_sends_an_offline_run_is_said_at_its_end(tmp_path: Path, caplog) -> None:
    offline = tracked(Path("run"))
    assert caplog.messages[-1] == f"W&B was offline; send this run with  wandb sync {offline}"


# -------------------------------------------------------------------------------------------------------------- faults


def refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("W&B has a fault")


def break_at(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make wandb raise in one place."""
    import wandb

    if place == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    elif place in ("init", "Table", "Artifact"):
        monkeypatch.setattr(wandb, place, refuse)
    else:
        monkeypatch.setattr(wandb.Run, place, refuse)


FAULTS = ("import", "init", "log", "define_metric", "Table", "Artifact", "log_artifact", "finish")


@pytest.mark.parametrize("place", FAULTS)
def test_a_fault_is_warned_of_once_and_never_raised(tmp_path: Path, monkeypatch, caplog, place: str) -> None:
    break_at(place, monkeypatch)
    folder = stored_folder(tmp_path / "run", FIRST, SECOND)
    with open_tracker(OFFLINE, stored_of(folder, FIRST)) as tracker:
        for _ in range(3):
            tracker.record(SECOND)
        tracker.finish(table_of(FIRST, SECOND), [FIRST, SECOND])
    (warning,) = warnings(caplog)
    assert warning.startswith("W&B: ")
    assert "failed" in warning
    monkeypatch.undo()


def test_an_error_of_the_run_is_not_changed(tmp_path: Path, monkeypatch) -> None:
    break_at("log", monkeypatch)
    with pytest.raises(ZeroDivisionError), open_tracker(OFFLINE, stored_of(tmp_path / "run")) as tracker:
        tracker.record(FIRST)
        _ = 1 / 0


# ------------------------------------------------------------------------------------------------------ the whole run


def run_tracked(*overrides: str) -> list[Record]:
    """A run of the tiny model on two examples, as `python run.py tracker=wandb` makes it; its records."""
    quick = ["tracker=wandb", "dataset=lookup", "limit=2", "max_new_tokens=3", "timing.warmup=0", "out=run"]
    run(run_of(*quick, *overrides))
    return read_run(Path("run"))[1]


def test_a_run_is_whole_without_its_tracker(monkeypatch, caplog) -> None:
    break_at("log", monkeypatch)
    records = run_tracked()
    rows = json.loads(Path("run/summary.json").read_text())["rows"]
    assert (len(records), rows[0]["name"], rows[0]["examples"]) == (2, "lookup", 2)
    assert len(warnings(caplog)) == 1
    monkeypatch.undo()


def test_a_run_that_was_measured_without_a_tracker_is_shown_whole() -> None:
    run_tracked("tracker=none")
    assert not Path("run/wandb").exists()
    records = run_tracked("tracker.tags=[later]")
    written = Written(*Path("run/wandb").glob("offline-run-*"))
    assert [(row["dataset"], row["id"]) for row in written.table()] == [record.key for record in records]
    rows = json.loads(Path("run/summary.json").read_text())["rows"]
    assert written.summary["lookup/score"] == rows[0]["score"]["mean"]
    assert written.summary["lookup/ttft_speedup"] == rows[0]["ttft_speedup"]["mean"]
    assert len(written.running) == 2
    assert written.config["tracker"]["tags"] == ["later"]
