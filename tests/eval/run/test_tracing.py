"""Traces: the tokens' texts make up prompt and answer, and the file can be read back unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lazyllm
from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.datasets import DATASETS, load_rows
from eval.benchmarks.prompts import build_prompt
from eval.run.measure import Bench, Case
from eval.store.record import Trace, read_trace
from lazyllm.methods import Lazy, Method, RandomDrop
from lazyllm.models.load import load_tokenizer_of
from lazyllm.spec import ModelSpec
from tests.helpers import tiny

MODEL, TOKENIZER = tiny()
BENCH = Bench(MODEL, TOKENIZER, CHAT_FORMATS["none"], paired=False)


def case_of(name: str, method: Method) -> Case:
    loaded = load_rows(DATASETS[name])
    example = loaded.examples[0]
    prompt = build_prompt(example, loaded.template, TOKENIZER)
    return Case(DATASETS[name], example, prompt, method, 12, (2,))


@pytest.mark.parametrize("name", ["digest", "complete"])
def test_trace_equals_the_generation(name: str) -> None:
    case = case_of(name, Lazy({2: 0.3, 5: 0.5}))
    found = BENCH.trace(case)
    out = lazyllm.generate(MODEL, case.prompt.token_ids, case.method, 12, (2,))
    assert found.selected == out.selected
    assert [len(row) for row in found.importance] == [len(case.prompt.token_ids)] * 8
    assert "".join(found.tokens).endswith(case.prompt.text)
    assert "".join(found.generated) == TOKENIZER.decode(out.token_ids)
    assert len(found.generated) == len(out.token_ids)


def test_trace_comes_back_from_its_file(tmp_path: Path) -> None:
    found = BENCH.trace(case_of("lookup", RandomDrop(0.5)))
    assert list(found.selected[0]) == [0]
    file = tmp_path / Trace.file_name("lookup", "../a b")
    assert file.parent == tmp_path
    file.write_text(found.to_json())
    assert read_trace(file) == found
    content = json.loads(file.read_text())
    del content["tokens"]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not a trace"):
        read_trace(file)


def test_llamas_tokens_keep_their_spaces(shared: Path) -> None:
    """The text of each token equals the prompt's, including spaces and characters that span several tokens."""
    from eval.run.measure import _texts_of_prompt

    tokenizer = load_tokenizer_of(ModelSpec("llama2", "dummy", tokenizer=str(shared / "tokenizers" / "llama2")))
    assert tokenizer is not None
    loaded = load_rows(DATASETS["multifieldqa_en"], str(shared / "longbench"))
    example = loaded.examples[0]
    prompt = build_prompt(example, "{context} 你好 \U0001f600 {input}", tokenizer)
    texts = _texts_of_prompt(tokenizer, prompt)
    assert texts[0] == "<s>"
    assert "".join(texts[1:]) == prompt.text
    assert len(texts) == len(prompt.token_ids)


def test_traces_of_two_examples_have_two_names() -> None:
    ids = ["a", "a b", "a_b", "a/b", "x" * 90, "x" * 91, "\u6771" * 80, "\u4eac" * 80]
    names = [Trace.file_name("lookup", name) for name in ids]
    assert names[0] == "lookup-a.json"
    assert len(set(names)) == len(ids)
    assert max(len(name.encode()) for name in names) < 200
