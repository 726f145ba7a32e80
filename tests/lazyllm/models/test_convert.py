"""Pickled weights of the hub, converted: against the tensors that the pickles were made from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lazyllm.errors import UserError
from lazyllm.models import convert
from lazyllm.models.load import load_weights
from lazyllm.spec import ModelSpec
from tests.reference import random_variant
from tests.stand_in_checkpoints import xgen

HUB_ID = "Salesforce/xgen-7b-8k-inst"


@pytest.fixture
def repository(
    hub: dict[str, Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """XGen's files as on the hub; the cache is empty."""
    folder = tmp_path_factory.getbasetemp() / "xgen"
    if not folder.is_dir():
        folder.mkdir()
        for name, content in xgen([5, 6]).items():
            (folder / name).write_bytes(content)
    mine = tmp_path / "repository"
    mine.mkdir()
    for file in folder.iterdir():
        (mine / file.name).hardlink_to(file)
    hub[HUB_ID] = mine
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path / "cache"))
    return mine


def converted_folder(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "cache" / "converted" / "Salesforce--xgen-7b-8k-inst").iterdir()
    return folder


def test_load_converts_pickles_once(repository: Path, tmp_path: Path) -> None:
    assert not convert.is_converted(HUB_ID)
    model = load_weights(ModelSpec("xgen", dtype="float32", device="cpu"))
    pickles = sorted(repository.glob("*.bin"))
    expected = {name: tensor for file in pickles for name, tensor in torch.load(file, weights_only=True).items()}
    loaded = model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())
    shards = sorted(converted_folder(tmp_path).glob("*.safetensors"))
    assert [set(load_file(shard)) for shard in shards] == [set(torch.load(file)) for file in pickles]
    assert convert.is_converted(HUB_ID)
    for file in pickles:  # the second load reads no pickle
        file.unlink()
    load_weights(ModelSpec("xgen", dtype="float32", device="cpu"))


def test_conversion_continues_at_the_first_missing_shard(repository: Path, tmp_path: Path) -> None:
    load_weights(ModelSpec("xgen", dtype="float32", device="cpu"))
    folder = converted_folder(tmp_path)
    first, *others = sorted(folder.glob("*.safetensors"))
    (folder / convert.INDEX).unlink()  # as after a kill before the end
    others[0].unlink()
    kept = os.stat(first).st_mtime_ns
    assert not convert.is_converted(HUB_ID)
    load_weights(ModelSpec("xgen", dtype="float32", device="cpu"))
    assert os.stat(first).st_mtime_ns == kept
    assert others[0].is_file()


def test_tied_weights_and_views_are_converted(hub: dict[str, Path], tmp_path: Path, monkeypatch) -> None:
    """A pickle stores one tensor under two names; safetensors refuses names that share memory."""
    model = random_variant("llama", 0, dtype=torch.float32, tie_word_embeddings=True)
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    state["model.layers.0.self_attn.q_proj.weight"] = state["model.layers.0.self_attn.q_proj.weight"].T.contiguous().T
    repository = tmp_path / "repository"
    repository.mkdir()
    model.config.save_pretrained(repository)
    torch.save(state, repository / "pytorch_model.bin")
    hub["somebody/tied"] = repository
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path / "cache"))
    loaded = load_weights(ModelSpec("somebody/tied", dtype="float32", device="cpu")).state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.items())


class Code:
    """Runs code when it is unpickled by `pickle`."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> object:
        return Path.touch, (self.file,)


def test_pickle_with_code_is_refused_and_not_run(repository: Path, tmp_path: Path) -> None:
    bad = sorted(repository.glob("*.bin"))[0]
    bad.unlink()
    torch.save({"weight": Code(tmp_path / "was_run")}, bad)
    with pytest.raises(UserError, match="holds more than tensors"):
        load_weights(ModelSpec("xgen", dtype="float32", device="cpu"))
    assert not (tmp_path / "was_run").exists()
    assert not convert.is_converted(HUB_ID)


def test_conversion_refuses_a_file_whose_hash_is_not_the_hubs(tmp_path: Path) -> None:
    blob = tmp_path / ("0" * 64)
    blob.write_bytes(b"cut short")
    link = tmp_path / "pytorch_model.bin"
    link.symlink_to(blob)
    with pytest.raises(UserError, match="delete it"):
        convert._convert(link, tmp_path / "model.safetensors")
