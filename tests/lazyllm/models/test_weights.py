"""Quantised checkpoints, and models that transformers spread: every method's result is that of
one device.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

import lazyllm
from lazyllm import measuring
from lazyllm.engine import decoder
from lazyllm.engine.checks import check_same_as_model
from lazyllm.engine.devices import devices_of, main_device, read_clock
from lazyllm.errors import UserError
from lazyllm.methods import GemFilter, Lazy, Method, SpecPrefill
from lazyllm.models import config as config_module
from lazyllm.models import load
from lazyllm.models.config import as_device
from lazyllm.models.load import load_weights
from lazyllm.spec import ModelSpec
from tests.helpers import prompt_tensor, slow
from tests.lazyllm.methods.method_matrix import PRUNING
from tests.lazyllm.models.pretend_devices import Placed, pretending
from tests.reference import random_model

hooks = pytest.importorskip("accelerate.hooks")

STEPS = 4
# one kind always; the others among the slow tests
KINDS = pytest.mark.parametrize(
    ("dtype", "attention"),
    [("float32", "sdpa"), *slow(("float32", "eager"), ("bfloat16", "sdpa"), ("float16", "eager"))],
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a checkpoint of a small Llama with 4 layers."""
    folder = tmp_path_factory.mktemp("weights") / "llama"
    random_model("llama", 2, num_layers=4).float().save_pretrained(folder)
    return str(folder)


def same(first: lazyllm.Generation, second: lazyllm.Generation) -> None:
    assert first.token_ids == second.token_ids
    assert torch.equal(first.first_logits, second.first_logits)
    assert first.computed.tolist() == second.computed.tolist()
    assert (first.selected, first.kv_bytes, first.aux_bytes) == (
        second.selected,
        second.kv_bytes,
        second.aux_bytes,
    )


def check_batched(model: PreTrainedModel, method: Method, expected: lazyllm.Generation) -> None:
    """Assert that two prompts of 30 tokens give in a batch what one gives alone; half precision
    rounds it otherwise.
    """
    for _, found in lazyllm.generate_many(
        model, [prompt_tensor(30)] * 2, method, len(expected.token_ids), (), batch_size=2
    ):
        if model.dtype == torch.float32:
            assert (found.token_ids, found.selected) == (expected.token_ids, expected.selected)
            assert found.computed.tolist() == expected.computed.tolist()


def test_checkpoint_quantised_by_a_missing_package_is_refused_before_it_loads(
    saved: str, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(
        load.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded")
    )
    for method, message in (
        ("bitsandbytes", "bitsandbytes"),
        ("gptq", "cannot be read here"),
        ("mine", "'mine'"),
    ):
        folder = tmp_path / method
        shutil.copytree(saved, folder)
        quantisation = {"quant_method": method, "load_in_8bit": method == "bitsandbytes", "bits": 4}
        config = json.loads((folder / "config.json").read_text()) | {
            "quantization_config": quantisation
        }
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=message):
            load_weights(ModelSpec(str(folder), device="cpu"))


def test_quantised_checkpoint_is_made_on_its_device_by_its_own_config(
    saved: str, tmp_path: Path, monkeypatch
) -> None:
    """Nothing that can be installed everywhere quantises, so that what transformers would do is
    only noted.
    """
    given: dict[str, Any] = {}

    def from_pretrained(source: str, **how: object) -> tuple[PreTrainedModel, dict]:
        given.update(how, source=source)
        info = dict.fromkeys(("missing_keys", "unexpected_keys", "mismatched_keys"), ())
        return random_model("llama", 2, num_layers=4), info

    folder = shutil.copytree(saved, tmp_path / "quantised")
    config = json.loads((folder / "config.json").read_text())
    quantisation = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    monkeypatch.setattr(AutoHfQuantizer, "from_config", lambda *_, **__: Mock())
    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    load_weights(ModelSpec(str(folder), dtype="bfloat16", device="cpu"))
    assert (given["device_map"], given["dtype"]) == ({"": torch.device("cpu")}, torch.bfloat16)
    assert given["weights_only"] is True
    assert "quantization_config" not in given  # as None it would override the checkpoint's
    with pytest.raises(UserError, match="random weights"):
        load_weights(ModelSpec(str(folder), "dummy", device="cpu"))
    monkeypatch.setattr(config_module, "is_accelerate_available", lambda: False)
    with pytest.raises(UserError, match=r"needs the package accelerate.*pip install accelerate"):
        load_weights(ModelSpec(str(folder), device="cpu"))


PARTS = [
    "model.embed_tokens",
    *(f"model.layers.{layer}" for layer in range(4)),
    "model.norm",
    "lm_head",
]


@KINDS
def test_weights_on_disk_change_nothing(saved: str, dtype: str, attention: str) -> None:
    place = {part: "cpu" if part == "model.layers.2" else "disk" for part in PARTS} | {
        "model.rotary_emb": "cpu"
    }
    plain = load_weights(ModelSpec(saved, dtype=dtype, device="cpu", attn_implementation=attention))
    how: dict[str, Any] = {
        "dtype": getattr(torch, dtype),
        "attn_implementation": attention,
        "device_map": place,
    }
    model = AutoModelForCausalLM.from_pretrained(saved, **how).eval()
    # it is read when it is its turn
    assert model.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    assert devices_of(model) == (main_device(model),) == (torch.device("cpu"),)
    for method in PRUNING.values():
        expected = lazyllm.generate(plain, prompt_tensor(30), method, 3, ())
        same(lazyllm.generate(model, prompt_tensor(30), method, 3, ()), expected)
        if isinstance(method, Lazy):
            check_batched(model, method, expected)


FIRST, SECOND, THIRD = (torch.device("cuda", number) for number in range(3))
# these choose on the device before the prefill: the clock is read then too
CHOOSING = (GemFilter, SpecPrefill)
SPREADS = {
    "two": [FIRST, FIRST, FIRST, SECOND, SECOND, SECOND, SECOND],
    "three, back and forth": [FIRST, SECOND, FIRST, THIRD, SECOND, THIRD, SECOND],
    "no layer at home": [FIRST, SECOND, SECOND, SECOND, SECOND, SECOND, FIRST],
}


def spread(model: PreTrainedModel, places: list[torch.device]) -> PreTrainedModel:
    """The model with its parts on pretended devices, and accelerate's hooks on them as
    `dispatch_model` has them.
    """
    place_of_part = dict(zip(PARTS, places, strict=True)) | {"model.rotary_emb": places[-1]}
    for name, place in place_of_part.items():
        for part in model.get_submodule(name).modules():
            for key, value in part._parameters.items():
                if value is not None:
                    part._parameters[key] = nn.Parameter(
                        Placed(value.data, place), requires_grad=False
                    )
            for key, value in part._buffers.items():
                if value is not None:
                    part._buffers[key] = Placed(value, place)
    whole = {"": places[0]} | place_of_part
    for name, place in whole.items():
        hook = hooks.AlignDevicesHook(
            place, io_same_device=name == "", skip_keys=["past_key_values"]
        )
        hook.init_hook = lambda module: module  # the weights are there already
        hooks.add_hook_to_module(model.get_submodule(name), hook)
    model.hf_device_map = place_of_part
    return model


@pytest.fixture
def synchronised(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    seen: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", seen.append)
    # chooses SDPA's backend
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "attention"),
    [("three, back and forth", "sdpa"), ("two", "eager"), ("no layer at home", "sdpa")],
)
def test_no_tensors_of_two_devices_meet(
    which: str, attention: str, synchronised: list[torch.device]
) -> None:
    plain = random_model("llama", 2, num_layers=4, dtype=torch.float32)
    plain.config._attn_implementation = attention
    model = spread(copy.deepcopy(plain), SPREADS[which])
    used = set(SPREADS[which])
    assert (devices_of(model)[0], set(devices_of(model))) == (FIRST, used)
    with pretending():
        check_same_as_model(model)
    for method in PRUNING.values():
        expected = lazyllm.generate(plain, prompt_tensor(30), method, STEPS, ())
        synchronised.clear()
        with pretending():
            found = lazyllm.generate(model, prompt_tensor(30), method, STEPS, ())
            assert found.first_logits.device == FIRST
        found.first_logits = found.first_logits.held
        same(found, expected)
        assert set(synchronised) == used
        # the clock is read
        assert len(synchronised) == len(used) * (STEPS + 1 + isinstance(method, CHOOSING))
        if isinstance(method, Lazy):
            with pretending():
                check_batched(model, method, expected)


def test_spread_model_costs_one_move_a_boundary_between_devices(
    synchronised: list[torch.device],
) -> None:
    model = spread(random_model("llama", 2, num_layers=4, dtype=torch.float32), SPREADS["two"])
    with pretending():
        check_same_as_model(model)  # as `load_model` does: else the first generation would
    with pretending() as moves:
        lazyllm.generate(model, prompt_tensor(30), lazyllm.methods.Baseline(), STEPS, ())
    # there: hidden states, positions, cos and sin before layer 3 (not again before layer 4), the
    # same but cos and sin before the rotary embedding, the last token's before the norm; back: cos
    # and sin, hidden states, logits
    assert moves["cuda:0", "cuda:1"] == STEPS * (4 + 2 + 1)
    assert moves["cuda:1", "cuda:0"] == STEPS * (2 + 1 + 1)


def test_pretended_devices_tell_when_something_is_not_moved(
    monkeypatch, synchronised: list[torch.device]
) -> None:
    with pretending(), pytest.raises(RuntimeError, match="tensors on cuda:0 and cuda:1 met"):
        torch.ones(2, device=FIRST) + torch.ones(2, device=SECOND)
    with pretending(), pytest.raises(RuntimeError, match="tensors on cpu and cuda:0 met"):
        torch.ones(2, device=FIRST) + torch.ones(2)
    model = spread(random_model("llama", 2, num_layers=4, dtype=torch.float32), SPREADS["two"])
    monkeypatch.setattr(decoder, "to_device", lambda value, device: value)
    with pretending(), pytest.raises(RuntimeError, match="met"):
        lazyllm.generate(model, prompt_tensor(30), Lazy({1: 0.6, 3: 0.5}), STEPS, ())


def test_the_clock_waits_for_each_device(synchronised: list[torch.device]) -> None:
    read_clock(FIRST, torch.device("cpu"), SECOND)
    assert synchronised == [FIRST, SECOND]


def test_peak_is_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    reset: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100 * (device.index + 1))
    measuring.reset_peak(SECOND)
    assert reset == [SECOND]
    assert measuring.read_peak(SECOND) == 200
    assert measuring.read_peak(torch.device("mps")) is None


def test_auto_is_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert as_device("auto") == torch.device("cuda")
