"""The doctor in broken environments: each fault is reported with the command that fixes it, without tracebacks."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest

from eval import cli
from eval.run import doctor, hub_checks, machine_checks
from eval.run.cost import parameters_of
from lazyllm.models.load import load_config
from lazyllm.presets import PRESETS
from lazyllm.spec import ModelSpec

Usage = namedtuple("Usage", "total used free")
CPU_WHEEL, CUDA_13 = "cuda: Optional[str] = None\n", "cuda: Optional[str] = '13.0'\n"


@pytest.fixture
def broken(monkeypatch, tmp_path: Path):
    """A machine without GPU, network, token and caches; and a function to break it further."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "WANDB_API_KEY", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home" / "not" / "there"))
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    monkeypatch.setattr(hub_checks, "is_reachable", lambda url, timeout: False)

    def change(gpu: str | None = None, wheel: str = CPU_WHEEL, free_gb: float = 500) -> None:
        if gpu is not None:
            smi = tmp_path / "nvidia-smi"
            smi.write_text(f"#!/bin/sh\necho '{gpu}'\n")
            smi.chmod(0o755)
        (tmp_path / "version.py").write_text(wheel)
        monkeypatch.setattr(machine_checks, "find_spec", lambda name: _Spec(str(tmp_path / "__init__.py")))
        monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda path: Usage(0, 0, free_gb * 1e9))

    change()
    return change


class _Spec:
    def __init__(self, origin: str) -> None:
        self.origin = origin


def lines(capsys, model: str = "llama2") -> dict[str, str]:
    """{item: state and sentence} of the command, which exits with 1."""
    assert cli.main(["doctor", "--model", model]) == 1
    printed = capsys.readouterr().out.splitlines()
    return {line[:15].strip(): line[15:] for line in printed}


def test_a_cpu_wheel_beside_a_gpu(broken, capsys) -> None:
    broken("NVIDIA A100-SXM4-80GB, 550.54.15, 81920 MiB")
    found = lines(capsys)
    assert found["torch"].startswith("missing")
    assert "is a CPU wheel, but there is NVIDIA A100-SXM4-80GB: pip install --force-reinstall torch" in found["torch"]
    assert found["torch"].endswith("--index-url https://download.pytorch.org/whl/cu126")
    assert found["GPU"] == "ok          NVIDIA A100-SXM4-80GB, 86 GB"


def test_an_old_driver(broken, capsys) -> None:
    broken("NVIDIA L4, 535.183.01, 23034 MiB", CUDA_13)
    assert "CUDA 13.0 needs driver 580 or later, found 535.183.01: pip install" in lines(capsys)["torch"]
    broken("Tesla K80, 418.10, 11441 MiB", CUDA_13)
    found = lines(capsys)
    assert found["torch"].endswith("needs driver 580 or later, found 418.10: update the driver")
    assert found["GPU"] == "missing     Tesla K80, 12 GB: less than 13: try model.quantise=int8"


def test_no_token_no_cache_and_no_network(broken, capsys) -> None:
    found = lines(capsys)
    assert found["token"] == "missing     hf auth login (gated models need it)"
    assert found["hub"].startswith("missing     does not answer: on a machine with a network, lazyllm-bench fetch")
    assert "is not in the cache: lazyllm-bench fetch model=llama2" in found["llama2"]
    assert "not in the cache: lazyllm-bench fetch dataset=all" in found["rows"]
    assert found["W&B"].startswith("not needed")
    assert found["scheduler"].startswith("not needed")


def test_no_disk(broken, capsys) -> None:
    broken(free_gb=9.5)
    assert "9.5 GB free in" in (found := lines(capsys)["disk"])
    assert found.endswith(", 15 GB needed: export HF_HOME=FOLDER_ON_A_LARGER_DISK")
    assert lines(capsys, "qwen3-0.6b")["disk"].startswith("ok")


def test_a_gated_checkpoint(broken, capsys, monkeypatch) -> None:
    from huggingface_hub import errors

    def refuse(source: str) -> None:
        raise errors.GatedRepoError.__new__(errors.GatedRepoError)

    monkeypatch.setattr(hub_checks, "is_reachable", lambda url, timeout: True)
    monkeypatch.setattr("huggingface_hub.auth_check", refuse)
    says = "is gated: ask for access at https://huggingface.co/meta-llama/Llama-2-7b-chat-hf, then hf auth login"
    assert lines(capsys)["llama2"].endswith(says)
    monkeypatch.setattr("huggingface_hub.auth_check", lambda source: None)
    assert lines(capsys)["llama2"].endswith("can be downloaded: lazyllm-bench fetch model=llama2")


def test_what_nobody_foresaw_is_a_finding(broken, capsys, monkeypatch) -> None:
    (Path(machine_checks.find_spec("torch").origin).parent / "version.py").unlink()  # type: ignore[union-attr]
    monkeypatch.setattr(machine_checks.os, "sysconf", None)
    found = lines(capsys)
    assert found["torch"].startswith("missing     could not be examined (FileNotFoundError: ")
    assert found["memory"].startswith("missing     could not be examined (TypeError: ")
    assert found["Python"].startswith("ok")


def test_tiny_needs_nothing_but_torch(broken, monkeypatch) -> None:
    findings = {finding.thing: finding.state for finding in doctor.examine("tiny")}
    assert {findings[thing] for thing in ("hub", "token", "rows", "GPU")} == {"not needed"}
    assert findings["tiny"] == "ok"


def test_a_model_that_is_none_is_refused(capsys) -> None:
    assert cli.main(["doctor", "--model", "lama2"]) == 2
    assert "'lama2' is not a model" in capsys.readouterr().err


def test_what_a_model_does_not_need_is_not_missing(broken, capsys, monkeypatch, tmp_path: Path) -> None:
    slurm = tmp_path / "sbatch"
    slurm.write_text("#!/bin/sh\n")
    slurm.chmod(0o755)
    monkeypatch.setattr(
        machine_checks, "find_spec", lambda name: None if "hydra" in name else _Spec(str(tmp_path / "x"))
    )
    found = lines(capsys, "qwen3-8b")
    assert found["token"] == "not needed  hf auth login (gated models need it)"
    assert found["scheduler"] == "not needed  Slurm without its launcher: pip install --editable '.[slurm]'"
    assert lines(capsys, "gemma3-1b")["token"].startswith("missing")
    assert {finding.thing: finding.state for finding in doctor.examine("coder")}["rows"] == "not needed"


def test_the_last_torch_for_an_old_driver_is_named(broken, capsys) -> None:
    broken("Tesla V100-SXM2-32GB, 470.82.01, 32768 MiB", CUDA_13)
    command = "pip install --force-reinstall torch==2.7.1 --index-url https://download.pytorch.org/whl/cu118"
    assert lines(capsys)["torch"].endswith(f"found 470.82.01: {command}")
    broken("Tesla K80, 418.10, 11441 MiB")
    assert lines(capsys)["torch"].endswith("but there is Tesla K80: update the driver")


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.architecture is not None])
def test_sizes_are_those_of_the_models(name: str) -> None:
    parameters, _ = parameters_of(load_config(ModelSpec(name, "dummy")))
    assert doctor.gigabytes(name) == pytest.approx(2 * parameters / 1e9, rel=1e-3)


def test_sizes_are_those_of_the_checkpoints() -> None:
    assert doctor.gigabytes("llama2") == pytest.approx(13.477, rel=1e-3)  # its index' total_size
    assert doctor.gigabytes("tiny") == 0
