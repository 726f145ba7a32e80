"""The embedded suite's rows: LongBench's format, exact lengths, and the needles that answer each question."""

import re
from functools import cache

import pytest

from eval.benchmarks import SUITES, embedded
from eval.benchmarks.datasets import DATASETS, load_rows
from eval.benchmarks.suite import Example
from tests.helpers import tiny


@cache
def examples_of(name: str) -> tuple[Example, ...]:
    return load_rows(DATASETS[name]).examples[:12]


def needles(name: str, context: str, question: str, answer: str) -> tuple[tuple[int, int], ...]:
    """The places of the answer: the asked key's entry, and that of the key it leads to."""
    asked, words = question.split()[-1], answer.split()
    forms = {
        "lookup": [rf"entry {asked} {answer}\."],
        "hops": [rf"link {asked} {words[0]}\.", rf"entry {answer}\."],
        "shots": [rf"{asked} {answer}\."],
        "retrieve": [rf"{question} {words[-1]}\."],
        "complete": [rf"proc {asked} {answer.strip()}"],
    }
    if name == "digest":
        points = [re.search(rf"{place} (\w+)\.", context) for place in ("first", "second", "third")]
        forms["digest"] = [rf"{point[0]}|entry {point[1]} [a-z ]+\." for point in points if point]
    return tuple(sorted(found.span() for form in forms[name] for found in re.finditer(form, context)))


def test_suite_has_one_dataset_a_task():
    suite = [dataset for dataset in DATASETS.values() if dataset.suite == "embedded"]
    assert [dataset.name for dataset in suite] == list(embedded.TEMPLATES)
    assert [dataset.task for dataset in suite] == list(SUITES["longbench"].all_tasks)
    assert not any(dataset.chat_wrap for dataset in suite)


# {dataset: hashes of its rows and of its template} in the identity of runs of version 0.4, whose code made the rows
OF_VERSION_0_4 = {
    "lookup": ["6232467f40ade2b0", "4b64c6219bfd95ae"],
    "hops": ["c2b7d6443ebb9e95", "38c5efcd269ea71e"],
    "digest": ["10d8d868b88eb4d5", "8ae8874f099583ce"],
    "shots": ["ce45097c1f186070", "da423cb59047a6dc"],
    "retrieve": ["29823427afd59fb3", "f6c1744cf62e0b1b"],
    "complete": ["64fc2deca575cf9e", "44642148f18e5716"],
}


def test_rows_and_templates_are_those_of_version_0_4():
    loaded = {name: load_rows(DATASETS[name]) for name in embedded.TEMPLATES}
    facts = {name: [rows.data_sha256[:16], rows.config_sha256[:16]] for name, rows in loaded.items()}
    assert facts == OF_VERSION_0_4


@pytest.mark.parametrize("name", embedded.TEMPLATES)
def test_rows_have_the_stated_tokens_needles_and_answers_that_fit(name):
    for example in examples_of(name):
        row, tokenizer = example.official, tiny()[1]
        assert len(tokenizer(embedded.TEMPLATES[name].format(**row)).input_ids) == int(row["_id"].split("-")[2])
        said = row["answers"][0].strip().removeprefix("Paragraph ")
        ids = tokenizer(f" {said}", add_special_tokens=False).input_ids
        assert len(ids) + 2 <= embedded.MAX_NEW_TOKENS[name]  # full stop and end token
        found = needles(name, row["context"], row["input"], example.answers[0])
        assert len(found) == {"hops": 2, "digest": 6, "shots": 3}.get(name, 1)
