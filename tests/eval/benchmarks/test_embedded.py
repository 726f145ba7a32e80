"""The embedded suite's rows: those of version 0.4, exact lengths, and the needles in them."""

import re

import pytest

from eval.benchmarks import SUITES, embedded
from tests.eval.benchmarks.loading import load
from tests.helpers import tiny

# {dataset: hashes of its rows and of its template} in the identity of runs of version 0.4
OF_VERSION_0_4 = {
    "lookup": ("6232467f40ade2b0", "4b64c6219bfd95ae"),
    "hops": ("c2b7d6443ebb9e95", "38c5efcd269ea71e"),
    "digest": ("10d8d868b88eb4d5", "8ae8874f099583ce"),
    "shots": ("ce45097c1f186070", "da423cb59047a6dc"),
    "retrieve": ("29823427afd59fb3", "f6c1744cf62e0b1b"),
    "complete": ("64fc2deca575cf9e", "44642148f18e5716"),
}


def needles(name: str, context: str, question: str, answer: str) -> set[tuple[int, int]]:
    """The places of the answer: the entry of the key, and that of the key it leads to."""
    key, words = question.split()[-1], answer.split()
    forms = {
        "lookup": [rf"entry {key} {answer}\."],
        "hops": [rf"link {key} {words[0]}\.", rf"entry {answer}\."],
        "shots": [rf"{key} {answer}\."],
        "retrieve": [rf"{question} {words[-1]}\."],
        "complete": [rf"proc {key} {answer.strip()}"],
    }
    if name == "digest":
        found = (re.search(rf"{place} (\w+)\.", context) for place in ("first", "second", "third"))
        points = [point for point in found if point is not None]
        forms[name] = [rf"{point[0]}|entry {point[1]} [a-z ]+\." for point in points]
    return {match.span() for form in forms[name] for match in re.finditer(form, context)}


def test_suite_has_one_dataset_of_each_of_longbenchs_tasks() -> None:
    suite = SUITES["embedded"]
    assert [dataset.name for dataset in suite.datasets] == [*OF_VERSION_0_4]
    assert [dataset.task for dataset in suite.datasets] == [*SUITES["longbench"].all_tasks]


@pytest.mark.parametrize("name", OF_VERSION_0_4)
def test_rows_have_the_stated_tokens_and_needles_and_answers_that_fit(name: str) -> None:
    loaded, tokenizer = load(name), tiny()[1]
    assert (loaded.data_sha256[:16], loaded.config_sha256[:16]) == OF_VERSION_0_4[name]
    for example in loaded.examples[:12]:
        row = example.official
        text = embedded.TEMPLATES[name].format(**row)
        assert len(tokenizer(text).input_ids) == int(row["_id"].split("-")[2])
        answer = row["answers"][0].strip().removeprefix("Paragraph ")
        ids = tokenizer(f" {answer}", add_special_tokens=False).input_ids
        assert len(ids) + 2 <= loaded.max_new_tokens  # full stop and end token
        found = needles(name, row["context"], row["input"], example.answers[0])
        assert len(found) == {"hops": 2, "digest": 6, "shots": 3}.get(name, 1)
