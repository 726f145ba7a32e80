"""LongBench v2: prompts and answers against the official code's steps, made folders, and runs."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.benchmarks import longbench_v2
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.longbench_v2 import SUITE
from eval.benchmarks.prompts import build_prompt
from eval.benchmarks.suite import DataSettings
from lazyllm.errors import UserError
from tests.eval import official
from tests.eval.benchmarks.test_prompts import Characters
from tests.eval.official import LLAMA2, llama2

DATASET = DATASETS["longbench_v2"]
# Our own prompt with the official placeholders: LongBench's must not enter the repository
PROMPT = "Read {this}.\n$DOC$\n---\nAsked: $Q$\nA: $C_A$\nB: $C_B$\nC: $C_C$\nD: $C_D$\nSay it."


def row(number: int, **changes: Any) -> dict[str, Any]:
    values = {
        "_id": f"id-{number}",
        "domain": "Single-Document QA",
        "sub_domain": "Academic",
        "difficulty": ("easy", "hard")[number % 2],
        "length": ("short", "medium", "long")[number % 3],
        "question": f" Which {number}?\n",
        **{f"choice_{letter}": f"{letter}{number} " for letter in "ABCD"},
        "answer": "ABCD"[number % 4],
        "context": f"\nText of {number}. It has a $Q$ and {{braces}}. " + "word " * 300,
    }
    return values | changes


def write(folder: Path, *rows: Any) -> Path:
    (folder / "prompts").mkdir(exist_ok=True)
    (folder / "prompts" / "0shot.txt").write_text(PROMPT)
    (folder / "data.json").write_text(json.dumps(rows, ensure_ascii=False))
    return folder


@pytest.fixture(autouse=True)
def _own_prompt(monkeypatch):
    monkeypatch.setattr(longbench_v2, "PROMPT_SHA256", hashlib.sha256(PROMPT.encode()).hexdigest())


def load(folder: Path):
    return SUITE.load(DATASET, DataSettings(dir=folder))


def official_prompt(values: dict[str, Any]) -> str:
    """`pred.py`: one replacement after the other in the whole prompt, each value stripped."""
    prompt = PROMPT.replace("$DOC$", values["context"].strip()).replace("$Q$", values["question"].strip())
    for letter in "ABCD":
        prompt = prompt.replace(f"$C_{letter}$", values[f"choice_{letter}"].strip())
    return prompt


def test_prompts_are_official(tmp_path):
    rows = [row(0), row(1, question="$C_A$ or $DOC$?", choice_A="$C_B$", context="\u2028$C_D$ end\r\n")]
    loaded = load(write(tmp_path, *rows))
    assert loaded.max_new_tokens == 128
    tokenizer: Any = Characters()
    for example, values in zip(loaded.examples, rows, strict=True):
        prompt = build_prompt(example, DATASET, tokenizer)
        assert prompt.text == official_prompt(values)
        assert [prompt.text[start:end] for start, end in prompt.context] == [example.context]
        assert example.answers == (values["answer"],)


@given(st.text("ab c\n", max_size=40), st.integers(2, 50))
def test_prompts_lose_their_middle_as_officially(context, limit):
    """`ids[:limit // 2] + ids[-limit // 2:]`, decoded together."""
    values, tokenizer = row(0, context=f"x{context}"), cast(Any, Characters())
    example = longbench_v2._example(DATASET, PROMPT, values, 0)
    ids = tokenizer(official_prompt(values), truncation=False, add_special_tokens=True, verbose=False)["input_ids"]
    if len(ids) > limit:
        ids = ids[: limit // 2] + ids[-limit // 2 :]
    prompt = build_prompt(example, DATASET, tokenizer, limit)
    assert prompt.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert all(0 <= start < end <= len(prompt.text) for start, end in prompt.context)


@official.needs(LLAMA2)
def test_halves_decoded_together_keep_the_space_between_them():
    """Sentencepiece drops the space in front of a text: decoded alone, the second half would lose it."""
    values, tokenizer = row(0, context="alpha beta gamma delta " * 20), llama2()
    example = longbench_v2._example(DATASET, PROMPT, values, 0)
    datasets = (replace(DATASET, decode_halves=apart) for apart in (True, False))
    texts = [build_prompt(example, dataset, tokenizer, 41).text for dataset in datasets]
    ids = tokenizer(official_prompt(values))["input_ids"]
    assert texts[1] == tokenizer.decode(ids[:20] + ids[-21:], skip_special_tokens=True)
    assert texts[0] == "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:20], ids[-20:]))
    assert texts[0] != texts[1]


def test_incomplete_folder_is_refused(tmp_path):
    write(tmp_path, row(0))
    (tmp_path / "prompts" / "0shot.txt").write_text("$DOC$")
    with pytest.raises(UserError, match=r"0shot\.txt: .* with the place \$Q\$"):
        load(tmp_path)
    (tmp_path / "prompts" / "0shot.txt").unlink()
    with pytest.raises(UserError, match=r"prompts/0shot\.txt is missing; give data\.dir=FOLDER with LongBench v2's"):
        load(tmp_path)
    write(tmp_path, row(0))
    (tmp_path / "data.json").unlink()
    with pytest.raises(UserError, match=r"no file data\.json is there; give data\.dir=FOLDER with LongBench v2's"):
        load(tmp_path)


def test_examples_are_in_the_groups_of_their_difficulty_and_length(tmp_path):
    loaded = load(write(tmp_path, *(row(number) for number in range(3))))
    assert [example.groups for example in loaded.examples] == [
        ("difficulty=easy", "length=short (0-32k words)"),
        ("difficulty=hard", "length=medium (32-128k words)"),
        ("difficulty=easy", "length=long (128k-2M words)"),
    ]
