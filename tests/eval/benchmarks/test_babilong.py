"""BABILong: the scorer against the official rule in other words, prompts and rows from made files."""

import json
import random
from pathlib import Path

import pytest

from eval.benchmarks.babilong import LABELS, PROMPTS, SUITE, BabilongConfig, _example, read_prompts
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.metrics import score_example
from eval.benchmarks.suite import DataSettings
from lazyllm.errors import UserError

# Our own prompts: BABILong's must not enter the repository
PARTS = {"instruction": "Do {this}.", "examples": "<example>\nA\n</example>", "post_prompt": "One word."}
ROW = {"input": " John went to the office. Text. ", "question": "Where is John? ", "target": "office"}


def official(target: str, output: str, question: str, task: str) -> bool:
    """The rule: labels in the first sentence, without those in the question, are exactly the target."""
    for mark in (".", "<context>", "<example>"):
        output = output.lower().partition(mark)[0]
    named = {label for label in LABELS[task] if label in output} - {
        label for label in LABELS[task] if label in question.lower()
    }
    return named == {target.lower()}


def folder(path: Path, *rows: object) -> Path:
    (path / "data" / "qa1").mkdir(parents=True)
    (path / "data" / "qa1" / "4k.json").write_text(json.dumps(list(rows)))
    (path / PROMPTS).write_text(f"X = 1\nDEFAULT_PROMPTS = {dict.fromkeys(LABELS, PARTS)!r}\n")
    return path


def loaded(path: Path, lengths: tuple[str, ...] = ("4k",)):
    return SUITE.load(SUITE.datasets[0], DataSettings(dir=path, options=BabilongConfig(list(lengths))))


def scored(target: str, answer: str, question: str, task: str) -> float:
    """The score by what a record holds, as the board gives it."""
    dataset = DATASETS[f"babilong_{task}"]
    example = _example(dataset, PARTS, ("4k", 0, ROW | {"question": question, "target": target}), 0)
    return score_example(dataset, answer, example.answers)


def test_score_of_random_answers_is_the_official_rule() -> None:
    rng, words = random.Random(0), [*LABELS["qa5"], "Bill", "the", ".", "<context>", "Question"]
    for _ in range(300):
        answer, question = (" ".join(rng.choices(words, k=rng.randint(0, 4))) for _ in range(2))
        target = rng.choice(LABELS["qa5"])
        assert scored(target, answer, question, "qa5") == official(target, answer, question, "qa5")


def test_prompt_is_the_official_one(tmp_path: Path) -> None:
    (example,) = loaded(folder(tmp_path, ROW)).examples
    assert example.instruction + example.context + example.input == (
        "Do {this}.\n\n<example>\nA\n</example>\n\nOne word.\n\n"
        "<context>\nJohn went to the office. Text.\n</context>\n\nQuestion: Where is John?"
    )
    assert example.groups == ("length=4k",)
    (tmp_path / "data" / "qa1" / "0k.json").write_text(json.dumps([ROW]))
    assert loaded(tmp_path, ("0k", "4k")).examples[1].id == example.id  # tables join runs of several lengths by id


def test_other_prompts_are_refused() -> None:
    for content in (b"x = (", b"x = 1", b"DEFAULT_PROMPTS = {'qa1': {}}"):
        with pytest.raises(UserError, match="not BABILong's prompts"):
            read_prompts(content)
