"""Loading: presets, folders, random weights, and every refusal as one message."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import lazyllm
from lazyllm.errors import UserError
from lazyllm.models import checkpoint, hub
from lazyllm.models.load import as_device, load_config, load_end_ids, load_weights
from lazyllm.models.spec import PRESETS, ModelSpec, Preset, source_of
from tests.reference import random_model

TINY = Path(source_of("tiny"))


@pytest.fixture
def offline(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize("name", ["tiny", str(TINY)])
def test_a_preset_and_its_folder_are_the_same_model(name: str) -> None:
    model, tokenizer = lazyllm.load_model(name, dtype="float32", device="cpu")
    expected = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer("Grüße, 世界\n").input_ids, skip_special_tokens=True) == "Grüße, 世界\n"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_dtypes(dtype: str) -> None:
    model = load_weights(ModelSpec("tiny", dtype=dtype, device="cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    out = lazyllm.generate(model, list(range(3, 60)), lazyllm.methods.Lazy(), 4, ())
    assert out.first_logits.dtype == getattr(torch, dtype)


def test_random_weights_are_seeded_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, again, other = (load_weights(ModelSpec("tiny", "dummy", "bfloat16", "cpu", seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    for left, right in zip(one.parameters(), again.parameters(), strict=True):
        assert torch.equal(left, right)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert {parameter.dtype for parameter in one.parameters()} == {torch.bfloat16}
    assert one.model.rotary_emb.inv_freq.dtype == torch.float32  # as a checkpoint has it


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama2", 6_738_415_616), ("llama2-base", 6_738_415_616), ("xgen", 6_895_702_016)]
)
def test_presets_have_the_published_sizes_without_a_download(offline, name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(ModelSpec(name, "dummy")))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_a_dummy_has_no_tokenizer_unless_named(offline, monkeypatch) -> None:
    monkeypatch.setitem(PRESETS, "small", Preset("owner/small", random_model("llama", 0).config.to_dict()))
    assert lazyllm.load_model("small", "dummy", "float32", "cpu")[1] is None
    assert lazyllm.load_model("small", "dummy", "float32", "cpu", tokenizer=str(TINY))[1] is not None


def test_offline_and_not_cached_is_said_without_asking_the_hub(offline, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set.*model.name=FOLDER.*model.load_format=dummy"):
        lazyllm.load_model("llama2")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError, "is gated: ask for access at https://huggingface.co/meta-llama/Llama-2-7b-chat-hf"),
        (RepositoryNotFoundError, "no such repository on the hub, or it is private"),
    ],
)
def test_no_access_says_how_to_get_it(monkeypatch, tmp_path: Path, error: type, message: str) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise error("403", response=_Response())

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "is_reachable", lambda *_: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(UserError, match=message):
        lazyllm.load_model("llama2")


class _Response:
    """As much of a web response as the hub's errors ask for."""

    headers: dict[str, str] = {}  # noqa: RUF012
    request = None
    status_code = 403


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("nosuch", {}, "none of the presets llama2, llama2-base, xgen, tiny"),
        ("./nosuch", {}, "no such folder"),
        ("a/b/c", {}, "no such folder"),
        ("tiny", {"dtype": "int8"}, "unknown dtype 'int8'"),
        ("tiny", {"device": "cuda:0"}, "torch .* sees none: give device=cpu"),
        ("tiny", {"device": "gpu"}, "unknown device"),
        ("tiny", {"load_format": "pickle"}, "unknown load_format"),
    ],
)
def test_bad_arguments(name: str, settings: dict, message: str) -> None:
    if "cuda" in str(settings) and torch.cuda.is_available():
        pytest.skip("this machine has the device that the test expects to be absent")
    with pytest.raises(UserError, match=message):
        lazyllm.load_model(name, **settings)


def test_pickles_and_remote_code_are_not_read(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "pickled")
    model = AutoModelForCausalLM.from_pretrained(TINY)
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"its weights are pickles \(pytorch_model.bin\)"):
        lazyllm.load_model(str(tmp_path / "pickled"), device="cpu")
    shutil.copytree(TINY, tmp_path / "remote")
    config = json.loads((TINY / "config.json").read_text()) | {
        "model_type": "custom_type",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (tmp_path / "remote" / "config.json").write_text(json.dumps(config))
    (tmp_path / "remote" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError):
        lazyllm.load_model(str(tmp_path / "remote"), device="cpu")
    assert not (tmp_path / "ran").exists()


def test_end_tokens_are_the_generation_configs(tmp_path: Path) -> None:
    assert load_end_ids(ModelSpec("tiny")) == (2,)
    assert load_end_ids(ModelSpec("xgen", "dummy")) == (50256,)
    folder = tmp_path / "chat"
    shutil.copytree(TINY, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert load_end_ids(ModelSpec(str(folder))) == (2, 7)
    (folder / "generation_config.json").unlink()
    assert load_end_ids(ModelSpec(str(folder))) == (2,)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="generation_config"):
        load_end_ids(ModelSpec(str(folder)))


def test_auto_device_is_one_that_works() -> None:
    assert torch.ones(2, device=as_device("auto")).sum() == 2
    assert as_device("cpu") == torch.device("cpu")


class _Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.touch, (self.mark,)


def pickled(folder: Path, name: str, mark: Path) -> None:
    """A pickle with a model's weights, and a mark that appears when somebody reads it."""
    model = AutoModelForCausalLM.from_pretrained(TINY)
    torch.save({**model.state_dict(), "bomb": _Bomb(mark)}, folder / name)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("pytorch_model.bin", {}),
        ("pytorch_model-00001-of-00001.bin", {"model.safetensors.index.json": True}),
        ("adapter_model.bin", {"transformers_weights": "adapter_model.bin"}),
        ("weights.pt", {}),
    ],
)
def test_no_pickle_is_opened_whatever_names_it(tmp_path: Path, file: str, changes: dict) -> None:
    folder, mark = tmp_path / "pickled", tmp_path / "mark"
    shutil.copytree(TINY, folder)
    pickled(folder, file, mark)
    torch.load(folder / file, weights_only=False)
    assert mark.exists()  # that is what reading it would do
    mark.unlink()
    (folder / "model.safetensors").unlink()
    if "model.safetensors.index.json" in changes:
        names = dict.fromkeys(AutoModelForCausalLM.from_pretrained(TINY).state_dict(), file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    else:
        config = json.loads((TINY / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"its weights are pickles \({file}\).*refused.*save_pretrained"):
        lazyllm.load_model(str(folder), device="cpu")
    assert not mark.exists()


def test_what_the_refusal_says_makes_the_checkpoint_readable(tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(TINY, folder)
    model = AutoModelForCausalLM.from_pretrained(TINY)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(UserError) as caught:
        load_weights(ModelSpec(str(folder), dtype="float32", device="cpu"))
    command = re.search(r'python -c "(.*)",', str(caught.value))
    assert command is not None
    exec(command[1].replace("FOLDER", str(folder)), {})
    loaded = load_weights(ModelSpec(str(folder), dtype="float32", device="cpu"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_a_hub_repository_without_safetensors_is_refused_and_not_converted(monkeypatch, tmp_path: Path) -> None:
    """transformers would ask the hub to convert it."""
    asked = []

    def hub_file(source: str, name: str, revision: str | None = None) -> Path | None:
        asked.append(name)
        return TINY / name if name == "config.json" else None

    monkeypatch.setattr("lazyllm.models.load.hub_file", hub_file)
    monkeypatch.setattr(checkpoint, "hub_file", hub_file)
    monkeypatch.setattr(lazyllm.models.AutoConfig, "from_pretrained", lambda *_, **__: random_model("llama", 0).config)
    monkeypatch.setattr(
        lazyllm.models.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded")
    )
    with pytest.raises(UserError, match=r"owner/old: its weights are no safetensors.*refused"):
        load_weights(ModelSpec("owner/old", device="cpu"))
    assert asked == ["config.json", "model.safetensors", "model.safetensors.index.json"]


def sharded(folder: Path) -> list[Path]:
    AutoModelForCausalLM.from_pretrained(TINY).save_pretrained(folder, max_shard_size="500KB")
    return sorted(folder.glob("*.safetensors"))


def test_a_checkpoint_in_shards_is_whole_or_refused(tmp_path: Path) -> None:
    shards = sharded(tmp_path / "shards")
    assert len(shards) > 2
    whole = load_weights(ModelSpec(str(tmp_path / "shards"), dtype="float32", device="cpu"))
    expected = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), expected.parameters(), strict=True))
    content = shards[1].read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message):
            load_weights(ModelSpec(str(tmp_path / "shards"), dtype="float32", device="cpu"))

    for end in (0, 7, 100, len(content) // 2, len(content) - 1):
        shards[1].write_bytes(content[:end])
        refused(f"{shards[1].name} is damaged or cut short")
    shards[1].write_bytes(b"\xff" * len(content))
    refused("is damaged or cut short")
    shards[1].unlink()
    refused(f"{shards[1].name} is missing")
    shards[1].write_bytes(content)
    index = tmp_path / "shards" / "model.safetensors.index.json"
    named = json.loads(index.read_text())
    first = next(iter(named["weight_map"]))
    for outside in ("../elsewhere.safetensors", "/etc/elsewhere.safetensors"):
        index.write_text(json.dumps(named | {"weight_map": named["weight_map"] | {first: outside}}))
        refused("is not a file of the folder: refused")
    for garbled in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'):
        index.write_text(garbled)
        refused("model.safetensors.index.json could not be used")


def test_weights_that_a_checkpoint_lacks_are_not_made_up(tmp_path: Path) -> None:
    folder = tmp_path / "part"
    shutil.copytree(TINY, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"lacks 1 of the model's weights, the first: model.layers.3.mlp.up_proj.weight"
    ):
        load_weights(ModelSpec(str(folder), device="cpu"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds no weights"):
        load_weights(ModelSpec(str(folder), device="cpu"))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="is an adapter: merge it into its model"):
        load_weights(ModelSpec(str(folder), device="cpu"))


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"logits are not finite .* in float32; are its weights whole"):
        load_weights(ModelSpec(str(tmp_path / "broken"), dtype="float32", device="cpu"))
