"""What `dtype="auto"` is: by the checkpoint, the device, and a product that is measured once."""

import inspect
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyllm
from lazyllm.errors import UserError
from lazyllm.models.dtype import bfloat16_gain, choose_dtype, gain_file
from lazyllm.models.load import load_weights
from lazyllm.presets import PRESETS
from lazyllm.spec import ModelSpec
from tests.gguf_files import model_of, write_gguf
from tests.helpers import keep_gain

FAST, SLOW = 8.0, 0.2  # how many times as fast a product is in bfloat16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept_gain() -> float | None:
    """The number in the file of an earlier measurement; None without one."""
    try:
        return json.loads(gain_file().read_text())["times as fast in bfloat16"]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def unasked() -> float:
    raise AssertionError("a product was measured")


def checkpoint(folder: Path, **config: Any) -> ModelSpec:
    """A folder with a config.json alone."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return ModelSpec(str(folder))


# (fields of config.json, dtype on a GPU, on a CPU that is slow in bfloat16, on one that is fast)
STORED = [
    ({"dtype": "bfloat16"}, "bfloat16", "float32", "bfloat16"),
    ({"torch_dtype": "bfloat16"}, "bfloat16", "float32", "bfloat16"),
    ({"dtype": "float16"}, "float16", "float32", "bfloat16"),
    ({"torch_dtype": "float16"}, "float16", "float32", "bfloat16"),
    ({}, "bfloat16", "float32", "bfloat16"),
    ({"dtype": None}, "bfloat16", "float32", "bfloat16"),
    ({"dtype": "float8_e4m3fn"}, "bfloat16", "float32", "bfloat16"),
    ({"dtype": "float32"}, "float32", "float32", "float32"),
    ({"dtype": "float64"}, "float64", "float64", "float64"),
    (
        {"dtype": "float16", "quantization_config": {"quant_method": "awq"}},
        "float16",
        "float16",
        "float16",
    ),
]


@pytest.mark.parametrize(("config", "gpu", "slow", "fast"), STORED, ids=str)
def test_checkpoint_s_dtype_on_a_gpu_and_the_faster_one_on_a_cpu(
    config: dict[str, Any], gpu: str, slow: str, fast: str, tmp_path: Path
) -> None:
    spec = checkpoint(tmp_path / "model", **config)
    assert choose_dtype(spec, "cuda", unasked)[0] == gpu
    assert choose_dtype(spec, "xpu", unasked)[0] == gpu
    gains = {slow: lambda: SLOW, fast: lambda: FAST} if slow != fast else {slow: unasked}
    for expected, gain in gains.items():
        assert choose_dtype(spec, "cpu", gain)[0] == expected


def test_advantage_of_bfloat16_must_be_clear(tmp_path: Path) -> None:
    spec = checkpoint(tmp_path / "model", dtype="bfloat16")
    chosen = [choose_dtype(spec, "cpu", lambda gain=gain: gain) for gain in (0.4, 1.0, 1.3, 2.0)]
    assert [dtype for dtype, _ in chosen] == ["float32", "float32", "float32", "bfloat16"]
    assert [reason for _, reason in chosen][
        -1
    ] == "on this CPU a product is 2 times as fast in bfloat16 as in float32"


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_dtype_that_is_given_is_taken(dtype: str) -> None:
    for device in ("cpu", "cuda"):
        assert choose_dtype(ModelSpec("no/model", dtype=dtype), device, unasked) == (
            dtype,
            "as asked for",
        )


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", PRESETS)
def test_presets_need_no_files(name: str) -> None:
    expected = "float32" if name == "tiny" else "bfloat16"
    assert choose_dtype(ModelSpec(name), "cuda", unasked)[0] == expected
    assert choose_dtype(ModelSpec(name, "dummy"), "cuda", unasked)[0] == expected
    assert choose_dtype(ModelSpec(name), "cpu", lambda: SLOW)[0] == "float32"


def test_random_weights_of_given_sizes_name_no_dtype() -> None:
    assert choose_dtype(ModelSpec("layers=2,width=64", "dummy"), "cuda", unasked)[0] == "bfloat16"


@pytest.mark.parametrize(
    ("quantisation", "gpu", "cpu"),
    [
        ("F32", "float32", "float32"),
        ("F16", "float16", "float32"),
        ("BF16", "bfloat16", "float32"),
        ("Q8_0", "bfloat16", "float32"),
    ],
)
def test_gguf_file_that_is_not_quantised_has_its_own_dtype(
    quantisation: str, gpu: str, cpu: str, tmp_path: Path
) -> None:
    spec = ModelSpec(str(write_gguf(tmp_path / "small.gguf", model_of("llama"), quantisation)))
    assert choose_dtype(spec, "cuda", unasked)[0] == gpu
    assert choose_dtype(spec, "cpu", lambda: SLOW)[0] == cpu


def test_config_that_is_not_here_is_refused(offline: None) -> None:
    with pytest.raises(UserError, match="it is not in the hub's cache"):
        choose_dtype(ModelSpec("owner/model"), "cuda")


def test_product_is_measured_once_and_kept(cache: Path) -> None:
    assert kept_gain() is None
    gain = bfloat16_gain()
    assert gain > 0
    assert kept_gain() == gain
    assert [file.name for file in cache.rglob("*.json")] == [gain_file().name]
    code = (
        "from lazyllm.models.dtype import bfloat16_gain as gain; import sys; print(gain(), 'torch' "
        "in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(gain), "False"]


def test_kept_number_is_taken() -> None:
    keep_gain(123.0)
    assert bfloat16_gain() == kept_gain() == 123


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"times as fast in bfloat16": null}'])
def test_damaged_file_is_measured_anew(content: str) -> None:
    gain_file().parent.mkdir(parents=True)
    gain_file().write_text(content)
    assert kept_gain() is None
    assert bfloat16_gain() == kept_gain()


def test_cache_that_cannot_be_written_costs_time_only(cache: Path) -> None:
    cache.write_text("a file in the place of the folder")
    gain = bfloat16_gain()
    assert gain > 0
    assert bfloat16_gain() == gain  # this process stays with it
    assert kept_gain() is None


@pytest.mark.parametrize(("gain", "expected"), [(FAST, torch.bfloat16), (SLOW, torch.float32)])
def test_model_loads_in_it_and_says_why(
    gain: float, expected: torch.dtype, tmp_path: Path, caplog: Any
) -> None:
    keep_gain(gain)
    half, whole = tmp_path / "half", tmp_path / "whole"
    model_of("llama").to(torch.bfloat16).save_pretrained(half)
    model_of("llama").save_pretrained(whole)
    with caplog.at_level(logging.INFO):
        model = load_weights(ModelSpec(str(half), device="cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    name = str(expected).removeprefix("torch.")
    (line,) = [
        record.getMessage() for record in caplog.records if " loads in " in record.getMessage()
    ]
    assert line.startswith(
        f"{half} loads in {name}: on this CPU a product is {gain:g} times as fast"
    )
    assert load_weights(ModelSpec(str(whole), device="cpu")).dtype == torch.float32
    assert load_weights(ModelSpec(str(half), device="cpu", dtype="float16")).dtype == torch.float16
    assert load_weights(ModelSpec("layers=2,width=64", "dummy", device="cpu")).dtype == expected


def test_auto_is_the_default() -> None:
    assert ModelSpec("tiny").dtype == "auto"
    assert inspect.signature(lazyllm.load_model).parameters["dtype"].default == "auto"
    assert lazyllm.load_model("tiny", device="cpu")[0].dtype == torch.float32
