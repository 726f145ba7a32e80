"""Traces: the tokens' texts make up prompt and answer."""

from dataclasses import replace
from pathlib import Path

import pytest

import lazyllm
from eval.benchmarks.datasets import DATASETS, load
from eval.benchmarks.prompts import build_prompt
from eval.benchmarks.suite import DataSettings
from eval.run.tracing import _texts_of_prompt, traces_of
from lazyllm.methods import Lazy
from lazyllm.models.tokenizers import load_tokenizer_of
from lazyllm.spec import ModelSpec
from tests.helpers import tiny
from tests.runs import arm, bench_of, prompt_of

SCHEDULE = {2: 0.3, 5: 0.5}


@pytest.mark.parametrize("name", ["digest", "complete"])
def test_trace_equals_the_generation_of_each_arm(name: str) -> None:
    model, tokenizer = tiny()
    arms = arm("lazy", "lazy", schedule=SCHEDULE), arm("drop", "random_drop", keep=0.5)
    prompt = prompt_of(name, tokenizer, 12)
    lazy, drop = traces_of(bench_of(model, tokenizer, arms), prompt, arms)
    assert (lazy.arm, drop.arm) == ("lazy", "drop")
    out = lazyllm.generate(model, prompt.token_ids, Lazy(SCHEDULE), 12, (2,))
    assert lazy.selected == out.selected
    assert list(drop.selected[0]) == [0]
    assert lazy.importance == drop.importance  # of a prefill without pruning
    assert [len(row) for row in lazy.importance] == [len(prompt.token_ids)] * 8
    assert "".join(lazy.tokens).endswith(prompt.text)
    assert "".join(lazy.generated) == tokenizer.decode(out.token_ids)
    assert len(lazy.generated) == len(out.token_ids)


def test_llamas_tokens_keep_their_spaces(shared: Path) -> None:
    """Each token's text is the prompt's, spaces and characters of several tokens included."""
    folder = str(shared / "tokenizers" / "llama2")
    tokenizer = load_tokenizer_of(ModelSpec("llama2", "dummy", tokenizer=folder))
    loaded = load(DATASETS["multifieldqa_en"], DataSettings(dir=shared / "longbench"))
    example = loaded.examples[0]
    example = replace(example, input=f" 你好 \U0001f600 {example.input}")
    prompt = build_prompt(example, loaded.dataset, tokenizer)
    texts = _texts_of_prompt(tokenizer, prompt)
    assert texts[0] == "<s>"
    assert "".join(texts[1:]) == prompt.text
    assert len(texts) == len(prompt.token_ids)
