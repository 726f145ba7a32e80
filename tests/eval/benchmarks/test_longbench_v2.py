"""LongBench v2: prompts against the official code's steps, made folders, and the hub's file."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.benchmarks import longbench_v2
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.prompts import build_prompt
from eval.benchmarks.suite import DataSettings, Example
from lazyllm.errors import UserError
from tests.eval import official
from tests.eval.benchmarks.loading import Characters, context_of, load
from tests.hub_server import HubServer, Repository

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


def example_of(values: dict[str, Any]) -> Example:
    return longbench_v2._make_example(DATASET, PROMPT, values, 0)


@pytest.fixture(autouse=True)
def _own_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = hashlib.sha256(PROMPT.encode()).hexdigest()
    monkeypatch.setattr(longbench_v2, "PROMPT_SHA256", sha256)


def official_prompt(values: dict[str, Any]) -> str:
    """`pred.py`: one replacement after the other in the whole prompt, each value stripped."""
    prompt = PROMPT.replace("$DOC$", values["context"].strip())
    prompt = prompt.replace("$Q$", values["question"].strip())
    for letter in "ABCD":
        prompt = prompt.replace(f"$C_{letter}$", values[f"choice_{letter}"].strip())
    return prompt


def test_prompts_and_groups_are_official(tmp_path: Path) -> None:
    odd = row(1, question="$C_A$ or $DOC$?", choice_A="$C_B$", context="\u2028$C_D$ end\r\n")
    rows = [row(0), odd, row(2)]
    loaded = load("longbench_v2", write(tmp_path, *rows))
    assert loaded.max_new_tokens == 128
    tokenizer: Any = Characters()
    for example, values in zip(loaded.examples, rows, strict=True):
        prompt = build_prompt(example, DATASET, tokenizer)
        assert prompt.text == official_prompt(values)
        assert context_of(prompt) == [example.context]
        assert example.answers == (values["answer"],)
    assert [example.groups for example in loaded.examples] == [
        ("difficulty=easy", "length=short (0-32k words)"),
        ("difficulty=hard", "length=medium (32-128k words)"),
        ("difficulty=easy", "length=long (128k-2M words)"),
    ]


@given(st.text("ab c\n", max_size=40), st.integers(2, 50))
def test_prompts_lose_their_middle_as_officially(context: str, limit: int) -> None:
    """`ids[:limit // 2] + ids[-limit // 2:]`, decoded together."""
    values, tokenizer = row(0, context=f"x{context}"), cast(Any, Characters())
    text = official_prompt(values)
    settings: Any = {"truncation": False, "add_special_tokens": True, "verbose": False}
    ids = tokenizer(text, **settings)["input_ids"]
    if len(ids) > limit:
        ids = ids[: limit // 2] + ids[-limit // 2 :]
    prompt = build_prompt(example_of(values), DATASET, tokenizer, limit)
    assert prompt.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert all(0 <= start < end <= len(prompt.text) for start, end in prompt.context)


@official.needs(official.LLAMA2)
def test_halves_decoded_together_keep_the_space_between_them() -> None:
    """Sentencepiece drops the space before a text: alone, the second half would lose it."""
    values, tokenizer = row(0, context="alpha beta gamma delta " * 20), official.llama2()
    apart, together = (
        build_prompt(example_of(values), replace(DATASET, decode_halves=halves), tokenizer, 41).text
        for halves in (True, False)
    )
    ids = tokenizer(official_prompt(values))["input_ids"]
    assert together == tokenizer.decode(ids[:20] + ids[-21:], skip_special_tokens=True)
    halves = (tokenizer.decode(half, skip_special_tokens=True) for half in (ids[:20], ids[-20:]))
    assert apart == "".join(halves) != together


def test_incomplete_folder_is_refused(tmp_path: Path) -> None:
    prompt = write(tmp_path, row(0)) / "prompts" / "0shot.txt"
    prompt.write_text("$DOC$")
    with pytest.raises(UserError, match=r"0shot\.txt: .* with the place \$Q\$"):
        load("longbench_v2", tmp_path)
    for file in (tmp_path / "data.json", prompt):
        write(tmp_path, row(0))
        file.unlink()
        reason = rf"{file.name} is missing; give data\.dir=FOLDER with LongBench v2's"
        with pytest.raises(UserError, match=reason):
            load("longbench_v2", tmp_path)


def test_rows_come_once_from_the_hub_and_the_prompt_from_a_commit(
    tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert re.search("/[0-9a-f]{40}/", longbench_v2.PROMPT_URL)
    write(tmp_path, row(0), row(1))
    path = f"/{longbench_v2.PROMPT}"
    hub.others[path] = PROMPT.encode()
    monkeypatch.setattr(longbench_v2, "PROMPT_URL", hub.url + path)
    files = {"data.json": (tmp_path / "data.json").read_bytes()}
    hub.repositories["THUDM/LongBench-v2"] = Repository(files, "datasets")
    assert not longbench_v2.is_cached(DataSettings())
    loaded = load("longbench_v2")
    assert loaded.examples == load("longbench_v2", tmp_path).examples
    hub.requests.clear()
    assert load("longbench_v2") == loaded
    assert longbench_v2.is_cached(DataSettings())
    assert not hub.requests
