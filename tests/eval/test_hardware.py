"""Numbers that physics allows: shares of a device's peak, and the attention kernel."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval.analysis.run_table import run_table
from eval.report.page import warnings
from eval.store.record import Visit
from eval.store.results import Results
from eval.store.runs import StoredRun
from lazyllm import measuring
from lazyllm.engine.generation import generate
from lazyllm.errors import UserError
from lazyllm.machine import ACCELERATORS, FLASH_2, accelerator, machine_warnings
from lazyllm.measuring import attention_events, attention_kernel, utilisation
from lazyllm.methods import Baseline
from lazyllm.models.config import load_config
from lazyllm.spec import ModelSpec
from tests.eval.made import stored
from tests.eval.store.visits import visit
from tests.helpers import prompt_of
from tests.reference import random_model
from tests.runs import measured, small_config

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("device", "sheet"),  # TFLOP/s in 16 bits; GB and TB/s where cards of one chip differ in memory
    [
        (H100, (989,)), ("NVIDIA H100 PCIe", (756,)), ("NVIDIA H200", (989,)),
        ("NVIDIA L4", (121,)),
        ("NVIDIA L40S", (362,)), ("NVIDIA L40", None), ("NVIDIA GH200 480GB", (989,)),
        ("NVIDIA H200 NVL", (836,)), ("NVIDIA GeForce RTX 4090", (165,)),
        ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        (f"{H100} MIG 1g.10gb", None), ("AMD EPYC 7742", None), ("Tesla T4", (65,)),
        ("NVIDIA A100-SXM4-80GB", (312, 80, 2.04)), ("NVIDIA A100-SXM4-40GB", (312, 40, 1.555)),
        ("NVIDIA A100 80GB PCIe", (312, 80, 2.04)), ("Tesla V100-PCIE-16GB", (125, 16, 0.9)),
    ],
)  # fmt: skip
def test_data_sheet_is_found_by_the_drivers_name(
    device: str, sheet: tuple[float, ...] | None
) -> None:
    kind = accelerator(device)
    found = kind and (kind.flops_per_s / 1e12, kind.gigabytes, kind.bytes_per_s / 1e12)
    assert (found and found[: len(sheet or ())]) == (sheet and pytest.approx(sheet))


def test_peak_by_dtype() -> None:
    a100, t4 = ACCELERATORS["a100"], ACCELERATORS["t4"]
    assert a100.peak("float32", tf32=True) == 156e12  # NVIDIA's own number
    assert (a100.peak("float32"), a100.peak("bfloat16", tf32=True), a100.peak("float64")) == (
        19.5e12,
        312e12,
        None,
    )
    assert (t4.peak("float16"), t4.peak("bfloat16")) == (65e12, None)
    assert t4.peak("float32", tf32=True) == t4.peak("float32") == 8.1e12  # it has no TF32
    assert [accelerator(f"NVIDIA {kind.name}") for kind in ACCELERATORS.values()] == [
        *ACCELERATORS.values()
    ]


# {what a program sets: whether products may then be of TF32}
TF32 = {
    "": False,
    "torch.backends.cuda.matmul.allow_tf32 = True": True,
    "torch.set_float32_matmul_precision('high')": True,
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": True,  # from then on, allow_tf32 raises
    "torch.backends.fp32_precision = 'tf32'": True,
    "torch.backends.cuda.matmul.fp32_precision = 'ieee'": False,
}
# Each setting in a fork of its own, as none can be taken back
EACH_SETTING = """
import os, sys, torch
from lazyllm import measuring
for settings in sys.argv[1:]:
    if os.fork() == 0:
        exec(settings)
        print(measuring.allows_tf32(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_tf32_is_known_whichever_setting_was_used() -> None:
    new = hasattr(torch.backends.cuda.matmul, "fp32_precision")
    cases = {
        settings: allowed
        for settings, allowed in TF32.items()
        if new or "fp32_precision" not in settings
    }
    command = [sys.executable, "-c", EACH_SETTING, *cases]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [*map(str, cases.values())]


def test_bfloat16_without_units_for_it_gets_a_line() -> None:
    [line] = machine_warnings("Tesla T4", [], float("nan"), "bfloat16")
    assert "Tesla T4 has no units for bfloat16" in line
    for device, dtype in (("Tesla T4", "float16"), (H100, "bfloat16")):
        assert machine_warnings(device, [], float("nan"), dtype) == []


def test_share_of_a_data_sheets_peak_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(config=load_config(ModelSpec("tiny")), device=torch.device("cuda"))
    monkeypatch.setattr(measuring, "devices_of", lambda model: [model.device])
    monkeypatch.setattr(measuring, "device_name", lambda _: H100)
    for dtype, teraflops, share in (
        (torch.float32, 33.5, 0.5),
        (torch.float64, 1, None),
        (torch.bfloat16, 1029, 1.04),
    ):
        model.dtype = dtype
        assert utilisation(model, teraflops * 1e12, 1) == (share and pytest.approx(share, rel=1e-3))
    with pytest.raises(
        UserError,
        match=r"impossible clock: 1048 TFLOP/s are 106% of the peak of H100, 989.*synchroni",
    ):
        utilisation(model, 1.06 * 989e12, 1)


def test_a_share_above_a_cpus_measured_rate_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_rate", lambda *_: 1e9)
    model = random_model("llama", 1, num_layers=1)
    assert [utilisation(model, flops, 1) for flops in (5e8, 1e9, 4.14e9)] == [0.5, 1, None]
    model.config.quantization_config = {}
    assert utilisation(model, 1, 1) is None


@pytest.mark.parametrize(
    ("event", "kernel"),
    [
        ("aten::_scaled_dot_product_flash_attention", FLASH_2),
        ("aten::_scaled_dot_product_efficient_attention", "memory-efficient"),
        ("aten::_scaled_dot_product_cudnn_attention", "cuDNN"),
        ("flash_attn::_flash_attn_forward", FLASH_2),
        ("flash_attn::_flash_attn_varlen_forward", FLASH_2),
        ("aten::_softmax", "eager"),
        ("own::attend", "own::attend, aten::scaled_dot_product_attention"),
        ("flash_attn_3::fwd", "FlashAttention 3"),
        ("aten::_scaled_dot_product_attention_math", "SDPA without a fused kernel"),
    ],
)
def test_kernel_is_told_by_its_operators_names(event: str, kernel: str) -> None:
    assert attention_kernel([event, "aten::scaled_dot_product_attention"]) == kernel


@pytest.mark.parametrize(
    ("attention", "kernel"), [("sdpa", "SDPA's flash for CPUs"), ("eager", "eager")]
)
def test_kernel_that_ran_is_told_by_its_operators(attention: str, kernel: str) -> None:
    model = random_model("llama", 1, num_layers=2, attn_implementation=attention)
    assert (
        attention_kernel(attention_events(lambda: generate(model, prompt_of(9), Baseline(), 1, ())))
        == kernel
    )


def test_run_stores_mfu_as_counted_by_hand_and_its_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_rate", lambda *_: 1e15)
    run = measured(small_config(tmp_path / "run", limit=1, dataset="lookup", warmup=1))
    [example] = run.visits
    baseline = example.answers["baseline"]
    config: Any = load_config(ModelSpec("tiny"))
    n, w, d = example.prompt_tokens, config.hidden_size, config.head_dim
    linear = 2 * (
        w * d * 2 * (config.num_attention_heads + config.num_key_value_heads)
        + 3 * w * config.intermediate_size
    )
    pairs = 4 * config.num_attention_heads * d * n * (n + 1) // 2
    flops = config.num_hidden_layers * (n * linear + pairs) + 2 * w * config.vocab_size
    assert baseline.prefill_mfu == pytest.approx(flops / baseline.ttft_s / 1e15)
    assert example.kernel == "SDPA's flash for CPUs"
    text = run_table(Results([run]), "a run").to_markdown()
    assert "MFU, %" in text
    assert "Attention kernel of the baseline, by its operators: SDPA's flash for CPUs." in text


def at(mfu: float | None, tokens: int, kernel: str | None = None, **changes: Any) -> Visit:
    """A visit whose baseline has this MFU, and reads 14 GB of weights in a step."""
    usual = {"prefill_mfu": mfu, "prefill_flops": 14 * 10**9 * tokens, "decode_step_s": [0.005]}
    return visit(1, "hotpotqa", usual | changes, prompt_tokens=tokens, kernel=kernel)


def stored_on(device: str, made: Visit) -> StoredRun:
    return stored(
        [made], provenance={"machine": {"device": device}, "started": "2026-11-22T00:00:00Z"}
    )


@pytest.mark.parametrize(
    ("device", "made", "signs"),
    [
        (H100, at(0.39, 8000), ["39 % of the peak of NVIDIA H100"]),
        (H100, at(0.39, 7999), []),
        (H100, at(0.41, 8000, "FlashAttention 3"), []),
        (H100, at(0.1, 9000, FLASH_2), ["10 % of the peak", "FlashAttention 2 on NVIDIA H100"]),
        (H100, at(None, 9000), []),
        ("NVIDIA A100-SXM4-80GB", at(0.5, 9000, FLASH_2), []),
        ("AMD EPYC 7742", at(0.1, 9000), []),  # its peak was measured, not promised
        # an H100 reads the weights in 4.2 ms
        (H100, at(0.5, 1000, decode_step_s=[0.021, 0.025]), ["6 times as long as NVIDIA"]),
        (H100, at(0.5, 1000, decode_step_s=[0.012]), []),
    ],
)
def test_baseline_that_flatters_speedups_is_named(
    device: str, made: Visit, signs: list[str]
) -> None:
    run = stored_on(device, made)
    assert len(run.warnings) == len(signs)
    table, page = run_table(Results([run]), "a run").to_markdown(), " ".join(warnings([run], None))
    for sign, sentence in zip(signs, run.warnings, strict=True):
        assert sign in sentence
        assert f"Caution: {sentence}." in table
        assert sentence in page
    assert ("Caution" in table) == bool(signs)


def test_table_of_runs_names_each_caution_of_all_runs_once() -> None:
    first, second = (stored_on(H100, at(0.1, 9000, kernel)) for kernel in (None, FLASH_2))
    caption = run_table(Results([first, second]), "two").caption
    assert len(first.warnings) == 1  # the other one has two
    assert [caption.count(f"Caution: {sentence}.") for sentence in second.warnings] == [1, 1]
    assert f"by its operators: {FLASH_2}." in caption


def test_table_names_arms_that_were_left_out() -> None:
    run = stored([at(0.5, 9000)])
    run.about["cautions"] = ["left out: fastkv cannot reach 6x"]
    assert "Caution: left out: fastkv cannot reach 6x." in run_table(Results([run]), "a").caption


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        ([0.2, 0.3, 0.4, 0.9], 0),
        ([0.2, 0.9, 0.4, 0.9], 1),  # 0.4 s was enough for a longer prompt
        ([0.2, 0.7, 0.4, 2.0], 0),  # nothing longer says that the last one is slow
        ([0.9, 0.9, 0.2, 0.9], 2),
    ],
)
def test_table_names_answers_that_other_work_slowed(times: list[float], slow: int) -> None:
    visits = [
        visit(row, ttft_s=ttft_s, prefill_flops=1000 + row) for row, ttft_s in enumerate(times)
    ]
    caption = run_table(Results([stored(visits)]), "a").caption
    sentence = f"Caution: {slow} of 8 TTFTs are more than 2 times that of an arm's longer prompt"
    assert (sentence in caption) == bool(slow)
    assert ("other work slowed" in caption) == bool(slow)
