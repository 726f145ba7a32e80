"""`model.dtype=auto` in a run, a plan and `doctor`: each speaks of the dtype that the model loads in."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from eval import cli
from eval.run import doctor
from eval.run.plan import as_text, costs
from eval.run.run import prepare
from eval.run.settings import ModelConfig
from eval.store.runs import stored_runs
from lazyllm.machine import ACCELERATORS
from lazyllm.models.dtype import gain_file
from lazyllm.presets import PRESETS
from tests.runs import measure, run_of

QUICK = ["model.device=cpu", "model.chat=none", "model.max_prompt_tokens=96", "dataset=lookup", "limit=1", "warmup=0"]
QUICK += ["method=lazy", "method.schedule={2: 0.5}", "max_new_tokens=2", "batch_size=1"]
FAST, SLOW = 8.0, 0.2  # how many times as fast a product is in bfloat16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def half(tmp_path: Path, tiny: tuple[Any, Any]) -> str:
    """The model of this package as a checkpoint in bfloat16."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(PRESETS["tiny"].source, dtype=torch.bfloat16).save_pretrained(folder)
    tiny[1].save_pretrained(folder)
    return str(folder)


def keep_gain(gain: float) -> None:
    """Leave the file that an earlier measurement on this machine would have left."""
    gain_file().parent.mkdir(parents=True, exist_ok=True)
    gain_file().write_text(json.dumps({"times as fast in bfloat16": gain}))


@pytest.mark.parametrize(("gain", "dtype"), [(FAST, "bfloat16"), (SLOW, "float32")])
def test_run_s_identity_and_record_hold_what_auto_was(
    half: str, gain: float, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep_gain(gain)
    arguments = [*QUICK, f"model.name={half}", "model=custom"]
    with caplog.at_level(logging.INFO):
        measure(run_of(*arguments, f"out={tmp_path / 'run'}"), show=False)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"loading {half}")]
    reason = f"on this CPU a product is {gain:g} times as fast in bfloat16 as in float32"
    assert line == f"loading {half} in {dtype}: {reason}"
    (stored,) = stored_runs([tmp_path / "run"])
    assert stored.identity["dtype"] == dtype
    assert stored.about["config"]["model"]["dtype"] == dtype
    explicit = prepare(run_of(*arguments, f"model.dtype={dtype}"))
    assert explicit.identity == stored.identity
    assert explicit.folder == prepare(run_of(*arguments)).folder


def test_plan_takes_the_dtype_of_its_device(half: str) -> None:
    keep_gain(SLOW)
    arguments = [*QUICK, f"model.name={half}", "model=custom"]
    here, on_gpu = costs(arguments)[0], costs(arguments, ACCELERATORS["a100"])[0]
    assert here.memory["weights"] == 2 * on_gpu.memory["weights"]
    assert f"half: bfloat16 (the checkpoint's dtype){chr(10)}" in as_text([on_gpu])
    assert "half: float32 (on this CPU a product is 0.2 times as fast" in as_text([here])
    given = costs([*arguments, "model.dtype=float32"], ACCELERATORS["a100"])[0]
    assert given.memory["weights"] == here.memory["weights"]


# By hand: Llama 2 has 6,738,415,616 weights, of 2 bytes in bfloat16 and 4 in float32
@pytest.mark.parametrize(
    ("gain", "dtype", "gigabytes"), [(FAST, "bfloat16", 13), (SLOW, "float32", 27)], ids=["fast", "slow"]
)
def test_doctor_names_dtype_and_size_on_a_cpu(gain: float, dtype: str, gigabytes: int, monkeypatch: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    keep_gain(gain)
    states = doctor.examine(["model=llama2"])
    assert states["dtype"][1].startswith(f"llama2: {dtype} (on this CPU a product is {gain:g} times")
    assert states["GPU"][1].endswith(f"must hold {gigabytes} GB of weights")
    assert doctor.examine(["model=tiny"])["dtype"] == ("ok", "tiny: float32 (as asked for)")
    assert doctor.examine(["model.name=owner/x"])["dtype"] == ("ok", "owner/x: known once its config is here")


def test_doctor_takes_the_checkpoint_s_dtype_for_a_gpu(half: str) -> None:
    keep_gain(SLOW)
    gpu = ["NVIDIA A100-SXM4-80GB", "550.54.15", "81920 MiB", "GPU-11aa"]
    spec = run_of(*QUICK, f"model.name={half}", "model=custom", "model.device=auto").subject.spec
    assert doctor.dtype_of(spec, gpu) == ("bfloat16", "the checkpoint's dtype")
    assert doctor.dtype_of(spec, None)[0] == "float32"
    on_cpu = run_of(*QUICK, f"model.name={half}", "model=custom").subject.spec
    assert doctor.dtype_of(on_cpu, gpu)[0] == "float32"


def test_unknown_dtype_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert ModelConfig().dtype == "auto"
    assert cli.main(["run", "model=tiny", "model.dtype=half"]) == 2
    assert "unknown dtype 'half': give one of auto, float32, bfloat16, float16, float64" in capsys.readouterr().err
