"""Sweeps through real launchers: joblib, Ray and Slurm, the last two started here on loopback.

If Ray or Slurm is not installed, its tests are skipped with the reason; with REQUIRE_LAUNCHERS="ray
slurm" they fail.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from eval.compose import LAUNCHERS, check_arguments
from eval.store.results import read_results
from lazyllm.errors import UserError
from tests.conftest import ROOT
from tests.runs import checked, measured

pytestmark = pytest.mark.slow

SLURM = ROOT / "scripts" / "dev" / "slurm_single_node.sh"
QUICK = ("dataset=[lookup,shots]", "limit=2", "max_new_tokens=2", "warmup=0")
# The tiny model has 8 layers: the second of these four jobs fails
FOUR_JOBS = ("method=static_pruning", "method.layer=2,9,3,4", *QUICK)

RAY_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # sockets on 127.0.0.1 only
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # no token in the home folder
    "RAY_DEDUP_LOGS": "0",
}


def sweep(folder: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python run.py ... -m ...` in `folder`, offline, with a separate home folder."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    basic = {"PATH": "/usr/bin:/bin", "HOME": str(home)}
    basic |= {"HF_HUB_OFFLINE": "1", "LAZYLLM_BENCH_CACHE": str(folder / "cache")}
    command = [sys.executable, str(ROOT / "run.py"), overrides[0], "-m", *overrides[1:]]
    return subprocess.run(
        command, cwd=folder, env=basic | environment, capture_output=True, text=True, timeout=400
    )


def said(folder: Path, done: subprocess.CompletedProcess[str]) -> str:
    """All output of a sweep and its jobs, to show if an assertion fails."""
    logs = sorted((folder / "runs" / ".submitit").glob("*/*_log.*"))
    return "\n".join(
        [done.stdout, done.stderr, *(f"{log.name}:\n{log.read_text()}" for log in logs)]
    )


def require(engine: str, here: bool, otherwise: str) -> None:
    """Skip if a launcher is not installed; fail if it is required."""
    if not here:
        (pytest.fail if engine in os.environ.get("REQUIRE_LAUNCHERS", "").split() else pytest.skip)(
            otherwise
        )


def installed(plugin: str) -> bool:
    return find_spec(f"hydra_plugins.{plugin}") is not None


def check_the_three_good_jobs(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    output = said(folder, done)
    assert done.returncode == 2, output
    assert "after layer 9, but the model has only 8 layers" in done.stderr, output
    assert "job failed (method=static_pruning method.layer=9" in output
    (results,) = read_results([folder / "runs"])
    frame: Any = results.frame
    table = frame[~frame["is_baseline"]]
    layers = sorted(json.loads(settings)["layer"] for settings in table["settings"].unique())
    assert layers == [2, 3, 4], output
    assert set(table.groupby("run").size()) == {4}  # two examples of each dataset
    for jobs in (folder / "runs").glob("tiny-*/jobs.jsonl"):
        begin, end = (json.loads(line) for line in jobs.read_text().splitlines())
        assert (begin["event"], begin["examples"], end["event"], end["error"]) == (
            "begin",
            4,
            "end",
            None,
        )
        assert len(begin["load"]) == len(end["load"]) == 3
    assert list((folder / "home").iterdir()) == []


def test_joblib_sweep_tells_once_what_it_leaves_out(tmp_path: Path) -> None:
    rows = tmp_path / "rows" / "4096"
    rows.mkdir(parents=True)
    row = {
        "index": 0,
        "input": "VAR A = 12345. Question: Which?",
        "outputs": ["A"],
        "answer_prefix": " It is",
    }
    (rows / "vt.jsonl").write_text(json.dumps(row) + "\n")  # one of RULER's thirteen tasks
    refused_early = ("seed=1,2", "dataset=ruler", f"data.dir={rows.parent}", "model.chat=auto")
    done = sweep(tmp_path, *refused_early, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    assert "the tokenizer has no chat template" in done.stderr
    assert said(tmp_path, done).count("left out: niah_single_1, ") == 2  # each job says so


def test_joblib_runs_four_jobs_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done = sweep(tmp_path, *FOUR_JOBS, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    check_the_three_good_jobs(tmp_path, done)
    assert "UserWarning" not in said(tmp_path, done)
    # the same run in this process finds everything measured
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    measured(checked("method=static_pruning", "method.layer=3", *QUICK))
    assert "4 examples, 4 of them already measured" in caplog.text


def test_sweep_in_one_process_continues_after_a_failed_job(tmp_path: Path) -> None:
    """The runs are in the folder that the sweep names, and in no other."""
    arms = ("method=static_pruning", "method.keep=0.5", "method.layer=9,2")
    done = sweep(tmp_path, *arms, *QUICK, "hydra.sweep.dir=elsewhere")
    assert done.returncode == 2, said(tmp_path, done)
    assert "job failed (method=static_pruning " in done.stderr
    assert "only 8 layers" in done.stderr.splitlines()[-1]
    assert len(list((tmp_path / "elsewhere").glob("tiny-static_pruning-*/summary.json"))) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launcher_that_is_not_installed_is_refused(launcher: str, monkeypatch) -> None:
    def no_package(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("eval.compose.version", no_package)
    package, extra = LAUNCHERS[launcher]
    with pytest.raises(
        UserError, match=rf"={launcher} needs the package {package}: .*--editable '\.\[{extra}\]'"
    ):
        check_arguments(["-m", "seed=0,1", f"hydra/launcher={launcher}"])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert any(requirement.startswith(f"{package}==") for requirement in extras[extra])


def processes_with(marker: str) -> list[str]:
    """Ids of other processes with the text in their command line or environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended in between
            if (
                marker.encode()
                in (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            ):
                found.append(folder.name)
    return [process for process in found if process != str(os.getpid())]


@pytest.mark.ray
def test_ray_runs_four_jobs_of_a_sweep(tmp_path: Path) -> None:
    require(
        "ray",
        installed("hydra_ray_launcher"),
        "Ray is not installed: pip install --editable '.[ray]'",
    )
    settings = (
        "hydra/launcher=ray",
        "hydra.launcher.ray.remote.num_gpus=0",
        "+hydra.launcher.ray.init.num_cpus=2",
    )
    done = sweep(
        tmp_path,
        *FOUR_JOBS,
        *settings,
        "+hydra.launcher.ray.init.include_dashboard=false",
        **RAY_ENVIRONMENT,
    )
    check_the_three_good_jobs(tmp_path, done)
    assert processes_with(str(tmp_path)) == []


@pytest.fixture(scope="module")
def slurm_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Slurm with one node on loopback; what its commands need in the environment."""
    slurm = shutil.which("slurmctld", path="/usr/sbin:/usr/bin") is not None
    require("slurm", slurm, f"Slurm is not installed: {SLURM.relative_to(ROOT)} install")
    require("slurm", os.geteuid() == 0, "Slurm's daemons are started by root only")
    require(
        "slurm",
        installed("hydra_submitit_launcher"),
        "no plugin for Slurm: pip install --editable '.[slurm]'",
    )
    folder = tmp_path_factory.mktemp("slurm")
    environment = {
        "PATH": f"{folder}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "SLURM_CONF": str(folder / "slurm.conf"),
    }
    hosts = Path("/etc/hosts").read_bytes()
    started = subprocess.run(
        [SLURM, "start", folder], capture_output=True, text=True, env=environment, check=False
    )
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield environment
    finally:
        stopped = subprocess.run(
            [SLURM, "stop", folder], capture_output=True, text=True, env=environment, check=False
        )
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert Path("/etc/hosts").read_bytes() == hosts
    assert processes_with(str(folder)) == []


@pytest.mark.slurm
def test_slurm_runs_four_jobs_of_a_sweep(tmp_path: Path, slurm_environment: dict[str, str]) -> None:
    settings = (
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.partition=debug",
        "hydra.launcher.gpus_per_node=0",
    )
    settings += ("hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=1")
    done = sweep(tmp_path, *FOUR_JOBS, *settings, **slurm_environment)
    check_the_three_good_jobs(tmp_path, done)
    scripts = [
        file.read_text() for file in (tmp_path / "runs" / ".submitit").glob("*/*_submission.sh")
    ]
    assert len(scripts) == 1
    assert "#SBATCH --array=0-3%4" in scripts[0]
    assert "#SBATCH --partition=debug" in scripts[0]
