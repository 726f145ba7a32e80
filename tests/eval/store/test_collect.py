from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.eval.paper.figures.made import small_trace, with_traces

from eval.analysis.figures import FIGURES
from eval.analysis.tables import TABLES
from eval.analysis.write import main as write_paper
from eval.report.__main__ import main as report
from eval.store import aggregate
from eval.store.collect import collect, describe, main
from eval.store.folder import open_store
from eval.store.record import SCHEMA, Failure
from eval.store.results import PLANNED, Results, find_runs, planned_text, stored_runs
from lazyllm.errors import UserError
from scripts.dev.simulate_campaign import write_campaign
from tests.eval.store.made import LAZY, record, with_turns, write_run


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some hundred records of 28 runs, in two shards each."""
    folder = tmp_path_factory.mktemp("campaign")
    assert write_campaign(folder / "runs", share=0.01, seeds=2, steps=(1, 64), settings=7) > 500
    run = next(run for run in find_runs([folder / "runs"]) if run.method == "lazy")
    with_traces(run, run.folder, small_trace())
    collect([folder / "runs"], folder / "collected")
    return folder


@pytest.fixture(scope="module")
def collected(campaign: Path) -> Results:
    return Results.read([campaign / "collected"])


def files(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# -------------------------------------------------------------------------------------------- the same either way


@pytest.mark.slow
def test_every_table_and_figure_is_the_same_from_both(campaign: Path, collected: Results, tmp_path: Path) -> None:
    """Tables and figures of the campaign, by the command, equal those made from the frames of the runs themselves."""
    assert write_paper([str(campaign / "collected"), "--out", str(tmp_path)]) == 0
    written = files(tmp_path)
    raw = Results.read([campaign / "runs"])
    assert raw.frame.drop(columns="folder").equals(collected.frame.drop(columns="folder"))
    for name, make in TABLES.items():
        assert written[f"tables/{name}.csv"].decode() == make(raw).to_csv()
    absent = {"needle", "evidence", "turns"}  # LongBench has no such rows; no other figure is left out
    for name in FIGURES.keys() - absent:
        assert written[f"figures/{name}.csv"].decode() == FIGURES[name].data(raw).to_csv(index=False)


def test_the_report_is_the_same_from_both(campaign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.analysis.figures.FIGURES", {})
    pages = []
    for name in ("runs", "collected"):
        assert report([str(campaign / name), "--out", str(tmp_path / name), "--records", "1"]) == 0
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


def test_nothing_of_a_run_is_lost(campaign: Path, collected: Results) -> None:
    raw = find_runs([campaign / "runs"])
    assert [run.folder.name for run in raw] == [run.folder.name for run in collected.runs]
    for run, other in zip(raw[:3], collected.runs[:3], strict=True):
        assert run.table().equals(other.table())
        assert run.table().schema.equals(SCHEMA)
        assert (run.about, run.planned, run.records_sha256) == (other.about, other.planned, other.records_sha256)
    assert [len(run.traces) for run in raw] == [len(run.traces) for run in collected.runs]


def test_each_settings_bootstrap_is_made_once(collected: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    rows_of = aggregate.rows_of
    monkeypatch.setattr(aggregate, "rows_of", lambda frame: made.append(len(frame)) or rows_of(frame))
    results = Results(collected.runs)
    for part in [*TABLES.values(), *(figure.data for figure in FIGURES.values())]:
        part(results)
    records = len(results.frame) // 2  # of a model
    # seven settings, and their baselines: of all, of two presets of Table 1, and of the six lazy ones
    of_a_model = [records // 7] * 7 + [records, 2 * records // 7, 6 * records // 7]
    assert sorted(made) == sorted(of_a_model * 2)


# -------------------------------------------------------------------- a slow version, in dictionaries and plain Python


def lines(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for about in sorted(folder.rglob("run.json")):
        for file in sorted(about.parent.glob("records*.jsonl")):
            for line in file.read_text().splitlines():
                yield json.loads(about.read_text()), json.loads(line)


def test_figure_7_is_that_of_a_slow_version(campaign: Path, collected: Results) -> None:
    of_models: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for about, line in lines(campaign / "runs"):
        if about["identity"]["method"].get("schedule") == "paper":
            of_models[about["identity"]["model"]].append(line)
    shares: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for model, of_model in of_models.items():
        for step in range(max(len(line["method"]["computed"]) for line in of_model)):
            for line in of_model:
                computed = line["method"]["computed"]
                for group, count in enumerate(computed[min(step, len(computed) - 1)]):
                    shares[model, step, group + 1].append(100 * count / line["prompt_tokens"])
    frame = FIGURES["figure7"].data(collected)
    found = {(row["model"], row["step"], row["group"]): row["pct_computed"] for row in frame.to_dict("records")}
    assert found.keys() == shares.keys()
    for key, values in shares.items():
        assert found[key] == pytest.approx(math.fsum(values) / len(values))


# ----------------------------------------------------------------------------------------------------- what is refused


def shard(folder: Path, part: str, *records: Any) -> None:
    (folder / f"records{part}.jsonl").write_text("".join(record.to_json() + "\n" for record in records))


def test_later_turns_are_collected_too(tmp_path: Path) -> None:
    records = [record(0), with_turns()]
    write_run(tmp_path / "runs" / "one", records)
    [raw] = find_runs([tmp_path / "runs"])
    collect([tmp_path / "runs"], tmp_path / "collected")
    [run] = find_runs([tmp_path / "collected"])
    assert run.records == records
    assert run.examples.equals(raw.examples)
    assert run.examples["turn"].tolist() == [1, 1, 2, 3]


def test_shards_are_merged_and_what_stands_twice_is_kept_once(tmp_path: Path, caplog: Any) -> None:
    folder = write_run(tmp_path / "runs" / "a", [])
    shard(folder, "-1-of-2", record(0), record(1))
    shard(folder, "-2-of-2", record(2), record(1))
    (done,) = collect([tmp_path / "runs"], tmp_path / "out")
    assert (done.records, done.files, done.missing) == (3, 2, None)
    (run,) = find_runs([tmp_path / "out"])
    assert run.records == [record(0), record(1), record(2)]
    assert "records-2-of-2.jsonl:2: repeats" in caplog.text


def test_shards_that_disagree_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "a", [])
    shard(folder, "-1-of-2", record(0))
    shard(folder, "-2-of-4", record(0, score=1.0))
    with pytest.raises(
        UserError, match=r"records-2-of-4.jsonl:1: another record of hotpotqa, row row-0, than .*records-1-of-2"
    ):
        collect([tmp_path / "runs"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_mixtures_are_refused(tmp_path: Path) -> None:
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


def test_a_place_that_would_lose_something_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", [record(0)])
    with pytest.raises(UserError, match="is inside the runs"):
        collect([tmp_path / "runs"], tmp_path / "runs" / "out")
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


# ------------------------------------------------------------------------------------------------------ what is missing


def test_what_is_missing_and_what_failed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "runs" / "a", [record(0)])
    keys = [("hotpotqa", f"row-{number}") for number in range(6)]
    (folder / PLANNED).write_text(planned_text(keys))
    with open_store(folder, json.loads((folder / "run.json").read_text())["identity"], {}) as store:
        store.fail(Failure("hotpotqa", "row-4", "RuntimeError: no", ""))
    write_run(tmp_path / "runs" / "begun", [], seed=1)
    assert main([str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    assert "a: 5 examples are missing, 1 of them failed: hotpotqa, row row-1" in said
    assert "row-3 and 2 more" in said
    out = tmp_path / "runs-collected"
    assert "begun: no records, 0 examples failed" in said
    entry, begun = json.loads((out / "campaign.json").read_text())["runs"]
    assert (begun["folder"], begun["records"], begun["missing"]) == ("begun", 0, None)
    assert [tuple(key) for key in entry["missing"]] == keys[1:]
    (run,) = find_runs([out])
    assert [failure.id for failure in run.failures] == ["row-4"]


def test_a_run_of_which_every_example_failed_is_kept(tmp_path: Path) -> None:
    keys = [("hotpotqa", "row-0"), ("hotpotqa", "row-1")]
    for number, name in enumerate("abc"):
        folder = write_run(tmp_path / "runs" / name, [] if name == "b" else [record(0), record(1)], seed=number)
        (folder / PLANNED).write_text(planned_text(keys))
    folder = tmp_path / "runs" / "b"
    with open_store(folder, json.loads((folder / "run.json").read_text())["identity"], {}) as store:
        for key in keys:
            store.fail(Failure(*key, "RuntimeError: no", ""))
    done = collect([tmp_path / "runs"], tmp_path / "once")
    assert [(run.folder, run.records, run.missing, run.failed) for run in done] == [
        ("a", 2, [], 0),
        ("b", 0, keys, 2),
        ("c", 2, [], 0),
    ]
    assert "b: 2 examples are missing, 2 of them failed" in describe(done, tmp_path)
    collect([tmp_path / "once"], tmp_path / "twice")
    for name in ("once", "twice"):
        assert (tmp_path / name / "b" / "failures.jsonl").read_bytes() == (folder / "failures.jsonl").read_bytes()
        runs = stored_runs([tmp_path / name])
        assert [run.records for run in runs] == [[record(0), record(1)], [], [record(0), record(1)]]
        assert [len(run.failures) for run in runs] == [0, 2, 0]
        assert [run.folder.name for run in find_runs([tmp_path / name])] == ["a", "c"]


def test_a_collected_campaign_without_its_records_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", [record(0)])
    collect([tmp_path / "runs"], tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "cut")
    (tmp_path / "cut" / "records.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="collect the runs again"):
        find_runs([tmp_path / "cut"])
