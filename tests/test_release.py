"""What nobody runs here: the release workflow, and the scripts of the paper's sweeps."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.run.job import jobs_of
from tests.conftest import ROOT

WORKFLOW: Any = yaml.safe_load(
    (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
)


def test_nothing_is_published_unless_a_maintainer_has_switched_it_on() -> None:
    jobs = WORKFLOW["jobs"]
    assert WORKFLOW["permissions"] == {"contents": "read"}
    publishes = {
        name for name, job in jobs.items() if {*job.get("permissions", {}).values()} & {"write"}
    }
    assert publishes == {"publish-package", "publish-image"}
    for name, variable in (("publish-package", "PUBLISH_PYPI"), ("publish-image", "PUBLISH_IMAGE")):
        assert jobs[name]["if"] == f"github.event_name == 'release' && vars.{variable} == 'true'"
        assert jobs[jobs[name]["needs"]].get("if") is None  # the dry run, also of pull requests
    for name in jobs.keys() - publishes:
        assert "push: true" not in yaml.safe_dump(jobs[name])
        assert "pypi-publish" not in yaml.safe_dump(jobs[name])


def printed(tmp_path: Path, script: str, *arguments: str, **environment: str) -> list[list[str]]:
    """The commands that a script gives, as a stand-in of `lazyllm-bench` prints its arguments."""
    stand_in = tmp_path / "lazyllm-bench"
    stand_in.write_text("#!/bin/sh\nprintf '%s\\037' \"$@\"\necho\n")
    stand_in.chmod(0o755)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = [str(ROOT / "scripts" / script), *arguments]
    said = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | path | environment
    )
    return [line.split("\037")[:-1] for line in said.stdout.splitlines()]


@pytest.mark.parametrize("datasets", [[], ["hotpotqa", "lcc"]])
def test_sweeps_are_of_both_models_and_all_the_paper_s_experiments(
    tmp_path: Path, datasets: list[str]
) -> None:
    commands = printed(
        tmp_path, "sweeps.sh", "seed=3", *([f"dataset={','.join(datasets)}"] if datasets else [])
    )
    assert [command[:2] for command in commands] == [["run", "-m"]] * 6
    jobs = [job for _, *arguments in commands for job in jobs_of(arguments)]
    assert len(jobs) == 6 * 2 * max(len(datasets), 1)
    assert {job.model.name for job in jobs} == {"llama2", "xgen"}
    assert {job.seed for job in jobs} == {3}
    assert not datasets or {tuple(job.dataset) for job in jobs} == {("hotpotqa",), ("lcc",)}
    assert printed(tmp_path, "sweeps.sh", COMMAND="plan", SWEEPS="table2")[0][:3] == [
        "plan",
        "-m",
        "experiment=table2",
    ]


def test_tables_are_of_runs_unless_others_are_given(tmp_path: Path) -> None:
    assert printed(tmp_path, "tables.sh") == [["paper", "runs"]]
    assert printed(tmp_path, "tables.sh", "a", "--out", "b") == [["paper", "a", "--out", "b"]]
