"""The run loop in this process: what fails, what a second command adds, and what is written."""

import gc
import gzip
import io
import json
import logging
import re
import shutil
import sys
import threading
import weakref
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import eval.run.bench
from eval.cli import main
from eval.run import loop
from eval.run.bench import load_model
from eval.run.job import job
from eval.run.prepare import prepare
from eval.store.folder import RunStore, read_visits
from eval.store.results import Results
from lazyllm import Generation
from lazyllm.errors import UserError
from lazyllm.models.load import load_weights
from tests.eval.store.test_folder import full_disk
from tests.runs import TINY, checked, measured, small_config

generate = eval.run.bench.generate


def failing(monkeypatch: pytest.MonkeyPatch, errors: dict[int, Exception]) -> None:
    """Make the generations with these numbers fail, in the order of calls."""
    calls = count()

    def generate_or_fail(*arguments, **settings) -> Generation:
        if (call := next(calls)) in errors:
            raise errors[call]
        return generate(*arguments, **settings)

    monkeypatch.setattr(eval.run.bench, "generate", generate_or_fail)


def test_failure_of_an_arm_is_its_own_and_the_same_command_tries_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # two arms, six visits, in the order of baseline and lazy: BL LB LB BL BL LB. Lazy fails in the
    # first one, the baseline in the fourth
    memory = torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB")
    failing(monkeypatch, {1: memory, 6: FloatingPointError("logits not finite")})
    caplog.set_level("INFO")
    config = small_config(tmp_path / "run")
    result = measured(config)
    visits = read_visits(tmp_path / "run")
    assert [len(visit.answers) for visit in visits] == [1, 2, 2, 1, 2, 2]
    failures = {
        (visit.dataset, label): why for visit in visits for label, why in visit.failures.items()
    }
    assert {key: re.split(r"; | \(", why.error)[0] for key, why in failures.items()} == {
        ("lookup", "lazy"): "OutOfMemoryError: CUDA out of memory. Tried 2 GiB",
        ("shots", "baseline"): "FloatingPointError: logits not finite",
    }
    error = failures["lookup", "lazy"].error
    assert re.search(r"; out of memory at 9\d prompt tokens: lower", error)
    assert all("generate_or_fail" in why.traceback for why in failures.values())
    said = "2 answers failed and are not in the table, the first of lazy on lookup"
    assert said in result.failures
    assert "1 answer failed, left out here" in (tmp_path / "run" / "summary.md").read_text()

    monkeypatch.setattr(eval.run.bench, "generate", generate)
    caplog.clear()
    again = measured(config)
    assert not again.failed
    visits = read_visits(tmp_path / "run")
    # the first six, and a second one of two examples; the baseline is there for the clock
    assert [list(visit.arms) for visit in visits[6:]] == [["baseline", "lazy"], ["baseline"]]
    assert visits[6].answers["lazy"].kl is not None  # beside the baseline of its own visit
    counting = Results([again]).counting
    assert len(counting) == len(counting.drop_duplicates(["dataset", "id", "arm"])) == 12
    assert set(counting[counting["arm"] == "baseline"]["visit"]) == {0, 1}  # the first that has one
    assert "4 of them already measured" in caplog.text
    assert " failed" not in caplog.text  # the folder has the name of this test


@pytest.mark.parametrize(("sweep", "calls"), [([], [0]), (["-m"], [4, 5])])
def test_run_ends_with_3_if_answers_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, sweep: list[str], calls: list[int]
) -> None:
    """Of a sweep's three jobs, all answers of the last one fail."""
    monkeypatch.chdir(tmp_path)
    failing(monkeypatch, {call: RuntimeError("no kernel image") for call in calls})
    quick = ["dataset=lookup", "limit=2", "max_new_tokens=2", "baseline=false", "warmup=0"]
    methods = "method=lazy,random_drop,static_pruning" if sweep else "method=lazy"
    assert main(["run", *sweep, *quick, methods]) == 3
    said = ["1 answer failed and is not in the table", "no answer: 2 answers failed"][len(sweep)]
    out, error = capsys.readouterr()
    assert f"error: {said}" in error.splitlines()[-1]
    assert "on lookup, row" in error.splitlines()[-1]
    assert ("All runs of the sweep" in out) == bool(sweep)


def test_comparison_is_one_folder_with_one_table_and_one_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    arms = [{"name": "lazy", "schedule": {2: 0.5}}, {"name": "random_drop", "seeds": 2}]
    config = small_config(None, arms=arms, dataset="lookup", limit=2, label="two")
    generations = Mock(side_effect=generate)
    monkeypatch.setattr(eval.run.bench, "generate", generations)
    measured(config, show=True)
    assert generations.call_count == 2 * 4  # the baseline once for all
    (folder,) = Path("runs").iterdir()
    assert folder == prepare(config).folder
    assert folder.name.startswith("tiny-two-lookup-")
    assert (folder / "summary.md").read_text().startswith("# tiny, two, lookup\n")
    assert {file.name for file in (folder / "figures").iterdir()} == {"methods.png"}
    out = capsys.readouterr().out
    files = (folder / "summary.md", folder / "figures" / "methods.png")
    assert all(f"  {file}" in out for file in files)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(loop, "PROGRESS_EVERY_S", 0)
    monkeypatch.setenv("TERM", "xterm")
    for stderr, lines in ((Terminal(), 0), (io.StringIO(), 3)):
        monkeypatch.setattr(sys, "stderr", stderr)
        caplog.clear()
        with loop._progress(3) as show:
            threads = threading.active_count()
            for done in (1, 2, 3):
                show(done, "needle")
        assert threads == threading.active_count()  # none redraws while arms are timed
        assert len(caplog.records) == lines
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stderr.getvalue()) + caplog.text
        assert ("2/3 needle" in text) == (lines == 0)
        assert ("2 of 3 examples (needle)" in text) == (lines == 3)


def test_log_goes_where_a_progress_bar_puts_stderr(monkeypatch) -> None:
    before, bar = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", before)
    with job():
        logging.info("first")
        monkeypatch.setattr(sys, "stderr", bar)
        logging.info("second")
    assert before.getvalue().endswith(" first\n")
    assert bar.getvalue().endswith(" second\n")
    assert "first" not in bar.getvalue()


@pytest.mark.parametrize(
    ("changes", "is_shown"),
    [
        ([], True),
        (["dataset=lookup"], False),
        (["arms=[lazy,fastkv]"], False),
        (["method=fastkv"], False),
        (["label=mine", "baseline=false"], False),
    ],
)
def test_only_the_plain_run_ends_with_what_to_run_next(
    changes: list[str], is_shown: bool, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["limit=1", "max_new_tokens=2", "warmup=0", "model.max_prompt_tokens=96"]
    measured(checked(*changes, *quick), show=True)
    assert ("model=llama2 method=lazy dataset=hotpotqa" in capsys.readouterr().out) == is_shown


def test_run_without_a_baseline_has_a_table_and_no_picture(tmp_path: Path) -> None:
    stored = measured(small_config(tmp_path, baseline=False, dataset="lookup", limit=2))
    assert Results([stored]).by_task["ttft_speedup"].isna().all()
    assert not (tmp_path / "figures").exists()


def test_model_loads_once_only_if_needed_and_leaves_the_memory(tmp_path, monkeypatch) -> None:
    loaded: list[weakref.ref] = []

    def counted(spec):
        loaded.append(weakref.ref(model := load_weights(spec)))
        return model

    monkeypatch.setattr("eval.run.bench.load_weights", counted)
    first, second = (measured(small_config(tmp_path)) for _ in range(2))
    assert len(loaded) == 1
    assert first.visits == second.visits
    gc.collect()
    assert loaded[0]() is None  # its memory is free for the next job of a sweep


def test_log_names_settings_of_the_generation_config_without_effect(tiny_copy, caplog) -> None:
    config = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "do_sample": True}
    (tiny_copy / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    with caplog.at_level(logging.INFO):
        load_model(prepare(small_config(None, model=TINY | {"name": str(tiny_copy)})))
    [line] = [text for text in caplog.messages if "have no effect" in text]
    named = "do_sample=True, repetition_penalty=1.7, no_repeat_ngram_size=2"
    assert line.endswith(f"these have no effect: {named}")


def test_another_prompt_in_the_folder_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path, limit=1)
    measured(config)
    file = tmp_path / "visits.jsonl"
    first, *others = file.read_text().splitlines(keepends=True)
    visit = json.loads(first) | {"prompt_sha256": "0" * 64}
    before = json.dumps(visit) + "\n" + "".join(others)
    file.write_text(before)
    where = rf"holds {visit['dataset']}, row {visit['id']}, with another prompt than the current"
    with pytest.raises(UserError, match=where):
        measured(config)
    assert file.read_text() == before


@pytest.mark.parametrize(("load", "lines"), [(2.9, 0), (3.1, 2)])
def test_other_work_on_the_machine_is_named(
    load: float, lines: int, tmp_path: Path, monkeypatch, caplog
) -> None:
    """At the begin and at the end, on two cores."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    measured(small_config(tmp_path))
    assert caplog.text.count("a load of 3.1 on 2 cores") == lines


def test_job_that_breaks_off_says_why_even_if_that_cannot_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_self: RunStore, event: dict) -> None:
        if event["event"] == "end":
            raise UserError("jobs.jsonl: no room")

    absent = Mock(side_effect=UserError("no such weights"))
    monkeypatch.setattr("eval.run.bench.load_weights", absent)
    with pytest.raises(UserError, match="no such weights"):
        measured(small_config(tmp_path))
    begin, end = map(json.loads, (tmp_path / "jobs.jsonl").read_text().splitlines())
    assert (begin["event"], begin["examples"]) == ("begin", 6)
    assert (end["event"], end["error"]) == ("end", "UserError: no such weights")
    monkeypatch.setattr(RunStore, "note", full)
    with pytest.raises(UserError, match="no such weights"):
        measured(small_config(tmp_path))
    assert "jobs.jsonl: no room" in caplog.text


def test_device_that_does_not_recover_ends_the_run_with_its_visits_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = "CUDA error: an illegal memory\naccess was encountered"
    monkeypatch.setattr("eval.run.device.release_memory", Mock(side_effect=RuntimeError(error)))
    failing(monkeypatch, {5: RuntimeError(error)})
    said = "cpu does not recover .*illegal memory access.*give the same command again"
    with pytest.raises(UserError, match=said):
        measured(small_config(tmp_path))
    assert len(read_visits(tmp_path)) == 2
    assert "its memory could not be freed" in caplog.text


def test_full_disk_in_the_middle_of_a_run_loses_nothing(tmp_path: Path) -> None:
    measured(small_config(tmp_path / "whole"))
    config, run = small_config(tmp_path / "run"), tmp_path / "run"
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "whole").iterdir()}
    room = int(0.7 * sizes["visits.jsonl"])
    assert sizes["run.json"] < room
    said = r"visits\.jsonl: the line could not be written .*free some disk space, then run the same"
    with full_disk(room), pytest.raises(UserError, match=said):
        measured(config)
    file = run / "visits.jsonl"
    before = file.read_bytes()
    assert before.endswith(b"\n")
    assert 1 <= before.count(b"\n") < 6
    assert "UserError" in json.loads((run / "jobs.jsonl").read_text().splitlines()[-1])["error"]
    assert not (run / "summary.json").exists()
    measured(config)
    assert file.read_bytes().startswith(before)
    lines = file.read_bytes().count(b"\n")
    assert len({visit.key for visit in read_visits(run)}) == lines == 6


def test_smaller_limit_leaves_the_table_of_a_wider_run(tmp_path: Path) -> None:
    measured(small_config(tmp_path))
    names = ("summary.csv", "examples.json")
    before = {name: (tmp_path / name).read_text() for name in names}
    measured(small_config(tmp_path, limit=1))
    assert {name: (tmp_path / name).read_text() for name in names} == before


def test_wider_run_that_a_compressed_folder_refuses_leaves_its_plan(tmp_path: Path) -> None:
    config: Any = small_config(tmp_path, limit=1)
    measured(config)
    file, planned = tmp_path / "visits.jsonl", (tmp_path / "examples.json").read_bytes()
    with file.open("rb") as opened, gzip.open(f"{file}.gz", "wb") as compressed:
        shutil.copyfileobj(opened, compressed)
    file.unlink()
    with pytest.raises(UserError, match="gunzip it"):
        measured(small_config(tmp_path, limit=2))
    assert (tmp_path / "examples.json").read_bytes() == planned
    assert measured(config).failures == ""
