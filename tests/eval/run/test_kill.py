"""After 10 kills nothing is lost: `tests.eval.run.kill_run` in a separate process, which can fork safely.

`python -m tests.eval.run.kill_run 100` kills more often.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
KILLS = 10
ROWS = (1, 4, 0)


@pytest.fixture(scope="module")
def counts_of() -> dict[str, dict[str, int]]:
    """{rows: counts}, all from one process, as starting one takes as long as several jobs."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.eval.run.kill_run", str(KILLS), "0", *map(str, ROWS)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2700,  # against a hang
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
def test_killed_run_ends_as_if_it_had_not_been(counts_of: dict[str, dict[str, int]], rows: int) -> None:
    counts = counts_of[str(rows)]
    print(counts)
    assert counts["kills"] == KILLS
    assert counts["half_lines"] >= 2  # every other kill is in the middle of a write, though not always a record's
    assert counts["runs"] >= 1
