"""Real rows of LongBench and official rows of RULER through every method, on a random model with a real vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from eval.benchmarks import SUITES
from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.datasets import DATASETS, load_rows
from eval.benchmarks.prompts import BuiltPrompt, build_prompt
from eval.benchmarks.ruler import RulerConfig
from eval.benchmarks.suite import Dataset, DataSettings, Example
from eval.run.cases import Case
from eval.run.measure import Bench, Todo
from eval.store.visit import Visit
from lazyllm.engine.method import Method
from lazyllm.methods import METHODS, Baseline
from lazyllm.models.load import load_tokenizer_of
from lazyllm.spec import ModelSpec
from tests.eval import official
from tests.eval.benchmarks.test_ruler import OFFICIAL_ROWS, SHARED
from tests.lazyllm.methods.method_matrix import LISTED

PROMPT_TOKENS, ANSWER_TOKENS = 400, 3
SPEC = ModelSpec("tiny", tokenizer=str(official.LLAMA2))

pytestmark = [pytest.mark.slow, official.needs(official.LONGBENCH), official.needs(SHARED / "ruler")]


@cache
def bench() -> Bench:
    """A Llama of 4 layers, as the matrix of methods needs, with Llama 2's vocabulary."""
    import torch

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512,
    )  # fmt: skip
    tokenizer = load_tokenizer_of(SPEC)
    assert tokenizer is not None
    return Bench(LlamaForCausalLM(config).eval(), tokenizer, CHAT_FORMATS["none"], (), "baseline")


def examples() -> Iterator[tuple[Dataset, Example]]:
    """The first real row of each dataset of LongBench, and the official rows of RULER's tasks without a corpus."""
    for dataset in SUITES["longbench"].datasets:
        loaded = load_rows(dataset, official.LONGBENCH)
        yield dataset, loaded.examples[0]
    for file in OFFICIAL_ROWS:
        if file.parent.name == "2048":
            dataset = DATASETS[file.stem]
            settings = DataSettings(SHARED / "ruler" / "official", options=RulerConfig(2048), model=SPEC, limit=1)
            loaded = SUITES["ruler"].load(dataset, settings)
            (example,), row = loaded.examples, json.loads(file.read_text().split("\n")[0])
            assert example.instruction + example.context + example.input == row["input"]
            assert (example.answer_prefix, list(example.answers)) == (row["answer_prefix"], row["outputs"])
            yield dataset, example


@cache
def prompts() -> list[tuple[Dataset, Example, BuiltPrompt]]:
    pytest.importorskip("wonderwords", reason="the package wonderwords ([ruler]) is not installed")
    return [
        (dataset, example, build_prompt(example, dataset, bench().tokenizer, PROMPT_TOKENS))
        for dataset, example in examples()
    ]


def test_rows_and_methods_are_complete() -> None:
    names = [dataset.name for dataset, _, _ in prompts()]
    assert len(names) == len(set(names)) == 16 + 6
    assert {name.split(",")[0] for name in LISTED} == set(METHODS)


@pytest.mark.parametrize("name", LISTED)
def test_every_method_measures_every_row(name: str) -> None:
    for dataset, example, prompt in prompts():
        arms: Any = _Arm("baseline", Baseline()), _Arm("method", LISTED[name].pruning)
        todo = Todo(Case(dataset, example, prompt, ANSWER_TOKENS, ()), arms)
        (visit,) = replace(bench(), arms=arms).measure([todo])
        assert not visit.failures
        assert Visit.from_json(visit.to_json()) == visit
        (measured,) = visit.answers["method"]
        assert len(measured.token_ids or ()) == ANSWER_TOKENS
        assert ((measured.computed or [])[0][-1] < visit.turns[0].tokens) == (name != "baseline")


@dataclass(frozen=True)
class _Arm:
    """An arm around a method that is made already."""

    label: str
    made: Method
    turns: str = "continue"

    def method(self, dataset: str) -> Method:
        return self.made
