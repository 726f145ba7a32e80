"""Quantised weights and layers on several devices: every method's result equals that of plain weights on one device."""

import copy
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import lazyllm
from lazyllm import measuring
from lazyllm.engine import decoder
from lazyllm.engine.checks import check_same_as_model
from lazyllm.engine.devices import devices_of, main_device, read_clock
from lazyllm.errors import UserError
from lazyllm.methods import GemFilter, Lazy, Method, SpecPrefill
from lazyllm.models import load, quantisation
from lazyllm.models.load import devices_in_use, load_weights
from lazyllm.spec import ModelSpec
from tests.helpers import prompt_tensor, slow
from tests.lazyllm.methods.method_matrix import KEEPING, PRUNING
from tests.lazyllm.models.pretend_devices import CPU, Placed, placed, pretending
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


def same(one: lazyllm.Generation, other: lazyllm.Generation) -> None:
    assert one.token_ids == other.token_ids
    assert torch.equal(one.first_logits, other.first_logits)
    assert one.computed.tolist() == other.computed.tolist()
    assert (one.selected, one.kv_bytes, one.aux_bytes) == (other.selected, other.kv_bytes, other.aux_bytes)


def check_batched(model: PreTrainedModel, method: Method, expected: lazyllm.Generation) -> None:
    """Assert that two prompts of 30 tokens give in a batch what one gives alone; half precision rounds it otherwise."""
    for _, found in lazyllm.generate_many(
        model, [prompt_tensor(30)] * 2, method, len(expected.token_ids), (), batch_size=2
    ):
        if model.dtype == torch.float32:
            assert (found.token_ids, found.selected) == (expected.token_ids, expected.selected)
            assert found.computed.tolist() == expected.computed.tolist()


@pytest.mark.quantised
@KINDS
def test_int8_weights_in_every_method(saved: str, dtype: str, attention: str) -> None:
    model = load_weights(ModelSpec(saved, dtype=dtype, device="cpu", attn_implementation=attention, quantise="int8"))
    prompt = prompt_tensor(30)
    # the model's own generation is the oracle if everything is kept
    theirs = model.generate(prompt[None], max_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=0)
    for name, method in KEEPING.items():
        out = lazyllm.generate(model, prompt, method, STEPS, ())
        assert out.token_ids == theirs[0, len(prompt) :].tolist(), name
    for name, method in PRUNING.items():
        out = lazyllm.generate(model, prompt, method, STEPS, ())
        check_batched(model, method, out)
        assert out.first_logits.isfinite().all(), name
        assert out.first_logits.dtype == model.dtype == getattr(torch, dtype)
        assert out.computed.shape == (STEPS, 4)


@pytest.mark.quantised
def test_int8_weights_are_rounded_to_the_nearest_of_255(saved: str) -> None:
    plain = load_weights(ModelSpec(saved, dtype="float32", device="cpu"))
    model = load_weights(ModelSpec(saved, dtype="float32", device="cpu", quantise="int8"))
    rounded = 0
    for name, weight in plain.named_parameters():
        found = model.get_parameter(name)
        if not re.search(r"_proj\.weight$", name):
            assert torch.equal(found, weight), name  # norms, embedding and head are as they were
            continue
        rounded += 1
        assert found.qdata.dtype == torch.int8
        step = weight.detach().abs().amax(dim=1, keepdim=True) / 127  # a row's largest is the last step
        assert ((found.dequantize() - weight).abs() <= step * 0.51).all(), name
    assert rounded == 4 * 7
    assert (model.dtype, model.device.type) == (torch.float32, "cpu")


@pytest.mark.quantised
def test_quantised_checkpoint_loads_as_it_is(saved: str, tmp_path: Path) -> None:
    once = load_weights(ModelSpec(saved, dtype="float32", device="cpu", quantise="int8"))
    once.save_pretrained(tmp_path / "int8")
    again = load_weights(ModelSpec(str(tmp_path / "int8"), dtype="float32", device="cpu"))
    weights = [model.model.layers[1].mlp.up_proj.weight for model in (once, again)]
    assert torch.equal(weights[0].qdata, weights[1].qdata)
    assert torch.equal(weights[0].scale, weights[1].scale)
    one, two = (
        lazyllm.generate(model, prompt_tensor(30), Lazy({1: 0.6, 3: 0.5}), STEPS, ()) for model in (once, again)
    )
    assert (one.token_ids, one.selected) == (two.token_ids, two.selected)
    # not bit for bit: the memory alignment of a file's bytes determines the CPU's order of summation
    torch.testing.assert_close(one.first_logits, two.first_logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="leave out quantise=int8"):
        load_weights(ModelSpec(str(tmp_path / "int8"), device="cpu", quantise="int8"))
    with pytest.raises(UserError, match="random weights"):
        load_weights(ModelSpec(str(tmp_path / "int8"), "dummy", device="cpu"))


def test_checkpoint_quantised_by_a_missing_package_is_refused_before_it_loads(saved: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    for method, message in (("bitsandbytes", "bitsandbytes"), ("gptq", "cannot be read here"), ("mine", "'mine'")):
        folder = tmp_path / method
        shutil.copytree(saved, folder)
        own = {"quant_method": method, "load_in_8bit": method == "bitsandbytes", "bits": 4}
        config = json.loads((folder / "config.json").read_text()) | {"quantization_config": own}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=message):
            load_weights(ModelSpec(str(folder), device="cpu"))


@pytest.mark.parametrize("quantise", ["bnb_int8", "bnb_nf4"])
def test_bitsandbytes_gets_its_config_and_the_device(saved: str, monkeypatch, quantise: str) -> None:
    told = {}

    def from_pretrained(source: str, **how: object) -> tuple[PreTrainedModel, dict]:
        told.update(how, source=source)
        info = dict.fromkeys(("missing_keys", "unexpected_keys", "mismatched_keys"), ())
        return random_model("llama", 2, num_layers=4), info

    monkeypatch.setattr(quantisation, "is_bitsandbytes_available", lambda: True)
    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    load_weights(ModelSpec(saved, dtype="bfloat16", device="cpu", quantise=quantise))
    config = told["quantization_config"]
    assert (config.load_in_8bit, config.load_in_4bit) == (quantise == "bnb_int8", quantise == "bnb_nf4")
    if quantise == "bnb_nf4":
        assert (config.bnb_4bit_quant_type, config.bnb_4bit_compute_dtype) == ("nf4", torch.bfloat16)
    assert (told["device_map"], told["dtype"]) == ({"": torch.device("cpu")}, torch.bfloat16)
    assert told["weights_only"] is True


PARTS = ["model.embed_tokens", *(f"model.layers.{layer}" for layer in range(4)), "model.norm", "lm_head"]


@KINDS
def test_weights_on_disk_change_nothing(saved: str, dtype: str, attention: str) -> None:
    place = {part: "cpu" if part == "model.layers.2" else "disk" for part in PARTS} | {"model.rotary_emb": "cpu"}
    plain = load_weights(ModelSpec(saved, dtype=dtype, device="cpu", attn_implementation=attention))
    model = load_weights(ModelSpec(saved, dtype=dtype, attn_implementation=attention, device_map=place))
    assert model.model.layers[1].mlp.up_proj.weight.device.type == "meta"  # it is read when it is its turn
    assert devices_of(model) == (main_device(model),) == (torch.device("cpu"),)
    for method in PRUNING.values():
        expected = lazyllm.generate(plain, prompt_tensor(30), method, 3, ())
        same(lazyllm.generate(model, prompt_tensor(30), method, 3, ()), expected)
        if isinstance(method, Lazy):
            check_batched(model, method, expected)


def test_auto_is_the_cpu_on_a_machine_without_accelerators(saved: str) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has what the test expects to be absent")
    model = load_weights(ModelSpec(saved, dtype="float32", device_map="auto"))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert (
        devices_in_use(ModelSpec("tiny", device_map="auto"))
        == devices_in_use(ModelSpec("tiny", device="cpu"))
        == (torch.device("cpu"),)
    )
    assert devices_in_use(ModelSpec("tiny", device_map={"model": "disk", "lm_head": "cpu"})) == (torch.device("cpu"),)


FIRST, SECOND, THIRD = (torch.device("cuda", number) for number in range(3))
# these choose on the device before the prefill: the clock is read then too
CHOOSING = (GemFilter, SpecPrefill)
SPREADS = {
    "two": [FIRST, FIRST, FIRST, SECOND, SECOND, SECOND, SECOND],
    "three, back and forth": [FIRST, SECOND, FIRST, THIRD, SECOND, THIRD, SECOND],
    "no layer at home": [FIRST, SECOND, SECOND, SECOND, SECOND, SECOND, FIRST],
}


def spread(model: PreTrainedModel, places: list[torch.device]) -> PreTrainedModel:
    """The model with its parts on pretended devices, and accelerate's hooks on them as `dispatch_model` has them."""
    place_of_part = dict(zip(PARTS, places, strict=True)) | {"model.rotary_emb": places[-1]}
    for name, place in place_of_part.items():
        for part in model.get_submodule(name).modules():
            for key, value in part._parameters.items():
                if value is not None:
                    part._parameters[key] = nn.Parameter(Placed(value.data, place), requires_grad=False)
            for key, value in part._buffers.items():
                if value is not None:
                    part._buffers[key] = Placed(value, place)
    whole = {"": places[0]} | place_of_part
    for name, place in whole.items():
        hook = hooks.AlignDevicesHook(place, io_same_device=name == "", skip_keys=["past_key_values"])
        hook.init_hook = lambda module: module  # the weights are there already
        hooks.add_hook_to_module(model.get_submodule(name), hook)
    model.hf_device_map = place_of_part
    return model


@pytest.fixture
def synchronised(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    seen: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", seen.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))  # chooses SDPA's backend
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "attention"), [("three, back and forth", "sdpa"), ("two", "eager"), ("no layer at home", "sdpa")]
)
def test_no_tensors_of_two_devices_meet(which: str, attention: str, synchronised: list[torch.device]) -> None:
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
        same(replace(found, first_logits=found.first_logits.held), expected)
        assert set(synchronised) == used
        assert len(synchronised) == len(used) * (STEPS + 1 + isinstance(method, CHOOSING))  # the clock is read
        if isinstance(method, Lazy):
            with pretending():
                check_batched(model, method, expected)


def test_later_turn_takes_tokens_on_the_models_device(synchronised: list[torch.device]) -> None:
    model, method = spread(random_model("llama", 2, num_layers=4), SPREADS["two"]), Lazy({1: 0.6, 3: 0.5})
    answers = []
    for place in (CPU, FIRST):
        with pretending():
            session = lazyllm.start(model, prompt_tensor(30), method)
            session.answer(None, STEPS, ())
            answers.append(session.answer(placed(torch.tensor([4, 5, 6]), place), STEPS, ()).token_ids)
    assert answers[0] == answers[1]


def test_spread_model_costs_one_move_a_boundary_between_devices(synchronised: list[torch.device]) -> None:
    model = spread(random_model("llama", 2, num_layers=4, dtype=torch.float32), SPREADS["two"])
    with pretending():
        check_same_as_model(model)  # as `load_model` does: else the first generation would
    with pretending() as moves:
        lazyllm.generate(model, prompt_tensor(30), lazyllm.methods.Baseline(), STEPS, ())
    # there: hidden states, positions, cos and sin before layer 3 (not again before layer 4), the same but cos and sin
    # before the rotary embedding, the last token's before the norm; back: cos and sin, hidden states, logits
    assert moves["cuda:0", "cuda:1"] == STEPS * (4 + 2 + 1)
    assert moves["cuda:1", "cuda:0"] == STEPS * (2 + 1 + 1)


def test_pretended_devices_tell_when_something_is_not_moved(monkeypatch, synchronised: list[torch.device]) -> None:
    with pretending(), pytest.raises(RuntimeError, match="tensors on cuda:0 and cuda:1 met"):
        torch.ones(2, device=FIRST) + torch.ones(2, device=SECOND)
    with pretending(), pytest.raises(RuntimeError, match="tensors on cpu and cuda:0 met"):
        torch.ones(2, device=FIRST) + torch.ones(2)
    model = spread(random_model("llama", 2, num_layers=4, dtype=torch.float32), SPREADS["two"])
    monkeypatch.setattr(decoder, "to_device", lambda value, device: value)
    with pretending(), pytest.raises(RuntimeError, match="met"):
        lazyllm.generate(model, prompt_tensor(30), Lazy({1: 0.6, 3: 0.5}), STEPS, ())


def test_peaks_of_several_devices_add_up_and_the_clock_waits_for_each(monkeypatch, synchronised) -> None:
    reset: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100 * (device.index + 1))
    measuring.reset_peak(FIRST, SECOND)
    assert reset == [FIRST, SECOND]
    assert measuring.read_peak(FIRST, SECOND) == 300
    assert measuring.read_peak(FIRST, torch.device("mps")) is None
    read_clock(FIRST, torch.device("cpu"), SECOND)
    assert synchronised == [FIRST, SECOND]


def test_devices_in_use_are_those_of_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    assert devices_in_use(ModelSpec("tiny", device="auto")) == (torch.device("cuda"),)
    assert devices_in_use(ModelSpec("tiny", device_map="auto")) == (FIRST, SECOND, THIRD)
    assert devices_in_use(ModelSpec("tiny", device_map={"a": 2, "b": "cuda:0", "c": "disk", "d": 2})) == (THIRD, FIRST)
    with pytest.raises(UserError, match="names 3, but torch sees cuda:0, cuda:1, cuda:2"):
        devices_in_use(ModelSpec("tiny", device_map={"a": 3}))
