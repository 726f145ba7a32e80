from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eval.run import device_lock
from eval.run.device_lock import held, load

ROOT = Path(__file__).resolve().parents[3]
DEVICE = torch.device("mps")  # locked as any accelerator is, and torch makes the name of one on every machine

HOLD = """
import logging, sys, torch
from eval.run.device_lock import held
logging.basicConfig(level=logging.INFO)
with held(torch.device("mps"), "the other run"):
    print("has it", flush=True)
    sys.stdin.read()
"""


def start_holder(cache: Path) -> subprocess.Popen[str]:
    """A process that holds the device until its standard input is closed."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD],
        cwd=ROOT,
        env=os.environ | {"LAZYLLM_BENCH_CACHE": str(cache)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_second_run_waits_and_says_for_whom(tmp_path: Path) -> None:
    first, second = start_holder(tmp_path), None
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "has it\n"
        second = start_holder(tmp_path)
        assert second.stderr is not None
        # packages may have words of their own before it
        assert any("mps is in use by the other run: waiting until it is free" in line for line in second.stderr)
        assert second.poll() is None
        first.communicate()  # closes its input
        assert second.stdout is not None
        assert second.stdout.readline() == "has it\n"
        second.communicate()
        assert (first.returncode, second.returncode) == (0, 0)
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.wait()


def test_a_run_that_is_killed_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path))
    with start_holder(tmp_path) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        other.kill()
        other.communicate()
    with held(DEVICE, "this run"):
        assert (tmp_path / "locks" / "mps-0.lock").read_text() == "this run"


def test_devices_of_their_own_and_the_cpu_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path))
    uuids = {0: "aaa", 1: "bbb"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda one: SimpleNamespace(uuid=uuids[one.index]))
    with held(torch.device("cuda:0"), "a"), held(torch.device("cuda:1"), "b"):
        assert {file.name for file in (tmp_path / "locks").iterdir()} == {"aaa.lock", "bbb.lock"}
        with held(torch.device("cpu"), "c"), held(torch.device("cpu"), "d"):
            assert len(list((tmp_path / "locks").iterdir())) == 2


def test_all_devices_of_a_run_are_taken_in_one_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that name the same two devices the other way round would else wait for each other for ever."""
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path))
    uuids = {0: "bbb", 1: "aaa"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda one: SimpleNamespace(uuid=uuids[one.index]))
    taken: list[int] = []
    own = device_lock.held
    monkeypatch.setattr(
        device_lock, "held", lambda device, holder: (taken.append(device.index), own(device, holder))[1]
    )
    cuda = [torch.device("cuda", number) for number in (0, 1)]
    for given in (cuda, cuda[::-1]):
        with device_lock.all_held(given, "this run"):
            for uuid in uuids.values():
                with (tmp_path / "locks" / f"{uuid}.lock").open() as file, pytest.raises(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert taken == [1, 0, 1, 0]
    with device_lock.all_held([torch.device("cpu")], "this run"):
        pass


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch, caplog) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path))
    monkeypatch.setattr("eval.run.device_lock.fcntl.flock", no_locks)
    with held(DEVICE, "this run"):
        pass
    assert "cannot be locked" in caplog.text


def test_load_is_what_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.234, 0.5, 0.25))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert load(torch.device("cpu")) == {"average": [1.23, 0.5, 0.25], "cpu_count": 8, "gpu_processes": None}


def test_processes_on_the_gpu_are_counted_where_nvidia_smi_says_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234-ab"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpu = torch.device("cuda:0")
    assert load(gpu)["gpu_processes"] is None
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ncase "$*" in *--id=GPU-1234-ab*) printf "4711\\n4712\\n" ;; *) exit 6 ;; esac\n')
    program.chmod(0o755)
    assert load(gpu)["gpu_processes"] == 2
    program.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert load(gpu)["gpu_processes"] is None
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(device_lock, "NVIDIA_SMI_TIMEOUT_S", 0.2)
    assert load(gpu)["gpu_processes"] is None
