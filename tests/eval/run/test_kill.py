"""After 10 kills nothing is lost: `tests.eval.run.kill_run` in a process that can fork safely.

`python -m tests.eval.run.kill_run 100` kills more often.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

KILLS = 10


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_killed_run_ends_as_if_it_had_not_been(rows: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.eval.run.kill_run", str(KILLS), "1", str(rows)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,  # against a hang
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    print(counts)
    assert counts["kills"] == KILLS
    # every other kill is in the middle of a write, though not always a record's
    assert counts["half_lines"] >= 2
    assert counts["runs"] >= 1
