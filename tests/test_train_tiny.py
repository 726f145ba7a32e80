"""`scripts/dev/train_tiny.py` and its results: tokenizer, sequences, the shipped model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.benchmarks import embedded
from scripts.dev import train_tiny

TINY = Path(__file__).resolve().parents[1] / "lazyllm" / "models" / "tiny"


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


AWKWARD = [
    "a\r\nb\r",
    "\n\n\n  x",
    "def f(x):\n\treturn x  # é\n",
    "日本語 😀\u200d",
    " lead",
    "trail ",
    "amber.amber;",
]


@settings(max_examples=150, deadline=None)
@given(st.text() | st.sampled_from(AWKWARD) | st.text(alphabet="ab \n\r\t.;_'{}"))
def test_tokenizer_is_lossless(text):
    if any(special in text for special in (embedded.BEGIN, embedded.END, embedded.PAD)):
        return  # the specials are not text
    tokenizer = train_tiny.build_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


def test_loaded_tokenizer_is_lossless_and_the_built_one(tokenizer):
    for text in AWKWARD:
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert tokenizer.get_vocab() == train_tiny.build_tokenizer().get_vocab()


def test_real_rows_survive_the_tokenizer(tokenizer):
    files = sorted((TINY.parents[2].parent / "shared" / "longbench").glob("**/*.jsonl"))
    if not files:
        pytest.skip("no LongBench rows: ../shared/longbench is absent")
    for path in files[:16]:
        row = json.loads(path.read_text(encoding="utf-8").split("\n")[0])
        text = str(row.get("context", row.get("pred", "")))[:20_000]
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_suite_words_newline_and_specials_are_single_tokens(tokenizer):
    for word in [*embedded.vocabulary(), "\n", ".", ";", ":"]:
        assert len(tokenizer(word, add_special_tokens=False).input_ids) == 1, word
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token == embedded.END
    assert 900 < len(tokenizer) < 2048


def test_shipped_model_loads_and_is_small(tokenizer):
    from transformers import AutoModelForCausalLM

    assert sum(path.stat().st_size for path in TINY.iterdir()) < 20 * 2**20
    model = AutoModelForCausalLM.from_pretrained(TINY)
    assert model.config.num_hidden_layers >= 8
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.max_position_embeddings >= 4096
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("stage", train_tiny.STAGES)
@pytest.mark.parametrize("name", embedded.NAMES)
def test_task_sequences(stage, name):
    rng = random.Random(5)
    asked = 0
    for _ in range(3):
        ids, labels, starts = train_tiny.task_sequence(rng, name, stage)
        assert len(ids) == len(labels) == stage.length
        assert all(label in (train_tiny.IGNORE, token) for token, label in zip(ids, labels, strict=True))
        assert all(labels[start] == ids[start] for start in starts)
        asked += len(starts)
    assert asked


def test_a_training_question_is_written_as_the_test_writes_it(tokenizer):
    """Context, question and answer of the first question of a sequence, decoded, are the template filled in."""
    for name in embedded.NAMES:
        ids, _, starts = train_tiny.task_sequence(random.Random(9), name, train_tiny.STAGES[4])
        text = tokenizer.decode(ids[1 : starts[0]])
        before, between = (part.strip(" ") for part in embedded.TEMPLATES[name].split("{context}"))
        assert text.startswith(before)
        assert between.removesuffix("{input}").strip() in text
        assert tokenizer(text).input_ids == ids[: starts[0]]


def test_no_question_of_the_test_split_is_asked(monkeypatch):
    stage = train_tiny.STAGES[4]
    monkeypatch.setattr(embedded, "is_test", lambda context, question: True)
    _, labels, starts = train_tiny.task_sequence(random.Random(0), "lookup", stage)
    assert not starts
    assert set(labels) == {train_tiny.IGNORE}


def test_copy_sequences_repeat_what_came_before():
    for seed in range(20):
        ids, labels = train_tiny.copy_sequence(random.Random(seed), 128)
        assert len(ids) == len(labels) == 128
        for i, label in enumerate(labels):
            if label != train_tiny.IGNORE:
                pairs = [(ids[j - 1], ids[j]) for j in range(1, i)]
                assert (ids[i - 1], label) in pairs
