"""Whole runs: real rows, resuming after an interruption, refusals, experiments."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eval.benchmarks.datasets import resolve_datasets
from eval.cli import main
from eval.run.loop import compare, run
from eval.run.prepare import prepare
from eval.store.folder import read_about, read_records
from eval.store.record import Record, read_trace
from lazyllm.errors import UserError
from lazyllm.methods import Lazy
from tests.runs import run_of

SHORT = ("max_new_tokens=2", "timing.warmup=0", "out=run")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")


def records_of() -> list[Record]:
    return read_records(Path("run"))


def test_run_measures_all_sixteen_datasets_of_real_rows(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ("limit=1", "max_new_tokens=3", "model.max_prompt_tokens=300", "timing.warmup=0")
    run(run_of("dataset=all", f"data.dir={shared / 'longbench'}", "out=run", *short))
    assert [path.name for path in Path().iterdir()] == ["run"]  # nothing is written elsewhere
    records = records_of()
    names = [dataset.name for dataset in resolve_datasets("all")]
    assert [record.dataset for record in records] == names
    for record in records:
        assert record.prompt_tokens_before_truncation > record.prompt_tokens
        assert record.baseline is not None
        assert record.baseline.pct_prompt_tokens_computed == 100
        assert 0 < record.method.pct_prompt_tokens_computed <= 100
        assert record.method.computed[0][0] == record.prompt_tokens
        assert 1 <= len(record.method.token_ids) <= 3
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)
    summary = json.loads(Path("run/summary.json").read_text())
    assert [row["name"] for row in summary["rows"] if row["kind"] == "dataset"] == names
    assert summary["provenance"]["versions"]["torch"]
    for suffix in ("csv", "md"):
        assert Path(f"run/summary.{suffix}").read_text().count("hotpotqa") == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset=hotpotqa"], "data.dir=FOLDER"),
        (["model.max_prompt_tokens=4097"], "model.max_prompt_tokens=4097: the model has 4096 positions: give fewer"),
        (["method=prompt_compression", "method.scorer=nosuch"], "not one of the presets"),
        (["method=prompt_compression", "method.window=9999"], "sees at most 4096 tokens at once"),
    ],
)
def test_run_refuses_before_it_writes_anything(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=message):
        run(run_of(*overrides))
    assert list(tmp_path.iterdir()) == []


def test_sweep_refuses_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs").write_text("a file, where the folder should be")
    assert main(["run", "-m", "method=lazy,baseline", "limit=1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: runs: cannot be written (runs): ")


def test_bad_rows_stop_a_run_or_are_counted(tmp_path: Path, shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = tmp_path / "data"
    (data / "config").mkdir(parents=True)
    for name in ("dataset2prompt.json", "dataset2maxlen.json"):
        (data / "config" / name).write_bytes((shared / "longbench" / "config" / name).read_bytes())
    rows = (shared / "longbench" / "trec.jsonl").read_bytes().split(b"\n")
    (data / "trec.jsonl").write_bytes(b"\n".join([rows[0], b"{broken", rows[1]]) + b"\n")
    overrides = ["dataset=trec", f"data.dir={data}", "max_new_tokens=1", "model.max_prompt_tokens=300"]
    overrides += ["timing.warmup=0", "out=run"]
    with pytest.raises(UserError, match=r"trec\.jsonl:2"):
        run(run_of(*overrides))
    run(run_of(*overrides, "data.on_error=skip"))
    assert "skipped 1 row (data.on_error=skip)" in caplog.text
    assert "trec.jsonl:2" in caplog.text
    assert len(records_of()) == 2


def test_demo_compares_the_methods_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    compare(run_of("experiment=demo", "limit=1", "dataset=[shots,complete]", "timing.warmup=0"))
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]
    for task in ("few_shot", "code"):
        methods = {"baseline", "lazy", "static_pruning", "random_drop", "prompt_compression"}
        assert {row[1] for row in rows if row and row[0] == task} == methods
    assert Path("runs/demo-tiny.md").read_text().count("| lazy |") == 3  # two tasks and their mean
    assert "model=llama2" in lines[-1]
    assert len(list(Path("runs").glob("tiny-*"))) == 4  # each method has its own run, with its own baseline
    (compressed,) = Path("runs").glob("tiny-prompt_compression-*")
    for record in read_records(compressed):
        assert record.baseline is not None
        assert 0 < record.method.scoring_s < record.method.ttft_s  # selecting is part of its time
        assert (record.baseline.scoring_s, record.baseline.pct_prompt_tokens_computed) == (0, 100)


def test_tuned_targets_depend_on_the_task_and_are_stored() -> None:
    run(run_of("method.schedule=table1", "dataset=[lookup,retrieve]", "limit=1", "timing.paired=false", *SHORT))
    about, records = read_about(Path("run/run.json")), read_records(Path("run"))
    parameters = about["identity"]["parameters"]
    for record in records:  # the tokens that entered each layer are those of the dataset's own schedule
        method = Lazy(parameters[record.dataset]["schedule"])
        per_layer = method.tokens_per_layer(8, record.prompt_tokens)
        assert record.method.computed[0] == [per_layer[start - 1] for start in record.method.group_starts]
    assert parameters["lookup"] != parameters["retrieve"]


def test_traces_are_made_once_beside_the_records(caplog: pytest.LogCaptureFixture) -> None:
    quick = (
        "dataset=[lookup,shots]",
        "limit=1",
        "max_new_tokens=3",
        "timing.warmup=0",
        "timing.paired=false",
        "out=run",
    )
    run(run_of(*quick), show=False)
    run(run_of(*quick, "trace=1"), show=False)  # of a run that is measured already
    files = sorted(Path("run/traces").iterdir())
    assert [file.name.split("-")[0] for file in files] == ["lookup", "shots"]
    for file in files:
        trace = read_trace(file)
        record = next(record for record in records_of() if record.key == (trace.dataset, trace.id))
        assert len(trace.tokens) == record.prompt_tokens
        assert (trace.computed, trace.group_starts) == (record.method.computed, record.method.group_starts)
        assert len(trace.generated) == len(record.method.token_ids)
        np.testing.assert_allclose(np.sum(trace.importance, axis=1), 1, rtol=1e-3)
    before = [file.stat().st_mtime_ns for file in files]
    caplog.clear()
    run(run_of(*quick, "trace=1"), show=False)
    assert "2 of them already measured" in caplog.text
    assert [file.stat().st_mtime_ns for file in files] == before


def test_sample_is_drawn_by_the_seed_and_can_be_widened() -> None:
    keys = [
        [case.key for case in prepare(run_of("dataset=[lookup,shots]", "limit=20", f"sample={sample}")).cases]
        for sample in (3, 3, 40)
    ]
    assert len(set(keys[0])) == 3
    assert keys[0] == keys[1]
    assert set(keys[0]) < set(keys[2])
    assert len(set(keys[2])) == 40
