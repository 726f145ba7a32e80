"""The run loop in this process, with examples that cannot be measured."""

import gc
import gzip
import json
import re
import weakref
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import eval.run.decode
from eval.analysis.field import field
from eval.cli import main
from eval.run.memory import free
from eval.run.run import prepare
from eval.store.folder import RunStore, read_visits
from eval.store.results import Results
from eval.store.runs import stored_runs
from lazyllm import Generation
from lazyllm.engine.flops import attention_ceiling
from lazyllm.errors import UserError
from lazyllm.methods import TriangleMix
from lazyllm.models.load import load_weights
from tests.eval.store.test_folder import full_disk
from tests.runs import measure, small_run

generate = eval.run.decode.generate


def failing(monkeypatch: pytest.MonkeyPatch, errors: dict[int, Exception]) -> None:
    """Make the generations with these numbers fail, in the order of calls."""
    calls = count()

    def generate_or_fail(*arguments, **settings) -> Generation:
        if (call := next(calls)) in errors:
            raise errors[call]
        return generate(*arguments, **settings)

    monkeypatch.setattr(eval.run.decode, "generate", generate_or_fail)


def test_method_that_skips_attention_is_timed_and_its_flops_are_those_of_its_pairs(tmp_path: Path) -> None:
    arms = {"triangle": {"name": "trianglemix", "dense": 1, "sinks": 1, "window": 8, "last": 8}}
    run = small_run(tmp_path / "run", method=None, compare=arms)
    measure(run, show=False)
    for visit in read_visits(tmp_path / "run"):
        costs = {label: answers[0].cost for label, answers in visit.answers.items()}
        assert visit.answers["triangle"][0].times.ttft_s
        n, config = visit.turns[0].tokens, run.subject.model_config
        assert costs["triangle"].prefill_flops == TriangleMix(1, 1, 8, 8).first_token_flops(config, n)
        assert {cost.attention_ceiling for cost in costs.values()} == {attention_ceiling(config, n)}
    table = field(Results(stored_runs([tmp_path / "run"]))).cells.set_index("method")
    assert "-" not in (str(table["TTFT speedup"]["TriangleMix"]), str(table["ideal"]["TriangleMix"]))


def test_failure_of_an_arm_is_its_own_and_the_same_command_visits_that_example_again(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    # two arms, six visits, in the order of baseline and lazy: BL LB LB BL BL LB. Lazy fails in the first one, the
    # baseline in the fourth
    errors = {1: torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB"), 6: FloatingPointError("logits not finite")}
    failing(monkeypatch, errors)
    caplog.set_level("INFO")
    result = measure(small_run(tmp_path / "run"), show=False)
    visits = read_visits(tmp_path / "run")
    assert [len(visit.answers) for visit in visits] == [1, 2, 2, 1, 2, 2]
    failures = {(visit.dataset, label): why for visit in visits for label, why in visit.failures.items()}
    assert [(key, re.split(r"; | \(", why.reason)[0]) for key, why in failures.items()] == [
        (("lookup", "lazy"), "OutOfMemoryError: CUDA out of memory. Tried 2 GiB"),
        (("shots", "baseline"), "FloatingPointError: logits not finite"),
    ]
    assert re.search(r"; out of memory at 9\d prompt tokens: lower", failures["lookup", "lazy"].reason)
    assert all("generate_or_fail" in why.traceback for why in failures.values())
    assert "2 answers failed and are not in the table, the first of lazy on lookup" in result.failures
    assert "1 answer failed, left out here" in (tmp_path / "run" / "summary.md").read_text()

    monkeypatch.setattr(eval.run.decode, "generate", generate)
    caplog.clear()
    assert not measure(small_run(tmp_path / "run"), show=False).failed
    visits = read_visits(tmp_path / "run")
    assert len(visits) == 8  # the first six, and a second one of two examples
    assert [sorted(visit.answers) for visit in visits[6:]] == [["baseline", "lazy"], ["baseline"]]
    assert "4 of them already measured" in caplog.text
    assert " failed" not in caplog.text  # the folder has the name of this test


def test_later_visit_holds_the_missing_arms_and_the_baseline_for_the_clock(tmp_path: Path, monkeypatch) -> None:
    arms = {"one": {"name": "lazy", "schedule": {2: 0.5}}, "two": {"name": "random_drop", "keep": 0.5}}
    run = small_run(tmp_path / "run", compare=arms, dataset={"lookup": True}, limit=1)
    failing(monkeypatch, {2: RuntimeError("no kernel image")})
    assert measure(run, show=False).failed
    monkeypatch.setattr(eval.run.decode, "generate", generate)
    assert not measure(run, show=False).failed
    first, second = read_visits(tmp_path / "run")
    assert (list(first.answers), list(second.answers)) == (["baseline", "one"], ["baseline", "two"])
    assert second.answers["two"][0].fidelity is not None  # compared with the baseline of its own visit
    frame = Results.read([tmp_path]).frame
    assert frame.query("counts")["arm"].tolist() == ["baseline", "one", "two"]  # the first baseline counts


@pytest.mark.parametrize(("sweep", "calls"), [([], [0]), (["-m"], [4, 5])])
def test_run_ends_with_3_if_answers_failed(tmp_path: Path, monkeypatch, capsys, sweep: list[str], calls) -> None:
    """Of a sweep's three jobs, all answers of the last one fail."""
    monkeypatch.chdir(tmp_path)
    failing(monkeypatch, {call: RuntimeError("no kernel image") for call in calls})
    quick = ["dataset=lookup", "limit=2", "max_new_tokens=2", "baseline=false", "warmup=0"]
    assert main(["run", *sweep, *quick, "method=lazy,random_drop,static_pruning" if sweep else "method=lazy"]) == 3
    told = {0: "1 answer failed and is not in the table", 1: "no answer: 2 answers failed"}[len(sweep)]
    out, error = capsys.readouterr()
    assert f"error: {told}" in error.splitlines()[-1]
    assert "on lookup, row" in error.splitlines()[-1]
    assert ("All runs of the sweep" in out) == bool(sweep)


def test_comparison_is_one_folder_with_one_table_and_one_picture(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    arms = {"mine": {"name": "lazy", "schedule": {2: 0.5}}, "drop": {"name": "random_drop", "keep": 0.5, "seeds": 2}}
    run = small_run(None, compare=arms, dataset={"lookup": True}, limit=2, label="two")
    generations = Mock(side_effect=generate)
    monkeypatch.setattr(eval.run.decode, "generate", generations)
    measure(run)
    assert generations.call_count == 2 * 4  # the baseline once for all
    (folder,) = Path("runs").iterdir()
    assert folder == prepare(run).folder
    assert folder.name.startswith("tiny-two-lookup-")
    assert (folder / "summary.md").read_text().startswith("# tiny, two, lookup\n")
    assert {file.name for file in (folder / "figures").iterdir()} == {"field.png"}
    out = capsys.readouterr().out
    assert all(f"  {file}" in out for file in (folder / "summary.md", folder / "figures" / "field.png"))


def test_run_without_a_baseline_has_a_table_and_no_picture(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", baseline=False, dataset={"lookup": True}, limit=2)
    assert Results([measure(run, show=False)]).by_task["ttft_speedup"].isna().all()
    assert not (tmp_path / "run" / "figures").exists()


def test_model_loads_once_only_if_needed_and_leaves_the_memory(tmp_path: Path, monkeypatch) -> None:
    loaded: list[weakref.ref] = []

    def counted(spec):
        loaded.append(weakref.ref(model := load_weights(spec)))
        return model

    monkeypatch.setattr("lazyllm.models.load.load_weights", counted)
    runs = [measure(small_run(tmp_path / "run"), show=False) for _ in range(2)]
    assert len(loaded) == 1
    assert runs[0].visits == runs[1].visits
    gc.collect()
    assert loaded[0]() is None  # its memory is free for the next job of a sweep


def test_arm_out_of_reach_is_left_out_with_a_line(tmp_path: Path, caplog) -> None:
    asked = {
        "random_drop": {"name": "random_drop", "keep": "6x"},
        "fastkv": {"name": "fastkv", "keep": "2x"},  # a cut half-way leaves half of the layers whole
        "specprefill": {"name": "specprefill", "draft": None, "keep": "2x"},
    }
    run = small_run(tmp_path, compare=asked)
    assert [arm.label for arm in prepare(run).arms] == ["baseline", "random_drop"]
    assert "left out: fastkv: method 'fastkv' cannot reach an ideal TTFT speedup of 2.0 on 8 layers" in caplog.text
    assert "left out: specprefill" in caplog.text
    assert "name a draft" in caplog.text
    with pytest.raises(UserError, match="no method reaches its speedup on this model: give another"):
        _ = prepare(run.changed(compare={"fastkv": asked["fastkv"]})).arms
    with pytest.raises(UserError, match="takes no preset as layer=2x"):  # a mistake is one still
        _ = prepare(run.changed(compare=asked | {"mine": {"name": "static_pruning", "layer": "2x", "keep": 0.5}})).arms


def test_job_that_breaks_off_says_why_even_if_that_cannot_be_noted(tmp_path: Path, monkeypatch, caplog) -> None:
    def full(_self: RunStore, event: dict) -> None:
        if event["event"] == "end":
            raise UserError("jobs.jsonl: no room")

    monkeypatch.setattr("lazyllm.models.load.load_weights", Mock(side_effect=UserError("no such weights")))
    with pytest.raises(UserError, match="no such weights"):
        measure(small_run(tmp_path / "run"), show=False)
    begin, end = (json.loads(line) for line in (tmp_path / "run" / "jobs.jsonl").read_text().splitlines())
    assert (begin["event"], begin["examples"]) == ("begin", 6)
    assert (end["event"], end["error"]) == ("end", "UserError: no such weights")
    monkeypatch.setattr(RunStore, "note", full)
    with pytest.raises(UserError, match="no such weights"):
        measure(small_run(tmp_path / "run"), show=False)
    assert "jobs.jsonl: no room" in caplog.text


def test_device_that_does_not_recover_ends_the_run_with_its_visits_safe(tmp_path: Path, monkeypatch, caplog) -> None:
    broken = Mock(side_effect=RuntimeError("CUDA error: an illegal memory\naccess was encountered"))
    monkeypatch.setattr("eval.run.memory.release_memory", broken)
    failing(monkeypatch, {5: RuntimeError("CUDA error: an illegal memory access was encountered")})
    with pytest.raises(UserError, match=r"cpu does not recover .*illegal memory access.*give the same command again"):
        measure(small_run(tmp_path / "run"), show=False)
    assert len(read_visits(tmp_path / "run")) == 2
    assert "its memory could not be freed" in caplog.text


def test_accelerator_is_asked_whether_it_still_answers(monkeypatch) -> None:
    synchronize = Mock(side_effect=[None, RuntimeError("CUDA error: unspecified launch failure")])
    monkeypatch.setattr("eval.run.memory.release_memory", lambda _: None)
    monkeypatch.setattr("torch.accelerator.synchronize", synchronize)
    free(torch.device("cuda", 1))
    synchronize.assert_called_once_with(torch.device("cuda", 1))
    with pytest.raises(UserError, match="cuda:1 does not recover"):
        free(torch.device("cuda", 1))


def test_full_disk_in_the_middle_of_a_run_loses_nothing(tmp_path: Path) -> None:
    config = small_run(tmp_path / "run")
    measure(config.changed(out=str(tmp_path / "whole")), show=False)
    size = (tmp_path / "whole" / "visits.jsonl").stat().st_size
    about = (tmp_path / "whole" / "run.json").stat().st_size
    assert about < 0.7 * size
    said = r"visits\.jsonl: the line could not be written .*free some disk space, then run the same"
    with full_disk(int(0.7 * size)), pytest.raises(UserError, match=said):
        measure(config, show=False)
    file = tmp_path / "run" / "visits.jsonl"
    before = file.read_bytes()
    assert before.endswith(b"\n")
    assert 1 <= before.count(b"\n") < 6
    assert "UserError" in json.loads((tmp_path / "run" / "jobs.jsonl").read_text().splitlines()[-1])["error"]
    assert not (tmp_path / "run" / "summary.json").exists()
    measure(config, show=False)
    assert file.read_bytes().startswith(before)
    assert len({visit.key for visit in read_visits(tmp_path / "run")}) == file.read_bytes().count(b"\n") == 6


def test_smaller_limit_leaves_the_table_of_a_wider_run(tmp_path: Path) -> None:
    config = small_run(tmp_path / "run")
    measure(config, show=False)
    before = {name: (tmp_path / "run" / name).read_text() for name in ("summary.csv", "examples.json")}
    measure(config.changed(limit=1), show=False)
    assert {name: (tmp_path / "run" / name).read_text() for name in before} == before


def test_wider_run_that_a_compressed_folder_refuses_leaves_its_plan(tmp_path: Path) -> None:
    measure(small_run(tmp_path, limit=1), show=False)
    visits, planned = tmp_path / "visits.jsonl", (tmp_path / "examples.json").read_bytes()
    (tmp_path / "visits.jsonl.gz").write_bytes(gzip.compress(visits.read_bytes()))
    visits.unlink()
    with pytest.raises(UserError, match="gunzip it"):
        measure(small_run(tmp_path, limit=2), show=False)
    assert (tmp_path / "examples.json").read_bytes() == planned
    assert measure(small_run(tmp_path, limit=1), show=False).failures == ""
