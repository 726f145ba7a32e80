"""Collected campaigns: nothing of their runs is lost, and nothing that would mislead is collected."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval import cli
from eval.analysis.registry import FIGURES, TABLES
from eval.store import aggregate
from eval.store.collect import collect, describe, main
from eval.store.folder import PLANNED, open_store, planned_text, read_planned
from eval.store.record import SCHEMA, Failure
from eval.store.results import Results, find_runs
from eval.store.runs import stored_runs
from lazyllm.errors import UserError
from tests.eval.analysis.made import small_trace, with_traces
from tests.eval.store.made import LAZY, PROVENANCE, record, write_run


def shard(folder: Path, part: str, *records: Any) -> None:
    (folder / f"records{part}.jsonl").write_text("".join(record.to_json() + "\n" for record in records))


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw runs of two models in two shards each, and the campaign collected from them."""
    folder = tmp_path_factory.mktemp("campaign")
    methods = [LAZY | {"schedule": "paper"}, *({"name": "random_drop", "keep": 0.5, "seed": seed} for seed in (0, 1))]
    for model in ("tiny", "llama2"):
        for method in methods:
            name = f"{model}-{method['name']}-{method.get('seed')}"
            paper = model if model == "llama2" else None
            run = write_run(
                folder / "runs" / name, [], method, model, paper, PROVENANCE | {"started": "2026"}, warmup=5
            )
            for part in (1, 2):
                done = [record(number, dataset) for dataset in ("hotpotqa", "trec") for number in (part, part + 2)]
                shard(run, f"-{part}-of-2", *done)
            (run / PLANNED).write_text(planned_text([("hotpotqa", "row-1")]))
    traced = find_runs([folder / "runs"])[0]
    with_traces(traced, traced.folder, small_trace())
    collect([folder / "runs"], folder / "collected")
    return folder


@pytest.fixture(scope="module")
def collected(campaign: Path) -> Results:
    return Results.read([campaign / "collected"])


@pytest.mark.slow
def test_tables_and_figures_are_equal_from_raw_and_collected(campaign: Path, collected: Results) -> None:
    raw = Results.read([campaign / "runs"])
    assert raw.frame.drop(columns="folder").equals(collected.frame.drop(columns="folder"))
    for name, make in TABLES.items():
        assert make(raw).to_csv() == make(collected).to_csv(), name
    for name, figure in FIGURES.items():
        assert figure.data(raw).equals(figure.data(collected)), name


def test_campaign_holds_all_of_its_runs(campaign: Path, collected: Results) -> None:
    raw = find_runs([campaign / "runs"])
    assert [run.folder.name for run in raw] == [run.folder.name for run in collected.runs]
    for run, other in zip(raw, collected.runs, strict=True):
        assert run.table().equals(other.table())
        assert run.table().schema.equals(SCHEMA)
        assert (run.about, run.records_sha256) == (other.about, other.records_sha256)
        assert read_planned(run.folder) == read_planned(other.folder) == [("hotpotqa", "row-1")]
    assert [len(run.traces) for run in raw] == [len(run.traces) for run in collected.runs]


def test_bootstrap_is_made_once_for_the_same_examples(collected: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    rows_of = aggregate.rows_of
    monkeypatch.setattr(aggregate, "rows_of", lambda frame: made.append(frame.to_csv()) or rows_of(frame))
    results = Results(collected.runs)
    for part in [*TABLES.values(), *(figure.data for figure in FIGURES.values())]:
        part(results)
    assert len(made) == len(set(made)) > 0


def test_runs_that_are_raw_and_collected_count_once(tmp_path: Path, monkeypatch, capsys) -> None:
    """`collect` writes below runs/ by default, where the next `report runs` meets it."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a", [record(0)])
    for _ in range(2):
        assert cli.main(["collect", "runs"]) == 0
        assert "runs/collected: 1 record of 1 run, from 1 file\n" in capsys.readouterr().out
    assert [run.folder for run in find_runs([Path("runs")])] == [Path("runs/a")]
    shutil.rmtree("runs/a")
    assert [run.folder for run in find_runs([Path("runs")])] == [Path("runs/collected/a")]


def test_shards_are_merged_and_equal_records_kept_once(tmp_path: Path, caplog: Any) -> None:
    folder = write_run(tmp_path / "runs" / "a", [])
    shard(folder, "-1-of-2", record(0), record(1))
    shard(folder, "-2-of-2", record(2), record(1))
    (done,) = collect([tmp_path / "runs"], tmp_path / "out")
    assert (done["records"], len(done["records_sha256"]), done["missing"]) == (3, 2, None)
    (run,) = find_runs([tmp_path / "out"])
    assert run.records == [record(0), record(1), record(2)]
    assert "records-2-of-2.jsonl:2: repeats" in caplog.text


def test_collect_refuses_shards_that_disagree(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "a", [])
    shard(folder, "-1-of-2", record(0))
    shard(folder, "-2-of-4", record(0, score=1.0))
    with pytest.raises(
        UserError, match=r"records-2-of-4.jsonl:1: another record of hotpotqa, row row-0, than .*records-1-of-2"
    ):
        collect([tmp_path / "runs"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_collect_refuses_mixtures(tmp_path: Path) -> None:
    write_run(tmp_path / "cell" / "a", [record(0)])
    write_run(tmp_path / "cell" / "b", [record(0)], warmup=9)
    with pytest.raises(UserError, match=r"measured twice, in .*/a and .*/b"):
        collect([tmp_path / "cell"], tmp_path / "out")
    write_run(tmp_path / "prompts" / "a", [record(0)])
    write_run(tmp_path / "prompts" / "b", [replace(record(0), prompt_sha256="other")], seed=1)
    with pytest.raises(UserError, match="another prompt than in earlier runs of tiny"):
        collect([tmp_path / "prompts"], tmp_path / "out")
    folder = write_run(tmp_path / "edited" / "a", [record(0)])
    about = (folder / "run.json").read_text()
    (folder / "run.json").write_text(about.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(UserError, match="the fingerprint differs from the identity's"):
        collect([tmp_path / "edited"], tmp_path / "out")
    (folder / "run.json").write_text(about.replace('"schema": 2', '"schema": 1'))
    with pytest.raises(UserError, match="schema 1"):
        collect([tmp_path / "edited"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_collect_refuses_a_place_that_would_lose_something(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", [record(0)])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(UserError, match="is not a campaign"):
        collect([tmp_path / "runs"], tmp_path / "mine")
    with pytest.raises(UserError, match="no run with records"):
        collect([tmp_path / "mine"], tmp_path / "out")
    collect([tmp_path / "runs"], tmp_path / "out")
    write_run(tmp_path / "runs" / "b", [record(1)], LAZY | {"schedule": "paper"})
    assert len(collect([tmp_path / "runs"], tmp_path / "out")) == 2  # an older campaign gives way
    assert len(find_runs([tmp_path / "out"])) == 2
    write_run(tmp_path / "out" / "c", [record(1)], seed=5)
    with pytest.raises(UserError, match="holds runs to collect"):
        collect([tmp_path / "out"], tmp_path / "out")


def test_collect_names_missing_and_failed_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "runs" / "a", [record(0)])
    keys = [("hotpotqa", f"row-{number}") for number in range(6)]
    (folder / PLANNED).write_text(planned_text(keys))
    with open_store(folder, json.loads((folder / "run.json").read_text())["identity"], {}) as store:
        store.fail(Failure("hotpotqa", "row-4", "RuntimeError: no", ""))
    write_run(tmp_path / "runs" / "begun", [], seed=1)
    out = tmp_path / "collected"
    assert main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "a: lacks 5 examples (1 failed)\n" in said
    assert "begun: no records, 0 failed examples" in said
    entry, begun = json.loads((out / "campaign.json").read_text())["runs"]
    assert (begun["folder"], begun["records"], begun["missing"]) == ("begun", 0, None)
    assert [tuple(key) for key in entry["missing"]] == keys[1:]
    (run,) = find_runs([out])
    assert [failure.id for failure in run.failures] == ["row-4"]


def test_run_without_records_is_kept_with_its_failures(tmp_path: Path) -> None:
    keys = [("hotpotqa", "row-0"), ("hotpotqa", "row-1")]
    for number, name in enumerate("abc"):
        folder = write_run(tmp_path / "runs" / name, [] if name == "b" else [record(0), record(1)], seed=number)
        (folder / PLANNED).write_text(planned_text(keys))
    folder = tmp_path / "runs" / "b"
    with open_store(folder, json.loads((folder / "run.json").read_text())["identity"], {}) as store:
        for key in keys:
            store.fail(Failure(*key, "RuntimeError: no", ""))
    done = collect([tmp_path / "runs"], tmp_path / "once")
    assert [tuple(run[name] for name in ("folder", "records", "missing", "failed")) for run in done] == [
        ("a", 2, [], 0),
        ("b", 0, keys, 2),
        ("c", 2, [], 0),
    ]
    assert "b: lacks 2 examples (2 failed)" in describe(done, tmp_path)
    collect([tmp_path / "once"], tmp_path / "twice")
    for name in ("once", "twice"):
        assert (tmp_path / name / "b" / "failures.jsonl").read_bytes() == (folder / "failures.jsonl").read_bytes()
        runs = stored_runs([tmp_path / name])
        assert [run.records for run in runs] == [[record(0), record(1)], [], [record(0), record(1)]]
        assert [len(run.failures) for run in runs] == [0, 2, 0]
        assert [run.folder.name for run in find_runs([tmp_path / name])] == ["a", "c"]


def test_damaged_campaign_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", [record(0)])
    collect([tmp_path / "runs"], tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "cut")
    (tmp_path / "cut" / "records.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="collect the runs again"):
        find_runs([tmp_path / "cut"])
