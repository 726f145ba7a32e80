"""`model.dtype=auto`: a run, a plan and `doctor` speak of the dtype that the model loads in."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.run import doctor
from eval.run.check import spec_of
from eval.run.plan import as_text, costs
from eval.store.runs import stored_runs
from lazyllm.machine import ACCELERATORS
from lazyllm.presets import PRESETS
from tests.helpers import keep_gain
from tests.runs import checked, measured, prepared

QUICK = ["model.device=cpu", "model.max_prompt_tokens=96", "dataset=lookup", "limit=1", "warmup=0"]
QUICK += ["max_new_tokens=2", "batch_size=1"]
FAST, SLOW = 8.0, 0.2  # how many times as fast a product is in bfloat16


@pytest.fixture
def quick(tmp_path: Path, tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a run of a checkpoint in bfloat16, on a machine with an empty cache."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "half"
    source = PRESETS["tiny"].source
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(folder)
    tiny[1].save_pretrained(folder)
    return [*QUICK, f"model={folder}"]


@pytest.mark.parametrize(("gain", "dtype"), [(FAST, "bfloat16"), (SLOW, "float32")])
def test_run_s_identity_and_record_hold_what_auto_was(
    quick: list[str], gain: float, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep_gain(gain)
    with caplog.at_level(logging.INFO):
        measured(checked(*quick, f"out={tmp_path / 'run'}"))
    loading = f"loading {tmp_path / 'half'} in "
    (line,) = [text for text in caplog.messages if text.startswith(loading)]
    reason = f"on this CPU a product is {gain:g} times as fast in bfloat16 as in float32"
    assert line == f"{loading}{dtype}: {reason}"
    (stored,) = stored_runs([tmp_path / "run"])
    assert stored.identity["dtype"] == stored.about["config"]["model"]["dtype"] == dtype
    explicit = prepared(*quick, f"model.dtype={dtype}")
    assert explicit.identity == stored.identity
    assert explicit.folder == prepared(*quick).folder


def test_plan_takes_the_dtype_of_its_device(quick: list[str]) -> None:
    keep_gain(SLOW)
    here, on_gpu = costs(quick)[0], costs(quick, ACCELERATORS["a100"])[0]
    assert here.memory["weights"] == 2 * on_gpu.memory["weights"]
    assert "half: bfloat16 (the checkpoint's dtype)\n" in as_text([on_gpu])
    assert "half: float32 (on this CPU a product is 0.2 times as fast" in as_text([here])
    given = costs([*quick, "model.dtype=float32"], ACCELERATORS["a100"])[0]
    assert given.memory["weights"] == here.memory["weights"]


# By hand: Llama 2 has 6,738,415,616 weights, of 2 bytes in bfloat16 and 4 in float32
@pytest.mark.parametrize(
    ("gain", "dtype", "gigabytes"), [(FAST, "bfloat16", 13), (SLOW, "float32", 27)]
)
def test_doctor_names_dtype_and_size_on_a_cpu(
    quick: list[str], gain: float, dtype: str, gigabytes: int, monkeypatch: Any
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    keep_gain(gain)
    states = doctor.examine(["model=llama2"])
    reason = f"llama2: {dtype} (on this CPU a product is {gain:g} times"
    assert states["dtype"][1].startswith(reason)
    assert states["GPU"][1].endswith(f"must hold {gigabytes} GB of weights")
    unknown = doctor.examine(["model=owner/x"])["dtype"]
    assert unknown == ("ok", "owner/x: known once its config is here")


def test_doctor_takes_the_checkpoint_s_dtype_for_a_gpu(quick: list[str]) -> None:
    keep_gain(SLOW)
    gpu = ["NVIDIA A100-SXM4-80GB", "550.54.15", "81920 MiB", "GPU-11aa"]
    on_gpu, on_cpu = (
        spec_of(checked(*quick, f"model.device={device}")) for device in ("auto", "cpu")
    )
    assert doctor.dtype_of(on_gpu, gpu) == ("bfloat16", "the checkpoint's dtype")
    assert doctor.dtype_of(on_gpu, None)[0] == doctor.dtype_of(on_cpu, gpu)[0] == "float32"
