"""One run at a time on an accelerator, and what a failure leaves on it."""

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

from eval.run import device
from eval.run.device import held, is_out_of_memory, recover
from lazyllm.errors import UserError
from tests.conftest import ROOT

DEVICE = torch.device("mps")  # locked like any accelerator; torch knows the name on every machine
HOLD = """
import sys, torch
from eval.run.device import held
with held(torch.device("mps")):
    print("has it", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_locks(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path))


def test_run_waits_for_the_device_until_the_holder_is_killed(monkeypatch, caplog) -> None:
    monkeypatch.setattr(device, "POLL_S", 0.01)
    caplog.set_level(logging.INFO)
    order = []

    def run() -> None:
        with held(DEVICE):
            order.append("held")

    command, pipe = [sys.executable, "-c", HOLD], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as holder:
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
    """As in a search, which holds it for its model and again for each run."""
    file = tmp_path / "locks" / "mps-0.lock"
    with held(DEVICE):
        with held(DEVICE):
            pass
        with pytest.raises(Timeout):
            FileLock(file).acquire(timeout=0)
    FileLock(file).acquire(timeout=0).lock.release()


def test_a_gpu_is_locked_by_its_uuid_and_a_cpu_is_not(tmp_path: Path, monkeypatch) -> None:
    def named(gpu: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"gpu {gpu.index}")

    monkeypatch.setattr(torch.cuda, "get_device_properties", named)
    with held(torch.device("cuda", 1)), held(torch.device("cpu")):
        with pytest.raises(Timeout):
            FileLock(tmp_path / "locks" / "gpu 1.lock").acquire(timeout=0)
        assert [file.name for file in (tmp_path / "locks").iterdir()] == ["gpu 1.lock"]


def test_file_system_without_locks_is_a_warning(monkeypatch, caplog) -> None:
    no_locks = Mock(side_effect=OSError(37, "No locks available"))
    monkeypatch.setattr("eval.run.device.FileLock.acquire", no_locks)
    with held(DEVICE):
        pass
    assert "cannot be locked" in caplog.text


def test_accelerator_is_asked_whether_it_still_answers(monkeypatch) -> None:
    gone = RuntimeError("CUDA error: unspecified launch failure")
    synchronize = Mock(side_effect=[None, gone])
    monkeypatch.setattr(device, "release_memory", lambda _: None)
    monkeypatch.setattr("torch.accelerator.synchronize", synchronize)
    recover(torch.device("cuda", 1))
    synchronize.assert_called_once_with(torch.device("cuda", 1))
    with pytest.raises(UserError, match="cuda:1 does not recover"):
        recover(torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_out_of_memory_has_several_names(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory
