from __future__ import annotations

import json
import os
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.run.expect import expected_runs
from eval.run.loop import run
from eval.run.status import Status, exit_code, main, status
from eval.store.collect import collect
from eval.store.folder import PLANNED, open_store, planned_text
from eval.store.record import Failure
from lazyllm.errors import UserError
from tests.eval.store.made import record, write_run
from tests.runs import run_of

BEGAN, ENDED = "2026-11-21T10:00:00Z", "2026-11-21T10:00:10Z"


def make(folder: Path, done: int, planned: int | None = None, **identity: Any) -> Path:
    write_run(folder, [record(number) for number in range(done)], **identity)
    if planned is not None:
        (folder / PLANNED).write_text(planned_text(("hotpotqa", f"row-{number}") for number in range(planned)))
    return folder


def job(
    folder: Path,
    part: str = "",
    host: str | None = None,
    process: int = 1,
    ended: bool = True,
    error: str | None = None,
) -> None:
    """Lines as a job leaves them."""
    begin = {"event": "begin", "time": BEGAN, "host": host or socket.gethostname(), "process": process, "examples": 4}
    events = [begin, *([{"event": "end", "time": ENDED, "error": error}] if ended else [])]
    with (folder / f"jobs{part}.jsonl").open("a") as opened:
        opened.writelines(json.dumps(event) + "\n" for event in events)


def fail(folder: Path, name: str, reason: str) -> None:
    identity = json.loads((folder / "run.json").read_text())["identity"]
    with open_store(folder, identity, {}) as store:
        store.fail(Failure("hotpotqa", name, reason, "a traceback"))


def one(folder: Path) -> Status:
    (line,) = status([folder])
    return line


def test_done_and_missing(tmp_path: Path) -> None:
    job(make(tmp_path / "a", 4, 4))
    make(tmp_path / "b", 1, 4, seed=1)
    os.utime(tmp_path / "b" / "records.jsonl", (0, 0))
    make(tmp_path / "c", 0, 2, seed=2)
    (tmp_path / "c" / PLANNED).unlink()
    done, missing, unknown = status([tmp_path])
    assert (done.state, done.done, done.expected, done.why) == ("done", 4, 4, "")
    assert (missing.run, missing.state, missing.done, missing.expected) == ("b", "incomplete", 1, 4)
    assert (missing.seed, missing.last) == (1, "1970-01-01T00:00:00Z")
    assert "3 examples are missing" in missing.why
    assert (unknown.state, unknown.expected, unknown.last) == ("incomplete", None, None)
    assert [exit_code([line]) for line in (done, missing)] == [0, 3]


def test_failed_examples_say_why(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", 1, 4)
    for name in ("row-1", "row-2"):
        fail(folder, name, "OutOfMemoryError: too long")
    fail(folder, "row-3", "FloatingPointError: NaN")
    fail(folder, "row-0", "of before: it has a record now")
    job(folder)
    line = one(tmp_path)
    assert (line.state, line.failed) == ("failed", 3)
    assert line.why == "2 failed: OutOfMemoryError: too long; 1 failed: FloatingPointError: NaN"
    assert exit_code([line]) == 1


def test_a_job_that_ended_early_says_why_until_the_run_is_done(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", 2, 3)
    job(folder, error="UserError: No space left on device")
    line = one(tmp_path)
    assert (line.state, line.why) == ("failed", f"job ended at {ENDED}: UserError: No space left on device")
    job(folder)  # the run continued, and left examples to other shards
    assert one(tmp_path).state == "incomplete"
    make(folder, 3)
    assert one(tmp_path).state == "done"


def test_a_run_that_was_stopped_has_not_failed(tmp_path: Path) -> None:
    job(make(tmp_path / "a", 2, 3), error="KeyboardInterrupt: ")
    line = one(tmp_path)
    assert (line.state, exit_code([line])) == ("incomplete", 3)
    assert line.why == "stopped; 1 examples are missing; the same command goes on"


def test_records_that_are_not_wanted_do_not_count(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", 4, 2)
    assert (one(tmp_path).done, one(tmp_path).expected) == (2, 2)
    (folder / PLANNED).write_text(planned_text([("hotpotqa", "row-3"), ("hotpotqa", "row-9")]))
    assert (one(tmp_path).state, one(tmp_path).done, one(tmp_path).expected) == ("incomplete", 1, 2)


def test_half_a_last_line_of_the_jobs_is_not_there(tmp_path: Path) -> None:
    job(make(tmp_path / "a", 1, 4))
    job(make(tmp_path / "b", 4, 4, seed=1))
    with (tmp_path / "a" / "jobs.jsonl").open("a") as opened:
        opened.write('{"event": "beg')
    assert [line.state for line in status([tmp_path])] == ["incomplete", "done"]


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no run in or below"):
        main([str(tmp_path / "empty")])
    make(tmp_path / "runs" / "a", 1, 1)
    collect([tmp_path / "runs"], tmp_path / "collected")
    with pytest.raises(UserError, match=f"{tmp_path / 'collected'}: a collected campaign"):
        main([str(tmp_path / "collected")])
    assert main([str(tmp_path)]) == 0


def test_a_job_of_another_machine_is_running_or_died_there(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", 2, 4)
    job(folder, "-1-of-2", host="node7", ended=False)
    line = one(tmp_path)
    assert line.state == "unclear"
    assert f"running or died on node7 since {BEGAN}, last record 2" in line.why
    assert exit_code([line]) == 3


@pytest.mark.parametrize("part", ["", "-2-of-3"])
def test_a_living_process_is_running_and_a_killed_one_has_died(tmp_path: Path, part: str) -> None:
    folder = make(tmp_path / "a", 2, 4)
    with subprocess.Popen(["sleep", "1000"]) as process:
        job(folder, part, process=process.pid, ended=False)
        assert (one(tmp_path).state, one(tmp_path).why) == ("running", "")
        process.kill()
    line = one(tmp_path)
    assert line.state == "failed"
    assert f"job{part} began at {BEGAN} and died" in line.why


def test_a_damaged_run_says_so_and_hides_no_other(tmp_path: Path) -> None:
    make(tmp_path / "a", 2, 2)
    make(tmp_path / "b", 2, 2, seed=1)
    (tmp_path / "a" / "records.jsonl").write_text('{"dataset": "hotpotqa"}\n')
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "run.json").write_text("{")
    lines = {line.run: line for line in status([tmp_path])}
    assert {name: line.state for name, line in lines.items()} == {"a": "failed", "b": "done", "c": "failed"}
    assert "records.jsonl:1: not a record" in lines["a"].why


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(make(tmp_path / "a", 4, 4))
    assert main([str(tmp_path)]) == 0
    assert "1 runs: 1 done" in capsys.readouterr().out
    make(tmp_path / "b", 1, 4, seed=1)
    assert main([str(tmp_path), "--json"]) == 3
    lines = json.loads(capsys.readouterr().out)
    assert [(line["run"], line["state"], line["expected"]) for line in lines] == [
        ("a", "done", 4),
        ("b", "incomplete", 4),
    ]
    with pytest.raises(UserError, match="no such folder"):
        main([str(tmp_path / "absent")])
    with pytest.raises(UserError, match="unknown key nosuch"):
        main([str(tmp_path), "--expect", "nosuch=1"])


# ------------------------------------------------------------------------------------------------- what a sweep makes

QUICK = ("dataset=[lookup,shots]", "limit=2", "timing.warmup=0")


def test_a_sweeps_runs_that_never_began_are_missing_and_refused_ones_say_why(tmp_path: Path) -> None:
    wanted = expected_runs(["method=static_pruning", "method.layer=2,9,3", "shard=1/2,2/2", *QUICK])
    assert len(wanted) == 3  # shards are of one run
    folder = tmp_path / "begun"
    write_run(folder, [record(0, "lookup")])
    about = json.loads((folder / "run.json").read_text())
    about["identity"] = wanted[0].identity | {"device": "another", "threads": None, "code": "of then"}
    (folder / "run.json").write_text(json.dumps(about))
    begun, refused, missing = status([tmp_path], wanted)
    assert (begun.state, begun.done, begun.expected) == ("incomplete", 0, 4)  # row-0 is not in the sweep's four
    assert (refused.state, exit_code([refused])) == ("failed", 1)
    assert "refused before it began" in refused.why
    assert "only 8 layers" in refused.why
    assert (missing.state, missing.done, missing.expected) == ("missing", 0, 4)
    assert "layer=3" in missing.run


def test_a_sweep_for_a_gpu_is_known_on_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> None:
        raise UserError("not on this machine")

    monkeypatch.setattr("lazyllm.models.load.check_quantise", absent)  # as if torchao or the kernels were missing
    (gpu,) = expected_runs(["model.device=cuda", "model.quantise=int4", *QUICK])
    assert (gpu.refused, gpu.identity["quantise"], gpu.identity["device_map"]) == (None, "int4", None)
    (placed,) = expected_runs(["model.device=auto", "model.device_map={lm_head:1}", *QUICK])
    assert (placed.refused, placed.identity["device_map"]) == (None, {"lm_head": 1})
    (plain,) = expected_runs(QUICK)
    assert not plain.is_of(gpu.identity)
    assert gpu.is_of(gpu.identity | {"device": "a GPU", "threads": None})


def test_one_bad_job_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["model.dtype=foo,float32", "model.quantise=null,foo", *QUICK]
    dtype, _, good, quantise = expected_runs(arguments)
    assert (good.refused, len(good.examples)) == (None, 4)
    assert "unknown dtype 'foo'" in str(dtype.refused)
    assert "model.dtype=foo model.quantise=null" in dtype.name
    assert "unknown quantise 'foo'" in str(quantise.refused)
    make(tmp_path / "a", 1, 1)
    assert main([str(tmp_path), "--expect", *arguments]) == 1
    assert "unknown dtype 'foo'" in " ".join(capsys.readouterr().out.split())


def test_an_experiments_methods_are_a_run_each() -> None:
    labels = [run.setting for run in expected_runs(["experiment=demo", "limit=1", "dataset=lookup"])]
    assert [label.split(",")[0] for label in labels] == ["lazy", "static_pruning", "random_drop", "prompt_compression"]
    swept = expected_runs(["experiment=table1", "limit=1", "dataset=lookup"])  # whose sweep is in the experiment's file
    assert [run.seed for run in swept if run.setting.startswith("random_drop")] == [0, 1, 2, 3, 4]
    assert len(swept) == 8


def test_a_target_out_of_reach_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["experiment=field", "speedup=2x", "only=lazy,fastkv", "limit=1", "dataset=lookup"]
    lazy, fastkv = expected_runs(arguments)
    assert (lazy.refused, lazy.out_of_reach, fastkv.out_of_reach) == (None, False, True)
    write_run(tmp_path / "lazy", [replace(record(0, "lookup"), id=lazy.examples[0][1])])
    about = json.loads((tmp_path / "lazy" / "run.json").read_text())
    (tmp_path / "lazy" / "run.json").write_text(json.dumps(about | {"identity": lazy.identity}))
    assert main([str(tmp_path), "--expect", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "2 runs: 1 done, 1 cannot reach" in printed
    assert "method 'fastkv' cannot reach an ideal TTFT speedup of 2.0" in " ".join(printed.split())


def test_what_is_expected_is_what_a_job_makes_and_a_second_job_loads_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = run_of(*QUICK, "max_new_tokens=2")
    run(config, show=False)
    (jobs,) = tmp_path.glob("runs/*/jobs.jsonl")
    before = jobs.read_bytes()

    def no_model(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("eval.run.loop.load_weights", no_model)
    run(config, show=False)
    assert jobs.read_bytes() == before
    wanted = expected_runs([*QUICK, "max_new_tokens=2", "seed=0,1"])
    (done, other) = status([tmp_path], wanted)
    assert (done.state, done.done, done.expected) == ("done", 4, 4)
    assert (other.state, other.seed) == ("missing", 1)
