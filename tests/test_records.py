"""Records without texts: what `scripts.dev.records` makes, and what results/ holds of LongBench's
and RULER's rows."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.benchmarks.datasets import DATASETS
from eval.store.folder import PLANNED, read_visits
from eval.store.record import Failure
from eval.store.results import Results
from eval.store.runs import stored_runs
from eval.store.trace import read_trace
from scripts.dev import records
from tests.conftest import ROOT
from tests.eval.made import small_trace, with_traces, write_run
from tests.eval.store.visits import answer, visit

# Keys of a visit and of a trace whose strings are names and hashes, not texts
NAMES = {"dataset", "id", "prompt_sha256", "order", "groups", "kernel", "arm"}
COMMITTED = sorted(
    file.parent
    for file in (ROOT / "results").rglob("run.json")
    if any(map(records.is_private, json.loads(file.read_text())["identity"]["data"]))
)


def texts_in(value: Any, key: str = "") -> Iterator[str]:
    """Every string of some JSON that is not empty and stands under no key of `NAMES`."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from texts_in(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from texts_in(part, key)
    elif isinstance(value, str) and value and key not in NAMES:
        yield value


def faults(folder: Path) -> list[str]:
    """What a run's records hold that quotes a prompt or an answer."""
    found = []
    for line in gzip.decompress((folder / "visits.jsonl.gz").read_bytes()).splitlines():
        made = json.loads(line)
        found += texts_in(made)
        ids = [number for arm in made["arms"].values() for number in arm.get("token_ids", ())]
        found += [f"token {number}" for number in ids if number]
    for file in (folder / "traces").glob("*.json.gz"):
        found += texts_in(json.loads(gzip.decompress(file.read_bytes())))
    return found


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_no_text_of_longbench_is_committed(folder: Path) -> None:
    assert faults(folder) == []
    assert {file.name for file in folder.iterdir()} <= {
        "run.json",
        PLANNED,
        "visits.jsonl.gz",
        "traces",
    }
    assert all(file.name.endswith(".json.gz") for file in folder.glob("traces/*"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three examples, of which the third lacks an arm, with a trace."""
    failed = visit(
        2, arms={"baseline": answer(), "lazy": Failure(error="secret", traceback="secret")}
    )
    folder = write_run(tmp_path / "runs" / "one", [visit(0), visit(1, score=0.25), failed])
    (folder / PLANNED).write_text('{"hotpotqa": ["row-0", "row-1", "row-2", "row-3"]}')
    with_traces(stored_runs([folder])[0], folder, small_trace(dataset="hotpotqa", id="row-0"))
    return folder


def test_records_are_the_run_without_its_texts(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "records"
    (out / "old").mkdir(parents=True)
    records.main(["--out", str(out), str(run.parent)])
    assert [folder.name for folder in out.iterdir()] == ["one"]
    assert faults(out / "one") == []
    [made], [was] = stored_runs([out]), stored_runs([run])
    assert made.planned == [("hotpotqa", "row-0"), ("hotpotqa", "row-1")]
    assert made.unfinished == ""
    [trace] = map(read_trace, made.traces)
    [whole] = map(read_trace, was.traces)
    assert trace.model_copy(update={"tokens": whole.tokens, "generated": whole.generated}) == whole
    assert (trace.tokens, trace.generated) == ([""] * 3, [""] * 3)
    numbers: Any = Results([was]).frame
    kept = numbers[numbers["id"] != "row-2"].drop(columns="folder").reset_index(drop=True)
    found: Any = Results([made]).frame
    assert found.drop(columns="folder").equals(kept)


def test_texts_made_here_stay(tmp_path: Path) -> None:
    made_here = {"lookup", "hops", "digest", "shots", "retrieve", "complete", "needle", "random"}
    assert {name for name in DATASETS if not records.is_private(name)} == made_here
    assert records.is_private("niah_single_1")  # a row of a user's file, here RULER's
    run = write_run(tmp_path / "one", [visit(0, "needle", {"text": "seven"}, gold=["seven"])])
    with_traces(stored_runs([run])[0], run, small_trace(dataset="needle", id="row-0"))
    records.main(["--out", str(tmp_path / "records"), str(run)])
    [made], [was] = stored_runs([tmp_path / "records"]), stored_runs([run])
    assert made.visits == was.visits
    assert [*map(read_trace, made.traces)] == [*map(read_trace, was.traces)]


def test_a_text_would_be_seen(run: Path, tmp_path: Path) -> None:
    whole = run / "visits.jsonl.gz"
    whole.write_bytes(gzip.compress((run / "visits.jsonl").read_bytes()))
    assert {"why?" in text for text in faults(run)} == {True, False}
    assert {"because", "an answer", "secret", "token 3"} <= {*faults(run)}


def test_a_visit_beside_other_work_is_named_and_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LazyLLM runs half of the baseline's FLOPs in 0.2 s as usual; in 0.26 s, at 0.77 of its
    rate."""
    times = [0.2, 0.21, 0.19, 0.26, 0.2, 0.24]
    half = {"baseline": {"prefill_flops": 100}, "prefill_flops": 50}
    folder = write_run(
        tmp_path / "runs" / "timed",
        [visit(row, ttft_s=time, **half) for row, time in enumerate(times)],
    )
    records.main([str(folder)])
    line = "timed, hotpotqa, row-3: speed over the usual one: lazy 0.79\n"
    assert capsys.readouterr().out == line
    assert len(read_visits(folder)) == len(times)
    records.main(["--again", str(folder)])
    assert capsys.readouterr().out == line
    left = [example.id for example in read_visits(folder)]
    assert left == ["row-0", "row-1", "row-2", "row-4", "row-5"]
    records.main([str(folder)])
    assert capsys.readouterr().out == ""
