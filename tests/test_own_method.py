"""`python run.py method=NAME`, with a method that only an installed package knows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eval.store.folder import read_run
from eval.store.results import find_runs
from tests.own_package import install_own_package

ROOT = Path(__file__).resolve().parents[1]
QUICK = ("dataset=lookup", "limit=2", "max_new_tokens=2", "timing.warmup=0", "model.dtype=float32")
OWN = ("method=keep_last", "method.layer=2", "method.keep=0.3")


def call(folder: Path, installed: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """`python run.py ...` in `folder`, offline, with the package."""
    return subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *QUICK, *overrides],
        cwd=folder,
        capture_output=True,
        text=True,
        env={"PATH": os.defpath, "HOME": str(folder), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(installed)},
    )


@pytest.mark.slow
def test_installed_method_runs_and_two_versions_never_share_a_table(tmp_path: Path) -> None:
    older = install_own_package(tmp_path)
    done = call(tmp_path, older, *OWN, "out=run")
    assert done.returncode == 0, done.stderr
    about, records = read_run(tmp_path / "run")
    assert about["identity"]["method"] == {"name": "keep_last", "layer": 2, "keep": 0.3}
    assert about["identity"]["method_code"].startswith("own-methods 0.1 ")
    assert len(records) == 2
    for record in records:
        n = record.prompt_tokens
        kept = -(-3 * n // 10)  # ceil(0.3 n) continue after layer 2 of 8
        assert record.method.pct_prompt_tokens_computed == pytest.approx(100 * (2 * n + 6 * kept) / (8 * n))
        assert record.baseline is not None
    assert "lookup" in done.stdout

    newer = install_own_package(tmp_path, "0.2", helper="SHARE = 0.5\n")
    mixed = call(tmp_path, newer, *OWN, "out=run")
    assert mixed.returncode == 2
    assert re.search(
        "holds a run that differs .*method_code: .own-methods 0.1 .* there, .own-methods 0.2", mixed.stderr
    )
    assert "Traceback" not in mixed.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["identity"] == about["identity"]

    shutil.copytree(tmp_path / "run", tmp_path / "newer")  # in the same folder, they do not share a table either
    about["identity"]["method_code"] = "own-methods 0.2 0123456789abcdef"
    (tmp_path / "newer" / "run.json").write_text(json.dumps(about))
    (there, here) = (run.model for run in find_runs([tmp_path / "run", tmp_path / "newer"]))
    assert "code of keep_last=own-methods" in (here + there)
    assert here != there
