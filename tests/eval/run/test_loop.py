"""The run loop in this process, with examples that cannot be measured."""

from __future__ import annotations

import gc
import json
import re
import weakref
from pathlib import Path

import pytest
import torch

import eval.run.measure
from eval.analysis.run_table import run_table
from eval.cli import main
from eval.run.config import TimingConfig
from eval.run.loop import RunResult, compare, run, show_together
from eval.run.measure import free
from eval.run.prepare import within_reach
from eval.store.folder import RunStore, read_about, read_failures, read_records
from eval.store.record import Record
from eval.store.results import Results, as_frame, find_runs
from lazyllm import Generation
from lazyllm.errors import FailedExamplesError, UserError
from lazyllm.models.load import load_weights
from tests.eval.analysis.made import stored
from tests.eval.store.made import record
from tests.eval.store.test_folder import full_disk
from tests.runs import small_run

generate = eval.run.measure.generate


def failing(monkeypatch: pytest.MonkeyPatch, errors: dict[int, Exception]) -> None:
    """Make the generations with these numbers fail, in the order of calls."""
    calls = 0

    def generate_or_fail(*arguments, **settings) -> Generation:
        nonlocal calls
        calls += 1
        if calls - 1 in errors:
            raise errors[calls - 1]
        return generate(*arguments, **settings)

    monkeypatch.setattr(eval.run.measure, "generate", generate_or_fail)


def no_weights(*_: object, **__: object) -> None:
    raise UserError("no such weights")


def test_failed_example_is_written_down_and_the_others_go_on(tmp_path: Path, monkeypatch, caplog) -> None:
    # two generations per example: the method fails on the first, and the baseline (second run) on the fourth
    errors = {1: torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB"), 7: FloatingPointError("logits not finite")}
    failing(monkeypatch, errors)
    caplog.set_level("INFO")
    result = run(small_run(tmp_path / "run"), show=False)
    records = read_records(tmp_path / "run")
    failures = [json.loads(line) for line in (tmp_path / "run" / "failures.jsonl").read_text().splitlines()]
    assert len(records) == 4
    assert re.search(r"; out of memory at 9\d prompt tokens: lower model.max_prompt_tokens", failures[0]["reason"])
    assert [(failure["dataset"], failure["reason"].partition(";")[0]) for failure in failures] == [
        ("lookup", "OutOfMemoryError: CUDA out of memory. Tried 2 GiB"),
        ("shots", "FloatingPointError: logits not finite"),
    ]
    assert all("generate_or_fail" in failure["traceback"] for failure in failures)
    assert "2 of 6 examples failed and are not in the table, the first: lookup" in result.failed
    assert "2 examples failed, left out here" in (tmp_path / "run" / "summary.md").read_text()

    monkeypatch.setattr(eval.run.measure, "generate", generate)
    caplog.clear()
    assert not run(small_run(tmp_path / "run"), show=False).failed  # tries them again
    assert len(read_records(tmp_path / "run")) == 6
    assert " failed" not in caplog.text  # the folder has the name of this test


@pytest.mark.slow
def test_shard_in_which_all_fails_leaves_the_others_alone(tmp_path: Path, monkeypatch, caplog) -> None:
    first, second = (small_run(tmp_path / "run").changed(shard=f"{number}/2") for number in (1, 2))
    failing(monkeypatch, dict.fromkeys(range(99), RuntimeError("no kernel image")))
    result = run(first, show=False)
    assert result.results is None
    failed = len(read_failures(tmp_path / "run"))
    assert 0 < failed < 6
    assert f"{failed} of 6 examples failed and are not in the table" in result.failed
    with pytest.raises(FailedExamplesError, match=r"every example failed \(6\)"):
        run(second, show=False)
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(("sweep", "calls"), [([], [0]), (["-m"], [4, 5])])
def test_run_ends_with_3_if_examples_failed(tmp_path: Path, monkeypatch, capsys, sweep: list[str], calls) -> None:
    """Of a sweep's three jobs, all examples of the last one fail."""
    monkeypatch.chdir(tmp_path)
    failing(monkeypatch, {call: RuntimeError("no kernel image") for call in calls})
    quick = ["dataset=lookup", "limit=2", "max_new_tokens=2", "timing.paired=false", "timing.warmup=0"]
    assert main(["run", *sweep, *quick, "method=lazy,random_drop,static_pruning" if sweep else "method=lazy"]) == 3
    told = {0: "1 of 2 examples failed and are not in the table", 1: "every example failed (2)"}[len(sweep)]
    out, error = capsys.readouterr()
    assert f"error: {told}, the first: lookup" in error.splitlines()[-1]
    assert ("All runs of the sweep" in out) == bool(sweep)


@pytest.mark.slow
def test_comparison_names_its_half(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eval.analysis.style.save", lambda *_: [])
    titles = []
    monkeypatch.setattr("eval.analysis.field.plot_comparison", lambda _, title, methods: titles.append(title))
    config = small_run(tmp_path).changed(out=None, limit=2, dataset={"lookup": True}, label="two")
    for half, title in (("held-out", "two, held-out half"), (None, "two")):
        compare(config.changed(half=half, compare={"lazy": config.method}))
        assert capsys.readouterr().out.splitlines()[0].strip() == title
        assert (tmp_path / "runs" / "two-tiny.md").read_text().startswith(f"# {title}\n")
    assert titles == ["tiny, two, held-out half", "tiny, two"]


def test_comparison_without_baselines_has_a_table_and_no_picture(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = small_run(tmp_path).changed(out=None, limit=2, dataset={"lookup": True}, label="alone")
    config = config.changed(compare={"lazy": config.method}, timing=TimingConfig(paired=False, warmup=0))
    compare(config)
    assert "| lazy | 2 |" in (tmp_path / "runs" / "alone-tiny.md").read_text()
    assert not [*(tmp_path / "runs").glob("alone-tiny.*g")]


def test_comparison_loads_its_model_once_and_only_if_needed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eval.analysis.style.save", lambda *_: [])
    loaded: list[weakref.ref] = []

    def counted(spec):
        model = load_weights(spec)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr("eval.run.loop.load_weights", counted)
    config = small_run(tmp_path).changed(out=None, limit=2, dataset={"lookup": True}, label="two")
    config = config.changed(compare={"lazy": config.method, "random_drop": {"name": "random_drop", "keep": 0.5}})
    for _ in range(2):
        assert len(compare(config)) == 2
        assert len(loaded) == 1
    gc.collect()
    assert loaded[0]() is None  # its memory is free for the next job of a sweep


def test_method_out_of_reach_is_left_out_with_a_line(tmp_path: Path, caplog) -> None:
    asked = {
        "random_drop": {"name": "random_drop", "keep": "6x"},
        "fastkv": {"name": "fastkv", "keep": "2x"},  # a cut half-way leaves half of the layers whole
        "specprefill": {"name": "specprefill", "draft": None, "keep": "2x"},
    }
    config = small_run(tmp_path).changed(out=None, compare=asked)
    assert {label: one.method for label, one in within_reach(config).items()} == {"random_drop": asked["random_drop"]}
    assert "left out: fastkv: method 'fastkv' cannot reach an ideal TTFT speedup of 2.0 on 8 layers" in caplog.text
    assert "left out: specprefill" in caplog.text
    assert "name a draft" in caplog.text
    assert compare(config.changed(only="fastkv")) == []  # of a sweep, this job does nothing
    with pytest.raises(UserError, match="no method of comparison reaches its speedup"):
        compare(config.changed(compare={"fastkv": asked["fastkv"]}))
    with pytest.raises(UserError, match="takes no preset as layer=2x"):  # a mistake is one still
        within_reach(config.changed(compare=asked | {"mine": {"name": "static_pruning", "layer": "2x", "keep": 0.5}}))


def test_shards_measure_each_example_once_and_the_last_makes_the_table(tmp_path: Path) -> None:
    whole = run(small_run(tmp_path / "whole"), show=False)
    shards = [small_run(tmp_path / "run").changed(shard=f"{number}/3") for number in (1, 2, 3)]
    results = [run(shard, show=False) for shard in shards]
    assert [result.results is None for result in results] == [True, True, False]
    about, records = read_about(tmp_path / "run/run.json"), read_records(tmp_path / "run")
    assert about["identity"] == read_about(tmp_path / "whole/run.json")["identity"]
    assert about["config"]["shard"] is None
    files = [(tmp_path / "run" / f"records-{number}-of-3.jsonl").read_text().splitlines() for number in (1, 2, 3)]
    assert [len(file) for file in files] == [2, 2, 2]
    lines = [Record.from_json(line) for file in files for line in file]
    assert lines == records

    def outcome(folder: str) -> dict:
        return {
            record.key: (record.prompt_sha256, record.method.token_ids) for record in read_records(tmp_path / folder)
        }

    assert outcome("run") == outcome("whole")
    assert len(lines) == len(outcome("run")) == 6
    assert whole.results is not None
    assert results[2].results is not None
    tables = [run_table(result.results, "").frame["examples"] for result in (results[2], whole) if result.results]
    assert tables[0].tolist() == tables[1].tolist()
    assert len(as_frame(find_runs([tmp_path / "run"]))) == 6


def test_shard_measures_nothing_again(tmp_path: Path, monkeypatch) -> None:
    for shard in ("1/2", "1/1"):
        run(small_run(tmp_path / "run").changed(shard=shard), show=False)
    counts = {
        name: (tmp_path / "run" / f"records-{name}.jsonl").read_text().count("\n") for name in ("1-of-2", "1-of-1")
    }
    assert sum(counts.values()) == 6
    assert min(counts.values()) >= 2
    failing(monkeypatch, dict.fromkeys(range(99), RuntimeError("measured again")))
    assert run(small_run(tmp_path / "run"), show=False).results is not None
    # more shards than examples: some have nothing to do
    assert run(small_run(tmp_path / "new").changed(shard="7/7"), show=False).results is None


def test_job_that_breaks_off_says_why(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("eval.run.loop.load_weights", no_weights)
    with pytest.raises(UserError):
        run(small_run(tmp_path / "run"), show=False)
    begin, end = (json.loads(line) for line in (tmp_path / "run" / "jobs.jsonl").read_text().splitlines())
    assert (begin["event"], begin["examples"]) == ("begin", 6)
    assert (end["event"], end["error"]) == ("end", "UserError: no such weights")


def test_logits_that_are_not_finite_fail_their_example_only(tmp_path: Path, monkeypatch) -> None:
    """A real model whose head sometimes gives NaN: no token is chosen from it, and the example gets no score."""
    calls = 0

    def broken(spec):
        model = load_weights(spec)

        def now_and_then(_module, _inputs, logits: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return logits * float("nan") if calls in (3, 7) else logits

        model.lm_head.register_forward_hook(now_and_then)
        return model

    monkeypatch.setattr("eval.run.loop.load_weights", broken)
    result = run(small_run(tmp_path / "run"), show=False)
    failures = read_failures(tmp_path / "run")
    assert {failure.reason for failure in failures} == {
        "FloatingPointError: the model's logits are not finite (NaN or infinite)"
    }
    records = read_records(tmp_path / "run")
    assert {record.key for record in records}.isdisjoint(failure.key for failure in failures)
    assert len(records) + len(failures) == 6
    assert result.results is not None
    assert run_table(result.results, "").frame["failed"].iloc[-1] == len(failures) == 2


def test_memory_of_a_failed_example_is_released_before_the_next(tmp_path: Path, monkeypatch) -> None:
    freed: list[int] = []
    records = tmp_path / "run" / "records.jsonl"

    def release(_: torch.device) -> None:
        freed.append(records.read_text().count("\n") if records.exists() else 0)

    monkeypatch.setattr("eval.run.measure.release_memory", release)
    failing(monkeypatch, {1: torch.OutOfMemoryError("CUDA out of memory"), 7: RuntimeError("an exception in a method")})
    run(small_run(tmp_path / "run"), show=False)
    assert freed == [0, 2, 4]  # at the first failure, at the second with two records since, and at the end


def test_device_that_does_not_recover_ends_the_run_with_its_records_safe(tmp_path: Path, monkeypatch, caplog) -> None:
    def broken(_: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory\naccess was encountered")

    monkeypatch.setattr("eval.run.measure.release_memory", broken)
    failing(monkeypatch, {5: RuntimeError("CUDA error: an illegal memory access was encountered")})
    with pytest.raises(UserError, match=r"cpu does not recover .*illegal memory access.*give the same command again"):
        run(small_run(tmp_path / "run"), show=False)
    assert len(read_records(tmp_path / "run")) == 2
    assert len(read_failures(tmp_path / "run")) == 1
    assert "its memory could not be freed" in caplog.text


def test_accelerator_is_asked_whether_it_still_answers(monkeypatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr("eval.run.measure.release_memory", lambda _: None)
    monkeypatch.setattr("torch.accelerator.synchronize", asked.append)
    free(torch.device("cuda", 1))
    assert asked == [torch.device("cuda", 1)]

    def gone(_: torch.device) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr("torch.accelerator.synchronize", gone)
    with pytest.raises(UserError, match="cuda:1 does not recover"):
        free(torch.device("cuda", 1))


def test_full_disk_in_the_middle_of_a_run_loses_nothing(tmp_path: Path) -> None:
    config = small_run(tmp_path / "run")
    run(config.changed(out=str(tmp_path / "whole")), show=False)
    size = (tmp_path / "whole" / "records.jsonl").stat().st_size
    about = (tmp_path / "whole" / "run.json").stat().st_size
    assert about < 0.7 * size
    with (
        full_disk(int(0.7 * size)),
        pytest.raises(
            UserError, match=r"records\.jsonl: the line could not be written .*free some disk space, then run the same"
        ),
    ):
        run(config, show=False)
    file = tmp_path / "run" / "records.jsonl"
    before = file.read_bytes()
    assert before.endswith(b"\n")
    assert 1 <= before.count(b"\n") < 6
    assert "UserError" in json.loads((tmp_path / "run" / "jobs.jsonl").read_text().splitlines()[-1])["error"]
    assert not (tmp_path / "run" / "summary.json").exists()
    run(config, show=False)
    assert file.read_bytes().startswith(before)
    assert len({record.key for record in read_records(tmp_path / "run")}) == file.read_bytes().count(b"\n") == 6


def test_error_of_a_job_is_told_even_if_it_cannot_be_noted(tmp_path: Path, monkeypatch, caplog) -> None:
    def full(_self: RunStore, event: dict) -> None:
        if event["event"] == "end":
            raise UserError("jobs.jsonl: no room")

    monkeypatch.setattr("eval.run.loop.load_weights", no_weights)
    monkeypatch.setattr(RunStore, "note", full)
    with pytest.raises(UserError, match="no such weights"):
        run(small_run(tmp_path / "run"), show=False)
    assert "jobs.jsonl: no room" in caplog.text


def test_resumed_run_sets_damaged_line_aside_and_measures_its_example_again(tmp_path: Path, monkeypatch) -> None:
    config = small_run(tmp_path / "run")
    run(config, show=False)
    file = tmp_path / "run" / "records.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], b"garbled\n", *lines[3:]]))
    with pytest.raises(UserError, match=r"records\.jsonl:3: not a line of records"):
        read_records(tmp_path / "run")
    failing(monkeypatch, dict.fromkeys(range(2, 99), RuntimeError("more than one example is measured")))
    run(config, show=False)
    assert [Record.from_json(line).key for line in file.read_text().splitlines()] == [
        Record.from_json(lines[number].decode()).key for number in (0, 1, 3, 4, 5, 2)
    ]


def test_smaller_limit_leaves_the_table_of_a_wider_run(tmp_path: Path) -> None:
    config = small_run(tmp_path / "run")
    run(config, show=False)
    before = {name: (tmp_path / "run" / name).read_text() for name in ("summary.csv", "examples.json")}
    run(config.changed(limit=1), show=False)
    assert {name: (tmp_path / "run" / name).read_text() for name in before} == before


def test_sweep_ends_in_one_table_under_the_names_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = (Results([stored([record(0, score=score)])]) for score in (0.5, 1.0))
    names = ("tiny", "lazy", "", "hops")
    show_together([RunResult(Path("a"), fast, names)])
    assert capsys.readouterr().out == ""  # it has been shown
    show_together([RunResult(Path("a"), fast, names), RunResult(Path("b"), slow, ("tiny", "random", "seed 1", "hops"))])
    lines = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if "multi_doc_qa" in line]
    names = ("baseline ", "lazy ", "random, seed 1 ")
    assert all(line.startswith(name) for line, name in zip(lines, names, strict=True))
