"""The deeper model in the repository: its size; its tokenizer is lossless and contains tiny's words."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from eval.benchmarks import embedded, stdlib
from eval.benchmarks.datasets import DATASETS, load_rows
from lazyllm.presets import PRESETS

CODER = Path(PRESETS["coder"].source)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CODER)


@settings(max_examples=100, deadline=None)
@given(text=st.text() | st.text(alphabet="ab \n\r\t.;_'{}"))
def test_tokenizer_is_lossless(tokenizer, text: str) -> None:
    if not any(special in text for special in (embedded.BEGIN, embedded.END, embedded.PAD)):
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_embedded_tasks_have_tinys_tokens(tokenizer) -> None:
    tiny = AutoTokenizer.from_pretrained(PRESETS["tiny"].source)
    for name in embedded.NAMES:
        for row in (example.official for example in load_rows(DATASETS[name]).examples[:3]):
            text = embedded.TEMPLATES[name].format(**row)
            assert tokenizer(text).input_ids == tiny(text).input_ids


@pytest.mark.slow
def test_prompts_of_the_stdlib_suite_have_1000_to_4000_tokens(tokenizer) -> None:
    newline = tokenizer("\n", add_special_tokens=False).input_ids
    for name, template in stdlib.TEMPLATES.items():
        prompts = [
            tokenizer(template.format(**row)).input_ids
            for row in (example.official for example in load_rows(DATASETS[name]).examples)
        ]
        assert all(ids[-1:] == newline for ids in prompts)
        assert 600 < min(map(len, prompts)) < 1000
        assert 3000 < max(map(len, prompts)) <= 4096
