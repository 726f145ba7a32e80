"""The command itself, as a user calls it: real rows, resume after a kill, refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from eval.benchmarks.longbench import resolve_datasets
from eval.store.folder import read_run
from eval.store.record import Record
from eval.store.trace import read_trace
from lazyllm import Schedule
from lazyllm.methods import METHODS, Lazy

ROOT = Path(__file__).resolve().parents[1]
TIMES = ("ttft", "total_s", "generation_speedup", "step_speedup", "started", "git_commit")


def call(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """`python run.py ...` in `folder`, offline."""
    with start(folder, *overrides) as process:
        stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), *overrides],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell has the commands that it starts in the background ignore Ctrl-C, and whatever these start
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(folder), "LAZYLLM_BENCH_CACHE": str(folder)},
    )


def stop_in_the_middle(folder: Path, number: signal.Signals, *overrides: str) -> tuple[int, str]:
    """Start a run and send it a signal when some of its examples are on the disk; its exit status and stderr."""
    file = folder / "run" / "records.jsonl"
    with start(folder, *overrides) as process:
        while process.poll() is None and not (file.exists() and file.read_bytes().count(b"\n") >= 2):
            time.sleep(0.005)
        process.send_signal(number)
        _, stderr = process.communicate()
    return process.returncode, stderr


def test_all_sixteen_datasets_of_real_rows_to_the_table(tmp_path: Path, shared: Path) -> None:
    short = ("limit=1", "max_new_tokens=3", "model.max_prompt_tokens=600", "timing.warmup=1")
    done = call(tmp_path, "dataset=all", f"data.dir={shared / 'longbench'}", "out=run", *short)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # nothing is written elsewhere
    _, records = read_run(tmp_path / "run")
    names = [dataset.name for dataset in resolve_datasets("all")]
    assert [record.dataset for record in records] == names
    for record in records:
        assert record.prompt_tokens_before_truncation > record.prompt_tokens
        assert record.baseline is not None
        assert record.baseline.pct_prompt_tokens_computed == 100
        assert 0 < record.method.pct_prompt_tokens_computed <= 100
        assert record.method.computed[0][0] == record.prompt_tokens
        assert 1 <= len(record.method.token_ids) <= 3
    for name in names:
        assert name in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [row["name"] for row in summary["rows"] if row["kind"] == "dataset"] == names
    assert summary["provenance"]["versions"]["torch"]
    for suffix in ("csv", "md"):
        assert (tmp_path / "run" / f"summary.{suffix}").read_text().count("hotpotqa") == 1


QUICK = ("dataset=[lookup,shots]", "limit=12", "max_new_tokens=4", "timing.warmup=0", "out=run")


def without_times(summary: str) -> dict:
    def clean(value):
        if isinstance(value, dict):
            return {key: clean(one) for key, one in value.items() if not key.startswith(TIMES)}
        return [clean(one) for one in value] if isinstance(value, list) else value

    return clean(json.loads(summary))


def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert call(whole, *QUICK).returncode == 0
    status, _ = stop_in_the_middle(killed, signal.SIGKILL, *QUICK)
    assert status == -signal.SIGKILL  # not ended by itself before
    file = killed / "run" / "records.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2]) + lines[0][:100])  # as a kill in the middle of a write leaves it
    again = call(killed, *QUICK)
    assert again.returncode == 0, again.stderr
    assert "24 examples, 2 of them already measured" in again.stderr
    assert file.read_bytes().startswith(b"".join(lines[:2]))  # measured once, kept as it was
    ours = [Record.from_json(line) for line in file.read_text().splitlines()]
    theirs = [Record.from_json(line) for line in (whole / "run" / "records.jsonl").read_text().splitlines()]
    assert [(one.key, one.prompt_sha256, one.method.token_ids, one.method.computed) for one in ours] == [
        (one.key, one.prompt_sha256, one.method.token_ids, one.method.computed) for one in theirs
    ]
    summaries = [without_times((folder / "run" / "summary.json").read_text()) for folder in (whole, killed)]
    assert summaries[0] == summaries[1]
    third = call(killed, *QUICK)
    assert "24 of them already measured" in third.stderr
    assert third.stdout == again.stdout  # the table is rebuilt from the store, without a model
    other = call(killed, *QUICK, "seed=1")
    assert other.returncode == 1
    assert "holds a run that differs (seed: 0 there, 1 now)" in other.stderr
    assert "Traceback" not in other.stderr


def test_ctrl_c_ends_with_a_word_and_a_store_to_go_on_from(tmp_path: Path) -> None:
    status, stderr = stop_in_the_middle(tmp_path, signal.SIGINT, *QUICK)
    assert status == 130
    assert "the same command goes on from there" in stderr
    assert "Traceback" not in stderr
    lines = (tmp_path / "run" / "records.jsonl").read_text().splitlines(keepends=True)
    assert 2 <= len(lines) < 24
    assert all(Record.from_json(line) for line in lines)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset=hotpotqa"], "data.dir=FOLDER"),
        (["dataset=hotpotqa", "data.dir=nosuch"], "no such folder"),
        (["model=llama2"], "model.load_format=dummy"),
        (["model=llama2", "model.load_format=dummy"], "model.tokenizer="),
        (["method.schedule={9: 0.5}"], "only 8 layers"),
        (["model=custom", "model.name=nosuch"], "none of the presets"),
        (["method=prompt_compression", "method.scorer=nosuch"], "none of the presets"),
        (["method=prompt_compression", "method.window=9999"], "sees at most 4096 tokens at once"),
    ],
)
def test_refusals_are_one_message_before_anything_is_written(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    done = call(tmp_path, *overrides)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_bad_rows_stop_the_run_or_are_counted(tmp_path: Path, shared: Path) -> None:
    data = tmp_path / "data"
    (data / "config").mkdir(parents=True)
    for name in ("dataset2prompt.json", "dataset2maxlen.json"):
        (data / "config" / name).write_bytes((shared / "longbench" / "config" / name).read_bytes())
    rows = (shared / "longbench" / "trec.jsonl").read_bytes().split(b"\n")
    (data / "trec.jsonl").write_bytes(b"\n".join([rows[0], b"{broken", rows[1]]) + b"\n")
    overrides = ["dataset=trec", f"data.dir={data}", "max_new_tokens=1", "model.max_prompt_tokens=300"]
    overrides += ["timing.warmup=0", "out=run"]
    stopped = call(tmp_path, *overrides)
    assert stopped.returncode != 0
    assert "trec.jsonl:2" in stopped.stderr
    skipped = call(tmp_path, *overrides, "data.on_error=skip")
    assert skipped.returncode == 0, skipped.stderr
    assert "1 rows were skipped" in skipped.stderr
    assert "trec.jsonl:2" in skipped.stderr
    assert len(read_run(tmp_path / "run")[1]) == 2


def test_the_demo_compares_every_method(tmp_path: Path) -> None:
    done = call(tmp_path, "experiment=demo", "limit=1", "dataset=[shots,complete]", "timing.warmup=0")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    for task in ("few_shot", "code"):
        assert {row[1] for row in rows if row and row[0] == task} == set(METHODS)
    assert (tmp_path / "runs" / "demo-tiny.md").read_text().count("| lazy |") == 3  # two tasks and their mean
    assert "model=llama2" in done.stdout.splitlines()[-1]
    assert len(list((tmp_path / "runs").glob("tiny-*"))) == 4  # each method has its own run, beside its own baseline


def test_prompt_compression_scores_in_its_own_time(tmp_path: Path) -> None:
    done = call(tmp_path, "method=prompt_compression", "limit=1", "timing.warmup=0", "max_new_tokens=2", "out=run")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    assert len(records) == 6
    for record in records:
        method, baseline = record["method"], record["baseline"]
        assert 0 < method["scoring_s"] < method["ttft_s"]
        assert baseline["scoring_s"] == 0
        assert method["pct_prompt_tokens_computed"] < 90
        assert baseline["pct_prompt_tokens_computed"] == 100


def test_a_prompt_that_the_model_cannot_hold_is_refused(tmp_path: Path, shared: Path) -> None:
    data = f"data.dir={shared / 'longbench'}"
    done = call(tmp_path, "dataset=qasper", data, "model.max_prompt_tokens=4090", "limit=1")
    assert done.returncode != 0
    assert "set a lower model.max_prompt_tokens" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_one_of_an_experiments_methods_by_its_label(tmp_path: Path) -> None:
    quick = ("dataset=lookup", "limit=1", "max_new_tokens=2", "timing.warmup=0")
    done = call(tmp_path, "-m", "experiment=demo", "only=lazy,random_drop", *quick)
    assert done.returncode == 0, done.stderr
    assert {path.name.rsplit("-", 1)[0] for path in (tmp_path / "runs").glob("tiny-*")} == {
        "tiny-lazy-lookup", "tiny-random_drop-lookup",
    }  # fmt: skip


def test_a_sweep_goes_on_after_a_job_that_fails(tmp_path: Path) -> None:
    quick = ("dataset=lookup", "limit=1", "max_new_tokens=2", "timing.warmup=0")
    done = call(tmp_path, "-m", "method=static_pruning", "method.layer=9,2", *quick)
    assert done.returncode == 1
    assert "only 8 layers" in done.stderr
    assert len(list((tmp_path / "runs").glob("tiny-static_pruning-*/records.jsonl"))) == 1


def test_presets_depend_on_the_task_and_are_written_down(tmp_path: Path) -> None:
    quick = ("dataset=[lookup,retrieve]", "limit=1", "max_new_tokens=2", "timing.warmup=0", "out=run")
    assert call(tmp_path, "method.schedule=table1", *quick).returncode == 0
    about, records = read_run(tmp_path / "run")
    found = about["identity"]["parameters"]
    for record in records:  # the tokens that entered each layer are those of the dataset's own schedule
        schedule = Schedule(found[record.dataset]["schedule"])
        per_layer = Lazy(schedule).tokens_per_layer(8, record.prompt_tokens)
        assert record.method.computed[0] == [per_layer[start - 1] for start in record.method.group_starts]
    assert found["lookup"] != found["retrieve"]


def test_traces_lie_beside_the_records_and_are_made_once(tmp_path: Path) -> None:
    quick = ("dataset=[lookup,shots]", "limit=2", "max_new_tokens=3", "timing.warmup=0", "out=run")
    assert call(tmp_path, *quick).returncode == 0
    done = call(tmp_path, *quick, "trace=1")  # of a run that is measured already
    assert done.returncode == 0, done.stderr
    _, records = read_run(tmp_path / "run")
    files = sorted((tmp_path / "run" / "traces").iterdir())
    assert [file.name.split("-")[0] for file in files] == ["lookup", "shots"]
    for file in files:
        trace = read_trace(file)
        record = next(one for one in records if one.key == (trace.dataset, trace.id))
        assert len(trace.tokens) == record.prompt_tokens
        assert (trace.computed, trace.group_starts) == (record.method.computed, record.method.group_starts)
        assert len(trace.generated) == len(record.method.token_ids)
        np.testing.assert_allclose(np.sum(trace.importance, axis=1), 1, rtol=1e-3)
    before = [file.stat().st_mtime_ns for file in files]
    assert "4 of them already measured" in call(tmp_path, *quick, "trace=1").stderr
    assert [file.stat().st_mtime_ns for file in files] == before


def test_a_sample_is_drawn_by_the_seed_and_can_be_widened(tmp_path: Path) -> None:
    quick = ("dataset=[lookup,shots]", "limit=20", "max_new_tokens=1", "timing.warmup=0", "out=run")
    keys = []
    for sample in (3, 3, 40):
        assert call(tmp_path, *quick, f"sample={sample}").returncode == 0
        keys.append([record.key for record in read_run(tmp_path / "run")[1]])
    assert len(set(keys[0])) == 3
    assert keys[0] == keys[1] == keys[2][:3]
    assert len(set(keys[2])) == 40
