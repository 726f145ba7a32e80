import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from filelock import FileLock, Timeout

from eval.run import device_lock
from eval.run.device_lock import held
from tests.conftest import ROOT

DEVICE = torch.device("mps")  # locked like any accelerator; torch accepts the name on every machine

HOLD = """
import logging, sys, torch
from eval.run.device_lock import held
logging.basicConfig(level=logging.INFO)
with held(torch.device("mps")):
    print("has it", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_locks(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path))


def test_run_waits_for_the_device_until_the_holder_is_killed(monkeypatch, caplog) -> None:
    monkeypatch.setattr(device_lock, "POLL_S", 0.01)
    caplog.set_level(logging.INFO)
    order = []

    def run() -> None:
        with held(DEVICE):
            order.append("held")

    with subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout.readline() == "has it\n"
            waiting = threading.Thread(target=run)
            waiting.start()
            while "mps is in use by another run: waiting until it is free" not in caplog.text:
                assert waiting.is_alive()
                time.sleep(0.01)
            order.append("killed")
        finally:
            holder.kill()
            holder.communicate()
    waiting.join()
    assert order == ["killed", "held"]


def test_device_held_twice_is_free_when_both_have_ended(tmp_path: Path) -> None:
    """As in a comparison, which holds the lock for its model and again for each run."""
    file = tmp_path / "locks" / "mps-0.lock"
    with held(DEVICE):
        with held(DEVICE):
            pass
        with pytest.raises(Timeout):
            FileLock(file).acquire(timeout=0)
    FileLock(file).acquire(timeout=0).lock.release()


def test_a_gpu_is_locked_by_its_uuid_and_a_cpu_is_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"gpu {device.index}"))
    with held(torch.device("cuda", 1)), held(torch.device("cpu")):
        with pytest.raises(Timeout):
            FileLock(tmp_path / "locks" / "gpu 1.lock").acquire(timeout=0)
        assert [file.name for file in (tmp_path / "locks").iterdir()] == ["gpu 1.lock"]


def test_file_system_without_locks_is_a_warning(monkeypatch, caplog) -> None:
    no_locks = Mock(side_effect=OSError(37, "No locks available"))
    monkeypatch.setattr("eval.run.device_lock.FileLock.acquire", no_locks)
    with held(DEVICE):
        pass
    assert "cannot be locked" in caplog.text
