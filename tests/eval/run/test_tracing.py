"""Traces: the tokens' texts make up prompt and answer."""

from dataclasses import replace
from pathlib import Path

import pytest

import lazyllm
from eval.benchmarks.datasets import DATASETS, load_rows
from eval.benchmarks.prompts import build_prompt
from eval.run.tracing import _texts_of_prompt, traces
from lazyllm.methods import Lazy
from lazyllm.models.load import load_tokenizer_of
from lazyllm.spec import ModelSpec
from tests.helpers import tiny
from tests.runs import arm, case_of

MODEL, TOKENIZER = tiny()
ARMS = arm("lazy", name="lazy", schedule={2: 0.3, 5: 0.5}), arm("drop", name="random_drop", keep=0.5)


@pytest.mark.parametrize("name", ["digest", "complete"])
def test_trace_equals_the_generation_of_each_arm(name: str) -> None:
    case = case_of(name, TOKENIZER, 12)
    lazy, drop = traces(MODEL, TOKENIZER, case, ARMS)
    assert (lazy.arm, drop.arm) == ("lazy", "drop")
    out = lazyllm.generate(MODEL, case.prompt.token_ids, Lazy({2: 0.3, 5: 0.5}), 12, (2,))
    assert lazy.selected == out.selected
    assert list(drop.selected[0]) == [0]
    assert lazy.importance == drop.importance  # of a prefill without pruning
    assert [len(row) for row in lazy.importance] == [len(case.prompt.token_ids)] * 8
    assert "".join(lazy.tokens).endswith(case.prompt.text)
    assert "".join(lazy.generated) == TOKENIZER.decode(out.token_ids)
    assert len(lazy.generated) == len(out.token_ids)


def test_llamas_tokens_keep_their_spaces(shared: Path) -> None:
    """The text of each token equals the prompt's, including spaces and characters that span several tokens."""
    tokenizer = load_tokenizer_of(ModelSpec("llama2", "dummy", tokenizer=str(shared / "tokenizers" / "llama2")))
    loaded = load_rows(DATASETS["multifieldqa_en"], str(shared / "longbench"))
    example = loaded.examples[0]
    example = replace(example, input=f" 你好 \U0001f600 {example.input}")
    prompt = build_prompt(example, loaded.dataset, tokenizer)
    texts = _texts_of_prompt(tokenizer, prompt)
    assert texts[0] == "<s>"
    assert "".join(texts[1:]) == prompt.text
    assert len(texts) == len(prompt.token_ids)
