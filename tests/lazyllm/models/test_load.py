"""Loading: presets, folders, the hub, random weights, and every refusal as one message."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

import lazyllm
from lazyllm.errors import UserError
from lazyllm.models.config import load_config, load_end_ids
from lazyllm.models.load import load_weights, random_weights
from lazyllm.presets import PRESETS, Preset
from lazyllm.spec import DTYPES, ModelSpec
from tests.hub_server import Repository
from tests.reference import VARIANTS, random_model, random_variant
from tests.runs import prepared
from tests.stand_in_checkpoints import xgen

TINY = Path(PRESETS["tiny"].source)


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    """As transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def load(source: Path | str) -> PreTrainedModel:
    return load_weights(ModelSpec(str(source), dtype="float32", device="cpu"))


def refused(source: Path | str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(source)


def same_weights(left: PreTrainedModel, right: PreTrainedModel) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True)
    )


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("name", ["tiny", str(TINY), "owner/tiny"])
def test_preset_folder_and_repository_are_the_same_model(name: str, tiny, hub) -> None:
    hub.repositories["owner/tiny"] = Repository.of(TINY)
    model, tokenizer = lazyllm.load_model(name, dtype="float32", device="cpu")
    assert not model.training
    assert same_weights(model, tiny)
    assert tokenizer is not None
    assert (
        tokenizer.decode(tokenizer("Grüße, 世界\n").input_ids, skip_special_tokens=True)
        == "Grüße, 世界\n"
    )
    commit = Repository.commit if name == "owner/tiny" else None
    assert getattr(load_config(ModelSpec(name)), "_commit_hash", None) == commit


@pytest.mark.parametrize("dtype", DTYPES)
def test_load_model_uses_the_dtype(dtype: str) -> None:
    model = load_weights(ModelSpec("tiny", dtype=dtype, device="cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    out = lazyllm.generate(model, list(range(3, 60)), lazyllm.methods.Lazy(), 4, ())
    assert out.first_logits.dtype == getattr(torch, dtype)


def test_random_weights_are_seeded_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (
        load_weights(ModelSpec("tiny", "dummy", "bfloat16", "cpu", seed=seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert same_weights(first, again)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert {parameter.dtype for parameter in first.parameters()} == {torch.bfloat16}
    assert first.model.rotary_emb.inv_freq.dtype == torch.float32  # as a checkpoint has it


class Drawn(TorchDispatchMode):
    """Counts the numbers that are drawn at random into memory."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "nondeterministic_seeded" in {tag.name for tag in func.tags} and not args[0].is_meta:
            self.numbers += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", list(VARIANTS))
def test_random_weights_are_drawn_once_and_are_as_transformers_makes_them(name: str) -> None:
    config = random_variant(name, 0, "eager", torch.bfloat16).config
    usual = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with Drawn() as drawn:
        model = random_weights(
            config, ModelSpec(name, "dummy", "bfloat16", "cpu", attn_implementation="eager")
        )
    assert drawn.numbers == sum(
        layer.weight.numel()
        for layer in model.modules()
        if isinstance(layer, (nn.Linear, nn.Embedding))
    )
    for kind in ("named_parameters", "named_buffers"):
        for (key, tensor), (other_key, other) in zip(
            getattr(model, kind)(), getattr(usual, kind)(), strict=True
        ):
            assert (key, tensor.dtype, tensor.shape, tensor.device) == (
                other_key,
                other.dtype,
                other.shape,
                other.device,
            )
            assert torch.equal(tensor, other) or tensor.std().item() == pytest.approx(
                other.std().item(), rel=0.2
            )


def test_dummy_has_no_tokenizer_unless_named(offline, monkeypatch) -> None:
    monkeypatch.setitem(
        PRESETS,
        "small",
        Preset("owner/small", random_model("llama", 0).config.to_dict() | {"vocab_size": 923}),
    )
    assert lazyllm.load_model("small", "dummy", "float32", "cpu")[1] is None
    assert (
        lazyllm.load_model("small", "dummy", "float32", "cpu", tokenizer=str(TINY))[1] is not None
    )


def test_end_tokens_are_the_generation_configs(tiny_copy: Path) -> None:
    assert load_end_ids(ModelSpec("tiny")) == (2,)
    assert load_end_ids(ModelSpec("xgen", "dummy")) == (50256,)
    spec, file = ModelSpec(str(tiny_copy)), tiny_copy / "generation_config.json"
    file.write_text('{"eos_token_id": [2, 7]}')
    assert load_end_ids(spec) == (2, 7)
    file.unlink()
    assert load_end_ids(spec) == (2,)
    file.write_text("{")
    with pytest.raises(UserError, match="generation_config"):
        load_end_ids(spec)


def test_load_model_is_refused_offline_with_the_remedies(offline) -> None:
    refused("llama2", r"not in the hub's cache.*model=FOLDER.*model.load_format=dummy")


def test_repository_without_access_is_refused_with_the_remedy(hub) -> None:
    refused("llama2", "no such repository.*model=FOLDER")
    hub.repositories[PRESETS["llama2"].source] = replace(Repository.of(TINY), gated=frozenset())
    refused("llama2", "https://huggingface.co/meta-llama/Llama-2-7b-chat-hf.*model=FOLDER")
    hub.repositories["owner/tiny"] = Repository.of(TINY)
    with pytest.raises(UserError, match=r"no revision 'nosuch'.*model=FOLDER"):
        load_weights(ModelSpec("owner/tiny", revision="nosuch", device="cpu"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "nosuch"},
            "no preset: the nearest names are .*; lazyllm-bench run --list shows all",
        ),
        ({"name": "./nosuch"}, "no such folder"),
        ({"name": "a/b/c"}, "no such folder"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"device": "xpu:0"}, r"torch .* sees none: give device=cpu \(in a run model\.device=cpu"),
        ({"device": "gpu"}, "unknown device"),
        ({"load_format": "pickle"}, "unknown load_format"),
        ({"attn_implementation": "flash"}, "attn_implementation"),
    ],
)
def test_settings_are_refused_before_anything_is_read(settings: dict, message: str, monkeypatch):
    monkeypatch.setattr("lazyllm.models.config.AutoConfig", None)
    with pytest.raises(UserError, match=message):
        lazyllm.load_model(**{"name": "tiny", **settings})


class Code:
    """Runs code when it is unpickled by `pickle`."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> object:
        return Path.touch, (self.file,)


@pytest.mark.parametrize(
    ("file", "named_by"),
    [
        ("pytorch_model.bin", None),
        ("pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"),
        ("pytorch_model-00001-of-00001.bin", "model.safetensors.index.json"),
        ("adapter_model.bin", "config.json"),
    ],
)
def test_pickle_with_code_is_refused_and_not_run(
    tiny_copy: Path, tiny, file: str, named_by: str | None
) -> None:
    mark = tiny_copy / "mark"
    torch.save({**tiny.state_dict(), "bomb": Code(mark)}, tiny_copy / file)
    (tiny_copy / "model.safetensors").unlink()
    if named_by == "config.json":
        edit(tiny_copy / named_by, transformers_weights=file)
    elif named_by is not None:
        names = dict.fromkeys(tiny.state_dict(), file)
        (tiny_copy / named_by).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    refused(tiny_copy, f"{tiny_copy}: its pickled weights hold more than tensors")
    assert not mark.exists()


def test_pickle_with_shards_of_a_repository_loads(
    tmp_path: Path, hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = Mock()  # transformers would ask the hub to convert the repository
    monkeypatch.setattr("transformers.modeling_utils.auto_conversion", conversion)
    files = xgen([5, 6])
    hub.repositories["Salesforce/xgen-7b-8k-inst"] = Repository(files)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    pickles = sorted(tmp_path.glob("*.bin"))
    assert len(pickles) > 1
    expected = {
        name: tensor
        for file in pickles
        for name, tensor in torch.load(file, weights_only=True).items()
    }
    loaded = load("xgen").state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())
    assert not conversion.called
    pickles[1].write_bytes(pickles[1].read_bytes()[:-9])
    refused(tmp_path, "could not be loaded: .*failed finding central directory")
    torch.save({"bomb": Code(tmp_path / "mark")}, pickles[1])
    refused(tmp_path, "its pickled weights hold more than tensors")
    assert not (tmp_path / "mark").exists()
    pickles[1].write_bytes(b"")
    refused(tmp_path, "or are damaged")
    pickles[1].unlink()
    refused(tmp_path, f"{pickles[1].name} is missing")


def test_pickle_with_tied_weights_and_views_loads(tmp_path: Path) -> None:
    """A pickle stores one tensor under two names."""
    model = random_variant("llama", 0, dtype=torch.float32, tie_word_embeddings=True)
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    state["model.layers.0.self_attn.q_proj.weight"] = (
        state["model.layers.0.self_attn.q_proj.weight"].T.contiguous().T
    )
    model.config.save_pretrained(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    loaded = load(tmp_path).state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.items())


def test_remote_code_is_refused_and_not_run(tiny_copy: Path) -> None:
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit(tiny_copy / "config.json", model_type="custom_type", auto_map=code)
    (tiny_copy / "evil.py").write_text(f"open({str(tiny_copy / 'ran')!r}, 'w')\n")
    refused(tiny_copy, "its config.json could not be used")
    assert not (tiny_copy / "ran").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "config.json",
            {"rope_parameters": {"rope_type": "yarn"}},
            r"json could not be used \(KeyError: .*factor",
        ),
        (
            "config.json",
            {"rope_parameters": {"rope_type": "none"}},
            "could not be loaded: KeyError: 'none'",
        ),
        (
            "config.json",
            {"num_attention_heads": 3},
            r"json could not be used .* not a multiple of .* heads \(3\)",
        ),
        (
            "config.json",
            {"quantization_config": "fp8"},
            r"config\.json could not be used \(AttributeError",
        ),
        ("config.json", {"model_type": "t5"}, "its model_type t5 is not a causal language model"),
        ("generation_config.json", [], "could not be loaded: TypeError"),
        (
            "tokenizer.json",
            {},
            r"its tokenizer could not be loaded \(KeyError.*model\.tokenizer=FOLDER",
        ),
        ("tokenizer_config.json", [], r"its tokenizer could not be loaded \(AttributeError"),
    ],
)
def test_file_that_transformers_cannot_use_is_refused(
    tiny_copy: Path, file: str, content: Any, message: str
) -> None:
    if file == "config.json":
        edit(tiny_copy / file, **content)
    else:
        (tiny_copy / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        lazyllm.load_model(str(tiny_copy), dtype="float32", device="cpu")


def test_shards_are_whole_or_refused(tmp_path: Path, tiny) -> None:
    folder = tmp_path / "shards"
    tiny.save_pretrained(folder, max_shard_size="500KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert same_weights(load(folder), tiny)
    content = shards[1].read_bytes()
    for damaged in (b"", content[:7], content[:-1], b"\xff" * 999):
        shards[1].write_bytes(damaged)
        refused(folder, f"{shards[1].name} is damaged or cut short")
    shards[1].unlink()
    refused(folder, f"{shards[1].name} is missing")
    shards[1].write_bytes(content)
    index = folder / "model.safetensors.index.json"
    named = json.loads(index.read_text())
    first = next(iter(named["weight_map"]))
    for outside in ("../elsewhere.safetensors", "/etc/elsewhere.safetensors"):
        index.write_text(json.dumps(named | {"weight_map": named["weight_map"] | {first: outside}}))
        refused(folder, "outside the folder")
    for garbled in ("{", "[]", '{"weight_map": {"a": 3}}'):
        index.write_text(garbled)
        refused(folder, "model.safetensors.index.json could not be used")


def test_checkpoint_whose_weights_are_not_the_architectures_is_refused(
    tiny_copy: Path, tiny
) -> None:
    weights = load_file(tiny_copy / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, tiny_copy / "model.safetensors", metadata={"format": "pt"})
    refused(
        tiny_copy, "lacks 1 of the model's weights, the first: model.layers.3.mlp.up_proj.weight"
    )
    norm = "model.norm.weight"
    biases = {"model.layers.3.mlp.up_proj.bias": torch.ones(256), "lm_head.bias": torch.ones(2)}
    for changed, message in (
        (
            tiny.state_dict() | biases,
            "has 2 weights in its layers that the model has not, the first: lm_head.bias",
        ),
        (
            tiny.state_dict() | {norm: torch.ones(9)},
            f"has 1 weights of another shape .*, the first: {norm}",
        ),
    ):
        changed.pop("lm_head.weight")  # tied
        save_file(changed, tiny_copy / "model.safetensors")
        refused(tiny_copy, message)
    # a vision tower, a layer that predicts more tokens, and what older Llama 2 checkpoints hold
    unused = ("vision_tower.proj.weight", "model.layers.8.mlp.up_proj.weight",
              "model.layers.0.self_attn.rotary_emb.inv_freq")  # fmt: skip
    weights = load_file(TINY / "model.safetensors") | {name: torch.ones(2) for name in unused}
    save_file(weights, tiny_copy / "model.safetensors")
    assert same_weights(load(tiny_copy), tiny)
    (tiny_copy / "model.safetensors").unlink()
    refused(tiny_copy, "has no weights: expected one of model.safetensors")
    (tiny_copy / "adapter_config.json").write_text("{}")
    refused(tiny_copy, "is an adapter: merge it into its model")


def test_weights_that_are_not_finite_are_refused(tiny_copy: Path) -> None:
    weights = load_file(tiny_copy / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tiny_copy / "model.safetensors", metadata={"format": "pt"})
    refused(tiny_copy, r"logits are not finite .* in float32: check that its weights are complete")


def test_folder_s_own_tokenizer_must_fit_the_model(
    tiny_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder whose tokenizer was replaced: refused before the weights are read."""
    config = json.loads((tiny_copy / "config.json").read_text())
    (tiny_copy / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    refusal = (
        r"tokenizer of .*checkpoint: it has [0-9,]+ tokens, the model 100: give the model's own"
    )
    with pytest.raises(UserError, match=refusal):
        prepared(f"model={tiny_copy}", "dataset=lookup", "limit=1")
    monkeypatch.setattr("lazyllm.models.load.load_weights", None)
    with pytest.raises(UserError, match=refusal):
        lazyllm.load_model(str(tiny_copy))


def test_another_tokenizer_with_another_end_is_named(
    tiny_copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lazyllm.load_model("tiny", tokenizer=str(tiny_copy))
    assert not any(record.levelname == "WARNING" for record in caplog.records)
    file = tiny_copy / "tokenizer_config.json"
    about = json.loads(file.read_text())
    file.write_text(json.dumps(about | {"eos_token": about["pad_token"]}))
    lazyllm.load_model("tiny", tokenizer=str(tiny_copy))
    assert re.search(r"it ends a text by token \d+, the model by \[\d+\]", caplog.text)
