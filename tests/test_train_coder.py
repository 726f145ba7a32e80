"""`scripts/dev/train_coder.py`: tokenizer, first model, sequences, attention."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.benchmarks import embedded, stdlib
from lazyllm.presets import PRESETS
from scripts.dev import train_coder, train_tiny
from scripts.dev.training import IGNORE

TEXTS = {
    f"{package}/{name}.py": "".join(
        f"def {name}_{i}(self, value):\n    return self.{package}[value] + {i}\n" for i in range(40)
    )
    for package in ("json", "email")
    for name in ("reader", "writer")
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_coder.build_tokenizer([*TEXTS.values()])


@pytest.fixture(scope="module")
def sequences(tokenizer) -> train_coder.Sequences:
    return train_coder.Sequences(tokenizer, TEXTS, random.Random(0))


@settings(max_examples=100, deadline=None)
@given(st.text() | st.text(alphabet="ab \n\r\t.;_'{}"))
def test_the_tokenizer_is_lossless(tokenizer, text: str) -> None:
    if not any(special in text for special in (embedded.BEGIN, embedded.END, embedded.PAD)):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_the_tasks_have_tinys_tokens(tokenizer) -> None:
    tiny = train_tiny.build_tokenizer()
    assert tokenizer.get_vocab().items() >= tiny.get_vocab().items()
    for name in embedded.NAMES:
        for row in embedded.rows(name, count=3):
            text = embedded.TEMPLATES[name].format(**row)
            assert tokenizer.encode(text).ids == tiny.encode(text).ids


def test_words_of_the_texts_are_tokens_and_so_is_the_newline(tokenizer) -> None:
    tokens = tokenizer.encode("    return self\n", add_special_tokens=False).tokens
    assert tokens[-2:] == ["Ġself", "Ċ"]


def test_the_first_model_computes_what_tiny_does(tokenizer) -> None:
    from transformers import AutoModelForCausalLM

    model = train_coder.build_model(tokenizer.get_vocab_size(), seed=0).double()
    tiny = AutoModelForCausalLM.from_pretrained(PRESETS["tiny"].source, dtype=torch.float64)
    ids = torch.randint(3, 923, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert model.config.num_hidden_layers == 12
        torch.testing.assert_close(model(ids).logits[..., :923], tiny(ids).logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("length", [1, 128, 300])
def test_block_attention_is_causal_attention(length: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, length, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, length, 8, dtype=torch.float64)
    ours, _ = train_coder.block_attention(torch.nn.Identity(), query, key, value, None, scaling=0.3)
    key, value = (tensor.repeat_interleave(2, dim=1) for tensor in (key, value))
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)
    torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [*train_coder.KINDS])
def test_a_sequence_has_its_length_and_labels(sequences, kind: str) -> None:
    for length in (512, 1024):
        ids, labels = getattr(sequences, kind)(length)
        assert len(ids) == len(labels) == length
        assert all(label in (IGNORE, token) for token, label in zip(ids, labels, strict=True))
        assert any(label != IGNORE for label in labels)


def test_a_cross_sequence_ends_in_a_file_behind_files_of_its_package(sequences, tokenizer) -> None:
    text = tokenizer.decode(sequences.cross(1024)[0])
    assert {"json", "email"} - {line.split("/")[0][2:] for line in text.split("\n") if line.startswith("# ")}
    assert text.count("# ") > 1


def test_no_held_out_module_is_in_the_text() -> None:
    library = train_coder.library_files()
    assert {name for name in library if stdlib.is_held_out(name)} >= {"http/client.py", "typing.py"}
    tests = train_coder.test_files({"http", "io"})
    assert not any(name.startswith(("test/test_http", "test/test_io")) for name in tests)
    assert "test/test_json/test_decode.py" in tests or not tests  # some installations leave the tests out
