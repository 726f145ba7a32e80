"""Whole runs: real rows, resuming after an interruption, refusals, experiments."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eval.benchmarks.datasets import CHOICES
from eval.cli import main
from eval.store.folder import read_about, read_visits
from eval.store.record import Visit
from eval.store.trace import read_trace
from lazyllm.engine.depth import Depth
from lazyllm.errors import UserError
from lazyllm.methods import Lazy
from tests.conftest import ROOT
from tests.runs import checked, measured

SHORT = ("max_new_tokens=2", "warmup=0", "out=run")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")


def visits_of() -> list[Visit]:
    return read_visits(Path("run"))


def test_run_measures_all_sixteen_datasets_of_real_rows(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ("limit=1", "max_new_tokens=3", "model.max_prompt_tokens=300", "warmup=0")
    measured(
        checked("dataset=all", f"data.dir={shared / 'longbench'}", "out=run", *short), show=True
    )
    assert [path.name for path in Path().iterdir()] == ["run"]  # nothing is written elsewhere
    visits = visits_of()
    names = [dataset.name for dataset in CHOICES["all"]]
    assert [visit.dataset for visit in visits] == names
    for visit in visits:
        method, baseline = visit.answers["lazy"], visit.answers["baseline"]
        assert visit.uncut_tokens > visit.prompt_tokens
        assert {*baseline.computed_per_layer} == {visit.prompt_tokens}
        assert 0 < method.computed_per_layer[-1] <= visit.prompt_tokens
        assert method.computed[0][0] == visit.prompt_tokens
        assert 1 <= len(method.token_ids) <= 3
    output = capsys.readouterr().out
    assert all(name in output for name in names)
    summary = json.loads(Path("run/summary.json").read_text())
    assert [
        row["name"]
        for row in summary["rows"]
        if row["kind"] == "dataset" and row["method"] == "baseline"
    ] == names
    assert summary["provenance"]["versions"]["torch"]
    for suffix in ("csv", "md"):
        # a row for each arm
        assert Path(f"run/summary.{suffix}").read_text().count("hotpotqa") == 2


def test_sweep_refuses_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").write_text("a file, where the folder should be")
    assert main(["run", "-m", "method=lazy,baseline", "limit=1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: runs: cannot be written (runs): ")


def test_bad_rows_stop_a_run_or_are_counted(
    tmp_path: Path, shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    (data / "config").mkdir(parents=True)
    for name in ("dataset2prompt.json", "dataset2maxlen.json"):
        (data / "config" / name).write_bytes((shared / "longbench" / "config" / name).read_bytes())
    rows = (shared / "longbench" / "trec.jsonl").read_bytes().split(b"\n")
    (data / "trec.jsonl").write_bytes(b"\n".join([rows[0], b"{broken", rows[1]]) + b"\n")
    overrides = ["dataset=trec", f"data.dir={data}", "model.max_prompt_tokens=300", *SHORT]
    with pytest.raises(UserError, match=r"trec\.jsonl:2"):
        measured(checked(*overrides))
    measured(checked(*overrides, "data.on_error=skip"))
    assert "skipped 1 row (data.on_error=skip)" in caplog.text
    assert "trec.jsonl:2" in caplog.text
    assert len(visits_of()) == 2


def test_demo_compares_the_methods_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    measured(checked("experiment=demo", "model=tiny", "limit=2", "warmup=0"), show=True)
    lines = capsys.readouterr().out.splitlines()
    arms = ["baseline", "lazy", "static_pruning", "random_drop", "prompt_compression"]
    labels = [line.split()[0] for line in lines if line.split() and line.split()[0] in arms]
    assert labels[: len(arms)] == arms
    assert "LongBench, on a GPU" not in "".join(lines)
    (folder,) = Path("runs").glob("tiny-*")  # one folder, and the baseline once
    visits = read_visits(folder)
    assert [list(visit.answers) for visit in visits] == [arms] * 2
    for visit in visits:
        compressed, baseline = visit.answers["prompt_compression"], visit.answers["baseline"]
        assert 0 < compressed.scoring_s < compressed.ttft_s  # selecting is part of its time
        assert baseline.scoring_s == 0
        assert {*baseline.computed_per_layer} == {visit.prompt_tokens}


def per_layer(group_layers: list[int], counts: list[int]) -> list[int]:
    """The number of each layer, of numbers of groups of layers."""
    return [
        count for layers, count in zip(group_layers, counts, strict=True) for _ in range(layers)
    ]


def test_solved_speedups_depend_on_the_task_and_are_stored() -> None:
    measured(
        checked(
            "method=lazy",
            "method.speedup=table1",
            "dataset=[lookup,retrieve]",
            "limit=1",
            "baseline=false",
            *SHORT,
        )
    )
    parameters = read_about(Path("run/run.json"))["identity"]["arms"]["lazy"]["parameters"]
    for (
        visit
    ) in visits_of():  # the tokens that entered each layer are those of the dataset's own schedule
        method, answer = Lazy(parameters[visit.dataset]["schedule"]), visit.answers["lazy"]
        assert per_layer(answer.group_layers, answer.computed[0]) == method.tokens_per_layer(
            Depth(8), visit.prompt_tokens
        )
    assert parameters["lookup"] != parameters["retrieve"]


def test_traces_are_made_once_beside_the_records(caplog: pytest.LogCaptureFixture) -> None:
    quick = ("dataset=[lookup,shots]", "limit=1", *SHORT)
    measured(checked(*quick))
    measured(checked(*quick, "trace=1"))  # of a run that is measured already
    files = sorted(Path("run/traces").iterdir())
    assert [file.name.split("-")[0] for file in files] == ["lookup", "shots"]  # not of the baseline
    visits = {visit.key: visit for visit in visits_of()}
    for file in files:
        trace = read_trace(file)
        visit = visits[trace.dataset, trace.id]
        answer = visit.answers[trace.arm]
        assert len(trace.tokens) == visit.prompt_tokens
        assert (trace.computed, trace.group_layers) == (answer.computed, answer.group_layers)
        assert len(trace.generated) == len(answer.token_ids)
        np.testing.assert_allclose(np.sum(trace.importance, axis=1), 1, rtol=1e-3)
    before = [file.stat().st_mtime_ns for file in files]
    caplog.clear()
    measured(checked(*quick, "trace=1"))
    assert "2 of them already measured" in caplog.text
    assert [file.stat().st_mtime_ns for file in files] == before
    measured(checked(*quick, "trace=2", "limit=2"))
    assert len(list(Path("run/traces").iterdir())) == 4


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("model=ti", "model=tiny"),
        ("model=tiny method=lazy method.sch", "method.schedule="),
        ("method=st", "method=static_pruning"),
    ],
)
def test_shell_completes_keys_and_values(typed: str, offered: str) -> None:
    """As the function that `python run.py -sc install=bash` prints asks for it."""
    line = os.environ | {"COMP_LINE": f"python run.py {typed}"}
    command = [sys.executable, str(ROOT / "run.py"), "-sc", "query=bash"]
    done = subprocess.run(command, env=line, capture_output=True, text=True, check=True)
    assert offered in done.stdout.split()
